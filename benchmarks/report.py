"""Cost of one report() on the training thread, from 2 ranks at 10,000 reports a second, compared with Ray Train's.

Each Powertrain rank reports at a steady pace (a late call is followed by the next immediately), and each call is timed
on the training thread. The memory of the program's processes is sampled from outside. Afterwards the points in
``result.dataframe(ranks="all")`` are counted. Ray Train makes only a handful of reports, as fast as it can: each waits
for its controller's next poll.

The limit is a queue append: copying the dict and appending it to a deque, at the same pace.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
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
    percentile,
    worst,
)

SCRIPTS = Path(__file__).resolve().parent / "report_scripts"
OUR_SCRIPT, RAY_SCRIPT = "with_powertrain.py", "with_ray_train.py"
REPETITIONS, QUICK_REPETITIONS = 3, 1
TIMEOUT_SECONDS = 180.0
RANKS = 2

#: The claims of the issue.
MEDIAN_AT_MOST_MICROSECONDS = 20.0
P99_AT_MOST_MICROSECONDS = 1000.0
REPORTS_A_SECOND_AT_LEAST = 10_000.0
#: The claim is 10 s; four times as long also shows whether memory is bounded.
SUSTAINED_SECONDS, QUICK_SUSTAINED_SECONDS = 40.0, 5.0
LOST_AT_MOST = 0
#: "Memory bounded", as a number, for each process, once settled. A rank that kept its points of those 15 s as
#: dicts would grow by 14 MB, a driver that kept both ranks' by twice that.
MEMORY_GROWTH_AT_MOST_MB = 4.0
#: In which buffers fill and libraries are loaded. The driver merges segments of points as they pile up, first at
#: 7 s, and its allocator's high-water mark rises a few times by 1 to 3 MB before it stays.
SETTLING_SECONDS, QUICK_SETTLING_SECONDS = 25.0, 3.0
#: The pace is set this much above the claim, so that sleeping a little too long does not decide it.
PACE_ABOVE_CLAIM = 1.01

RAY_REPORTS = 5
OURS, RAY, LIMIT = "Powertrain", "Ray Train", "a queue append"


@dataclass(frozen=True)
class Reporting:
    """One program's reports: the cost of each call on each rank, and the measurements of its driver and processes."""

    nanoseconds: tuple[tuple[int, ...], ...]
    #: On time.monotonic()'s clock: the first rank's begin and the last rank's end.
    began: float
    ended: float
    #: Ours only: when fit() returned, points missing from or twice in the data frame, MB grown by process.
    returned: float = 0.0
    lost: int = 0
    twice: int = 0
    growth_mb: tuple[tuple[str, float], ...] = ()
    left_behind: tuple[str, ...] = ()

    @property
    def a_second(self) -> float:
        """Reports per second of all ranks together."""
        return sum(len(rank) for rank in self.nanoseconds) / (self.ended - self.began)

    @property
    def worst_growth_mb(self) -> float:
        """Memory growth of the process that grew most."""
        return max(grown for _, grown in self.growth_mb)


def cost_of_call(reporting: Reporting, share: float) -> float:
    """Return the microseconds that ``share`` of all calls of all ranks did not exceed."""
    return percentile([cost for rank in reporting.nanoseconds for cost in rank], share) / 1000


def growth_of_process(reporting: Reporting, name: str) -> float:
    """Return the MB that the process ``name`` grew once settled."""
    return dict(reporting.growth_mb)[name]


class MemoryWatch:
    """Resident memory of a program and all its descendants, sampled from outside."""

    def __init__(self) -> None:
        self.driver = 0
        self.samples: dict[int, list[tuple[float, int]]] = {}

    def sample(self, pid: int) -> None:
        """Take one sample of every process of the program started as ``pid``."""
        self.driver = pid
        with suppress(psutil.Error):
            program = psutil.Process(pid)
            for process in (program, *program.children(recursive=True)):
                with suppress(psutil.Error):
                    held = process.memory_info().rss
                    self.samples.setdefault(process.pid, []).append((time.monotonic(), held))

    def growth_mb(self, pid: int, began: float, settled: float, ended: float) -> float:
        """Return the difference of its peaks after and before ``settled``: buffers may fill and empty, not grow."""
        samples = self.samples.get(pid, [])
        before = [memory for moment, memory in samples if began <= moment < settled]
        after = [memory for moment, memory in samples if settled <= moment <= ended]
        if not before or not after:
            raise MeasurementFailed(
                f"Process {pid} was sampled {len(before)} times before it had settled and {len(after)} times "
                "after: each must be at least once. Was the machine too busy to sample twice a second?"
            )
        return max(0.0, (max(after) - max(before)) / 1e6)


