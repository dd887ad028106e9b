"""The service's verbs as Hypothesis drives them beside the reference model: one rule for each kind of step.

Here are operators, reconciliation and time; creation and workers are in `tests.model_workers`.
"""

from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from durable_jobs import JobStatus, ProviderState
from durable_jobs.contract.reconciliation import ReconciliationPolicy, classify
from durable_jobs.service.control import RecheckFilter
from tests.model import UNCERTAIN, Seen
from tests.model_stage import PROJECT
from tests.model_workers import WORKERS, Workers, names_of_follow_ups, picks, where
from tests.support import make_due, sql

POLICY = ReconciliationPolicy(lookup_deadline=100)
"""Pauses of 30 and 60 s fit, the third goes beyond: `model.FAILED_LOOKUPS`."""
LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)
ANSWERS: dict[str, ProviderState[dict[str, Any]]] = {
    "succeeded": ProviderState.succeeded({"ok": True}),
    "failed": ProviderState.failed("no"),
    "pending": ProviderState.pending(),
    "absent": ProviderState.absent(),
    "refused after its deadline": ProviderState.absent(LONG_AGO),
    "unknown": ProviderState.unknown("no records"),
}


class Machine(Workers):
    """All rules."""

    # Operators

    @where(lambda job: job.active)
    @rule(pick=picks)
    def cancel(self, pick: int) -> None:
        self.cancelled(self.a_job(pick, lambda job: job.active))

    @where(lambda job: job.status == "failed")
    @rule(pick=picks, risk=st.booleans())
    def retry(self, pick: int, risk: bool) -> None:
        job = self.a_job(pick, lambda job: job.status == "failed")
        expected = self.model.retry(job, accept_duplicate_risk=risk)
        call = self.service.retry_job(job.id, "ann", "once more", accept_duplicate_risk=risk)
        self.decided("retry_job", expected, call)

    @where(lambda job: job.expired)
    @rule(pick=picks)
    def requeue(self, pick: int) -> None:
        job = self.a_job(pick, lambda job: job.expired)
        self.decided("requeue_job", self.model.requeue(job), self.service.requeue_job(job.id, "ann", "interrupted"))

    @where(lambda job: job.status in UNCERTAIN)
    @rule(pick=picks, verdict=st.sampled_from([JobStatus.COMPLETED, JobStatus.FAILED, JobStatus.DEAD_LETTER]))
    def resolve(self, pick: int, verdict: JobStatus) -> None:
        job = self.a_job(pick, lambda job: job.status in UNCERTAIN)
        call = self.service.resolve_job(job.id, verdict, {"seen": True}, "ann")
        self.decided("resolve_job", self.model.resolve(job, verdict), call)

    @where(lambda job: job.escalated)
    @rule(pick=picks)
    def recheck(self, pick: int) -> None:
        job = self.a_job(pick, lambda job: job.escalated)
        call = self.service.recheck_job(RecheckFilter(job_id=job.id), "ann", "look again")
        self.agree("recheck_job", self.model.recheck(job), call, lambda found: found == [job.id])
        self.rows_agree()

    @rule(job_type=st.sampled_from(["other", "other", "probe", None]), stop=st.sampled_from([False, False, True]))
    def pause_or_resume(self, job_type: str | None, stop: bool) -> None:
        verb = self.service.pause_queue if stop else self.service.resume_queue
        changed = self.model.pause(job_type or "") if stop else self.model.resume(job_type or "")
        self.agree(verb.__name__, changed, verb(self.name, job_type, actor="ann", reason="maintenance"), bool)

    # Reconciliation

    @where(lambda job: job.expired or job.status in UNCERTAIN)
    @rule()
    def sweep_reads(self) -> None:
        """The sweep's first step. It may write from what it saw here at any later time."""
        expected = {seen.id: seen for seen in self.model.candidates()}
        found = self.run(self.service.find_reconciliation_candidates(self.name, PROJECT, queue=self.name))
        assert {job.id for job, _ in found} == expected.keys()
        for candidate in found:
            seen = expected[candidate[0].id]
            action, _ = classify(*candidate)
            # To when a failed lookup is put off is a time, and none of the model's.
            assert seen.action == ("look_up" if action == "backing_off" else action)
            self.snapshots.append((seen, candidate))
            self.counts[f"find_reconciliation_candidates: {action}"] += 1

    @precondition(lambda self: self.snapshots)
    @rule(pick=picks, answer=st.sampled_from([*ANSWERS, "lookup failed", "lookup failed"]), names=names_of_follow_ups)
    def sweep_writes(self, pick: int, answer: str, names: tuple[str, ...]) -> None:
        """The second step, by what the first one saw, however much has happened since."""
        fresh = [each for each in self.snapshots if self.model.unmoved(each[0])]
        among = fresh if fresh and pick % 2 else self.snapshots
        seen, (candidate, began) = among[pick // 2 % len(among)]
        job = self.model.jobs[seen.id]
        if seen.action == "fence":
            call = self.service.fence_expired(candidate, "sweep")
            self.agree("fence_expired", self.model.fence_expired(seen), call, lambda it: it and str(it.status))
        elif seen.action == "escalate":
            call = self.service.escalate_job(candidate, "needs a look", "sweep")
            self.agree("escalate_job", self.model.escalate(seen), call, lambda it: it and "escalated")
        elif seen.action == "look_up" and answer == "lookup failed":
            call = self.service.defer_lookup(candidate, "hung", policy=POLICY, source="sweep")
            self.handled("defer_lookup", self.model.judged(seen, answer) or "moved", call)
        elif seen.action == "look_up":
            expected = self.model.judged(seen, answer)
            created = expected == "completed"
            follow_ups = self.follow_ups(job, names, created=created)
            call = self.service.resolve_by_provider(
                candidate,
                ANSWERS[answer],
                policy=POLICY,
                source="sweep",
                evidence={"asked": True},
                began=began,
                follow_ups=follow_ups,
            )
            self.handled("resolve_by_provider", expected or "moved", call)
            self.adopt_follow_ups(job, names, created=created)
        self.rows_agree()

    @where(lambda job: job.status == "queued")
    @rule(pick=picks)
    def escalate_what_nobody_hosts(self, pick: int) -> None:
        """As a worker of other types does with a job that waits."""
        job = self.a_job(pick, lambda job: job.status == "queued")
        if job.status == "queued":
            expected = self.model.escalate(Seen(job.id, job.position, "escalate"))
            candidate = self.run(self.service.get_job(job.id))
            call = self.service.escalate_job(candidate, "NOT_HOSTED", WORKERS[2])
            self.agree("escalate_job", expected, call, lambda it: it and "escalated")
            self.rows_agree()

    @where(lambda job: job.operation_key)
    @rule(pick=picks, answer=st.sampled_from(list(ANSWERS)), first=st.booleans())
    def provider_speaks(self, pick: int, answer: str, first: bool) -> None:
        """By a webhook, of the present intent or of the first."""
        job = self.a_job(pick, lambda job: job.status == "indeterminate" and job.operation_key)
        key = f"{job.id}:{0 if first else job.intent}"
        call = self.service.record_provider_state(
            key,
            ANSWERS[answer],
            {"webhook": True},
            "hook",
            organization=self.name,
            project=PROJECT,
            policy=POLICY,
            asked_at=datetime.now(UTC) - timedelta(hours=1),
        )
        self.decided("record_provider_state", self.model.provider_state(key, answer), call)

    @where(lambda job: job.follow_ups_due)
    @rule(pick=picks, names=names_of_follow_ups)
    def create_follow_ups_due(self, pick: int, names: tuple[str, ...]) -> None:
        """The next sweep, after a resolution where no handler was at hand; another sweep may have been first."""
        job = self.a_job(pick, lambda job: job.follow_ups_due)
        due, job.follow_ups_due = job.follow_ups_due, False
        asked = self.follow_ups(job, names, created=due)
        parent = self.run(self.service.get_job(job.id))
        self.run(self.service.create_follow_ups_due(parent, lambda _: (asked, None), "sweep"))
        self.counts[f"create_follow_ups_due: {due}"] += 1
        self.adopt_follow_ups(job, names, created=due)

    # Time

    @where(lambda job: job.lease_alive)
    @rule(pick=picks)
    def lease_runs_out(self, pick: int) -> None:
        self.lose_the_lease(self.a_job(pick, lambda job: job.lease_alive))

    @where(lambda job: not job.due)
    @rule(pick=picks)
    def backoff_passes(self, pick: int) -> None:
        job = self.a_job(pick, lambda job: not job.due)
        if job.status == "queued" and not job.due:
            self.run(make_due(self.service, job.id))
            job.due = True

    @where(lambda job: job.active)
    @rule(pick=picks)
    def time_of_the_attempt_is_up(self, pick: int) -> None:
        """Its timeout and the grace have passed since its claim; the lease itself runs on till the next renewal."""
        job = self.a_job(pick, lambda job: job.active)
        if job.active:
            statement = """
                UPDATE durable_jobs.job_attempts SET claimed_at = claimed_at - interval '2 days'
                WHERE job_id = %(id)s AND generation = %(generation)s"""
            self.run(sql(self.service, statement, id=job.id, generation=job.generation))
            job.time_up = True
