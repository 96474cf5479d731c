"""Writing and reading 10 million points: speed, size, and the time to a data frame and to a plot.

A point is one report of one rank: its row, its time and three metrics, so 10 million points are 30 million values. They
arrive as in the controller, 64 of a rank at a time, and count as written when all of them are durable. Generating the
points is part of the time of all contenders alike.

- "1,000 pixels": the smallest and the largest loss of rank 0 in each of 1,000 stretches of its rows, from storage; the
  first and all later looks count. It is taken of 8 ranks' points (rank 0 has an eighth) and of one rank's (it has all).
- The peak of the writer's memory is compared between a tenth of the points and all of them.
- The peers, TensorBoard's event files and lines of text, get fewer points, and so do we beside them: for 10 million
  they take a quarter of an hour and more. One report is one event a metric there, as their documentation has it.
- The limit is pyarrow on a table that lies in memory, written at once; and the disk's rate for the same bytes.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from child_process import run_to_end
from harness import (
    Bound,
    Contender,
    MeasurementFailed,
    Outcome,
    Rounds,
    Row,
    conclude,
    interleave,
    median,
    median_ratio,
    parse_options,
    things_left,
    worst,
)

SCRIPTS = Path(__file__).resolve().parent / "metrics_store_scripts"
TIMEOUT_SECONDS = 400.0
RANKS = 8
REPETITIONS, QUICK_REPETITIONS = 3, 1
#: The large ones take a minute each.
LARGE_REPETITIONS = 2

#: The claims of the issue.
POINTS, QUICK_POINTS = 10_000_000, 400_000
VIEW_AT_MOST_MILLISECONDS = 200.0
WRONG_AT_MOST = 0
#: "Memory independent of the number of points", as a number: a writer that kept but the row of each point of the
#: nine million that the large run has more would grow by 72 MB.
PEAK_GROWTH_AT_MOST_MB = 20.0
#: By so many points the writer has made its largest merge; runs of fewer (``--quick``) say nothing of its peak.
SETTLED_POINTS = 600_000
#: Number of points for peers.
COMPARED, QUICK_COMPARED = 40_000, 8_000

OURS, TENSORBOARD = "Powertrain", "TensorBoard (tensorboardX)"
JSON_LINES, CSV, LIMIT = "JSON lines + pandas", "CSV + pandas", "pyarrow, in memory"
SMALL, LARGE, ONE_RANK = "a tenth of the points", "8 ranks", "one rank"


@dataclass(frozen=True)
class Kept:
    """The measurements of one script."""

    points: int
    write_seconds: float
    bytes_a_point: float
    frame_seconds: float
    view_seconds: tuple[float, ...]
    peak_mb: float
    #: Points missing, duplicated or changed, and pixels that differ from the points.
    wrong: int
    raw_megabytes_a_second: float = 0.0
    left_behind: tuple[str, ...] = ()


def measure(script: str, points: int, ranks: int = RANKS, **more: Any) -> Kept:
    """Run one of ``metrics_store_scripts/`` in a separate process and directory."""
    with tempfile.TemporaryDirectory(prefix="ptb-", dir=_disk()) as directory:
        workspace = Path(directory)
        settings = json.dumps({"points": points, "ranks": ranks, **more})
        ended = run_to_end(
            (sys.executable, str(SCRIPTS / script), str(workspace), settings),
            workspace=workspace,
            timeout=TIMEOUT_SECONDS,
            grace=5.0,
        )
        try:
            measured = json.loads((workspace / "measured.json").read_text())
        except FileNotFoundError:
            raise MeasurementFailed(f"{script} wrote nothing down.") from None
    measured["view_seconds"] = tuple(measured["view_seconds"])
    return Kept(points=points, left_behind=tuple(_of_the_script(ended.left_behind)), **measured)


def _of_the_script(left_behind: Iterable[str]) -> Iterator[str]:
    """Without shared memory: the scripts take none, so what is new there is of other programs of this machine."""
    return (thing for thing in left_behind if not thing.startswith("/dev/shm/"))


def _disk() -> str | None:
    """A directory on a real disk: where temporary files lie in memory, the user's own."""
    kinds = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    in_memory = [place for place, kind in kinds if kind in ("tmpfs", "ramfs")]
    return str(Path.home()) if tempfile.gettempdir() in in_memory else None


# --------------------------------------------------------------------------- figures


def points_a_second(one: Kept) -> float:
    """Return the points written per second."""
    return one.points / one.write_seconds


def bytes_a_point(one: Kept) -> float:
    """Return the bytes per point on disk, once all is written."""
    return one.bytes_a_point


def seconds_to_frame(one: Kept) -> float:
    """Return the seconds from storage to a data frame of all points."""
    return one.frame_seconds


def view_milliseconds(one: Kept) -> float:
    """Return the milliseconds of the typical view."""
    return statistics.median(one.view_seconds) * 1000


def slowest_view_milliseconds(one: Kept) -> float:
    """Return the milliseconds of the slowest view, including the first."""
    return max(one.view_seconds) * 1000


def peak_mb(one: Kept) -> float:
    """Return the peak memory of the writing process, including libraries."""
    return one.peak_mb


FIGURES = (
    ("points written", "/s", points_a_second),
    ("on disk, a point", "bytes", bytes_a_point),
    ("to a data frame", "s", seconds_to_frame),
    ("to 1,000 pixels", "ms", view_milliseconds),
    ("peak of the writer", "MB", peak_mb),
)


