-------------------------------- MODULE Job --------------------------------
(* One durable job: the design's sections 5 to 9 as its code has them. Each action is one transaction of a verb, one  *)
(* step of a process between two transactions, or a step of the world (a clock, a network, a provider, an operator).  *)
(* docs/spec.md says which verb and statement each action stands for, and what is left out.                           *)
EXTENDS Integers, FiniteSets, Sequences, TLC

CONSTANTS
    Workers,        \* worker ids: incarnations of processes
    Slots,          \* attempts alive at one time, wherever they run; paused and fenced ones count
    None,
    MaxGen,         \* bounds what operators may start anew; never binds a claim, see TypeOK
    MaxIntent,      \* retry_job at most so many times
    Limits,         \* the job's max_attempts is one of these
    FreeReleases,   \* releases that give the attempt back
    Unhosted,       \* whether a job is escalated, as nobody hosts it, also before it is unresolved
    Live,           \* TRUE: with what liveness needs (workflow, lease cap) and without what it doesn't (trail)
    Mishaps,        \* Live: a workflow is lost, or a queue paused, at most so many times
    Mutant          \* "": the rules as they are; else the name of the rule that is broken

VARIABLES
    row,            \* the row of `jobs`
    limit,          \* its max_attempts
    paused,         \* whether its queue is paused
    att,            \* the attempts: memory of processes
    sw,             \* a sweep's snapshot of the row, between its read and its write
    world,          \* by intent: what became of its send at the provider; and what is true but unseen
    ev,             \* the event that the last step left on the trail
    wf, mishaps, cap \* Live: whether a workflow carries the job, what befell it, whether the lease reached its cap

vars == <<row, limit, paused, att, sw, world, ev, wf, mishaps, cap>>

Mut(name) == Mutant = name
Intents == 0..MaxIntent

-----------------------------------------------------------------------------
(* The transition table, as durable_jobs/contract/states.py has it; a test compares the two. *)

Active == {"claimed", "running"}
Unresolved == {"indeterminate", "timed_out"}
Settled == {"completed", "failed", "cancelled", "dead_letter", "halt_unsafe"}
Terminal == Settled \cup Unresolved
Statuses == {"queued"} \cup Active \cup Terminal

Moves ==
    [queued |-> {"claimed", "cancelled"},
     claimed |-> {"running", "queued", "failed", "cancelled", "dead_letter", "indeterminate", "halt_unsafe",
                  "timed_out", "claimed"},
     running |-> {"completed", "queued", "failed", "cancelled", "dead_letter", "indeterminate", "halt_unsafe",
                  "timed_out", "claimed"},
     completed |-> {},
     failed |-> {"queued"},
     cancelled |-> {},
     dead_letter |-> {},
     indeterminate |-> {"completed", "failed", "dead_letter"},
     halt_unsafe |-> {},
     timed_out |-> {"completed", "failed", "dead_letter"}]

TerminalEvent ==
    [completed |-> "completed", failed |-> "failed", cancelled |-> "cancelled", dead_letter |-> "dead_lettered",
     indeterminate |-> "indeterminate", halt_unsafe |-> "halt_unsafe", timed_out |-> "timed_out"]

-----------------------------------------------------------------------------
(* State *)

NoAttempt == [pc |-> "idle", w |-> None, gen |-> 0, i |-> 0]
NoSweep == [pc |-> "idle", st |-> "queued", gen |-> 0, esc |-> FALSE, key |-> FALSE, i |-> 0, passed |-> FALSE]
NoEvent == [name |-> "", actor |-> "", gen |-> 0]

\* pc of an attempt, with what is in its memory:
\*   claiming  its token is drawn and the claim sent; no reply has told it of a generation
\*   running   its handler runs, before the boundary
\*   unsure    inside dispatch(): a reply to the mark was lost
\*   marked    past the mark; the send may come at any time, or never
\*   sent      the send has left; no answer is known but what it finds at the provider. It may write its outcome, and
\*             after a lost reply write it again
AttemptPcs == {"idle", "claiming", "running", "unsure", "marked", "sent"}

NewRow == [status |-> "queued", gen |-> 0, intent |-> 0, attempts |-> 0, releases |-> 0, owner |-> None, token |-> None,
           lease |-> "none", marker |-> 0, flag |-> FALSE, esc |-> FALSE, by |-> "none"]

Init ==
    /\ row = NewRow
    /\ limit \in Limits
    /\ paused = FALSE
    /\ att = [a \in Slots |-> NoAttempt]
    /\ sw = NoSweep
    /\ world = [i \in Intents |-> [at |-> "none", sends |-> 0, mark |-> 0, passed |-> FALSE, risk |-> FALSE]]
    /\ ev = NoEvent
    /\ wf \in IF Live THEN {"up", "gone"} ELSE {"up"}
    /\ mishaps = 0
    /\ cap = FALSE

TypeOK ==
    /\ row.status \in Statuses
    /\ row.gen \in 0..MaxGen
    /\ row.intent \in Intents
    /\ row.attempts \in 0..limit
    /\ row.releases \in Nat
    /\ row.owner \in Workers \cup {None}
    /\ row.lease \in {"none", "live", "expired"}
    /\ row.marker \in 0..row.gen
    /\ row.by \in {"none", "provider", "operator"}
    /\ \A a \in Slots : att[a].pc \in AttemptPcs
    /\ sw.pc \in {"idle", "read", "absent"}
    /\ \A i \in Intents : world[i].at \in {"none", "flying", "pending", "succeeded", "failed"}

\* The trail. Every action that writes the row leaves one event, beside its writer and the generation it claims to hold.
Emit(name, actor, gen) == ev' = IF Live THEN ev ELSE [name |-> name, actor |-> actor, gen |-> gen]
Silent(actor) == Emit("", actor, 0)

RowOnly == UNCHANGED <<limit, paused, sw, world, wf, mishaps, cap>>
Rest == UNCHANGED <<limit, wf, mishaps, cap>>

\* The row that becomes terminal, and the one that goes back to the queue, or under a requested cancellation is cancelled.
Ended(r, status) == [r EXCEPT !.status = status, !.lease = "none", !.token = None, !.esc = FALSE]
Queued(r) == [r EXCEPT !.status = "queued", !.lease = "none", !.token = None, !.owner = None, !.esc = FALSE]
Requeued(r) == IF r.flag THEN Ended(r, "cancelled") ELSE Queued(r)
Cause(r, name, cause) == IF r.status = "queued" THEN name \o ":" \o cause ELSE TerminalEvent[r.status]

-----------------------------------------------------------------------------
(* Claims and leases *)

\* Drawn at random by the running attempt; what is drawn from the run's input, every run of it draws again.
Token(a) == IF Mut("TokenRepeats") THEN "input" ELSE a

Decision ==
    IF row.status = "queued" THEN IF paused THEN "paused" ELSE "claim"
    ELSE IF row.status \notin Active THEN "settled"
    ELSE IF row.lease = "live" THEN "held"
    ELSE IF row.marker # 0 /\ ~Mut("NoMarkerOnReclaim") THEN "indeterminate"
    ELSE IF row.flag THEN "cancelled"
    ELSE IF row.attempts >= limit THEN "dead_letter"
    ELSE IF paused THEN "paused"
    ELSE "claim"

Claims(a, w) == att[a].pc = "idle" \/ (att[a].pc = "claiming" /\ att[a].w = w)
Repeats(a, w) == row.status \in Active /\ row.owner = w /\ row.token = Token(a)

Claim(a, w, told) ==
    /\ Claims(a, w) /\ ~Repeats(a, w)
    /\ Decision = "claim"
    /\ row' = [row EXCEPT !.status = "claimed", !.gen = @ + 1, !.attempts = @ + 1, !.owner = w, !.token = Token(a),
                          !.lease = "live", !.esc = FALSE]
    /\ att' = [att EXCEPT ![a] = [pc |-> IF told THEN "running" ELSE "claiming", w |-> w,
                                  gen |-> IF told THEN row.gen + 1 ELSE 0, i |-> row.intent]]
    /\ cap' = FALSE
    /\ Emit("claimed", "claim", 0)
    /\ UNCHANGED <<limit, paused, sw, world, wf, mishaps>>