def run_script(
    script: str, count: int, gap: float, *, watch: MemoryWatch | None = None, through: Sequence[str] = ()
) -> tuple[Reporting, dict[str, Any]]:
    """Runs one of ``report_scripts/``, by way of the program ``through`` if one is given; returns its ranks' samples
    with what its driver wrote (ours only)."""
    is_ours = script == OUR_SCRIPT
    with tempfile.TemporaryDirectory(prefix="ptb-") as directory:
        workspace = Path(directory)
        samples = workspace / "samples"
        samples.mkdir()
        settings = json.dumps({"count": count, "gap_seconds": gap})
        ended = run_to_end(
            (sys.executable, *through, str(SCRIPTS / script), str(samples), settings),
            workspace=workspace,
            timeout=TIMEOUT_SECONDS,
            grace=5.0 if is_ours else 20.0,
            watch=watch.sample if watch else None,
        )
        ranks = [json.loads(file.read_text()) for file in sorted(samples.glob("rank-*.json"))]
        driver = json.loads((samples / "driver.json").read_text()) if is_ours else {}
    if not ranks:
        raise MeasurementFailed("No rank wrote its samples.")
    reporting = Reporting(
        nanoseconds=tuple(tuple(rank["nanoseconds"]) for rank in ranks),
        began=min(rank["began"] for rank in ranks),
        ended=max(rank["ended"] for rank in ranks),
        left_behind=ended.left_behind if is_ours else ended.left_processes,
    )
    return reporting, driver | {"pids": [rank["pid"] for rank in ranks]}


def settling(seconds: float) -> float:
    """Return the seconds after which memory is judged, of a measurement that takes ``seconds``."""
    return SETTLING_SECONDS if seconds > SETTLING_SECONDS else QUICK_SETTLING_SECONDS


def measure_ours(seconds: float) -> Reporting:
    """Measure Powertrain at the claimed rate for ``seconds``, with lost points and memory."""
    pace = REPORTS_A_SECOND_AT_LEAST * PACE_ABOVE_CLAIM / RANKS
    count = round(pace * seconds)
    watch = MemoryWatch()
    reporting, driver = run_script(OUR_SCRIPT, count, 1 / pace, watch=watch)
    if len(reporting.nanoseconds) != RANKS:
        raise MeasurementFailed(f"{len(reporting.nanoseconds)} of {RANKS} ranks wrote their samples.")
    settled = reporting.began + settling(seconds)
    processes = {"driver": watch.driver} | {f"rank {rank}": pid for rank, pid in enumerate(driver["pids"])}
    moments = (reporting.began, settled, reporting.ended)
    growth = [(name, watch.growth_mb(pid, *moments)) for name, pid in processes.items()]
    kept = [set(steps) for steps in driver["steps_kept"]]
    return Reporting(
        nanoseconds=reporting.nanoseconds,
        began=reporting.began,
        ended=reporting.ended,
        returned=driver["returned"],
        lost=sum(len(set(range(count)) - steps) for steps in kept),
        twice=driver["points"] - sum(len(steps) for steps in kept),
        growth_mb=tuple(growth),
        left_behind=reporting.left_behind,
    )


def measure_ray() -> Reporting:
    """Measure Ray Train's report(), a handful, as fast as it returns."""
    return run_script(RAY_SCRIPT, RAY_REPORTS, 0.0)[0]


def measure_limit(seconds: float) -> Reporting:
    """Measure a queue append at the rate of one Powertrain rank."""
    pace = REPORTS_A_SECOND_AT_LEAST * PACE_ABOVE_CLAIM / RANKS
    return run_script("queue_append.py", round(pace * seconds), 1 / pace)[0]


