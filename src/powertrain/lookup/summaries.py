"""Summaries of runs for tables: state in words, progress, age."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from powertrain.errors import StorageError
from powertrain.lookup.asking import how_it_stands
from powertrain.run import events as ev
from powertrain.run import lifecycle
from powertrain.run.record import journal
from powertrain.run.record.lease import last_beat
from powertrain.run.remote import protocol
from powertrain.storage import Storage
from powertrain.terminal.text import clock
from powertrain.views.run_summary import INTERRUPTED, RunSummary, state_in_words, summarize, was_running

__all__ = [
    "INTERRUPTED",
    "UNREADABLE",
    "RunSummary",
    "ago",
    "silent_since",
    "state_in_words",
    "summaries_in",
    "summarize",
    "was_running",
    "with_life",
]

#: The state of a run whose journal cannot be read.
UNREADABLE = "unreadable"
#: Seconds without a heartbeat, and without a change of any file where there are no heartbeats, after which a run of
#: another machine counts as silent. Both leave room for clocks that differ.
_SILENCE_S, _LONG_SILENCE_S = 120.0, 1800.0


def with_life(summary: RunSummary, live: protocol.LiveRun | None) -> RunSummary:
    """Return the summary updated with the status of a live run."""
    if live is None:
        return summary
    stands = how_it_stands(live)
    return replace(
        summary, pid=live.card.pid, rows=max(summary.rows, stands.row if stands is not None else 0)
    )


def summaries_in(place: Storage, names: Iterable[str], warn: Callable[[str], None]) -> Iterable[RunSummary]:
    """A summary of each run of these names directly below ``place``; ``warn`` is called for unreadable ones."""
    for name in names:
        try:
            run = place.child(name)
            events = journal.read(run)
            if events:
                yield summarize(name, events)
            elif _has_unreadable_journal(run):
                yield _unreadable(name)
        except (StorageError, OSError, ValueError, OverflowError) as error:
            warn(f"{name}: {error}")
            yield _unreadable(name)


def _has_unreadable_journal(run: Storage) -> bool:
    """Return whether a run of real storage has a non-empty journal without a readable fact."""
    path = run.local_path("journal")
    if path is None or not os.path.lexists(path):
        return False
    try:
        entries = list(os.scandir(path))
    except OSError:  # a file in its place, or not for this user
        return True
    return any(not entry.is_file() or entry.stat().st_size > 0 for entry in entries)


def _unreadable(name: str) -> RunSummary:
    return RunSummary(name=name, state=UNREADABLE, rows=0, world_size=0, attempts=0, started=0.0, seconds=0.0)


def silent_since(
    place: Storage, run: lifecycle.RunState, starts: Sequence[ev.RunStarted], now: float
) -> float:
    """Return when a run of another machine was last heard of, where that is long ago; 0.0 for any other run.

    Its heartbeat counts. A file system has none, so there the newest change of its journal, metrics and telemetry does.
    """
    if run.state in lifecycle.ENDED or not starts or starts[-1].host == socket.gethostname():
        return 0.0
    try:
        beat = last_beat(place, run.lease)
        if beat is not None:
            return beat if now - beat > _SILENCE_S else 0.0
        newest = max(_newest_change(place, prefix) for prefix in ("journal", "metrics", "telemetry"))
    except OSError:
        return 0.0
    return newest if newest and now - newest > _LONG_SILENCE_S else 0.0


def _newest_change(place: Storage, prefix: str) -> float:
    """Return the time of the last change of the newest files below ``prefix``; 0.0 without any."""
    found = 0.0
    for entry in place.list(prefix)[-2:]:
        with contextlib.suppress(FileNotFoundError):
            found = max(found, place.modified(entry.key))
    return found


def ago(then: float, now: float) -> str:
    """Return the time since ``then`` as text."""
    return f"{clock(now - then)} ago"
