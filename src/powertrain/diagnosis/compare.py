"""Compare two runs: whether the second is faster, slower or the same, and in which phase. Pure.

The steps of each run after start-up are resampled in blocks (bootstrap); the ratio of the medians of the two gives an
interval. A run is worse only when the whole interval lies beyond the tolerance (3 %). The same is done with the means,
because periodic work (a checkpoint, an evaluation) moves no median; single hiccups make that interval wide, and then it
decides nothing.

Swapped runs get swapped verdicts: ratios are kept as logarithms, both runs are drawn with the same seeds, and the
tolerance is relative to the faster run's time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np

from powertrain.diagnosis import words
from powertrain.diagnosis.goodput import training_share
from powertrain.diagnosis.summary import Report
from powertrain.diagnosis.tables import statistics
from powertrain.diagnosis.tables.steady import SteadySteps, steady_steps
from powertrain.diagnosis.tables.steps import Floats, StepTable
from powertrain.text.printable import escape_controls
from powertrain.trace.recording import phases

BETTER, SAME, WORSE, UNKNOWN = "better", "same", "worse", "unknown"
#: Exit codes of `powertrain compare`, for CI. 1 is an error, 2 a usage error.
EXIT_CODES = {BETTER: 0, SAME: 0, WORSE: 3, UNKNOWN: 4}
#: The tolerated difference, relative to the faster run's time.
TOLERANCE = 0.03
_CONFIDENCE = 0.95
_SURE = 0.99
#: The median of fewer steps can move by chance alone.
LEAST_STEPS = 30
#: Blocks of each run: few and long, so that a machine that is slow for a while is drawn as a whole or not at all.
_BLOCKS = 20
#: Of the draws half have the first run drawn with the first seed and the second with the other, half the reverse.
_REPEATS = 400
_SEEDS = (1, 2)
_MOST_STEPS = 2000
#: Batches whose sizes differ by more are compared by the sample.
_OTHER_BATCH = 0.01


class PhaseChange(msgspec.Struct, frozen=True):
    """The change of one phase."""

    phase: str
    #: Seconds of a step, or of a sample where those are compared; medians or means, as the comparison's.
    before: float
    after: float
    #: The 95 % confidence interval of the difference in seconds.
    low: float
    high: float
    verdict: str


class RateChange(msgspec.Struct, frozen=True):
    """Throughput, utilisation or goodput of both runs. It decides nothing."""

    #: "samples_per_second", "tokens_per_second", "flops_per_second", "mfu" or "goodput".
    name: str
    before: float
    after: float


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The second run against the first."""

    #: "better", "same", "worse"; "unknown" where a run has too few steps.
    verdict: str
    #: The deciding statistic: "median", or "mean" if only that has changed.
    by: str = "median"
    #: Share of the bootstrap samples that agree with the verdict.
    confidence: float = 0.0
    #: Time of the second divided by that of the first (by the statistic ``by``), and its 95 % confidence interval.
    ratio: float = 0.0
    low: float = 0.0
    high: float = 0.0
    #: Seconds of both, likewise.
    before: float = 0.0
    after: float = 0.0
    #: The unit of the seconds: per "step", or per "sample" if the two runs have batches of different sizes.
    per: str = "step"
    #: Phases, the one that changed most first.
    phases: tuple[PhaseChange, ...] = ()
    #: What both runs have recorded of these.
    rates: tuple[RateChange, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]


class _Series(NamedTuple):
    """One run after start-up: (steps,) of the slowest rank, (steps, phases) over the ranks' mean."""

    total: Floats
    phases: Floats


