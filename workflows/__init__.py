"""The workflows that this deployment hosts."""

from durable_jobs.temporal.job_workflow import JobWorkflow
from durable_jobs.temporal.reconciliation_workflow import ReconciliationWorkflow
from workflows.causal_audit import CausalAuditWorkflow
from workflows.research import ResearchWorkflow

PRODUCT = [ResearchWorkflow, CausalAuditWorkflow]
"""The product's own: what `worker.py` gives to the worker."""
PLUGIN = [JobWorkflow, ReconciliationWorkflow]
"""What the plugin adds by itself: every job's, and the scheduled sweep's."""
HOSTED = [*PRODUCT, *PLUGIN]