\* A claim repeated after a lost reply, by the same attempt, returns the same generation.
ClaimAgain(a, w) ==
    /\ Claims(a, w) /\ Repeats(a, w)
    /\ att' = [att EXCEPT ![a] = [pc |-> "running", w |-> w, gen |-> row.gen, i |-> row.intent]]
    /\ Silent("claim")
    /\ UNCHANGED row /\ RowOnly

\* The reclaim of an expired lease that ends the job.
ClaimLands ==
    /\ Decision \in {"indeterminate", "cancelled", "dead_letter"}
    /\ row' = [Ended(row, Decision) EXCEPT !.gen = @ + 1]
    /\ Emit(TerminalEvent[Decision] \o ":reclaim", "claim", 0)
    /\ UNCHANGED att /\ RowOnly

\* Owner, generation and status. Owner and generation still match after the holder's own exit.
Fence(a) ==
    /\ row.owner = att[a].w /\ row.gen = att[a].gen
    /\ row.status \in Active \/ Mut("StatusNotFenced")
Told(a) == att[a].pc \notin {"idle", "claiming"}
Holds(a) == Told(a) /\ Fence(a)

Renewed == [row EXCEPT !.status = "running", !.lease = IF cap THEN @ ELSE "live"]

\* The keeper renews the (job, generation) pairs of the attempts that run; the mutant's, all rows of its worker id.
Kept == IF Mut("KeeperByWorker") THEN row.status \in Active ELSE \E a \in Slots : Holds(a)

