"""Two runs held against each other: is the second faster, slower or the same, and in which phase. Pure.

Of each run the steps after start-up are drawn again in blocks, many times; the ratio of the medians of the two gives an
interval. A run is worse only when the whole interval lies beyond the difference that does not count (3 %). The same is
done with the means, because what comes every few steps (a checkpoint, an evaluation) moves no median; single hiccups
make that interval wide, and then it decides nothing.

Swapped runs get swapped words: ratios are held as logarithms, both runs are drawn with the same seeds, and what does
not count is a part of the faster run's time, whichever of the two that is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np

from powertrain.diagnosis import words
from powertrain.diagnosis.tables import statistics
from powertrain.diagnosis.tables.settled import SettledSteps, settled
from powertrain.diagnosis.tables.steps import Floats, StepTable
from powertrain.text.printable import escape_controls
from powertrain.trace.recording import phases

BETTER, SAME, WORSE, UNKNOWN = "better", "same", "worse", "unknown"
#: What `powertrain compare` exits with, for CI. 1 is an error, 2 a wrong call.
EXIT_CODES = {BETTER: 0, SAME: 0, WORSE: 3, UNKNOWN: 4}
#: A difference that does not count, as a part of the faster run's time.
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
    """What became of one phase."""

    phase: str
    #: Seconds of a step, or of a sample where those are compared; medians or means, as the comparison's.
    before: float
    after: float
    #: Where the difference in seconds lies with 95 % confidence.
    low: float
    high: float
    verdict: str


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The second run against the first."""

    #: "better", "same", "worse"; "unknown" where a run has too few steps.
    verdict: str
    #: What has decided it: "median", or "mean" where only that has changed.
    by: str = "median"
    #: Part of the draws that agree with the verdict.
    confidence: float = 0.0
    #: Time of the second by that of the first (of what ``by`` says), and where that lies with 95 % confidence.
    ratio: float = 0.0
    low: float = 0.0
    high: float = 0.0
    #: Seconds of both, likewise.
    before: float = 0.0
    after: float = 0.0
    #: What the seconds are of: "step", or "sample" where the two runs have batches of different sizes.
    per: str = "step"
    #: Phases, the one that changed most first.
    phases: tuple[PhaseChange, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]


class _Series(NamedTuple):
    """One run after start-up: (steps,) of the slowest rank, (steps, phases) over the ranks' mean."""

    total: Floats
    phases: Floats


class _Measure(NamedTuple):
    """What a run's time is taken to be, and how sure a difference in it must be."""

    name: str
    rows: statistics.Statistic
    #: Makes one value of each few of a long run, so that the measure stays what it is.
    condensed: Callable[[Floats, int], Floats]
    confidence: float

    def of(self, values: Floats) -> float:
        return float(self.rows(values[None, :])[0])

    def draws(self, values: Floats, seed: int) -> Floats:
        """Of the run drawn again in blocks."""
        kept = self.condensed(values, max(1, len(values) // _MOST_STEPS))
        return statistics.bootstrap(
            kept, self.rows, block=max(1, len(kept) // _BLOCKS), repeats=_REPEATS // len(_SEEDS), seed=seed
        )

    def draws_of_both(self, before: Floats, after: Floats) -> tuple[Floats, Floats]:
        """To be held against each other one by one: swapped runs give the same pairs, swapped and in another order.

        A pair never has one seed, because what both runs do at the same steps would be drawn together.
        """
        old, new = ([self.draws(run, seed) for seed in _SEEDS] for run in (before, after))
        return np.concatenate(old), np.concatenate(new[::-1])


def _every(values: Floats, width: int) -> Floats:
    return values[::width]


_MEDIAN = _Measure("median", statistics.row_medians, _every, _CONFIDENCE)
_MEAN = _Measure("mean", statistics.row_means, statistics.window_means, _SURE)


def compare(a: StepTable, b: StepTable, tolerance: float = TOLERANCE) -> Comparison:
    """What ``b`` is against ``a``. Never raises, whatever the numbers are."""
    first, second = settled(a), settled(b)
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
    """The measure that finds a difference, the logarithms of the ratios drawn, and its verdict.

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


def _unknown(first: SettledSteps, second: SettledSteps) -> Comparison:
    counts = f"{len(first.numbers)} and {len(second.numbers)}"
    note = f"The runs have {counts} steps after start-up; comparing takes {LEAST_STEPS} of each."
    return Comparison(verdict=UNKNOWN, before=first.step, after=second.step, notes=(note,))


def _batch(run: SettledSteps) -> float:
    """Samples of all ranks in a usual step, 0 where that is not known."""
    return statistics.median(run.steps.samples[run.begins :].sum(axis=1))


def _series(run: SettledSteps, by: float) -> _Series:
    return _Series(run.table.sum(axis=2).max(axis=1) / by, run.table.mean(axis=1) / by)


def _interval(changes: Floats, confidence: float) -> statistics.Interval:
    """Of changes with the other sign exactly the same with the other sign: each end is found as a lower one."""
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
    """A phase is better or worse when its difference is surely more than the run's tolerance in seconds."""
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


def _notes(
    first: SettledSteps, second: SettledSteps, by_sample: bool, sizes: tuple[float, float]
) -> list[str]:
    notes = []
    ranks = len(first.steps.ranks), len(second.steps.ranks)
    if ranks[0] != ranks[1]:
        notes.append(f"The first run has {ranks[0]} ranks and the second {ranks[1]}.")
    if by_sample:
        notes.append(
            f"A step has {sizes[0]:,.0f} samples in the first run and {sizes[1]:,.0f} in the second: "
            "times are of a sample."
        )
    elif min(sizes) <= 0 < max(sizes):
        notes.append("Only one of the runs says how many samples a step has: times are of a step.")
    return notes


# --------------------------------------------------------------------------- in words


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
        f"{words.share(comparison.confidence)} of the draws agree",
    ]
    for change in comparison.phases:
        mark = {WORSE: "worse", BETTER: "better"}.get(change.verdict, "")
        lines.append(
            f"   {change.phase:<11}{words.seconds(change.before):>10} -> {words.seconds(change.after):>10}   "
            f"{mark}".rstrip()
        )
    return "\n".join([*lines, *_note_lines(comparison)])


def _said(comparison: Comparison) -> str:
    if comparison.verdict == SAME:
        return "the same as" if comparison.confidence >= _CONFIDENCE else "not surely other than"
    faster = comparison.verdict == BETTER
    by = words.share(abs(comparison.ratio - 1))
    return f"{by} {'better' if faster else 'worse'} than"


def _note_lines(comparison: Comparison) -> list[str]:
    return [f"   note: {note}" for note in comparison.notes]
