"""The states of a run and the table of its transitions.

::

    new ──▶ waiting ──▶ starting ──▶ training ──▶ finished
              ▲            │            │  │
              │            ▼            ▼  └────▶ stopping ──▶ stopped
              └──────── recovering ◀────┘                └───▶ finished, failed, preempted
                           │
                           └──▶ failed

``RunStarted`` leads from every state to ``waiting``: a controller that was killed leaves its run in
whatever state it was, and the next one goes on from there.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from powertrain.run import events as ev
from powertrain.run.checkpoints.unsaved import UnsavedCheckpoint, find_newest, fold

NEW = "new"
WAITING = "waiting"
STARTING = "starting"
TRAINING = "training"
STOPPING = "stopping"
RECOVERING = "recovering"
FINISHED = "finished"
STOPPED = "stopped"
FAILED = "failed"
PREEMPTED = "preempted"

STATES = (
    NEW,
    WAITING,
    STARTING,
    TRAINING,
    STOPPING,
    RECOVERING,
    FINISHED,
    STOPPED,
    FAILED,
    PREEMPTED,
)
#: States in which no controller has work left.
ENDED = frozenset({FINISHED, STOPPED, FAILED, PREEMPTED})

#: (state, fact) -> state. A fact that is missing here for a state leaves the state as it is when it is
#: in NEUTRAL, and is illegal otherwise.
TRANSITIONS: dict[tuple[str, type[ev.Fact]], str] = {
    **{(state, ev.RunStarted): WAITING for state in STATES},
    (WAITING, ev.SlotsRequested): WAITING,
    (RECOVERING, ev.SlotsRequested): WAITING,
    (WAITING, ev.SlotsWaited): WAITING,
    (WAITING, ev.AttemptStarted): STARTING,
    (STARTING, ev.TrainingStarted): TRAINING,
    (WAITING, ev.Failed): RECOVERING,
    (STARTING, ev.Failed): RECOVERING,
    (TRAINING, ev.Failed): RECOVERING,
    (STOPPING, ev.Failed): STOPPING,
    (WAITING, ev.Lost): RECOVERING,
    (STARTING, ev.Lost): RECOVERING,
    (TRAINING, ev.Lost): RECOVERING,
    (STOPPING, ev.Lost): STOPPING,
    (TRAINING, ev.Resized): RECOVERING,
    (RECOVERING, ev.Resized): RECOVERING,
    (WAITING, ev.Resized): WAITING,
    (WAITING, ev.Stopping): STOPPING,
    (STARTING, ev.Stopping): STOPPING,
    (TRAINING, ev.Stopping): STOPPING,
    (RECOVERING, ev.Stopping): STOPPING,
    (STOPPING, ev.Stopping): STOPPING,
}
#: Facts that change no state and may come at any time.
NEUTRAL: frozenset[type[ev.Fact]] = frozenset(
    {
        ev.WorkerStarted,
        ev.StartupMeasured,
        ev.RanksAbsent,
        ev.Committed,
        ev.UploadLagged,
        ev.CheckpointFailed,
        ev.ValidationEnded,
        ev.Notified,
        ev.HangNoticed,
        ev.HangOver,
        ev.Warned,
        ev.Informed,
    }
)
#: The possible end states of each state.
ENDINGS: dict[str, frozenset[str]] = {
    NEW: frozenset(),
    WAITING: frozenset({FAILED, STOPPED, PREEMPTED}),
    STARTING: frozenset({FAILED, STOPPED, PREEMPTED}),
    TRAINING: frozenset({FINISHED, FAILED, PREEMPTED}),
    STOPPING: frozenset({FINISHED, STOPPED, FAILED, PREEMPTED}),
    RECOVERING: frozenset({FAILED, STOPPED, PREEMPTED}),
}


class IllegalTransition(Exception):
    """A fact came in a state in which it cannot have happened: a fault of ours, never of the user."""


def next_state(state: str, event: ev.Fact) -> str:
    """Return the state after ``event``; raises :class:`IllegalTransition` where the table has no answer."""
    if isinstance(event, ev.Ended):
        if event.state in ENDINGS.get(state, frozenset()):
            return event.state
        raise IllegalTransition(f"a run that is {state} cannot end as {event.state!r}")
    target = TRANSITIONS.get((state, type(event)))
    if target is not None:
        return target
    if type(event) in NEUTRAL and state != NEW:
        return state
    raise IllegalTransition(f"{type(event).__name__} cannot happen while a run is {state}")


@dataclass(frozen=True)
class Branch:
    """One attempt's part of the lineage: its rows begin at ``first_row``."""

    attempt: int
    first_row: int


@dataclass(frozen=True)
class RunState:
    """The state of a run, replayed from its journal."""

    state: str = NEW
    name: str = ""
    lease: int = 0
    #: Number of the newest attempt; -1 before the first. Counts on over controllers.
    attempt: int = -1
    world_size: int = 0
    #: Failures and losses of the current controller: a new start is a new budget.
    failures: int = 0
    losses_since_commit: int = 0
    preemptions: int = 0
    branches: tuple[Branch, ...] = ()
    committed: tuple[tuple[int, str], ...] = ()
    #: Reported checkpoints that are lost and whose rows were not trained again.
    unsaved: tuple[UnsavedCheckpoint, ...] = ()
    #: (attempt, row) of the newest commit.
    newest_commit: tuple[int, int] = (-1, 0)
    reason: str = ""
    facts: int = field(default=0, compare=False)

    @property
    def lost_last(self) -> UnsavedCheckpoint | None:
        """Return the checkpoint that was reported last, if it was not saved."""
        newest = find_newest(self.unsaved)
        is_last = newest is not None and (newest.attempt, newest.row) > self.newest_commit
        return newest if is_last else None

    def is_live(self, attempt: int, row: int) -> bool:
        """Return True when no later attempt began at or before this row."""
        return all(b.attempt <= attempt or row < b.first_row for b in self.branches)


def apply(run: RunState, event: ev.Fact) -> RunState:
    """Return the run after ``event``. Pure; raises :class:`IllegalTransition` as :func:`next_state` does."""
    run = replace(
        run,
        state=next_state(run.state, event),
        facts=run.facts + 1,
        unsaved=fold(run.unsaved, event),
    )
    if isinstance(event, ev.RunStarted):
        return replace(
            run,
            name=event.name,
            lease=event.lease,
            failures=0,
            losses_since_commit=0,
            preemptions=0,
            reason="",
        )
    if isinstance(event, ev.AttemptStarted):
        return replace(
            run,
            attempt=event.attempt,
            world_size=event.world_size,
            branches=(*run.branches, Branch(event.attempt, event.first_row)),
        )
    if isinstance(event, ev.Committed):
        return replace(
            run,
            committed=(*run.committed, (event.row, event.checkpoint)),
            newest_commit=max(run.newest_commit, (event.attempt, event.row)),
            losses_since_commit=0,
        )
    if isinstance(event, ev.Failed):
        return replace(run, failures=run.failures + 1, reason=event.reason)
    if isinstance(event, ev.Lost):
        return replace(
            run,
            losses_since_commit=run.losses_since_commit + 1,
            preemptions=run.preemptions + event.preempted,
            reason=event.reason,
        )
    if isinstance(event, (ev.Ended, ev.Stopping)):
        return replace(run, reason=event.reason)
    return run
