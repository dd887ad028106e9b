------------------------------- MODULE Trails -------------------------------
(* Whether recorded event trails are behaviours of the model: each step of a behaviour leaves the trail's next event, *)
(* or none. `Recorded`, written by tests/spec_trails.py, has the trails; a trail that is one is printed.              *)
EXTENDS Job, Recorded

VARIABLES trail, seen

RecordedLimits == {Recordings[t].limit : t \in DOMAIN Recordings}

Events == Recordings[trail].events

TrailInit ==
    /\ Init
    /\ trail \in DOMAIN Recordings
    /\ limit = Recordings[trail].limit
    /\ seen = 0
    /\ TLCSet(trail, FALSE)

\* The row after the event as the trail shows it.
Matches(event) ==
    /\ ev'.name = event.name
    /\ row'.status = event.status
    /\ row'.gen = event.gen
    /\ row'.intent = event.intent
    /\ row'.attempts = event.attempts

TrailNext ==
    /\ ~TLCGet(trail)
    /\ Next
    /\ UNCHANGED trail
    /\ IF ev'.name = "" THEN seen' = seen ELSE seen < Len(Events) /\ Matches(Events[seen + 1]) /\ seen' = seen + 1
    /\ seen' = Len(Events) => TLCSet(trail, TRUE) /\ PrintT(<<"accepted", trail>>)

TrailSpec == TrailInit /\ [][TrailNext]_<<vars, trail, seen>>

\* The last event has been matched; when it comes to an end, the trail is no part of what follows.
TrailView == <<row, att, sw, world, trail, seen>>
=============================================================================