def rows_beside_peers(rounds: Rounds[Kept], count: int) -> list[Row]:
    """Return every figure of every contender at the same number of points."""
    rows = []
    for what, unit, take in FIGURES:
        numbers = {name: rounds.numbers(name, take) for name in rounds.measured}
        for name in rounds.measured:
            ratio = None if name == OURS else median_ratio(numbers[OURS], numbers[name])
            rows.append(Row(f"{what}, {count:,}", name, unit, numbers[name], ratio, _limit(rounds, what)))
    return rows


def _limit(rounds: Rounds[Kept], what: str) -> str:
    """Return the limit of the disk alone for the bytes of the table in memory."""
    disk = median(rounds.numbers(LIMIT, lambda one: one.raw_megabytes_a_second))
    small = median(rounds.numbers(LIMIT, bytes_a_point))
    if what != "points written" or disk is None or not small:
        return ""
    return f"disk {disk:,.0f} MB/s: {disk * 1e6 / small:,.0f} /s"


def rows_of_large(rounds: Rounds[Kept], count: int) -> list[Row]:
    """Return Powertrain's figures at the size of the claim."""
    figures = (*FIGURES, ("slowest look at 1,000 pixels", "ms", slowest_view_milliseconds))
    rows = [
        Row(f"{what}, {count:,}", f"{OURS}, {name}", unit, rounds.numbers(name, take), limit=limit)
        for what, unit, take in figures
        for name in (LARGE, ONE_RANK)
        for limit in [f"{VIEW_AT_MOST_MILLISECONDS:.0f} ms" if "pixels" in what else ""]
    ]
    small = rounds.numbers(SMALL, peak_mb)
    return [*rows, Row(f"peak of the writer, {count // 10:,}", f"{OURS}, 8 ranks", "MB", small)]


def bounds_of(beside: Rounds[Kept], large: Rounds[Kept], count: int) -> list[Bound]:
    """Return the issue's bounds, by the worst repetition, and further conditions."""
    slowest = [worst(large.numbers(name, slowest_view_milliseconds)) for name in (LARGE, ONE_RANK)]
    wrong = [worst(large.numbers(name, lambda one: one.wrong)) for name in large.measured]
    wrong.append(worst(beside.numbers(OURS, lambda one: one.wrong)))
    left = [worst(large.numbers(name, lambda one: len(one.left_behind))) for name in large.measured]
    left.append(worst(beside.numbers(OURS, lambda one: len(one.left_behind))))
    grown = worst(
        [
            None if small is None or whole is None else whole.peak_mb - small.peak_mb
            for small, whole in zip(large.measured[SMALL], large.measured[LARGE], strict=True)
        ]
    )
    peak = Bound(
        f"MB that the writer's peak is higher for {count:,} points than for a tenth",
        grown,
        at_most=PEAK_GROWTH_AT_MOST_MB,
    )
    return [
        Bound(
            f"ms to 1,000 pixels of {count:,} points, slowest look",
            worst(slowest),
            at_most=VIEW_AT_MOST_MILLISECONDS,
        ),
        Bound("points lost, twice or changed, pixels that are wrong", worst(wrong), at_most=WRONG_AT_MOST),
        *([peak] if count // 10 >= SETTLED_POINTS else []),
        Bound("processes, files, sockets left behind", worst(left), at_most=0),
    ]


def contenders_of(count: int) -> list[Contender[Kept]]:
    """Return Powertrain and the peers, with the same points."""
    return [
        Contender(TENSORBOARD, ("tensorboardX",), partial(measure, "with_tensorboard.py", count)),
        Contender(OURS, ("powertrain",), partial(measure, "with_powertrain.py", count)),
        Contender(JSON_LINES, ("pandas",), partial(measure, "with_text.py", count, format="json")),
        Contender(CSV, ("pandas",), partial(measure, "with_text.py", count, format="csv")),
        Contender(LIMIT, ("pyarrow",), partial(measure, "with_pyarrow.py", count)),
    ]


def large_of(count: int) -> list[Contender[Kept]]:
    """Return Powertrain at the size of the claim."""
    ours = "with_powertrain.py"
    return [
        Contender(SMALL, ("powertrain",), partial(measure, ours, count // 10)),
        Contender(LARGE, ("powertrain",), partial(measure, ours, count)),
        Contender(ONE_RANK, ("powertrain",), partial(measure, ours, count, ranks=1)),
    ]


def main() -> int:
    """Measure, print, and return the exit code."""
    options = parse_options(
        "Points written and read back: rate, size, time to a data frame and to a picture."
    )
    compared = QUICK_COMPARED if options.quick else COMPARED
    count = QUICK_POINTS if options.quick else POINTS
    repetitions = QUICK_REPETITIONS if options.quick else REPETITIONS
    large_repetitions = QUICK_REPETITIONS if options.quick else LARGE_REPETITIONS
    beside = interleave(contenders_of(compared), repetitions, warm_up=False)
    large = interleave(large_of(count), large_repetitions, warm_up=False)
    outcome = Outcome(
        title=f"{count:,} points of three metrics, {large_repetitions} x; beside peers {compared:,}, {repetitions} x",
        repetitions=repetitions,
        rows=[*rows_beside_peers(beside, compared), *rows_of_large(large, count)],
        bounds=bounds_of(beside, large, count),
        missing=beside.missing,
        failures=[*beside.failures, *large.failures],
        notes=[*things_left(beside), *things_left(large)],
        samples={
            name: [None if one is None else asdict(one) for one in kept]
            for rounds in (beside, large)
            for name, kept in rounds.measured.items()
        },
    )
    return conclude(outcome, options)


if __name__ == "__main__":
    raise SystemExit(main())
