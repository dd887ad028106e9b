"""What the application does: its job handlers, and what they are made of. Not part of the library's wheel.

`HANDLERS` and `ACTIVITIES` list what this deployment hosts; `activities.hosting` puts them together from settings.
"""

from activities.causal_audit import AuditActivities, CausalAudit
from activities.evaluation import Evaluation
from activities.experiment import Experiment
from activities.lanes import LaneActivities
from activities.replay import ReplayEvaluation, ReplayExecution
from activities.research import DeepResearch, Research
from durable_jobs.temporal.activities import JobActivities

HANDLERS = [Research, DeepResearch, ReplayExecution, ReplayEvaluation, Evaluation, Experiment, CausalAudit]
"""By job type: what the plugin is given."""
PRODUCT = [AuditActivities.audit_plan, AuditActivities.audit_abandoned, LaneActivities.lane_states]
"""The product's own activities, which its workflows call: what the worker itself is given."""
PLUGIN = [
    JobActivities.run_attempt,
    JobActivities.read_job,
    JobActivities.cancel_job,
    JobActivities.close_as_cancelled,
    JobActivities.create_job,
    JobActivities.read_result,
]
"""What the plugin adds by itself."""
ACTIVITIES = [*PRODUCT, *PLUGIN]
