"""A run in one line, from its journal alone."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from powertrain.run import events as ev
from powertrain.run import lifecycle
from powertrain.run.record import journal

#: The state of a run whose process is gone before its end.
INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class RunSummary:
    """A run in one line, from its journal. ``seconds`` is its known duration."""

    name: str
    state: str
    rows: int
    world_size: int
    attempts: int
    started: float
    seconds: float
    #: The process that runs it on this machine; 0 where none does.
    pid: int = 0
    #: How many of its reported checkpoints could not be saved.
    unsaved: int = 0


def summarize(
    name: str, events: Sequence[ev.Event], rows: int = 0, run: lifecycle.RunState | None = None
) -> RunSummary:
    """Summarize ``events``; ``rows`` if more rows are known than the journal has, ``run`` if its state is known."""
    run = journal.replay(events) if run is None else run
    starts = [event for event in events if isinstance(event, ev.RunStarted)]
    ended = [event.rows for event in events if isinstance(event, ev.Ended)]
    committed = [row for row, _ in run.committed]
    began = starts[-1].time if starts else events[0].time
    state = state_in_words(run, starts)
    until = events[-1].time if state in (*lifecycle.ENDED, INTERRUPTED) else time.time()
    return RunSummary(
        name=name,
        state=state,
        rows=max([rows, *ended[-1:], *committed[-1:]]),
        world_size=run.world_size,
        attempts=run.attempt + 1,
        started=began,
        seconds=max(0.0, until - began),
        unsaved=len(run.unsaved),
    )


def state_in_words(run: lifecycle.RunState, starts: Sequence[ev.RunStarted]) -> str:
    """Return the state; "interrupted" if the run's process on this machine is gone."""
    if run.state in lifecycle.ENDED or not starts:
        return run.state
    start = starts[-1]
    if start.host == socket.gethostname() and not was_running(start.pid, start.time):
        return INTERRUPTED
    return run.state


def was_running(pid: int, at: float) -> bool:
    """Return whether the current process ``pid`` is the one that existed at ``at``."""
    import psutil

    try:
        # A second of slack: the start of a process is known to the clock tick, not closer.
        process = psutil.Process(pid)
        return bool(process.create_time() <= at + 1.0 and process.status() != psutil.STATUS_ZOMBIE)
    except (
        psutil.NoSuchProcess,
        ValueError,
        OverflowError,
    ):  # the last two for a number that no process can have
        return False