Renew ==
    /\ Kept
    /\ row' = Renewed
    /\ IF row.status = "claimed" THEN Emit("heartbeat", "worker", row.gen) ELSE Silent("worker")
    /\ UNCHANGED att /\ RowOnly

Heartbeat(a) ==
    /\ Holds(a)
    /\ row' = Renewed
    /\ Emit("heartbeat", "worker", att[a].gen)
    /\ UNCHANGED att /\ RowOnly

Expire ==
    /\ row.lease = "live"
    /\ row' = [row EXCEPT !.lease = "expired"]
    /\ Silent("clock")
    /\ UNCHANGED att /\ RowOnly

\* Claim time + timeout + grace has come: renewals extend the lease no further. Only ever credited to a handler that is
\* wedged: a job whose attempt is gone must come free by its lease alone, not by this, an hour or more later.
CapReached ==
    /\ Live /\ ~cap /\ ~Mut("LeaseUncapped")
    /\ \E a \in Slots : Holds(a)
    /\ cap' = TRUE
    /\ UNCHANGED <<row, limit, paused, att, sw, world, ev, wf, mishaps>>

\* The process died, or the attempt is over. No attempt ever draws its token again.
Exit(a) ==
    /\ att[a].pc # "idle"
    /\ att' = [att EXCEPT ![a] = NoAttempt]
    /\ row' = [row EXCEPT !.token = IF @ = Token(a) /\ ~Mut("TokenRepeats") THEN None ELSE @]
    /\ Silent("worker")
    /\ RowOnly

-----------------------------------------------------------------------------
(* The boundary, and the send that may come at any time after it *)

To(a, pc) == att' = [att EXCEPT ![a].pc = pc]

Mark(a, told) ==
    /\ att[a].pc \in {"running", "unsure"} /\ Fence(a)
    /\ row.lease = "live" /\ ~row.flag /\ row.marker = 0 /\ ~cap
    /\ row' = [Renewed EXCEPT !.marker = row.gen]
    /\ To(a, IF told THEN "marked" ELSE "unsure")
    /\ world' = [world EXCEPT ![row.intent].mark = IF @ = 0 THEN row.gen ELSE @]
    /\ Emit("dispatched", "worker", att[a].gen)
    /\ UNCHANGED <<paused, sw>> /\ Rest

\* The statement did not reach the database, or not yet; inside dispatch() nobody knows.
MarkInDoubt(a) ==
    /\ att[a].pc = "running"
    /\ To(a, "unsure")
    /\ Silent("worker")
    /\ UNCHANGED row /\ RowOnly

