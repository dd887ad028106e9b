#!/bin/sh
# The namespace, and the three search attributes that show a job's state in the UI. May be run again.
set -eu

temporal operator namespace describe -n default > /dev/null 2>&1 \
    || temporal operator namespace create -n default --retention 72h
for name in DurableJobState DurableJobQueue DurableJobOperationKey; do
    temporal operator search-attribute create --namespace default --name "$name" --type Keyword || true
done
temporal operator search-attribute list --namespace default
