#!/bin/sh
# Brings Temporal's two databases to the schema of these tools. SQL_PASSWORD is set; may be run again.
set -eu

schema() {
    database=$1 folder=$2
    tool="temporal-sql-tool --plugin postgres12 --ep $POSTGRES_SEEDS -u $POSTGRES_USER -p 5432 --db $database"
    $tool create || true # it is there already
    $tool setup-schema -v 0.0 || true # versioned already
    $tool update-schema -d "/etc/temporal/schema/postgresql/v12/$folder/versioned"
}

schema temporal temporal
schema temporal_visibility visibility
