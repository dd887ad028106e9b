------------------------------- MODULE Check -------------------------------
(* What must hold of the job: the invariants of the design's section 14 that concern one job. *)
EXTENDS Job

-----------------------------------------------------------------------------
(* Invariants *)

\* 1. At most one send for each intent, and none after a marker of an earlier generation of that intent.
OneSendPerIntent == \A i \in Intents : world[i].sends <= 1
NoSendPastEarlierMarker == \A a \in Slots : att[a].pc \in {"marked", "sent"} => att[a].gen = world[att[a].i].mark

\* 1, over intents: where the send of an earlier intent may land beside a later one, an operator has accepted that.
OneEffectUnlessAccepted ==
    \A i, j \in Intents :
        j < i /\ world[i].mark # 0 /\ CanLand(j) => \E k \in Intents : j < k /\ k <= i /\ world[k].risk

\* 10. Never failed, cancelled or dead_letter, save by an operator's word, while the send has landed or can still land.
\* (Stronger than the design: the provider's own word is not exempt, since it must be true.)
NeverWrongEnd ==
    row.status \in {"failed", "cancelled", "dead_letter"} /\ row.by # "operator" => ~CanLand(row.intent)

\* Completed past the boundary, save by an operator's word, is what the provider performed.
CompletedIsTrue ==
    row.status = "completed" /\ row.by # "operator" /\ row.marker # 0 => world[row.intent].at = "succeeded"

\* What the CHECK constraints ask of a row.
RowIsSound ==
    /\ row.status \in Active <=> row.lease # "none"
    /\ row.status = "queued" => ~row.flag /\ row.marker = 0 /\ row.owner = None
    /\ row.marker # 0 => row.marker = world[row.intent].mark

-----------------------------------------------------------------------------
(* Properties of steps *)

\* 2. The generation only grows, and every claim's is greater.
GenerationGrows == [][row'.gen >= row.gen /\ (ev'.name = "claimed" => row'.gen > row.gen)]_vars

\* 3. The transition table; and no terminal status changes but by the three paths.
LegalMoves == [][row'.status # row.status => row'.status \in Moves[row.status]]_vars
TerminalMoves ==
    [][row.status \in Terminal /\ row'.status # row.status =>
        \/ row.status = "indeterminate" /\ ev'.name \in {"reconciled:provider", "reconciled:operator"}
        \/ row.status = "timed_out" /\ ev'.name = "reconciled:operator"
        \/ row.status = "failed" /\ ev'.name = "retried:retry" /\ row'.intent = row.intent + 1]_vars

\* 4, in modest form: whatever the trail shows of the row changes with one event that says so, and no event says else.
Folded(r) == <<r.status, r.gen, r.intent, r.attempts, r.marker, r.esc, r.by>>
Says(name, old, new) ==
    CASE name = "claimed" -> new.status = "claimed" /\ new.gen = old.gen + 1 /\ new.attempts = old.attempts + 1
      [] name = "heartbeat" -> (new.status = "running" /\ new.gen = old.gen) \/ new = old
      [] name = "dispatched" -> new.status = "running" /\ new.marker = new.gen
      [] name \in {"retried:backoff", "retried:release", "retried:requeue"} ->
            new.status = "queued" /\ new.intent = old.intent
      [] name = "retried:retry" -> new.status = "queued" /\ new.intent = old.intent + 1
      [] name \in {"escalated", "escalated:cleared"} -> [old EXCEPT !.esc = name = "escalated"] = new
      [] name \in {"reconciled:provider", "reconciled:operator"} -> new.status \in Verdicts /\ ~new.esc
      [] OTHER -> \E status \in Terminal :
            /\ new.status = status /\ ~new.esc
            /\ name \in {TerminalEvent[status], TerminalEvent[status] \o ":reclaim", TerminalEvent[status] \o ":sweep"}
RowIsFoldOfEvents ==
    [][IF ev'.name = "" THEN Folded(row') = Folded(row) ELSE Says(ev'.name, row, row')]_vars

\* The promise behind 1: a stale worker changes nothing.
StaleChangesNothing ==
    [][ev'.actor = "worker" /\ ev'.name # "" => ev'.gen = row.gen /\ row.status \in Active]_vars

\* No holder is fenced while its lease is alive.
LiveLeaseStands == [][row.status \in Active /\ row'.gen # row.gen => row.lease = "expired"]_vars

\* 7. Reconciliation never dispatches.
SweepNeverDispatches ==
    [][ev'.actor \in {"sweep", "provider"} => att' = att /\ row'.marker = row.marker
        /\ \A i \in Intents : world'[i].sends = world[i].sends]_vars

\* 8. Of a cancel and a completion exactly one wins, and its caller is told with the write: neither is written twice, nor
\* one over the other.
OneWinner ==
    [][LET won == {"completed", "cancelled"} IN
        row'.status \in won /\ ev'.name \notin {"", "escalated", "escalated:cleared", "heartbeat"} => row.status \notin won]_vars

-----------------------------------------------------------------------------
(* 6. Every accepted job settles or stands before an operator, given a live worker, Postgres and Temporal: claims that
   the workflow asks for are made, the launch sweep launches, the sweep sweeps, time passes, a pause ends, and an
   attempt that was fenced is over at some time. Nothing is asked of the attempts: any may stop for ever. *)

Fenced(a) == IF att[a].pc = "claiming" THEN ~Repeats(a, att[a].w) ELSE ~Holds(a)

Fairness ==
    /\ WF_vars(Expire)
    /\ WF_vars(CapReached)
    /\ WF_vars(wf = "up" /\ (ClaimLands \/ \E a \in Slots, w \in Workers : Claim(a, w, TRUE)))
    /\ WF_vars(Relaunch)
    /\ WF_vars(Sweep)
    /\ WF_vars(Resume)
    /\ \A a \in Slots : WF_vars(Fenced(a) /\ Exit(a))

LiveSpec == Spec /\ Fairness

StandsOrSettled == row.status \in Settled \/ (row.status \in Unresolved /\ row.esc)
EveryJobSettles == []<>StandsOrSettled

-----------------------------------------------------------------------------
Symmetry == Permutations(Workers) \cup Permutations(Slots)

\* The last event is judged on each step, and is no part of the state.
View == <<row, limit, paused, att, sw, world>>
=============================================================================
