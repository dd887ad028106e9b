"""Executions under a name made of the operation key, through boto3, on moto's server, which runs state machines."""

import json
import re
import string
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from hypothesis import given
from hypothesis import strategies as st

from durable_jobs import DurableJobs, JobFailed, ProviderState
from durable_jobs.contract.provider import ProviderAnswer
from durable_jobs.providers import NotVisibleYet
from durable_jobs.providers.aws_stepfunctions import StepFunctions, execution_name
from tests.conftest import Specs, Workers
from tests.probes import eventually
from tests.provider_servers import Calls, LossyProxy, aws_variables, lost, moto, swept_until_completed
from tests.sweeping import NEVER

Machine = StepFunctions[dict[str, Any]]

ROLE = "arn:aws:iam::123456789012:role/any"
SEND = ("POST", "/")
SUCCEEDS = {"Type": "Pass", "End": True}
FAILS = {"Type": "Fail", "Error": "NO_FUNDS", "Cause": "the account is empty"}
WAITS = {"Type": "Wait", "Seconds": 600, "End": True}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with moto() as url:
        yield url


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in aws_variables().items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def aws(url: str, variables: None) -> Any:
    """A client of the server, for what a test arranges."""
    return boto3.client("stepfunctions", endpoint_url=url, config=Config(retries={"total_max_attempts": 1}))


def machine(aws: Any, state: dict[str, Any], kind: str = "STANDARD") -> str:
    """The ARN of a state machine of this one state."""
    definition = json.dumps({"StartAt": "Only", "States": {"Only": state}})
    made = aws.create_state_machine(name=f"m-{uuid4().hex}", definition=definition, roleArn=ROLE, type=kind)
    arn: str = made["stateMachineArn"]
    return arn


def over(url: str, arn: str) -> Machine:
    return StepFunctions(arn, read=lambda output: {"read": output["total"]}, endpoint_url=url)


def ago(**span: float) -> datetime:
    return datetime.now(UTC) - timedelta(**span)


async def answered(provider: Machine, key: str) -> ProviderState[Any]:
    """What the provider says of the key, once it is no longer pending."""

    async def look() -> ProviderState[Any] | None:
        state = await provider.state(key, ago(minutes=1))
        return None if state == ProviderState.pending() else state

    state: ProviderState[Any] = await eventually(look, f"an answer on {key}")
    return state


async def test_what_was_started_is_found_by_its_name(url: str, aws: Any) -> None:
    arn = machine(aws, SUCCEEDS)
    provider = over(url, arn)
    sent = await provider.send("summary:1", {"total": 7})
    assert await answered(provider, "summary:1") == ProviderState.succeeded({"read": 7})
    assert await sent.state() == ProviderState.succeeded({"read": 7})
    described = aws.describe_execution(executionArn=sent.reference)
    assert (described["stateMachineArn"], described["name"]) == (arn, execution_name("summary:1"))
    assert json.loads(described["input"]) == {"total": 7}


async def test_an_execution_that_failed_says_why(url: str, aws: Any) -> None:
    provider = over(url, machine(aws, FAILS))
    await provider.send("summary:1", {"total": 7})
    state = await answered(provider, "summary:1")
    assert state.answer is ProviderAnswer.FAILED
    assert state.error is not None
    assert (state.error.code, state.error.message) == ("NO_FUNDS", "execution failed: the account is empty")


async def test_an_execution_at_work_is_pending_until_it_is_aborted(url: str, aws: Any) -> None:
    provider = over(url, machine(aws, WAITS))
    sent = await provider.send("summary:1", {"total": 7})
    assert await provider.state("summary:1", ago(minutes=1)) == ProviderState.pending()
    aws.stop_execution(executionArn=sent.reference, error="STOPPED", cause="by hand")
    state = await answered(provider, "summary:1")
    assert state.answer is ProviderAnswer.FAILED
    assert state.error is not None
    assert state.error.message.startswith("execution aborted")


async def test_nothing_found_proves_nothing_for_five_minutes_and_after_ninety_days(url: str, aws: Any) -> None:
    """Descriptions lag at first; and an execution that ended at once is forgotten then."""
    provider = over(url, machine(aws, SUCCEEDS))
    with pytest.raises(NotVisibleYet):
        await provider.state("summary:1", ago(minutes=4))
    assert await provider.state("summary:1", ago(minutes=6)) == ProviderState.absent()
    assert await provider.state("summary:1", ago(days=89)) == ProviderState.absent()
    for dispatched_at in (ago(days=90), None):
        assert (await provider.state("summary:1", dispatched_at)).answer is ProviderAnswer.UNKNOWN


async def test_an_execution_from_before_the_dispatch_is_not_ours(url: str, aws: Any) -> None:
    """Clocks may differ by ten minutes."""
    provider = over(url, machine(aws, WAITS))
    await provider.send("summary:1", {"total": 7})
    assert await provider.state("summary:1", datetime.now(UTC) + timedelta(minutes=9)) == ProviderState.pending()
    state = await provider.state("summary:1", datetime.now(UTC) + timedelta(minutes=11))
    assert state.answer is ProviderAnswer.UNKNOWN


