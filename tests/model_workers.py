"""Rules of the model-based test: creation, and what workers do."""

from collections.abc import Callable
from typing import Any
from uuid import uuid4

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from durable_jobs.contract.errors import AdmissionRefused
from durable_jobs.contract.models import Claim
from tests.model import ModelJob
from tests.model_stage import Stage
from tests.support import ERROR, expire

WORKERS = ("worker-a:1:aaaa", "worker-b:2:bbbb", "worker-c:3:cccc")
TYPES = ("probe", "other")
SOON = (
    "",
    "claimed",
    "claimed marked",
    "claimed marked",
    "claimed lost",
    "claimed lost taken",
    "claimed lost taken running",
    "claimed lost taken running",
    "claimed lost taken marked",
    "claimed cancelling",
    "claimed marked cancelling",
    "claimed marked lost",
    "claimed marked uncertain",
    "claimed marked uncertain",
    "claimed uncertain",
    "claimed marked failed",
)
"""What becomes of a new job at once."""

picks = st.integers(0, 399)
workers = st.sampled_from(WORKERS)
names_of_follow_ups = st.sampled_from([(), ("mail",), ("mail", "bill")])
after_a_claim = precondition(lambda self: self.tokens)


def where(wanted: Callable[[ModelJob], object]) -> Any:
    """A precondition: some job is so. The rule's own pick may fall on another all the same."""
    return precondition(lambda self: any(wanted(job) for job in self.model.jobs.values()))


