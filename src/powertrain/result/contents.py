"""Contents of a result, read from the run's directory: its curves, and the card for notebooks."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from powertrain.checkpoint import retention
from powertrain.checkpoint.manifest import Manifest
from powertrain.errors import ConfigError, StorageError, TrainingFailedError
from powertrain.result.html import CheckpointCard, ResultCard, Spark, TimeCard, Unread
from powertrain.run import events as ev
from powertrain.run.checkpoints.unsaved import UnsavedCheckpoint, fold
from powertrain.run.lifecycle import RunState
from powertrain.run.metrics import curves
from powertrain.run.record import run_json
from powertrain.run.record.milestones import milestones
from powertrain.run.startup import report
from powertrain.storage import Storage
from powertrain.storage.addresses import without_secrets
from powertrain.terminal.text import data_size, duration, metric_pairs, number
from powertrain.text.loggers import module_logger

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from powertrain.diagnosis.finding import Finding
    from powertrain.diagnosis.summary import Report
    from powertrain.result.plot import MetricLine, Picture, PlottedCheckpoint
    from powertrain.run.metrics.curves import Curve

_T = TypeVar("_T")
_logger = module_logger(__name__)
#: A picture of all metrics shows so many of them, and a line is drawn of so many pixels.
_MOST_PANELS, _PIXELS = 24, 1000
#: The same for the small ones in a notebook.
_MOST_SPARKS, _SPARK_PIXELS = 12, 200
_MOST_METRICS = 60


@dataclass(frozen=True)
class Contents:
    """A run as stored in its directory. Its functions read the rest on demand and may raise."""

    path: str
    storage: Callable[[], Storage]
    facts: Callable[[], Sequence[ev.Event]]
    state: Callable[[], RunState]
    manifests: Callable[[], Sequence[Manifest]]
    findings: Callable[[], Sequence[Finding]]
    #: The diagnosis; None without telemetry.
    report: Callable[[], Report | None] = lambda: None

    def best(self) -> str:
        """Return the name of the kept checkpoint with the best score; "" if the run has no score."""
        try:
            run = run_json.read(self.storage()).get("run_config", {})
        except FileNotFoundError:
            return ""
        except StorageError as error:
            _logger.warning("%s The best checkpoint is unknown.", error)
            return ""
        config = run.get("checkpoint_config") or {}
        attribute, order = config.get("checkpoint_score_attribute"), config.get("checkpoint_score_order")
        if not isinstance(attribute, str) or not attribute or order not in ("min", "max"):
            return ""
        found = retention.best(self.manifests(), attribute, order)
        return found.name if found is not None else ""


# --------------------------------------------------------------------------- the picture


def picture_of(
    run: Contents, metrics: str | Sequence[str] | None, *, x: str, rank: int | str, smooth: float
) -> Picture:
    """Return the curves of the requested metrics; raises :class:`ConfigError` if they cannot be drawn."""
    from powertrain.result.plot import Panel, Picture, is_smooth

    if x not in ("row", "time"):
        raise ConfigError(f"x={x!r} is neither 'row' nor 'time'. It is the horizontal axis.")
    if not is_smooth(smooth):
        raise ConfigError(
            f"smooth={smooth!r} cannot be used: it must be at least 0 and less than 1. 0.9 smooths strongly."
        )
    storage, state, facts = run.storage(), run.state(), run.facts()
    there = curves.metric_names(storage, state)
    names = _chosen(metrics, there)
    most = _world_size(facts)
    ranks = _ranks(rank, most)
    axis = _Axis(storage, state, facts[0].time if x == "time" else None)
    panels = tuple(
        Panel(name, tuple(line for one in ranks if (line := axis.line(name, one)) is not None))
        for name in names
    )
    if metrics is None:  # some may be of attempts that count no more
        panels = tuple(panel for panel in panels if panel.lines) or panels[:1]
    left_out = max(0, len(there) - _MOST_PANELS) if metrics is None else 0
    return Picture(
        title=_title(state.name, len(panels), left_out, ranks, most),
        panels=panels,
        over_time=x == "time",
        saved=_saved(run, axis),
        happened=tuple((axis.place(found.row, found.time), found) for found in milestones(facts)),
        smooth=smooth,
    )


class _Axis:
    """The horizontal axis: rows or time."""

    def __init__(self, storage: Storage, state: RunState, begin: float | None) -> None:
        self._storage, self._state = storage, state
        #: Unix seconds at which the time axis begins; None for an axis of rows.
        self._begin = begin
        #: Times at which each rank reported its rows.
        self._times: dict[int, Curve] = {}

    def place(self, row: int, time: float) -> float:
        """Return the position of an event at ``time``, when ``row`` was the newest."""
        return float(row) if self._begin is None else time - self._begin

    def places(self, rows: Iterable[int], rank: int) -> NDArray[np.float64]:
        """Return the positions of a rank's reports with these rows; none over time for a rank that never reported."""
        import numpy as np

        wanted = np.asarray(list(rows), np.float64)
        if self._begin is None or not len(wanted):
            return wanted
        if rank not in self._times:
            self._times[rank] = self._curve("timestamp", rank)
        times = self._times[rank]
        if not len(times.rows):
            return np.full(len(wanted), np.nan)
        return (
            np.interp(wanted, times.rows, times.low) - self._begin
        )  # low is the time of a pixel's first row

    def line(self, name: str, rank: int) -> MetricLine | None:
        """A metric of a rank; None where it never reported it."""
        from powertrain.result.plot import MetricLine, drawable

        curve = self._curve(name, rank)
        if not len(curve.rows):
            return None
        low, high, last = map(drawable, (curve.low, curve.high, curve.last))
        return MetricLine(rank, self.places(curve.rows, rank), low, high, last)

    def _curve(self, name: str, rank: int) -> Curve:
        return curves.curve(self._storage, self._state, name, pixels=_PIXELS, rank=rank)