def rows_of(rounds: Rounds[Reporting]) -> list[Row]:
    """Return rows of cost and rate with Ray Train's and the limit; then Powertrain's further claims."""
    rows = []
    for what, share in (("one report(), median", 0.5), ("one report(), p99", 0.99)):
        cost = {name: rounds.numbers(name, partial(cost_of_call, share=share)) for name in rounds.measured}
        limit = median(cost[LIMIT])
        for name in (OURS, RAY, LIMIT):
            ratio = None if name == OURS else median_ratio(cost[OURS], cost[name])
            text = "" if limit is None else f"queue append {limit:.3g} us"
            rows.append(Row(what, name, "us", cost[name], ratio, text))
    rate = {name: rounds.numbers(name, lambda one: one.a_second) for name in (OURS, RAY)}
    for name in (OURS, RAY):
        ratio = None if name == OURS else median_ratio(rate[OURS], rate[name])
        limit_text = f"paced at {REPORTS_A_SECOND_AT_LEAST * PACE_ABOVE_CLAIM:,.0f}" if name == OURS else ""
        rows.append(Row("reports a second, 2 ranks", name, "/s", rate[name], ratio, limit_text))
    drain = rounds.numbers(OURS, lambda one: one.returned - one.ended)
    rows.append(Row("last report to the end of fit()", OURS, "s", drain))
    rows.append(Row("points lost", OURS, "", rounds.numbers(OURS, lambda one: one.lost)))
    names = next(([name for name, _ in one.growth_mb] for one in rounds.measured[OURS] if one), [])
    for name in names:
        grown = rounds.numbers(OURS, partial(growth_of_process, name=name))
        rows.append(Row(f"memory growth once settled, {name}", OURS, "MB", grown))
    return rows


def bounds_of(rounds: Rounds[Reporting], seconds: float) -> list[Bound]:
    """Return the issue's bounds. Cost is the median of the repetitions, everything else the worst of them."""
    middle = median(rounds.numbers(OURS, partial(cost_of_call, share=0.5)))
    tail = median(rounds.numbers(OURS, partial(cost_of_call, share=0.99)))
    rate = worst(rounds.numbers(OURS, lambda one: one.a_second), min)
    lost = worst(rounds.numbers(OURS, lambda one: one.lost + one.twice))
    growth = worst(rounds.numbers(OURS, lambda one: one.worst_growth_mb))
    left = worst(rounds.numbers(OURS, lambda one: len(one.left_behind)))
    grown = f"MB grown after the first {settling(seconds):.0f} of {seconds:.0f} s, worst process"
    return [
        Bound("report() from 2 ranks, median in microseconds", middle, at_most=MEDIAN_AT_MOST_MICROSECONDS),
        Bound("report() from 2 ranks, p99 in microseconds", tail, at_most=P99_AT_MOST_MICROSECONDS),
        Bound(f"reports a second for {seconds:.0f} s", rate, at_least=REPORTS_A_SECOND_AT_LEAST),
        Bound("points lost or kept twice", lost, at_most=LOST_AT_MOST),
        Bound(grown, growth, at_most=MEMORY_GROWTH_AT_MOST_MB),
        Bound("processes, files, sockets left behind", left, at_most=0),
    ]


def notes_of(rounds: Rounds[Reporting]) -> list[str]:
    """Return notes on leftovers, by name."""
    return sorted(
        {
            f"{name} left behind: {thing}"
            for name, reportings in rounds.measured.items()
            for one in reportings
            if one is not None
            for thing in one.left_behind
        }
    )


def main() -> int:
    """Measure, print, and return the exit code."""
    options = parse_options("What one report() costs the training thread, and whether any is lost.")
    repetitions = QUICK_REPETITIONS if options.quick else REPETITIONS
    seconds = QUICK_SUSTAINED_SECONDS if options.quick else SUSTAINED_SECONDS
    contenders = [
        Contender(RAY, ("torch", "ray"), measure_ray),
        Contender(OURS, ("torch", "powertrain"), partial(measure_ours, seconds)),
        Contender(LIMIT, (), partial(measure_limit, min(seconds, 10.0))),
    ]
    rounds = interleave(contenders, repetitions, warm_up=False)
    outcome = Outcome(
        title=f"report() from 2 ranks for {seconds:.0f} s, {repetitions} x interleaved",
        repetitions=repetitions,
        rows=rows_of(rounds),
        bounds=bounds_of(rounds, seconds),
        missing=rounds.missing,
        failures=rounds.failures,
        notes=notes_of(rounds),
        samples={
            name: [None if one is None else asdict(one) for one in reportings]
            for name, reportings in rounds.measured.items()
        },
    )
    return conclude(outcome, options)


if __name__ == "__main__":
    raise SystemExit(main())