class Workers(Stage):
    """See `Stage`. What a worker does after an answer (a send after its mark) happens at any later time, or never."""

    @initialize(first=st.sampled_from(SOON), second=st.sampled_from(SOON), other=st.sampled_from(TYPES))
    def begin(self, first: str, second: str, other: str) -> None:
        self.submit("a", 1, "probe", 0, 2)
        self.bring(first)
        self.submit("b", 1, other, 1, 3)
        self.bring(second)

    @precondition(lambda self: len(self.model.jobs) < 10 and sum(job.moves for job in self.model.jobs.values()) < 3)
    @rule(
        job_type=st.sampled_from(TYPES),
        priority=st.integers(-1, 1),
        max_attempts=st.integers(1, 3),
        soon=st.sampled_from(SOON),
    )
    def create(self, job_type: str, priority: int, max_attempts: int, soon: str) -> None:
        self.submit(str(len(self.model.jobs)), 1, job_type, priority, max_attempts)
        self.bring(soon)

    def bring(self, soon: str) -> None:
        """Bring the newest job where the interesting steps begin: by chance few examples would get far."""
        job = list(self.model.jobs.values())[-1]
        for step in soon.split():
            claim = self.newest_claim(job)
            match step, claim:
                case "claimed", _:
                    self.claimed(job, WORKERS[0], uuid4())
                case "taken", _:
                    self.claimed(job, WORKERS[1], uuid4())
                case "running", Claim():
                    self.renewed(claim, job, progress=False)
                case "marked", Claim():
                    self.marked(claim, job, f"{job.id}:{job.intent}", admitted=True)
                case "lost", _:
                    self.lose_the_lease(job)
                case "uncertain", Claim():
                    self.landed(claim, job, "indeterminate")
                case "failed", Claim():
                    self.failed(claim, job, retryable=False)
                case "cancelling", _:
                    self.cancelled(job)

    def cancelled(self, job: ModelJob) -> None:
        self.agree("cancel_job", self.model.cancel(job), self.service.cancel_job(job.id, "not wanted", "ann"), str)
        self.rows_agree()

    def lose_the_lease(self, job: ModelJob) -> None:
        if job.active:
            self.run(expire(self.service, job.id))
            job.lease_alive = False

    def newest_claim(self, job: ModelJob) -> Claim | None:
        return next((claim for claim in reversed(self.tokens) if claim.job_id == job.id), None)

    @rule(pick=picks, variant=st.integers(1, 2), job_type=st.sampled_from(TYPES))
    def create_again(self, pick: int, variant: int, job_type: str) -> None:
        keys = list(self.model.keys)
        self.submit(keys[pick % len(keys)], variant, job_type)

    @precondition(lambda self: len(self.model.jobs) < 10)
    @rule(pick=picks)
    def take_the_key_of_a_follow_up(self, pick: int) -> None:
        self.submit(f"{self.a_job(pick, lambda job: job.moves).id}:mail", 2, "probe")

    # Claims and leases

    @rule(pick=picks, worker=workers)
    def claim_by_id(self, pick: int, worker: str) -> None:
        self.claimed(self.a_job(pick, self.model.eligible), worker, uuid4())

    @where(lambda job: job.expired)
    @rule(pick=picks, worker=workers)
    def claim_a_lost_one(self, pick: int, worker: str) -> None:
        """Whatever keeps a claim of the next job away from it."""
        self.claimed(self.a_job(pick, lambda job: job.expired), worker, uuid4())

    @where(lambda job: job.lease_alive and not job.operation_key)
    @rule(pick=picks, worker=workers, running=st.booleans())
    def take_over(self, pick: int, worker: str, running: bool) -> None:
        """The lease runs out and another claim comes: from here on there is a stale worker."""
        job = self.a_job(pick, lambda job: job.lease_alive and not job.operation_key)
        self.lose_the_lease(job)
        if (claim := self.claimed(job, worker, uuid4())) and running:
            self.renewed(claim, job, progress=False)

    @after_a_claim
    @rule(pick=picks)
    def claim_again_after_a_lost_reply(self, pick: int) -> None:
        claim, job = self.a_claim(pick)
        self.claimed(job, claim.worker_id, self.tokens[claim])

    @rule(worker=workers, job_types=st.sampled_from([None, None, ["OTHER"]]))
    def claim_next(self, worker: str, job_types: list[str] | None) -> None:
        """The first eligible one by priority, schedule and age; those that land instead of it are passed."""
        token, expected = uuid4(), "None"
        for job in [self.model.jobs[row.id] for row, _ in self.rows()]:
            if self.model.eligible(job) and (job_types is None or job.job_type == "other"):
                answer = self.model.claim(job, worker, token)
                if not answer.startswith("landed"):
                    expected = f"{answer} {job.id}"
                    break
        call = self.service.claim_job(worker, token, queues=[self.name], job_types=job_types)
        outcome = self.run(call)
        actual = f"{self.told_of_claim(outcome, token)} {outcome.job.id}" if outcome and outcome.job else "None"
        assert actual == expected, f"claim_job gave {actual}, the model {expected}"
        self.counts[f"claim_job, the next: {actual.split(maxsplit=1)[0]}"] += 1
        self.rows_agree()
        self.granted(outcome, token)

    @after_a_claim
    @rule(pick=picks, progress=st.booleans())
    def renew(self, pick: int, progress: bool) -> None:
        self.renewed(*self.a_claim(pick), progress=progress)

    def renewed(self, claim: Claim, job: ModelJob, *, progress: bool) -> None:
        verb = self.service.heartbeat if progress else self.service.renew_lease
        self.agree(verb.__name__, self.model.renew(job, claim), verb(claim), str)
        self.rows_agree()

    @after_a_claim
    @rule(
        pick=picks,
        key=st.sampled_from(["own", "own", "own", "of the first intent", "another's"]),
        admitted=st.sampled_from([True, True, True, False]),
    )
    def mark(self, pick: int, key: str, admitted: bool) -> None:
        claim, job = self.a_claim(pick, lambda job: not job.operation_key)
        intent = job.intent if key == "own" else 0
        operation_key = "shared" if key == "another's" else f"{job.id}:{intent}"
        self.marked(claim, job, operation_key, admitted=admitted)

    def marked(self, claim: Claim, job: ModelJob, operation_key: str, *, admitted: bool) -> None:
        expected = self.model.mark(job, claim, operation_key, admitted=admitted)
        # A consequential job without an identity is not admitted.
        call = self.service.mark_provider_dispatched(claim, operation_key, consequential=not admitted)
        if self.decided("mark_provider_dispatched", expected, call):
            self.unsent.append((job.id, job.intent))

    @precondition(lambda self: self.unsent)
    @rule(pick=picks)
    def send(self, pick: int) -> None:
        self.sends[self.unsent.pop(pick % len(self.unsent))] += 1

    # Outcomes

    @after_a_claim
    @rule(pick=picks, names=names_of_follow_ups)
    def complete(self, pick: int, names: tuple[str, ...]) -> None:
        claim, job = self.a_claim(pick)
        expected = self.model.complete(job, claim)
        created = expected == "completed"
        call = self.service.complete_job(claim, {"ok": True}, self.follow_ups(job, names, created=created))
        self.agree("complete_job", expected, call, lambda completion: str(completion.job.status))
        self.adopt_follow_ups(job, names, created=created)

    @after_a_claim
    @rule(pick=picks, retryable=st.sampled_from([True, True, False]))
    def fail(self, pick: int, retryable: bool) -> None:
        self.failed(*self.a_claim(pick), retryable=retryable)

    def failed(self, claim: Claim, job: ModelJob, *, retryable: bool) -> None:
        expected = self.model.fail(job, claim, retryable=retryable)
        self.decided("fail_job", expected, self.service.fail_job(claim, ERROR, retryable))

    @after_a_claim
    @rule(pick=picks)
    def refuse_dispatch(self, pick: int) -> None:
        claim, job = self.a_claim(pick)
        expected = self.model.fail(job, claim, retryable=False)
        call = self.service.refuse_dispatch(claim, AdmissionRefused(["no identity"]))
        self.decided("refuse_dispatch", expected, call)

    @after_a_claim
    @rule(pick=picks, status=st.sampled_from(["indeterminate", "indeterminate", "halt_unsafe", "timed_out"]))
    def land(self, pick: int, status: str) -> None:
        self.landed(*self.a_claim(pick), status)

    def landed(self, claim: Claim, job: ModelJob, status: str) -> None:
        verb = getattr(self.service, f"mark_{status}")
        self.decided(f"mark_{status}", self.model.land(job, claim, status), verb(claim, ERROR))

    @after_a_claim
    @rule(pick=picks)
    def release(self, pick: int) -> None:
        claim, job = self.a_claim(pick)
        self.decided("release_job", self.model.release(job, claim), self.service.release_job(claim, "shutdown"))

    @where(lambda job: job.status == "queued")
    @rule(pick=picks, times=st.integers(8, 11))
    def release_often(self, pick: int, times: int) -> None:
        """Ten times are free."""
        job = self.a_job(pick, self.model.eligible)
        for _ in range(times if pick % 8 == 7 else 1):
            if claim := self.claimed(job, WORKERS[0], uuid4()):
                expected = self.model.release(job, claim)
                self.decided("release_job", expected, self.service.release_job(claim, "shutdown"))

    @after_a_claim
    @where(lambda job: job.cancel_requested)
    @rule(pick=picks, confirmed=st.booleans())
    def acknowledge(self, pick: int, confirmed: bool) -> None:
        claim, job = self.a_claim(pick, lambda job: job.cancel_requested)
        expected = self.model.acknowledge(job, claim, confirmed=confirmed)
        call = self.service.acknowledge_cancellation(claim, {"provider": "stopped it"} if confirmed else None)
        self.decided("acknowledge_cancellation", expected, call)
