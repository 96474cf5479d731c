"""Controller load of a run with 2,048 ranks: each sends a heartbeat and a report per second over authenticated sockets.

The controller is the real one, with its journal, metrics store, hub and watchdog, in its own process. The workers are
simulated: real links with their own keys, many to a process, and those processes do not count. Each produces the
messages of a worker that reports once a second: a report of four metrics and a heartbeat. It sends them as a worker of
a run of that size does, which batches reports for some seconds if no rank waits for them
(``powertrain.run.workers.pacing``: with 2,048 ranks four); every report arrives, of heartbeats only the newest. The
bounds apply to that. For comparison, the same run is measured with each second's report and heartbeat sent separately,
as in runs of up to 512 ranks: the cost without batching. Workers are spread evenly over time, which is the most
expensive case: simultaneous messages cost less.

Measured from outside: CPU time of all threads of the controller's process from the first order to train to the last
complete row; its total resident memory, twice a second: the median of the last ten seconds less that of the ten seconds
around the 20th; then the time from SIGKILL of a worker's process until the controller ends the others because of it,
while they still send heartbeats, and the time from the closing of a worker's link until the hub detects it. Then the
points in the store are counted.

The limit is the same messages over the same wire into a hub that only acknowledges them. Its memory grows too, for a
while: ZeroMQ has a queue per connection and direction, of chunks of 256 messages with 64 bytes each, which it touches
one after the other. That is 128 bytes for each batch and its acknowledgement, until all chunks have been used once.

There is no peer that publishes such a figure: Ray Train's controller polls its workers every two seconds and receives
no heartbeats.

    python benchmarks/control_plane.py [--quick] [--json FILE] [--check] [--scale] [--tcp]

``--scale`` also measures 4,096 and 8,192 workers for some seconds each; ``--tcp`` uses TCP on the loopback instead of
Unix sockets, as between nodes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from child_process import run_to_end
from harness import Bound, MeasurementFailed, Outcome, Row, conclude, parse_options

from powertrain.run.workers.pacing import gathering_seconds

SCRIPTS = Path(__file__).resolve().parent / "control_plane_scripts"
CONTROLLER, WIRE_ALONE = "conducted.py", "wire_alone.py"
OURS, LIMIT = "Powertrain", "the wire alone"
#: Number of processes for the simulated workers.
CROWDS = 4
TIMEOUT_SECONDS = 400.0

#: The claims of the issue.
WORKERS, SECONDS = 2048, 60
CORES_AT_MOST = 1.0
GROWTH_AT_MOST_MB = 5.0
SETTLING_SECONDS = 20.0
NOTICED_WITHIN_SECONDS = 1.0
LOST_AT_MOST = 0

QUICK_WORKERS, QUICK_SECONDS, QUICK_SETTLING_SECONDS = 768, 24, 12.0
#: Number of workers for the extrapolation at the end.
MANY = 10_000
#: Workers and seconds of ``--scale``.
SCALE = ((4096, 15), (8192, 15))
#: Window of a memory median in seconds. The metrics store holds some megabytes more for five seconds after each write:
#: the window is long enough not to depend on whether such a time is in it.
WINDOW_SECONDS = 10.0
SHARED_MEMORY = "/dev/shm/"
#: Prefix of the name of the only non-Python thread.
IO_THREAD = "ZMQ"


class Watch:
    """CPU time and resident memory of a process, sampled from outside."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, float, int]] = []

    def sample(self, pid: int) -> None:
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            used = process.cpu_times()
            self.samples.append((time.monotonic(), used.user + used.system, process.memory_info().rss))

    def cores(self, began: float, ended: float) -> float:
        """CPU seconds a second."""
        during = [(at, cpu) for at, cpu, _ in self.samples if began <= at <= ended]
        if len(during) < 2:
            raise MeasurementFailed("The process was sampled less than twice: was the machine too busy?")
        return (during[-1][1] - during[0][1]) / (during[-1][0] - during[0][0])

    def growth_mb(self, settled: float, ended: float) -> float:
        """The median of the last window over that of the window around ``settled``."""
        return self._median_mb(ended - WINDOW_SECONDS) - self._median_mb(settled - WINDOW_SECONDS / 2)

    def _median_mb(self, begin: float) -> float:
        held = [memory for at, _, memory in self.samples if begin <= at < begin + WINDOW_SECONDS]
        if not held:
            raise MeasurementFailed(
                f"Memory was not sampled for {WINDOW_SECONDS:g} s: was the machine too busy?"
            )
        return statistics.median(held) / 1e6