def _chosen(metrics: str | Sequence[str] | None, there: Sequence[str]) -> list[str]:
    """The metrics to draw; raises :class:`ConfigError` for one that the run does not have."""
    if not there:
        raise ConfigError(
            "There is nothing to plot: the run has no metric that is a number. Report some: report({'loss': 0.5})."
        )
    if metrics is None:
        return list(there[:_MOST_PANELS])
    names = [metrics] if isinstance(metrics, str) else list(metrics)
    if not names:
        raise ConfigError("metrics=[] names no metric. Name some, or leave it out to plot all of them.")
    for name in names:
        if name not in there:
            near = difflib.get_close_matches(str(name), there, n=3, cutoff=0.5) or there[:5]
            raise ConfigError(
                f"The run has no metric {name!r} that is a number. Did you mean {' or '.join(map(repr, near))}?"
            )
    return names


def _world_size(facts: Sequence[ev.Event]) -> int:
    """The most ranks that the run ever had."""
    return max((fact.world_size for fact in facts if isinstance(fact, ev.AttemptStarted)), default=1)


def _ranks(rank: int | str, most: int) -> Sequence[int]:
    """The ranks to draw; raises :class:`ConfigError` for one that the run does not have."""
    from powertrain.result.plot import ranks_drawn

    if rank == "all":
        return ranks_drawn(most)
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < most:
        raise ConfigError(
            f"rank={rank!r} cannot be plotted: the run has ranks 0 to {most - 1}, or rank='all'."
        )
    return [rank]


def _title(name: str, drawn: int, left_out: int, ranks: Sequence[int], most: int) -> str:
    """The run, and how much of it is in the picture."""
    metrics = f" ({drawn} of {drawn + left_out} metrics)" if left_out else ""
    if len(ranks) == 1:
        return f"{name}{metrics}, rank {ranks[0]}"
    chosen = f"all {most} ranks" if len(ranks) == most else f"{len(ranks)} of {most} ranks"
    return f"{name}{metrics}, {chosen}"


def _saved(run: Contents, axis: _Axis) -> tuple[PlottedCheckpoint, ...]:
    """Return the positions of reports with checkpoints, not of the later commits."""
    from powertrain.result.plot import PlottedCheckpoint

    best, manifests = run.best(), run.manifests()
    places = axis.places((m.row for m in manifests), 0)
    return tuple(
        PlottedCheckpoint(float(at), m.name == best) for at, m in zip(places, manifests, strict=True)
    )


# --------------------------------------------------------------------------- the card


