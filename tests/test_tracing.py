"""A job's trace is that of the span it was submitted in, and Temporal's own spans join it."""

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from temporalio.client import Client
from temporalio.contrib.opentelemetry import TracingInterceptor
from temporalio.worker import Worker

from durable_jobs import DurableJobs, DurableJobService, DurableJobsPlugin, ExecutionInput
from durable_jobs.contract.envelope import read_execution_identity
from tests.conftest import Specs
from tests.test_happy_path import Sends


async def test_temporals_spans_join_the_jobs_trace(
    database_url: str, temporal_client: Client, service: DurableJobService, spec: Specs, queue: str
) -> None:
    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    tracer = provider.get_tracer("product")
    config = temporal_client.config()
    config["interceptors"] = [TracingInterceptor(tracer)]
    traced = Client(**config)
    plugin = DurableJobsPlugin(database_url, [Sends()], grace_seconds=1)
    async with (
        Worker(traced, task_queue=queue, plugins=[plugin]),
        await DurableJobs.connect(database_url, traced) as jobs,
    ):
        with tracer.start_as_current_span("submit") as span:
            handle = await jobs.create_job(spec(execution=ExecutionInput(tenant="acme-eu", actor="ada")))
        await handle.result(timeout=30)
    expected = trace.format_trace_id(span.get_span_context().trace_id)
    identity = read_execution_identity(await service.get_job(handle.id))
    assert identity is not None
    assert identity.trace == expected
    joined = {
        each.name for each in spans.get_finished_spans() if trace.format_trace_id(each.context.trace_id) == expected
    }
    assert {"submit", "StartWorkflow:DurableJob", "RunActivity:durable_jobs.run_attempt"} <= joined