@dataclass(frozen=True)
class Run:
    """Measurements of one program."""

    workers: int
    cores: float
    growth_mb: float
    #: Cores by thread.
    threads: dict[str, float]
    began: float
    ended: float
    #: Resident megabytes by second since training began.
    memory_mb: dict[float, float] = field(default_factory=dict)
    findings: dict[str, Any] = field(default_factory=dict)
    left_behind: tuple[str, ...] = ()

    @property
    def io_cores(self) -> float:
        """Cores used by non-Python threads."""
        return sum(cores for name, cores in self.threads.items() if name.startswith(IO_THREAD))

    @property
    def python_cores(self) -> float:
        """Cores used by all Python threads together: they share one interpreter."""
        return sum(cores for name, cores in self.threads.items() if not name.startswith(IO_THREAD))


def measure(script: str, workers: int, seconds: int, settling: float, address: str, *more: str) -> Run:
    """Run one of ``control_plane_scripts/`` to its end."""
    watch = Watch()
    with tempfile.TemporaryDirectory(prefix="ptb-") as directory:
        (Path(directory) / "crowd").mkdir()
        settings = (str(workers), str(seconds), str(CROWDS), address, *more)
        ended = run_to_end(
            (sys.executable, str(SCRIPTS / script), directory, *settings),
            workspace=Path(directory),
            timeout=TIMEOUT_SECONDS,
            grace=5.0,
            watch=watch.sample,
        )
    lines = [json.loads(line) for line in ended.output.splitlines() if line.startswith("{")]
    phases = {line["phase"]: line for line in lines if "phase" in line}
    if ended.returncode or "rows" not in phases:
        raise MeasurementFailed(
            f"{script} with {workers} workers did not come to its end: {ended.output[-2000:]}"
        )
    began, over = phases["training"]["at"], phases["rows"]["at"]
    before = phases["training"]["threads"]
    return Run(
        workers=workers,
        cores=watch.cores(began, over),
        growth_mb=watch.growth_mb(began + settling, over),
        threads={
            name: (seconds_used - before.get(name, 0.0)) / (over - began)
            for name, seconds_used in phases["rows"]["threads"].items()
        },
        began=began,
        ended=over,
        memory_mb={round(at - began, 1): held / 1e6 for at, _, held in watch.samples if began <= at <= over},
        findings=lines[-1],
        # Shared memory is excluded: it is listed for the whole machine, where other programs may run too.
        left_behind=tuple(thing for thing in ended.left_behind if not thing.startswith(SHARED_MEMORY)),
    )


def rows_of(run: Run, alone: Run, singly: Run, others: list[Run]) -> list[Row]:
    """Return a row for each figure, with its limit."""
    found, size = run.findings, f"{run.workers:,} workers"
    gathered = f"gathered for {gathering_seconds(run.workers):g} s, as the run tells"
    limits = {
        "cores": f"{alone.cores:.2f} cores by the wire alone; claimed {CORES_AT_MOST:g}",
        "python": f"{alone.python_cores:.2f} by the wire alone; one interpreter has 1",
        "io": f"{alone.io_cores:.2f} by the wire alone; one thread has 1",
        "memory": f"{alone.growth_mb:.1f} MB by the wire alone",
    }
    rows = [
        Row(f"{size}, {gathered}: CPU", OURS, "cores", [run.cores], None, limits["cores"]),
        Row("  of that, Python threads", OURS, "cores", [run.python_cores], None, limits["python"]),
        Row("  of that, ZeroMQ's thread", OURS, "cores", [run.io_cores], None, limits["io"]),
        Row("  memory growth once settled", OURS, "MB", [run.growth_mb], None, limits["memory"]),
        Row(
            "  SIGKILL of a worker to action",
            OURS,
            "s",
            [found["process_seconds"]],
            None,
            "a wait() returns at once",
        ),
        Row(
            "  a link closed to the hub's word",
            OURS,
            "s",
            [found["socket_seconds"]],
            None,
            "the kernel tells at once",
        ),
        Row(
            "  points kept",
            OURS,
            "",
            [found["points"]],
            None,
            f"{found['points'] + found['lost']:,} reported",
        ),
        Row("each second by itself, to compare: CPU", OURS, "cores", [singly.cores]),
        Row("  memory growth once settled", OURS, "MB", [singly.growth_mb]),
        Row("  points lost or twice", OURS, "", [singly.findings["lost"] + singly.findings["twice"]]),
    ]
    for other in others:
        seconds = gathering_seconds(other.workers)
        rows.append(
            Row(f"{other.workers:,} workers, gathered for {seconds:g} s: CPU", OURS, "cores", [other.cores])
        )
        rows.append(Row("  of that, Python threads", OURS, "cores", [other.python_cores], None, "at most 1"))
        lost = other.findings["lost"] + other.findings["twice"]
        rows.append(Row("  points lost or twice", OURS, "", [lost]))
    return rows