def card_of(
    run: Contents,
    *,
    state: str,
    reason: str,
    metrics: dict[str, Any] | None,
    error: TrainingFailedError | None,
) -> ResultCard:
    """Return the card of a result for notebooks. Never raises: an unreadable part shows its error."""
    facts = _read("its journal", run.facts)
    uri = _read("its place", lambda: run.storage().uri)
    card = ResultCard(
        path=without_secrets(run.path if isinstance(uri, Unread) else uri),
        state=state,
        reason=reason,
        error=str(error) if error is not None else "",
        metrics=None if metrics is None else tuple(metric_pairs(metrics, limit=_MOST_METRICS)),
    )
    if isinstance(facts, Unread):  # storage that does not reply is not read again: the user is waiting
        return replace(card, about=facts)
    return replace(
        card,
        name=next((fact.name for fact in reversed(facts) if isinstance(fact, ev.RunStarted)), ""),
        about=_read("its journal", lambda: _about(facts)),
        sparks=_read("its metrics", lambda: _sparks(run)),
        checkpoints=_read("its checkpoints", lambda: _checkpoints(run)),
        findings=_read("its diagnosis", lambda: tuple(run.findings())),
        time=_read("its diagnosis", lambda: _time(run.report())),
    )


def _time(found: Report | None) -> TimeCard:
    """Return the phases of a step, the speed and the goodput."""
    from powertrain.diagnosis.card import speed_line, time_line

    if found is None:
        return TimeCard()
    phases = tuple((phase.phase, phase.share) for phase in found.phases)
    return TimeCard(phases, found.mean_step_seconds, speed_line(found), time_line(found))


def _about(facts: Sequence[ev.Event]) -> tuple[tuple[str, str], ...]:
    """Return facts of the newest start from the journal, in pairs."""
    starts = [fact for fact in facts if isinstance(fact, ev.RunStarted)]
    begun = starts[-1].time if starts else 0.0
    attempts = [fact for fact in facts if isinstance(fact, ev.AttemptStarted)]
    own = [fact for fact in attempts if fact.time >= begun]
    ended = next((f for f in reversed(facts) if isinstance(f, (ev.Ended, ev.RunStarted))), None)
    measured = [f for f in facts if isinstance(f, ev.StartupMeasured) and report.has_phases(f)]
    pairs = [("started", time.strftime("%Y-%m-%d %H:%M", time.localtime(begun)))] if starts else []
    if isinstance(ended, ev.Ended):
        pairs += [("took", duration(ended.seconds)), ("rows", f"{ended.rows:,}")]
    if attempts:
        pairs.append(("workers", str(attempts[-1].world_size)))
    if len(own) > 1:
        pairs.append(("restarts", str(len(own) - 1)))
    if len(starts) > 1:
        pairs.append(("starts", str(len(starts))))
    unsaved: tuple[UnsavedCheckpoint, ...] = ()
    for fact in facts:
        unsaved = fold(unsaved, fact)
    if unsaved:
        pairs.append(("checkpoints not saved", str(len(unsaved))))
    if measured:
        pairs.append(("start-up", report.line(measured[-1])))
    return tuple(pairs)


def _read(what: str, read: Callable[[], _T]) -> _T | Unread:
    """Return a part of the run, or the reason why it cannot be read: storage may be gone, and files damaged."""
    try:
        return read()
    except Exception as error:
        return Unread(f"{what} cannot be read: {type(error).__name__}: {error}")


def _sparks(run: Contents) -> tuple[tuple[Spark, ...], int]:
    """Small curves of rank 0's metrics, and how many are left out."""
    storage, state = run.storage(), run.state()
    names = curves.metric_names(storage, state)
    sparks = []
    for name in names[:_MOST_SPARKS]:
        curve = curves.curve(storage, state, name, pixels=_SPARK_PIXELS)
        if len(curve.rows):
            low, high, last = (tuple(map(float, edge)) for edge in (curve.low, curve.high, curve.last))
            sparks.append(Spark(name, number(last[-1]), tuple(map(int, curve.rows)), low, high, last))
    return tuple(sparks), max(0, len(names) - _MOST_SPARKS)


def _checkpoints(run: Contents) -> tuple[CheckpointCard, ...]:
    best = run.best()
    manifests = run.manifests()
    return tuple(
        CheckpointCard(
            name=m.name,
            row=m.row,
            size=data_size(m.bytes),
            metrics=", ".join(f"{name} {value}".strip() for name, value in metric_pairs(m.metrics, limit=4)),
            is_best=m.name == best,
            is_newest=m is manifests[-1],
        )
        for m in manifests
    )
