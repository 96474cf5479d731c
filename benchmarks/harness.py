"""Common harness of the benchmarks: interleaved rounds, ratios of pairs, one table, ``--json`` and ``--check``.

A benchmark is one file that
1. lists its contenders (ours and the peers), each with the modules it needs and how to measure it once,
2. passes them to :func:`interleave`, which measures each once per round,
3. turns the measurements into :class:`Row` (a line of the table) and :class:`Bound` (a claim that must hold),
4. ends with ``raise SystemExit(conclude(...))``.

A bound that could not be measured, because a peer is missing or a measurement failed, does not hold.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

Measured = TypeVar("Measured")

#: Distributions whose versions affect a figure; those not installed are omitted.
VERSIONED = (
    "powertrain",
    "torch",
    "ray",
    "numpy",
    "pyarrow",
    "pandas",
    "duckdb",
    "pyzmq",
    "msgspec",
    "cloudpickle",
    "datasets",
    "torchdata",
    "pillow",
    "tensorboardX",
)


class MeasurementFailed(Exception):
    """Raised if a contender could not be measured; the message is a full sentence with the reason."""


@dataclass(frozen=True)
class Options:
    """The command line, parsed."""

    quick: bool
    json_file: Path | None
    check: bool


@dataclass(frozen=True)
class Contender(Generic[Measured]):
    """One side of a comparison. ``measure`` measures once."""

    name: str
    requires: tuple[str, ...]
    measure: Callable[[], Measured]


@dataclass(frozen=True)
class Rounds(Generic[Measured]):
    """The results of the rounds: one entry per round and contender, None if it failed or is missing."""

    measured: dict[str, list[Measured | None]]
    missing: tuple[str, ...]
    failures: tuple[str, ...]

    def numbers(self, name: str, take: Callable[[Measured], float]) -> list[float | None]:
        """Return one number of each round's measurement of ``name``."""
        return [None if one is None else take(one) for one in self.measured[name]]


@dataclass(frozen=True)
class Row:
    """One line of the table. ``numbers`` has one entry per round; ``ratio`` is Powertrain's figure over this line's."""

    what: str
    who: str
    unit: str
    numbers: Sequence[float | None]
    ratio: float | None = None
    limit: str = ""


@dataclass(frozen=True)
class Bound:
    """A claim with its measured number. Exactly one of ``at_most`` and ``at_least`` is given."""

    claim: str
    measured: float | None
    at_most: float | None = None
    at_least: float | None = None

    def __post_init__(self) -> None:
        if (self.at_most is None) == (self.at_least is None):
            raise ValueError(f"The bound {self.claim!r} needs one of at_most and at_least, and only one.")

    @property
    def holds(self) -> bool:
        """Whether the claim holds; False if nothing was measured."""
        if self.measured is None:
            return False
        if self.at_most is not None:
            return self.measured <= self.at_most
        return self.at_least is not None and self.measured >= self.at_least

    def sentence(self) -> str:
        """Return the claim, the measured number, and whether the claim holds."""
        verdict = "holds " if self.holds else "BROKEN"
        measured = "not measured" if self.measured is None else _short(self.measured)
        side, number = ("at most", self.at_most) if self.at_most is not None else ("at least", self.at_least)
        return f"{verdict}  {self.claim}: {measured} ({side} {_short(number or 0.0)})"


@dataclass
class Outcome:
    """The outcome of a benchmark. ``samples`` is written to the JSON file unchanged."""

    title: str
    repetitions: int
    rows: list[Row]
    bounds: list[Bound]
    missing: Sequence[str] = ()
    failures: Sequence[str] = ()
    notes: list[str] = field(default_factory=list)
    samples: Mapping[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether all bounds hold, no contender was missing and no measurement failed."""
        return not self.missing and not self.failures and all(bound.holds for bound in self.bounds)


def parse_options(description: str, arguments: Sequence[str] | None = None) -> Options:
    """Parse the options that every benchmark accepts."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="smaller and fewer repetitions, for a look")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write machine, versions and every sample to FILE"
    )
    parser.add_argument("--check", action="store_true", help="exit with 0 only where all bounds hold")
    parsed = parser.parse_args(arguments)
    if parsed.json is not None and not parsed.json.absolute().parent.is_dir():
        parser.error(
            f"--json {parsed.json}: its directory does not exist, so nothing could be written. Make it first."
        )
    return Options(quick=parsed.quick, json_file=parsed.json, check=parsed.check)


def is_installed(module: str) -> bool:
    """Return whether the top-level ``module`` can be imported; a bare directory of that name does not count."""
    found = importlib.util.find_spec(module)
    return found is not None and found.origin is not None