\* Our own mark found on the row is the one that was sent; its lease must be renewable without a cancellation.
MarkFound(a) ==
    /\ att[a].pc = "unsure" /\ Fence(a) /\ row.marker = att[a].gen /\ ~row.flag
    /\ row' = Renewed
    /\ To(a, "marked")
    /\ Silent("worker")
    /\ RowOnly

\* One dispatch() per attempt; the mutant takes a second for the repetition of the first.
DispatchAgain(a) ==
    /\ Mut("SecondDispatch")
    /\ att[a].pc = "sent" /\ Fence(a) /\ row.marker = att[a].gen /\ row.lease = "live" /\ ~row.flag
    /\ To(a, "marked")
    /\ Silent("worker")
    /\ UNCHANGED row /\ RowOnly

\* However long after its mark: fenced, paused, its outcome written.
Send(a) ==
    /\ att[a].pc = "marked" /\ ~Live
    /\ LET i == att[a].i IN
        world' = [world EXCEPT ![i].sends = IF @ = 2 THEN 2 ELSE @ + 1,
                               ![i].at = IF @ = "none" /\ ~world[i].passed THEN "flying" ELSE @]
    /\ To(a, "sent")
    /\ Silent("worker")
    /\ UNCHANGED <<row, paused, sw>> /\ Rest

World(i, at) ==
    /\ world' = [world EXCEPT ![i].at = at]
    /\ Silent("provider")
    /\ UNCHANGED <<row, att, paused, sw>> /\ Rest

Land(i) == world[i].at = "flying" /\ ~world[i].passed /\ World(i, "pending")
Drop(i) == world[i].at = "flying" /\ World(i, "none")
Perform(i, at) == world[i].at = "pending" /\ World(i, at)

\* The provider refuses what comes for this key from now on; of one that enforces no deadline this never comes.
DeadlinePasses(i) ==
    /\ ~world[i].passed /\ world[i].mark # 0 /\ ~Live
    /\ world' = [world EXCEPT ![i].passed = TRUE]
    /\ Silent("provider")
    /\ UNCHANGED <<row, att, paused, sw>> /\ Rest

\* Whether the send of intent i has landed or can still land.
CanLand(i) ==
    \/ world[i].at \in {"pending", "succeeded"}
    \/ world[i].at = "flying" /\ ~world[i].passed
    \/ ~world[i].passed /\ \E a \in Slots : att[a].pc = "marked" /\ att[a].i = i

\* What a lookup begun now can say of intent i.
Answer(i) == IF world[i].at \in {"none", "flying"} THEN "absent" ELSE world[i].at

-----------------------------------------------------------------------------
(* Outcomes: accepted from the holder until it is fenced, also after its lease ran out *)

\* A definite no to a sender: the provider's, or its refusal of what came too late.
Refused(i) == world[i].at = "failed" \/ (world[i].at = "none" /\ world[i].passed)

Outcome(a, next, name, left) ==
    /\ row' = next
    /\ att' = [att EXCEPT ![a] = left]
    /\ Emit(name, "worker", att[a].gen)
    /\ RowOnly

\* What is left of an attempt whose handler has ended: it sends nothing more.
Over(a) == IF att[a].pc = "sent" THEN att[a] ELSE NoAttempt

\* By a handler that never dispatched, or with the provider's answer.
Complete(a) ==
    /\ Told(a) /\ (Fence(a) \/ Mut("NoFenceOnComplete"))
    /\ row.status = "running" \/ (Mut("StatusNotFenced") /\ row.status \in Terminal)
    /\ att[a].pc = "running" \/ (att[a].pc = "sent" /\ world[att[a].i].at = "succeeded")
    /\ Outcome(a, Ended(row, "completed"), "completed", Over(a))

FailRetryable(a) ==
    /\ Holds(a)
    /\ LET next == IF row.marker # 0 THEN Ended(row, "indeterminate")
                   ELSE IF row.flag THEN Ended(row, "cancelled")
                   ELSE IF row.attempts >= limit THEN Ended(row, "dead_letter")
                   ELSE Queued(row)
       IN Outcome(a, next, Cause(next, "retried", "backoff"), Over(a))