class _Measure(NamedTuple):
    """A statistic of a run's step times, and the confidence that a difference needs."""

    name: str
    rows: statistics.Statistic
    #: Condenses the values of a long run without changing the statistic.
    condensed: Callable[[Floats, int], Floats]
    confidence: float

    def of(self, values: Floats) -> float:
        return float(self.rows(values[None, :])[0])

    def draws(self, values: Floats, seed: int) -> Floats:
        """Return the statistic of bootstrap samples of the run."""
        kept = self.condensed(values, max(1, len(values) // _MOST_STEPS))
        return statistics.bootstrap(
            kept, self.rows, block=max(1, len(kept) // _BLOCKS), repeats=_REPEATS // len(_SEEDS), seed=seed
        )

    def draws_of_both(self, before: Floats, after: Floats) -> tuple[Floats, Floats]:
        """Return pairs of bootstrap samples of both runs: swapped runs give the same pairs, swapped and reordered.

        A pair never shares a seed, because steps at the same positions of both runs would be drawn together.
        """
        old, new = ([self.draws(run, seed) for seed in _SEEDS] for run in (before, after))
        return np.concatenate(old), np.concatenate(new[::-1])


def _every(values: Floats, width: int) -> Floats:
    return values[::width]


_MEDIAN = _Measure("median", statistics.row_medians, _every, _CONFIDENCE)
_MEAN = _Measure("mean", statistics.row_means, statistics.window_means, _SURE)


def compare(a: StepTable, b: StepTable, tolerance: float = TOLERANCE) -> Comparison:
    """Compare ``b`` with ``a``. Never raises for any numbers."""
    first, second = steady_steps(a), steady_steps(b)
    if min(len(first.numbers), len(second.numbers)) < LEAST_STEPS or min(first.step, second.step) <= 0:
        return _unknown(first, second)
    sizes = _batch(first), _batch(second)
    by_sample = min(sizes) > 0 and max(sizes) / min(sizes) - 1 > _OTHER_BATCH
    before, after = (
        _series(run, size if by_sample else 1.0) for run, size in zip((first, second), sizes, strict=True)
    )
    if min(_MEDIAN.of(before.total), _MEDIAN.of(after.total)) <= 0:
        return _unknown(first, second)
    measure, changes, verdict = _decide(before.total, after.total, math.log1p(tolerance))
    interval = _interval(changes, _CONFIDENCE)
    usual = measure.of(before.total), measure.of(after.total)
    return Comparison(
        verdict=verdict,
        by=measure.name,
        confidence=_agreeing(changes, verdict, math.log1p(tolerance)),
        ratio=usual[1] / usual[0],
        low=math.exp(interval.low),
        high=math.exp(interval.high),
        before=usual[0],
        after=usual[1],
        per="sample" if by_sample else "step",
        phases=_phase_changes(measure, before, after, tolerance * min(usual)),
        notes=tuple(_notes(first, second, by_sample, sizes)),
    )


def _decide(before: Floats, after: Floats, tolerance: float) -> tuple[_Measure, Floats, str]:
    """Return the measure that finds a difference, the logarithms of the drawn ratios, and its verdict.

    Means count for more, they are the run's time. ``tolerance`` is a logarithm, too.
    """
    verdicts = []
    for measure in (_MEAN, _MEDIAN):
        with np.errstate(all="ignore"):  # a draw of nothing but zeros, in a run that is mostly zeros
            old, new = map(np.log, measure.draws_of_both(before, after))
            changes = np.asarray(new - old, np.float64)
        verdicts.append((measure, changes, _verdict(_interval(changes, measure.confidence), tolerance)))
    mean, median = verdicts
    return mean if mean[2] != SAME and mean[2] != median[2] else median


def _unknown(first: SteadySteps, second: SteadySteps) -> Comparison:
    counts = f"{len(first.numbers)} and {len(second.numbers)}"
    note = f"The runs have {counts} steps after start-up; a comparison needs {LEAST_STEPS} of each."
    return Comparison(verdict=UNKNOWN, before=first.step, after=second.step, notes=(note,))


def _batch(run: SteadySteps) -> float:
    """Return the samples of all ranks in a usual step; 0 if unknown."""
    return statistics.median(run.steps.samples[run.begins :].sum(axis=1))


def _series(run: SteadySteps, by: float) -> _Series:
    return _Series(run.table.sum(axis=2).max(axis=1) / by, run.table.mean(axis=1) / by)


def _interval(changes: Floats, confidence: float) -> statistics.Interval:
    """Return the interval of changes; negated changes give exactly the negated interval."""
    low = statistics.interval(changes, confidence).low
    return statistics.Interval(low, -statistics.interval(-changes, confidence).low)


def _verdict(interval: statistics.Interval, tolerance: float) -> str:
    if interval.low > tolerance:
        return WORSE
    return BETTER if interval.high < -tolerance else SAME


def _agreeing(changes: Floats, verdict: str, tolerance: float) -> float:
    agree = {
        WORSE: changes > tolerance,
        BETTER: changes < -tolerance,
        SAME: np.abs(changes) <= tolerance,
    }
    return float(np.mean(agree[verdict]))


def _phase_changes(
    measure: _Measure, before: _Series, after: _Series, tolerance: float
) -> tuple[PhaseChange, ...]:
    """Return the changes of phases; a phase changes if its interval lies beyond the tolerance in seconds."""
    changes = []
    for phase, name in enumerate(phases.NAMES):
        old, new = before.phases[:, phase], after.phases[:, phase]
        if not old.any() and not new.any():
            continue
        olds, news = measure.draws_of_both(old, new)
        interval = _interval(news - olds, measure.confidence)
        verdict = _verdict(interval, tolerance)
        changes.append(
            PhaseChange(name, measure.of(old), measure.of(new), interval.low, interval.high, verdict)
        )
    return tuple(sorted(changes, key=lambda change: -abs(change.after - change.before)))


def _notes(first: SteadySteps, second: SteadySteps, by_sample: bool, sizes: tuple[float, float]) -> list[str]:
    notes = []
    ranks = len(first.steps.ranks), len(second.steps.ranks)
    if ranks[0] != ranks[1]:
        notes.append(f"The first run has {ranks[0]} ranks and the second {ranks[1]}.")
    if by_sample:
        notes.append(
            f"A step has {sizes[0]:,.0f} samples in the first run and {sizes[1]:,.0f} in the second: "
            "times are per sample."
        )
    elif min(sizes) <= 0 < max(sizes):
        notes.append("Only one of the runs recorded its batch size: times are per step.")
    return notes


def with_rates(comparison: Comparison, before: Report, after: Report) -> Comparison:
    """Return the comparison with the rates that both reports have."""
    old, new = _rates(before), _rates(after)
    changes = tuple(RateChange(name, old[name], new[name]) for name in old if name in new)
    return msgspec.structs.replace(comparison, rates=changes)


def _rates(report: Report) -> dict[str, float]:
    speed = report.throughput
    rates = {
        "samples_per_second": speed.samples_per_second,
        "tokens_per_second": speed.tokens_per_second,
        "flops_per_second": speed.flops_per_second,
        "mfu": speed.mfu or 0.0,
        "goodput": training_share(report.time),
    }
    return {name: rate for name, rate in rates.items() if rate > 0}


# --------------------------------------------------------------------------- as text

#: How rates are written.
_RATES: dict[str, tuple[str, Callable[[float], str]]] = {
    "samples_per_second": ("samples/s", words.rate),
    "tokens_per_second": ("tokens/s", words.rate),
    "flops_per_second": ("compute", words.flops),
    "mfu": ("MFU", words.share),
    "goodput": ("goodput", words.share),
}


def render_comparison(comparison: Comparison, first: str = "A", second: str = "B") -> str:
    """Return a few lines of text, without a line break at the end."""
    first, second = escape_controls(first), escape_controls(second)
    if comparison.verdict == UNKNOWN:
        return "\n".join([f"{second} cannot be compared with {first}", *_note_lines(comparison)])
    per = f"a {comparison.per}" + (" in the mean" if comparison.by == "mean" else "")
    lines = [
        f"{second} is {_said(comparison)} {first}: {words.seconds(comparison.after)} against "
        f"{words.seconds(comparison.before)} {per}",
        f"   ratio {comparison.ratio:.3f}, with 95 % confidence {comparison.low:.3f} to {comparison.high:.3f}; "
        f"{words.share(comparison.confidence)} of the bootstrap samples agree",
    ]
    for change in comparison.phases:
        mark = {WORSE: "worse", BETTER: "better"}.get(change.verdict, "")
        lines.append(
            f"   {change.phase:<11}{words.seconds(change.before):>10} -> {words.seconds(change.after):>10}   "
            f"{mark}".rstrip()
        )
    for rate in comparison.rates:
        title, text = _RATES[rate.name]
        lines.append(f"   {title:<11}{text(rate.before):>10} -> {text(rate.after):>10}")
    return "\n".join([*lines, *_note_lines(comparison)])


def _said(comparison: Comparison) -> str:
    if comparison.verdict == SAME:
        return "the same as" if comparison.confidence >= _CONFIDENCE else "not significantly different from"
    faster = comparison.verdict == BETTER
    by = words.share(abs(comparison.ratio - 1))
    return f"{by} {'better' if faster else 'worse'} than"


def _note_lines(comparison: Comparison) -> list[str]:
    return [f"   note: {note}" for note in comparison.notes]