def interleave(
    contenders: Sequence[Contender[Measured]], repetitions: int, warm_up: bool
) -> Rounds[Measured]:
    """Measure every contender once a round, keeping neighbours adjacent.

    Every other round is reversed, so that a machine that gets slower or faster favours no contender. The warm-up round
    fills the page cache for all alike and is discarded.
    """
    missing = tuple(
        f"{contender.name} (no module {module!r})"
        for contender in contenders
        for module in contender.requires
        if not is_installed(module)
    )
    present = [one for one in contenders if all(is_installed(module) for module in one.requires)]
    measured: dict[str, list[Measured | None]] = {one.name: [None] * repetitions for one in contenders}
    failures: list[str] = []
    for number in range(-1 if warm_up else 0, repetitions):
        for contender in present if number % 2 == 0 else present[::-1]:
            _progress(f"round {number + 1} of {repetitions}: {contender.name}" if number >= 0 else "warm-up")
            try:
                result = contender.measure()
            except MeasurementFailed as failure:
                failures.append(f"{contender.name}, round {number + 1}: {failure}")
                continue
            if number >= 0:
                measured[contender.name][number] = result
    _progress("")
    return Rounds(measured, missing, tuple(failures))


def things_left(rounds: Rounds[Any]) -> list[str]:
    """Return notes on leftovers of contenders, from ``left_behind`` of their measurements."""
    return sorted(
        {
            f"{name} left behind: {thing}"
            for name, measured in rounds.measured.items()
            for one in measured
            if one is not None
            for thing in one.left_behind
        }
    )


def median(numbers: Sequence[float | None]) -> float | None:
    """Return the median of the measured values, None if there are none."""
    present = [number for number in numbers if number is not None]
    return statistics.median(present) if present else None


def median_ratio(ours: Sequence[float | None], theirs: Sequence[float | None]) -> float | None:
    """Return the median over the rounds of ours / theirs of the same round: adjacent pairs."""
    return median(
        [a / b for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None and b > 0]
    )


def worst(numbers: Sequence[float | None], choose: Callable[[list[float]], float] = max) -> float | None:
    """Return the worst round (``choose=min`` if small is bad); None if one round is not measured."""
    present = [number for number in numbers if number is not None]
    return choose(present) if present and len(present) == len(numbers) else None


def percentile(samples: Sequence[float], share: float) -> float:
    """Return the smallest sample that at least ``share`` of all samples do not exceed."""
    ordered = sorted(samples)
    return ordered[max(0, -(-int(share * 10_000) * len(ordered) // 10_000) - 1)]


def conclude(outcome: Outcome, options: Options) -> int:
    """Print the table and the bounds, write the JSON file if requested, and return the exit code."""
    print(f"\n{outcome.title}\n")
    print(table(outcome.rows))
    print()
    for bound in outcome.bounds:
        print(bound.sentence())
    for name in outcome.missing:
        print(f"MISSING {name}: a claim against nobody is no claim. Install it to compare.")
    for failure in outcome.failures:
        print(f"FAILED  {failure}")
    for note in [*outcome.notes, *_load_note()]:
        print(f"note    {note}")
    if options.quick:
        print("note    --quick: too few repetitions to state a figure from.")
    if options.json_file is not None:
        options.json_file.write_text(json.dumps(as_json(outcome, options), indent=1) + "\n")
    return 1 if options.check and not outcome.passed else 0


def table(rows: Sequence[Row]) -> str:
    """Return the rows as text with aligned columns."""
    lines = [("what", "who", "median", "spread (min to max)", "ours / this", "limit")]
    for row in rows:
        present = [number for number in row.numbers if number is not None]
        middle = f"{_short(statistics.median(present))} {row.unit}" if present else "not measured"
        spread = f"{_short(min(present))} to {_short(max(present))}" if present else ""
        ratio = "" if row.ratio is None else _short(row.ratio)
        lines.append((row.what, row.who, middle.strip(), spread, ratio, row.limit))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    rule = tuple("-" * width for width in widths)
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in [lines[0], rule, *lines[1:]]
    )


def as_json(outcome: Outcome, options: Options) -> dict[str, Any]:
    """Return all data needed to judge the figures later, on another machine."""
    return {
        "title": outcome.title,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "quick": options.quick,
        "repetitions": outcome.repetitions,
        "machine": machine(),
        "versions": versions(),
        "rows": [asdict(row) for row in outcome.rows],
        "bounds": [asdict(bound) | {"holds": bound.holds} for bound in outcome.bounds],
        "missing": list(outcome.missing),
        "failures": list(outcome.failures),
        "notes": outcome.notes,
        "passed": outcome.passed,
        "samples": dict(outcome.samples),
    }


def machine() -> dict[str, Any]:
    """Return a description of the machine."""
    import psutil

    return {
        "system": platform.platform(),
        "processor": platform.machine(),
        "cores": psutil.cpu_count(logical=False),
        "threads": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load": list(os.getloadavg()),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and the distributions."""
    found = {"python": platform.python_version()}
    for name in VERSIONED:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


#: Read when the benchmark starts: later the benchmark itself is the load.
_LOAD_AT_START = os.getloadavg()[0]


def _load_note() -> list[str]:
    """Return a warning if other programs kept the machine busy."""
    if _LOAD_AT_START <= 0.5:
        return []
    return [
        f"the machine was busy before the start (load {_LOAD_AT_START:.1f}): figures are not to be trusted."
    ]


def _short(number: float) -> str:
    """Format with four significant digits, thousands separated, no exponent for everyday numbers."""
    if number and abs(number) < 1e-3:
        return f"{number:.2e}"
    return f"{number:,.0f}" if abs(number) >= 1000 or number == int(number) else f"{number:.4g}"


def _progress(text: str) -> None:
    """Print a progress line that replaces itself; nothing without a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