\* Whoever says a definite no sends no more; past the send only the provider can have said it.
FailDefinite(a) ==
    /\ Holds(a)
    /\ att[a].pc = "sent" => Refused(att[a].i)
    /\ Outcome(a, Ended(row, "failed"), "failed", Over(a))

HaltUnsafe(a) == Holds(a) /\ Outcome(a, Ended(row, "halt_unsafe"), "halt_unsafe", Over(a))

\* Written without waiting for the handler, which may go on to send: shutdown, a dispatch not recorded, a result that
\* can't be stored.
Indeterminate(a) == Holds(a) /\ Outcome(a, Ended(row, "indeterminate"), "indeterminate", att[a])
TimeOut(a) ==
    Holds(a) /\ att[a].pc # "running" /\ Outcome(a, Ended(row, "timed_out"), "timed_out", att[a])

Release(a) ==
    /\ Holds(a) /\ row.marker = 0
    /\ LET free == row.releases < FreeReleases
           given == [row EXCEPT !.attempts = IF free THEN @ - 1 ELSE @, !.releases = @ + 1]
           next == IF ~free /\ ~row.flag /\ row.attempts >= limit THEN Ended(row, "dead_letter") ELSE Requeued(given)
       IN Outcome(a, next, Cause(next, "retried", "release"), Over(a))

\* Past the mark only the provider's own word that it was not performed makes it cancelled.
Acknowledge(a, confirmed) ==
    /\ Holds(a) /\ row.flag
    /\ confirmed => row.marker # 0 /\ att[a].pc = "sent" /\ Refused(att[a].i)
    /\ LET next == Ended(row, IF row.marker = 0 \/ confirmed THEN "cancelled" ELSE "indeterminate")
       IN Outcome(a, next, TerminalEvent[next.status], att[a])

-----------------------------------------------------------------------------
(* Products and operators *)

Operate(next, name) ==
    /\ row' = next
    /\ Emit(name, "operator", 0)
    /\ UNCHANGED <<att, limit, paused, sw, mishaps, cap>>

\* As many generations are left as a job needs at most to end by itself.
Room(given) == row.gen + given + limit + FreeReleases + 1 <= MaxGen

Cancel ==
    /\ UNCHANGED <<world, wf>>
    /\ IF row.status = "queued" THEN Operate([Ended(row, "cancelled") EXCEPT !.flag = TRUE], "cancelled")
       ELSE row.status \in Active /\ ~row.flag /\ Operate([row EXCEPT !.flag = TRUE], "")

\* A pause only keeps claims from being made, as no claim has to be: safety doesn't need it.
Pause ==
    /\ Live /\ ~paused /\ paused' = TRUE
    /\ mishaps < Mishaps /\ mishaps' = mishaps + 1
    /\ Silent("operator")
    /\ UNCHANGED <<row, limit, att, sw, world, wf, cap>>
Resume == paused /\ paused' = FALSE /\ Silent("operator") /\ UNCHANGED <<row, att, sw, world>> /\ Rest

\* The wake that follows may be lost.
Retry ==
    /\ row.status = "failed" /\ row.intent < MaxIntent /\ Room(0)
    /\ Operate([Queued(row) EXCEPT !.intent = @ + 1, !.attempts = 0, !.releases = 0, !.marker = 0, !.flag = FALSE,
                                   !.by = "none"], "retried:retry")
    /\ world' = [world EXCEPT ![row.intent + 1].risk = row.by = "operator" /\ ~Mut("RetryBlind")]
    /\ wf' \in IF Live THEN {"up", wf} ELSE {wf}

Requeue ==
    /\ row.status \in Active /\ row.marker = 0 /\ row.lease = "expired" /\ Room(1)
    /\ LET next == Requeued([row EXCEPT !.gen = @ + 1, !.attempts = 0]) IN
        Operate(next, Cause(next, "retried", "requeue"))
    /\ UNCHANGED <<world, wf>>

Resolved(verdict, by) == [row EXCEPT !.status = verdict, !.by = by, !.esc = FALSE]
Verdicts == {"completed", "failed", "dead_letter"}

