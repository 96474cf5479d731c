"""Content of a run's page: overview, curves, steps and resources. Shared by the dashboard and by reports."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from powertrain.run import events as ev
from powertrain.run.lifecycle import RunState
from powertrain.run.metrics import curves, reading
from powertrain.run.record import journal
from powertrain.run.remote import protocol
from powertrain.storage import Storage
from powertrain.storage.addresses import without_secrets
from powertrain.terminal.text import metric_pairs
from powertrain.trace.store import RecordedTelemetry
from powertrain.views import history, machine, metrics, overview, timeline
from powertrain.views.encoding import id_of
from powertrain.views.run_summary import INTERRUPTED, summarize

#: Bounds of a page.
_MOST_PIXELS, _MOST_COLUMNS, _MOST_ROWS = 2000, 800, 256
#: Curves that one reply has at most, and events.
MOST_CURVES = 64
_MOST_EVENTS = 300


@dataclass(frozen=True)
class ShownRun:
    """A run at one moment, and what is known of it beside its directory."""

    name: str
    storage: Storage
    facts: Sequence[ev.Event]
    #: Returns the recorded steps and samples; asked for more than once.
    telemetry: Callable[[], RecordedTelemetry]
    #: The process that runs it on this machine; 0 where none does.
    pid: int = 0
    #: Its own answer about where it stands.
    stands: protocol.Description | None = None
    #: When a run of another machine was last heard of, where that is long ago; else 0.0.
    silent_since: float = 0.0

    @cached_property
    def state(self) -> RunState:
        return journal.replay(self.facts)

    @property
    def world_size(self) -> int:
        """The most ranks that the run ever had."""
        return max((fact.world_size for fact in self.facts if isinstance(fact, ev.AttemptStarted)), default=0)


def run_page(run: ShownRun) -> dict[str, Any]:
    """Return the overview of a run. A part that cannot be read has the reason in ``unread``."""
    storage, facts, state = run.storage, run.facts, run.state
    summary = summarize(run.name, facts, run.stands.row if run.stands is not None else 0, state)
    known_until = facts[-1].time if summary.state == INTERRUPTED else time.time()
    parts = history.spans(facts, run.silent_since or known_until)
    start = next((fact for fact in reversed(facts) if isinstance(fact, ev.RunStarted)), None)
    unread: dict[str, str] = {}

    def read(what: str, make: Callable[[], Any], default: Any) -> Any:
        try:
            return make()
        except Exception as error:  # storage may be gone, and files damaged: the rest of the page is shown
            unread[what] = f"{type(error).__name__}: {error}"
            return default

    last = read("metrics", lambda: reading.last_of_rank(storage, state, 0) or {}, {})
    return {
        **asdict(summary),
        "id": id_of(run.name),
        "path": without_secrets(storage.uri),
        "reason": state.reason,
        "silent_since": run.silent_since,
        "is_live": run.pid > 0,
        "pid": run.pid,
        "host": start.host if start is not None else "",
        "engine": start.engine if start is not None else "",
        "ranks": run.world_size,
        "stands": run.stands,
        "progress": read("progress", lambda: overview.progress(storage, summary.rows), None),
        "most_curves": MOST_CURVES,
        "metrics": read("metrics", lambda: curves.metric_names(storage, state), []),
        "last": metric_pairs(last, limit=60),
        "spans": [asdict(span) for span in parts],
        "goodput": history.goodput(parts),
        "marks": history.marks(facts),
        "events": history.happenings(facts, _MOST_EVENTS),
        "checkpoints": read("checkpoints", lambda: overview.checkpoints(storage, facts, state), None),
        "diagnosis": read("diagnosis", lambda: overview.diagnosis(storage, run.name, run.telemetry), None),
        "unread": unread,
    }


def run_lines(
    run: ShownRun,
    wanted: Sequence[str],
    *,
    ranks: Sequence[int],
    pixels: int,
    rows: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """Return the curves of metrics, of at most :data:`MOST_CURVES` in all."""
    content = metrics.metric_lines(
        run.storage,
        run.state,
        wanted[: max(1, MOST_CURVES // len(ranks))],
        ranks=ranks,
        pixels=min(max(1, pixels), _MOST_PIXELS),
        rows=rows,
    )
    return {"id": id_of(run.name), **content}


def run_steps(
    run: ShownRun, *, columns: int, rows: int, window: tuple[float, float] | None = None
) -> dict[str, Any] | None:
    """Return the step timeline, of all steps or of a time range; None if no steps were recorded."""
    telemetry = run.telemetry()
    columns = min(max(1, columns), _MOST_COLUMNS)
    shown = timeline.full_window(telemetry.steps, columns)
    if shown is None:
        return None
    if window is not None:
        shown = timeline.Window(*window, columns)
    return timeline.timeline(
        telemetry.steps, shown, most_rows=min(max(1, rows), _MOST_ROWS), is_thinned=telemetry.level > 0
    )


def run_resources(run: ShownRun, *, columns: int) -> dict[str, Any] | None:
    """Return the speed and the resources of ranks; None if neither steps nor samples were recorded."""
    telemetry = run.telemetry()
    columns = min(max(1, columns), _MOST_COLUMNS)
    window = machine.sample_window(telemetry.samples, columns)
    window = window or timeline.full_window(telemetry.steps, columns)
    return machine.resources(telemetry.samples, window, telemetry.steps) if window is not None else None