@pytest.mark.parametrize("state", [WAITS, SUCCEEDS], ids=["at work", "ended"])
async def test_a_second_start_finds_the_first(url: str, aws: Any, state: dict[str, Any]) -> None:
    """Step Functions takes it while the first is at work, and refuses it once that has ended: it landed either way."""
    arn = machine(aws, state)
    provider = over(url, arn)
    first = await provider.send("summary:1", {"total": 7})
    if state is SUCCEEDS:
        await answered(provider, "summary:1")
    second = await provider.send("summary:1", {"total": 7})
    assert second.reference == first.reference
    assert await second.state() == await first.state()
    assert len(aws.list_executions(stateMachineArn=arn)["executions"]) == 1


async def test_a_name_with_another_input_is_not_ours(url: str, aws: Any) -> None:
    provider = over(url, machine(aws, WAITS))
    await provider.send("summary:1", {"total": 7})
    with pytest.raises(JobFailed, match="another input") as failed:
        await provider.send("summary:1", {"total": 8})
    assert (failed.value.retryable, failed.value.code) == (False, "OPERATION_KEY_TAKEN")


async def test_a_refused_start_is_a_definite_no(url: str, aws: Any) -> None:
    arn = machine(aws, WAITS)
    provider = over(url, arn)
    await provider.send("summary:1", {"total": 7})
    aws.delete_state_machine(stateMachineArn=arn)
    with pytest.raises(JobFailed, match="StateMachineDoesNotExist") as failed:
        await provider.send("summary:2", {"total": 7})
    assert (failed.value.retryable, failed.value.code) == (False, "PROVIDER_REFUSED")


async def test_nothing_is_started_whose_executions_cannot_be_looked_up(url: str, aws: Any) -> None:
    """A state machine of type EXPRESS, and one whose type can't be read."""
    express = machine(aws, SUCCEEDS, kind="EXPRESS")
    missing = f"{express}-missing"
    for arn in (express, missing):
        with pytest.raises(JobFailed) as failed:
            await over(url, arn).send("summary:1", {"total": 7})
        assert (failed.value.retryable, failed.value.code) == (False, "NOT_SENT")
    assert aws.list_executions(stateMachineArn=express)["executions"] == []


def test_only_a_state_machines_arn_is_taken(url: str) -> None:
    for arn in ("", "arn:aws:states:us-east-1:123456789012:activity:a", "arn:aws:s3:::bucket"):
        with pytest.raises(ValueError, match="not the ARN of a state machine"):
            over(url, arn)


async def test_a_start_whose_answer_was_lost_is_raised_and_not_repeated(url: str, aws: Any) -> None:
    arn = machine(aws, SUCCEEDS)
    async with LossyProxy.before(url) as proxy:
        provider = over(proxy.url, arn)
        await provider.send("summary:1", {"total": 7})
        proxy.requests.clear()
        proxy.lose.add(SEND)
        with pytest.raises((BotoCoreError, ClientError)):
            await provider.send("summary:2", {"total": 7})
        assert proxy.requests == [SEND]
    assert await answered(over(url, arn), "summary:2") == ProviderState.succeeded({"read": 7})


async def test_a_send_whose_answer_was_lost_is_completed_by_the_sweep(
    jobs: DurableJobs, worker: Workers, spec: Specs, queue: str, url: str, aws: Any
) -> None:
    arn = machine(aws, SUCCEEDS)
    async with LossyProxy.before(url) as proxy:
        provider = over(proxy.url, arn)
        await provider.send("warm-up", {"total": 1})  # it has asked for the type of the state machine
        proxy.requests.clear()
        proxy.lose.add(SEND)
        async with worker(Calls(provider), reconcile_every=NEVER):
            handle = await lost(jobs, spec(payload={"total": 7}))
            assert proxy.requests == [SEND]
            proxy.lose.clear()
            assert await swept_until_completed(jobs, queue, handle) == {"read": 7}
    names = sorted(each["name"] for each in aws.list_executions(stateMachineArn=arn)["executions"])
    assert names == sorted(["warm-up", execution_name(f"summary:{handle.id}")])


async def test_a_job_waits_for_its_execution(
    jobs: DurableJobs, worker: Workers, spec: Specs, url: str, aws: Any
) -> None:
    brief = {"Type": "Wait", "Seconds": 1, "End": True}
    async with worker(Calls(over(url, machine(aws, brief))), reconcile_every=NEVER):
        handle = await jobs.create_job(spec(payload={"total": 7}))
        assert await handle.result(timeout=20) == {"read": 7}


ALLOWED = string.ascii_letters + string.digits + "-_"


@given(st.text(ALLOWED + ":/ é", min_size=1, max_size=300), st.text(ALLOWED + ":/ é", min_size=1, max_size=300))
def test_a_name_fits_and_no_two_keys_share_one(one: str, other: str) -> None:
    for key in (one, other):
        assert re.fullmatch(r"[0-9A-Za-z_-]{1,80}", execution_name(key))
    assert (execution_name(one) == execution_name(other)) is (one == other)


def test_a_key_that_looks_like_a_hashed_name_is_hashed_as_well() -> None:
    """Else it would have the name of the key that was hashed."""
    assert execution_name("summary-1_a") == "summary-1_a"
    hashed = execution_name("summary:1")
    assert hashed.startswith("summary-1-")
    assert execution_name(hashed) != hashed
    assert len({execution_name(key) for key in ("summary:1", "summary/1", "summary-1", hashed)}) == 4
    assert execution_name("k" * 80) == "k" * 80
    assert len(execution_name("k" * 81)) == 80