Resolve(verdict) ==
    /\ row.status \in Unresolved
    /\ Operate(Resolved(verdict, "operator"), "reconciled:operator")
    /\ UNCHANGED <<world, wf>>

Recheck ==
    /\ row.esc
    /\ Operate([row EXCEPT !.esc = FALSE], "escalated:cleared")
    /\ UNCHANGED <<world, wf>>

\* Nobody hosts it.
EscalateUnhosted ==
    /\ ~row.esc
    /\ \/ Unhosted /\ (row.status = "queued" \/ (row.status \in Active /\ row.lease = "expired"))
       \/ row.status \in Unresolved
    /\ ~Live
    /\ Operate([row EXCEPT !.esc = TRUE], "escalated")
    /\ UNCHANGED <<world, wf>>

\* append_job_event: an informative name, that changes nothing.
AppendEvent ==
    /\ ~Live
    /\ Operate(row, "heartbeat")
    /\ UNCHANGED <<world, wf>>

\* The follow-ups of its completion could not be created.
EscalateFollowUps ==
    /\ row.status = "completed" /\ ~Live
    /\ Operate([row EXCEPT !.esc = TRUE], "escalated")
    /\ UNCHANGED <<world, wf>>

-----------------------------------------------------------------------------
(* Reconciliation: a provider's own word, and the sweep, which reads, asks, and writes in steps of their own *)

Judged(next, name, actor) ==
    /\ row' = next
    /\ Emit(name, actor, 0)
    /\ UNCHANGED <<att, limit, paused, world, wf, mishaps, cap>>

\* What the answer for intent i leads to. Absent proves nothing but where the provider's own deadline had passed before.
Judge(i, answer, passed, actor) ==
    \/ answer = "succeeded" /\ Judged(Resolved("completed", "provider"), "reconciled:provider", actor)
    \/ answer = "failed" /\ \E v \in {"failed", "dead_letter"} :
            Judged(Resolved(v, "provider"), "reconciled:provider", actor)
    \/ answer = "absent" /\ passed /\ Judged(Resolved("failed", "provider"), "reconciled:provider", actor)
    \/ answer = "absent" /\ ~passed /\ ~row.esc /\ Judged([row EXCEPT !.esc = TRUE], "escalated", actor)

\* Unknown, pending beyond its deadline, lookups that fail for long.
JudgeUnknown(actor) == ~row.esc /\ Judged([row EXCEPT !.esc = TRUE], "escalated", actor)

Webhook ==
    /\ row.status = "indeterminate" /\ row.marker # 0
    /\ \/ Judge(row.intent, Answer(row.intent), world[row.intent].passed, "provider")
       \/ JudgeUnknown("provider")
    /\ UNCHANGED sw

SweepRead ==
    /\ sw.pc = "idle"
    /\ \/ row.status \in Unresolved /\ ~row.esc
       \/ row.status \in Active /\ row.lease = "expired" /\ (row.marker # 0 \/ row.flag)
    /\ sw' = [pc |-> "read", st |-> row.status, gen |-> row.gen, esc |-> row.esc, key |-> row.marker # 0,
              i |-> row.intent, passed |-> world[row.intent].passed]
    /\ Silent("sweep")
    /\ UNCHANGED <<row, att, paused, world>> /\ Rest

Unmoved == (row.status = sw.st /\ row.gen = sw.gen /\ row.esc = sw.esc) \/ Mut("SweepBlind")
StillLost == (row.lease = "expired" /\ (row.marker # 0 \/ row.flag)) \/ Mut("SweepBlind") \/ Mut("SweepNoRecheck")

SweepFence ==
    /\ sw.pc = "read" /\ sw.st \in Active /\ Unmoved /\ StillLost
    /\ LET status == IF row.marker # 0 THEN "indeterminate" ELSE "cancelled" IN
        /\ Judged([Ended(row, status) EXCEPT !.gen = @ + 1],
                  IF status = "cancelled" THEN status ELSE "indeterminate:sweep", "sweep")
        /\ sw' = IF status = "indeterminate" THEN [sw EXCEPT !.st = status, !.gen = row.gen + 1, !.key = TRUE]
                 ELSE NoSweep

\* Timed out, nothing to ask for, or an answer that settles nothing.
SweepEscalate ==
    /\ sw.pc # "idle" /\ sw.st \in Unresolved /\ ~sw.esc /\ Unmoved
    /\ JudgeUnknown("sweep")
    /\ sw' = NoSweep

SweepAsk ==
    /\ sw.pc = "read" /\ sw.st = "indeterminate" /\ sw.key /\ ~sw.esc /\ Unmoved
    /\ Answer(sw.i) = "absent"
    /\ sw' = [sw EXCEPT !.pc = "absent"]
    /\ Silent("sweep")
    /\ UNCHANGED <<row, att, paused, world>> /\ Rest

\* The provider's final answers stay: asking and writing may be one step. Absent does not.
SweepWrite ==
    /\ sw.st = "indeterminate" /\ sw.key /\ ~sw.esc /\ Unmoved
    /\ \/ sw.pc = "read" /\ Answer(sw.i) \in {"succeeded", "failed"} /\ Judge(sw.i, Answer(sw.i), FALSE, "sweep")
       \/ sw.pc = "absent"
          /\ LET passed == IF Mut("AbsentIsFailed") THEN TRUE
                           ELSE IF Mut("DeadlineAtWrite") THEN world[sw.i].passed ELSE sw.passed
             IN Judge(sw.i, "absent", passed, "sweep")
    /\ sw' = NoSweep

\* It finds the row moved, or escalated, or is cut short itself.
SweepLeaves ==
    /\ sw.pc # "idle"
    /\ Live => ~Unmoved \/ sw.esc \/ (sw.st \in Active /\ ~StillLost)
    /\ sw' = NoSweep
    /\ Silent("sweep")
    /\ UNCHANGED <<row, att, paused, world>> /\ Rest

Sweep == SweepRead \/ SweepFence \/ SweepEscalate \/ SweepAsk \/ SweepWrite \/ SweepLeaves

-----------------------------------------------------------------------------
(* Launching. `gone`: never started, terminated, closed, or asleep with its wake lost *)

Workflow(state, lost) ==
    /\ wf' = state
    /\ mishaps' = mishaps + lost
    /\ UNCHANGED <<row, limit, paused, att, sw, world, ev, cap>>

Lose == Live /\ wf = "up" /\ mishaps < Mishaps /\ Workflow("gone", 1)
Close == Live /\ wf = "up" /\ row.status \in Settled /\ Workflow("gone", 0)
Relaunch == Live /\ wf = "gone" /\ row.status \notin Settled /\ ~Mut("NoRelaunch") /\ Workflow("up", 0)

-----------------------------------------------------------------------------

Attempt(a) ==
    \/ \E w \in Workers : ClaimAgain(a, w) \/ \E told \in BOOLEAN : Claim(a, w, told)
    \/ Heartbeat(a) \/ Exit(a)
    \/ \E told \in BOOLEAN : Mark(a, told)
    \/ MarkInDoubt(a) \/ MarkFound(a) \/ DispatchAgain(a) \/ Send(a)
    \/ Complete(a) \/ FailRetryable(a) \/ FailDefinite(a) \/ HaltUnsafe(a) \/ Indeterminate(a) \/ TimeOut(a)
    \/ Release(a) \/ \E confirmed \in BOOLEAN : Acknowledge(a, confirmed)

Environment ==
    \/ ClaimLands \/ Renew \/ Expire \/ CapReached
    \/ \E i \in Intents : Land(i) \/ Drop(i) \/ DeadlinePasses(i) \/ \E at \in {"succeeded", "failed"} : Perform(i, at)
    \/ Cancel \/ Pause \/ Resume \/ Retry \/ Requeue \/ Recheck \/ \E v \in Verdicts : Resolve(v)
    \/ EscalateUnhosted \/ EscalateFollowUps \/ AppendEvent
    \/ Webhook \/ Sweep
    \/ Lose \/ Close \/ Relaunch

Next == (\E a \in Slots : Attempt(a)) \/ Environment

Spec == Init /\ [][Next]_vars
=============================================================================
