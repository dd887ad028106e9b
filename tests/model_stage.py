"""Where the service and the reference model are held against each other, step by step."""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from datetime import datetime
from typing import Any, ClassVar, TypeVar
from uuid import UUID, uuid4

from hypothesis import note
from hypothesis.stateful import RuleBasedStateMachine

from durable_jobs import DurableJobService, FollowUp, JobSpec
from durable_jobs.contract.errors import DurableJobsError
from durable_jobs.contract.models import Claim, ClaimOutcome, Job
from durable_jobs.service.reconciliation import Candidate, Handled
from durable_jobs.store.jobs import job_of
from tests.model import ACTIVE, Model, ModelJob, Seen
from tests.support import sql

T = TypeVar("T")

PROJECT = "alpha"
HOUR = 3600.0


class Stage(RuleBasedStateMachine):
    """One example: a handful of jobs on a queue and in an organization of its own, and all that was ever granted.

    Claims and snapshots are kept, to be presented again at any later time. Time is moved on the rows.
    """

    counts: ClassVar[Counter[str]] = Counter()
    """Every answer that was compared, by verb, over all examples."""

    def __init__(self, runner: asyncio.Runner, service: DurableJobService) -> None:
        super().__init__()
        self.runner = runner
        self.service = service
        self.name = f"model-{uuid4().hex[:12]}"
        self.model = Model()
        self.tokens: dict[Claim, UUID] = {}
        self.snapshots: list[tuple[Seen, Candidate]] = []
        self.unsent: list[tuple[UUID, int]] = []
        """Granted marks whose worker has not sent yet, by job and intent."""
        self.sends: Counter[tuple[UUID, int]] = Counter()
        self.generations: Counter[UUID] = Counter()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    # What a step is about

    def a_job(self, pick: int, wanted: Callable[[ModelJob], object]) -> ModelJob:
        """Three times of four one that is wanted, if there is any."""
        every = list(self.model.jobs.values())
        return _preferring([job for job in every if wanted(job)], every, pick)

    def a_claim(self, pick: int, wanted: Callable[[ModelJob], object] = bool) -> tuple[Claim, ModelJob]:
        """Half of the time a stale one of a job that somebody else has in hand, if there is any; a quarter the present
        one of a job that is wanted; else one of any age."""
        every = [(claim, self.model.jobs[claim.job_id]) for claim in self.tokens]
        held = [(claim, job) for claim, job in every if not job.refusal(claim)]
        stale = [(claim, job) for claim, job in every if job.active and job.refusal(claim)]
        if stale and pick % 4 in (1, 2):
            return stale[pick // 4 % len(stale)]
        return _preferring([(claim, job) for claim, job in held if wanted(job)] or held, every, pick)

    # How it is judged

    def agree(self, verb: str, expected: object, call: Coroutine[Any, Any, T], told: Callable[[T], object]) -> T | None:
        """Make the call, which the model has answered already: its answer, told as the model tells it, must be the
        model's. Returns what the call did, None for a refusal."""

        async def answered() -> tuple[T | None, object]:
            try:
                answer = await call
            except DurableJobsError as error:
                return None, type(error).__name__
            return answer, told(answer)

        answer, actual = self.run(answered())
        note(f"{verb}: {actual}")
        assert actual == expected, f"{verb} answered {actual!r}, the model {expected!r}"
        self.counts[f"{verb}: {actual}"] += 1
        return answer

    def decided(self, verb: str, expected: str, call: Coroutine[Any, Any, Job]) -> Job | None:
        """A verb that returns the job, and leaves no other job changed."""
        job = self.agree(verb, expected, call, lambda job: str(job.status))
        self.rows_agree()
        return job

    def handled(self, verb: str, expected: str, call: Coroutine[Any, Any, Handled]) -> None:
        self.agree(verb, expected, call, lambda handled: handled.word)

    def rows(self) -> list[tuple[Job, datetime]]:
        """Every row of the example in the order of claims, and the database's clock."""
        order = "priority DESC, scheduled_at, created_at, id"
        statement = f"SELECT *, clock_timestamp() AS now FROM durable_jobs.jobs WHERE queue = %(q)s ORDER BY {order}"
        return [(job_of(row), row["now"]) for row in self.run(sql(self.service, statement, q=self.name))]

    def rows_agree(self) -> None:
        """Every row is the model's, there is none beside them, and no generation shrinks."""
        rows = {job.id: (job, now) for job, now in self.rows()}
        assert rows.keys() == self.model.jobs.keys()
        for job, now in rows.values():
            actual, expected = _told_by_row(job, now), _told_by_model(self.model.jobs[job.id])
            different = {name: (value, expected[name]) for name, value in actual.items() if value != expected[name]}
            assert not different, f"job {job.id}, the row's and the model's: {different}"
            assert job.lease_generation >= self.generations[job.id]
            self.generations[job.id] = job.lease_generation

    def teardown(self) -> None:
        """The invariants, on all that the example left."""
        self.rows_agree()
        assert not [key for key, times in self.sends.items() if times > 1]
        for job in self.model.jobs.values():
            assert self.run(self.service.check_trail(job.id)) == []
            attempts = self.run(self.service.list_job_attempts(job.id, limit=1000)).items
            assert {each.generation: each.outcome for each in attempts} == job.outcomes
            assert [each.generation for each in attempts] == list(range(1, job.generation + 1))
            assert {each.generation for each in attempts if each.late_result} == job.late
            marked = [each.intent_number for each in attempts if each.operation_key]
            assert len(marked) == len(set(marked)), f"job {job.id}: intents {marked} crossed their boundaries"

    # What several steps do

    def submit(self, key: str, variant: int, job_type: str, priority: int = 0, max_attempts: int = 3) -> None:
        spec = JobSpec(
            organization=self.name,
            project=PROJECT,
            queue=self.name,
            job_type=job_type,
            idempotency_key=key,
            payload={"variant": variant},
            priority=priority,
            max_attempts=max_attempts,
            lease_seconds=HOUR,
            timeout_seconds=10 * HOUR,
            backoff_base_seconds=HOUR,
        )
        expected = self.model.create(key, variant, job_type)
        call = self.service.create_job(spec)
        answer = self.agree("create_job", expected, call, lambda made: "created" if made.created else "existing")
        if answer is not None and answer.created:
            self._adopt(answer.job)
        elif answer is not None:
            assert answer.job.id == self.model.keys[key]
        self.rows_agree()

    def _adopt(self, job: Job) -> None:
        """The row is there: the model gets its id."""
        made = ModelJob(job.id, job.payload["variant"], job.job_type, job.priority, job.max_attempts)
        self.model.add(job.idempotency_key, made)

    def follow_ups(self, parent: ModelJob, names: tuple[str, ...], *, created: bool) -> list[FollowUp]:
        """What a completion asks for. Where they are created, and a key is taken, the parent is escalated."""
        answers = [self.model.create(f"{parent.id}:{name}", 1, "probe") for name in names]
        if created and "IdempotencyKeyConflict" in answers:
            self.model.escalated(parent)
        return [FollowUp(name=name, job_type="probe", payload={"variant": 1}) for name in names]

    def adopt_follow_ups(self, parent: ModelJob, names: tuple[str, ...], *, created: bool) -> None:
        """Those just asked for, and none but them, are there now, where they are created and their keys were free."""
        keys = [key for name in names if (key := f"{parent.id}:{name}") not in self.model.keys] if created else []
        born = [job for job, _ in self.rows() if job.id not in self.model.jobs]
        assert sorted(job.idempotency_key for job in born) == sorted(keys)
        for job in born:
            self._adopt(job)
        self.rows_agree()

    def claimed(self, job: ModelJob, worker: str, token: UUID) -> Claim | None:
        expected = self.model.claim(job, worker, token)
        call = self.service.claim_job(worker, token, job_id=job.id)
        outcome = self.agree("claim_job", expected, call, lambda outcome: self.told_of_claim(outcome, token))
        self.rows_agree()
        return self.granted(outcome, token)

    def told_of_claim(self, outcome: ClaimOutcome | None, token: UUID) -> str:
        assert outcome is not None
        assert outcome.job is not None
        if outcome.claim is None:
            return f"landed in {outcome.job.status}" if outcome.refusal == "landed" else str(outcome.refusal)
        assert outcome.job.claim_token == token
        return "repeated" if outcome.claim in self.tokens else "reclaimed" if outcome.reclaimed else "claimed"

    def granted(self, outcome: ClaimOutcome | None, token: UUID) -> Claim | None:
        """Keep the claim for as long as the example lasts."""
        if outcome is None or outcome.claim is None:
            return None
        self.tokens[outcome.claim] = token
        return outcome.claim


def _preferring(wanted: list[T], every: list[T], pick: int) -> T:
    among = wanted if wanted and pick % 4 != 3 else every
    return among[pick // 4 % len(among)]


def _told_by_row(job: Job, now: datetime) -> dict[str, Any]:
    """The row in the model's words."""
    return {
        "status": str(job.status),
        "generation": job.lease_generation,
        "attempts": job.attempt_count,
        "intent": job.intent_number,
        "releases": job.release_count,
        "claimed_by": job.claimed_by,
        "holder": (job.lease_id, job.claim_token),
        "leased": job.lease_expires_at is not None,
        "lease_alive": job.lease_expires_at is not None and job.lease_expires_at > now,
        "due": job.status != "queued" or job.scheduled_at <= now,
        "marker": (job.operation_key, job.dispatched_generation, job.dispatched_at is not None),
        "cancel_requested": job.cancel_requested_at is not None,
        "escalated": job.escalated_at is not None,
        "resolved_by": (job.reconciliation or {}).get("by"),
        "follow_ups_due": job.follow_ups_due,
        "tries": job.lookup_tries,
        "finished": job.finished_at is not None,
        "has_result": job.result is not None,
        "has_error": job.error is not None,
        "dead_lettered": job.dead_lettered_at is not None,
    }


def _told_by_model(job: ModelJob) -> dict[str, Any]:
    active = job.status in ACTIVE
    return {
        "status": job.status,
        "generation": job.generation,
        "attempts": job.attempts,
        "intent": job.intent,
        "releases": job.releases,
        "claimed_by": job.claimed_by,
        "holder": (job.claimed_by, job.token) if active else (None, None),
        "leased": active,
        "lease_alive": job.lease_alive,
        "due": job.status != "queued" or job.due,
        "marker": (job.operation_key, job.marked_generation, job.operation_key is not None),
        "cancel_requested": job.cancel_requested,
        "escalated": job.escalated,
        "resolved_by": job.resolved_by,
        "follow_ups_due": job.follow_ups_due,
        "tries": job.tries,
        "finished": not active and job.status != "queued",
        "has_result": job.status == "completed",
        "has_error": job.has_error,
        "dead_lettered": job.status == "dead_letter",
    }