def bounds_of(run: Run, seconds: int, settling: float) -> list[Bound]:
    """Return the issue's bounds."""
    found, size = run.findings, f"{run.workers:,} workers"
    return [
        Bound(f"cores of CPU time for {size} over {seconds} s", run.cores, at_most=CORES_AT_MOST),
        Bound(f"MB grown after the first {settling:g} s", run.growth_mb, at_most=GROWTH_AT_MOST_MB),
        Bound("seconds to act on a killed worker", found["process_seconds"], at_most=NOTICED_WITHIN_SECONDS),
        Bound("seconds to notice a closed link", found["socket_seconds"], at_most=NOTICED_WITHIN_SECONDS),
        Bound("reports lost or kept twice", found["lost"] + found["twice"], at_most=LOST_AT_MOST),
        Bound("processes, files, sockets left behind", len(run.left_behind), at_most=0),
    ]


def notes_of(run: Run, singly: Run) -> list[str]:
    """Return notes on the limits for more workers."""
    threads = ", ".join(
        f"{name} {cores:.2f}" for name, cores in sorted(run.threads.items()) if cores >= 0.005
    )
    notes = [f"cores by thread at {run.workers:,} workers: {threads}."]
    if run.workers >= WORKERS:  # with fewer workers, fixed costs dominate
        notes += limits_of_many(run, singly)
    notes += [f"the run remarked: {remark}" for remark in run.findings.get("remarks", [])]
    return notes + [f"left behind: {thing}" for thing in run.left_behind]


def limits_of_many(run: Run, singly: Run) -> list[str]:
    """Return the saturated resources at ``MANY`` workers, extrapolated from the cost of a batch and of a report."""
    kinds = {
        "Python, one interpreter for decoding, deciding and writing metrics": (
            run.python_cores,
            singly.python_cores,
        ),
        "ZeroMQ's one I/O thread, which encrypts": (run.io_cores, singly.io_cores),
    }
    gather, many_gather = gathering_seconds(run.workers), gathering_seconds(MANY)
    found = []
    for what, (gathered, each) in kinds.items():
        a_batch = max(0.0, each - gathered) / (run.workers * (1 - 1 / gather))
        a_report = max(0.0, gathered / run.workers - a_batch / gather)
        a_worker = max(a_batch / many_gather + a_report, 1e-9)
        found.append(
            (
                a_worker,
                f"{what}: {a_batch * 1e6:.0f} µs a batch and {a_report * 1e6:.0f} µs a report; {MANY:,} workers that "
                f"gather for {many_gather:g} s would take {MANY * a_worker:.2f} cores of 1, which is full at about "
                f"{1 / a_worker:,.0f} workers.",
            )
        )
    return [
        *(sentence for _, sentence in sorted(found, reverse=True)),
        f"So {MANY:,} workers that report once a second are limited by the first of these, and the other comes next "
        "(what does not depend on their number is counted with reports).",
        "Each worker also takes an open file (the hub raises its soft limit as far as the hard one allows) and 32 to "
        f"64 KiB of ZeroMQ's queues, once they have been gone through: with {MANY:,} "
        f"{MANY * 32 * 1024 / 1e9:.1f} to {MANY * 64 * 1024 / 1e9:.1f} GB.",
    ]


def main() -> int:
    """Measure, print, and return the exit code."""
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--scale", action="store_true")
    own.add_argument("--tcp", action="store_true")
    chosen, rest = own.parse_known_args()
    options = parse_options(
        "What 2,048 ranks cost their controller. Also: --scale for 4,096 and 8,192, --tcp instead of Unix sockets.",
        rest,
    )
    workers, seconds = (QUICK_WORKERS, QUICK_SECONDS) if options.quick else (WORKERS, SECONDS)
    settling = QUICK_SETTLING_SECONDS if options.quick else SETTLING_SECONDS
    address = "127.0.0.1" if chosen.tcp else "ipc"
    alone = measure(WIRE_ALONE, workers, seconds, settling, address)
    run = measure(CONTROLLER, workers, seconds, settling, address)
    singly = measure(CONTROLLER, workers, seconds, settling, address, "singly")
    others = (
        [measure(CONTROLLER, *size, WINDOW_SECONDS / 2, address) for size in SCALE] if chosen.scale else []
    )
    outcome = Outcome(
        title=f"{workers:,} workers that beat and report once a second for {seconds} s, over {address}",
        repetitions=1,
        rows=rows_of(run, alone, singly, others),
        bounds=bounds_of(run, seconds, settling),
        notes=notes_of(run, singly),
        samples={
            "runs": [asdict(one) for one in (run, *others)],
            "singly": asdict(singly),
            "wire_alone": asdict(alone),
        },
    )
    return conclude(outcome, options)


if __name__ == "__main__":
    raise SystemExit(main())
