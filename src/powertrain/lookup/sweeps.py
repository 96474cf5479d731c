"""Follow and summarize sweeps. All is read from ``sweep.json`` and the journal, never from the trials' directories."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from powertrain.errors import ConfigError
from powertrain.lookup.finding import FoundRun
from powertrain.lookup.summaries import INTERRUPTED, UNREADABLE, was_running
from powertrain.lookup.watching import JournalTail
from powertrain.storage.addresses import without_secrets
from powertrain.tune.reporter.table import find_best
from powertrain.tune.sweep.journal import events as ev
from powertrain.tune.sweep.journal import record as sweep_record
from powertrain.tune.sweep.journal.state import SweepState
from powertrain.tune.trial import Trial

#: Endings of a sweep as text.
_ENDED = {"finished": "has finished", "stopped": "was stopped", "failed": "has failed"}
#: States in which no driver works on a sweep that can be continued.
_LEFT = frozenset({"stopped", "failed", INTERRUPTED})


class SweepWatch:
    """Follows one sweep by its journal.

    ``sweep`` is its state so far; of the history of a metric only the last value is right.
    """

    def __init__(self, found: FoundRun) -> None:
        self._found = found
        self._tail = JournalTail(found, ev.decode_event)
        self.sweep = SweepState()
        self.start: ev.SweepStarted | None = None
        self.newest = 0.0

    def look(self) -> list[ev.SweepEvent]:
        """Return the facts since the last call."""
        facts: list[ev.SweepEvent] = self._tail.new_facts()
        for fact in leave_out_superseded(facts):
            self.sweep.apply(fact)
            self.newest = max(self.newest, fact.time)
            if isinstance(fact, ev.SweepStarted):
                self.start = fact
        return facts

    @property
    def trials(self) -> list[Trial]:
        """The trials so far."""
        return list(self.sweep.trials.values())

    @property
    def state(self) -> str:
        """The state; "interrupted" if the sweep's process on this machine is gone."""
        start = self.start
        if self.sweep.state != "running" or start is None or start.host != socket.gethostname():
            return self.sweep.state
        return self.sweep.state if was_running(start.pid, start.time) else INTERRUPTED

    @property
    def is_over(self) -> bool:
        """Whether this driver has left the sweep, or its process is gone."""
        return self.state != "running"

    @property
    def has_stopped(self) -> bool:
        """Whether it was stopped and can be resumed."""
        return self.sweep.state == "stopped"

    def ending(self) -> str:
        """Return one sentence about its end, or that its process is gone."""
        name, done = self._found.name, sum(trial.is_ended for trial in self.trials)
        trials = f"{done} of {len(self.trials)} trials are done"
        if self.sweep.state == "running":
            pid = self.start.pid if self.start is not None else 0
            return f"The sweep {name!r} is no longer running: its process ({pid}) is gone. {trials}."
        reason = f": {self.sweep.reason.rstrip('.')}" if self.sweep.reason else ""
        return f"The sweep {name!r} {_ENDED.get(self.sweep.state, self.sweep.state)}{reason}. {trials}."

    def continuing(self) -> str:
        """Return how to resume it; "" if nothing is left to do."""
        if self.state not in _LEFT:
            return ""
        path = without_secrets(self._found.place.uri)
        return f"Start the same script again to resume it, or call Tuner.restore({path!r}).fit()."


def leave_out_superseded(facts: Sequence[ev.SweepEvent]) -> list[ev.SweepEvent]:
    """Return the facts without superseded reports: most of those of a long sweep.

    The last two reports of a trial stay, because the time between them is shown, and so does the last one with each of
    its metrics.
    """
    kept: list[ev.SweepEvent] = []
    later: dict[str, list[set[str]]] = {}
    for fact in reversed(facts):
        if isinstance(fact, ev.TrialReported):
            reports = later.setdefault(fact.trial, [])
            names = {key for key, value in fact.metrics.items() if type(value) in (int, float)}
            if len(reports) > 1 and len(names) == len(fact.metrics) and names <= set().union(*reports):
                continue
            reports.append(names)
        elif isinstance(fact, (ev.SweepStarted, ev.TrialRevived)):
            later.clear()  # reports before a restart count separately
        kept.append(fact)
    return kept[::-1]


# --------------------------------------------------------------------------- one line


@dataclass(frozen=True)
class SweepSummary:
    """A sweep in one line. ``total`` is None if the number of trials is unknown."""

    name: str
    state: str
    done: int = 0
    total: int | None = None
    best: str = ""
    started: float = 0.0
    seconds: float = 0.0
    #: The process that runs it on this machine; 0 where none does.
    pid: int = 0


def summarize(found: FoundRun) -> SweepSummary:
    """Return a sweep in one line; raises :class:`StorageError` where its journal or record cannot be read."""
    watch = SweepWatch(found)
    watch.look()
    return summary_of(found, watch, read_record(found))


def read_record(found: FoundRun) -> dict[str, Any]:
    """Return the content of ``sweep.json``; {} if it cannot be reached, as on a user's own file system."""
    try:
        return sweep_record.read(found.place)
    except ConfigError:  # there is none
        return {}


def summary_of(found: FoundRun, watch: SweepWatch, record: Mapping[str, Any]) -> SweepSummary:
    """Return a sweep in one line from what was read of it."""
    if watch.start is None:
        return SweepSummary(found.name, UNREADABLE)
    metric, mode = objective(watch.sweep, record)
    best = find_best(watch.trials, metric, mode)
    until = time.time() if watch.state == "running" else watch.newest
    return SweepSummary(
        name=found.name,
        state=watch.state,
        done=sum(trial.is_ended for trial in watch.trials),
        total=count_trials(watch.sweep, record),
        best=f"{metric}={best.metrics[metric].last:.6g}" if best is not None else "",
        started=watch.start.time,
        seconds=max(0.0, until - watch.start.time),
        pid=found.live.card.pid if found.live is not None else 0,
    )


def objective(sweep: SweepState, record: Mapping[str, Any]) -> tuple[str, str]:
    """Return the metric and the mode by which trials are compared; "" for one that is not known."""
    named = [record.get(key) for key in ("metric", "mode")]
    first = [str(value[0]) if isinstance(value, list) and value else "" for value in named]
    return sweep.metric or first[0], sweep.mode or first[1]


def count_trials(sweep: SweepState, record: Mapping[str, Any]) -> int | None:
    """Return how many trials there will be; None where that is not known."""
    samples = record.get("num_samples")
    if sweep.is_search_over:
        return len(sweep.trials)
    if not isinstance(samples, int) or samples < 0:
        return None
    grids = math.prod(_grid_sizes(record.get("param_space")))
    return max(len(sweep.trials), samples * grids)


def _grid_sizes(space: Any) -> Iterator[int]:
    if isinstance(space, Mapping):
        values = space.get("grid_search")
        if len(space) == 1 and isinstance(values, list):
            yield len(values)
        else:
            for entry in space.values():
                yield from _grid_sizes(entry)
