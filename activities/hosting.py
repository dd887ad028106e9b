"""Puts the application together from its settings: what its worker hosts, and how to close it."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI
from pydantic import HttpUrl

from activities.agents import SUPPORT_AGENT
from activities.causal_audit import AuditActivities, CausalAudit
from activities.contracts import RuntimeName
from activities.evaluation import Evaluation
from activities.experiment import Experiment
from activities.lanes import LaneActivities
from activities.product import Product
from activities.replay import ReplayEvaluation, ReplayExecution
from activities.research import DeepResearch, Research, batched_report_of, report_of
from activities.runtime import RuntimeAdapter
from activities.runtime.http_adapter import HttpAdapter, HttpSettings
from activities.runtime.subprocess_adapter import MIB, SubprocessAdapter, SubprocessSettings
from activities.runtimes import ISOLATED, MODEL
from activities.settings import AppSettings
from activities.store.migrate import check
from durable_jobs import Database, DurableJobService, JobHandler
from durable_jobs.providers.openai_batch import OpenAIBatch
from durable_jobs.providers.openai_chat import OpenAIChat
from durable_jobs.store.tables import SCHEMA

AGENT_INSTRUCTIONS = "You are a support agent. Decide on the ticket by the policy and the evidence that you are given."


@dataclass(frozen=True)
class Application:
    """What the worker registers: handlers with the plugin, activities with the worker itself."""

    handlers: list[JobHandler[Any, Any]]
    activities: list[Callable[..., Any]]


@asynccontextmanager
async def application(
    settings: AppSettings, database_url: str, *, schema: str = SCHEMA, pool_size: int = 10
) -> AsyncIterator[Application]:
    """The application over a database that holds the jobs, in `schema`, and the product's tables; closed on leaving.

    Raises `SchemaMissing` where the product's tables are not there, `StoreUnavailable`.

    The research lanes and the model runtime are hosted only where `GOVERNANCE_PROVIDER_URL` names their provider.
    """
    async with AsyncExitStack() as closing:
        database = Database(database_url, schema=schema, pool_size=pool_size)
        closing.push_async_callback(database.close)
        await check(database)
        limits = SubprocessSettings(
            isolation=settings.isolation,
            wall_seconds=settings.agent_seconds,
            memory_bytes=settings.agent_memory_mib * MIB,
        )
        runtimes: dict[RuntimeName, RuntimeAdapter] = {ISOLATED: SubprocessAdapter([SUPPORT_AGENT], limits)}
        lanes: list[JobHandler[Any, Any]] = []
        if settings.provider_url is not None:
            client = AsyncOpenAI(
                base_url=str(settings.provider_url), api_key=settings.provider_key.get_secret_value(), max_retries=0
            )
            closing.push_async_callback(client.close)
            runtimes[MODEL] = await closing.enter_async_context(HttpAdapter(_model(settings, settings.provider_url)))
            lanes = [
                Research(OpenAIChat(client, read=report_of), settings.research_model),
                DeepResearch(
                    OpenAIBatch(client, "/v1/chat/completions", read=batched_report_of), settings.deep_research_model
                ),
            ]
        product = Product(database, DurableJobService(database), runtimes, SUPPORT_AGENT.agent)
        yield Application(
            handlers=[
                *lanes,
                ReplayExecution(product),
                ReplayEvaluation(product),
                Evaluation(product),
                Experiment(product),
                CausalAudit(product),
            ],
            activities=[*AuditActivities(product).all(), LaneActivities(product.jobs).lane_states],
        )


def _model(settings: AppSettings, url: HttpUrl) -> HttpSettings:
    return HttpSettings(
        base_url=url,
        api_key=settings.provider_key,
        model=settings.agent_model,
        agent=SUPPORT_AGENT.agent,
        instructions=AGENT_INSTRUCTIONS,
        store=True,
    )
