"""The dashboard: time and size of a first paint, the list of runs, and what viewers cost a live run.

- "First paint": all that the page of a run asks for at first, from a server that knows nothing of the run yet: its
  overview, twelve charts, the steps of all ranks, their resources, and the log. Of a run of 10 million points, and of
  one of 2,048 ranks.
- "List": 200 runs, the first look and one after it.
- "Viewers": one live run, in turns watched by ten viewers and by none. A viewer asks for the whole page again whenever
  the run has changed. The ratio is that of steps a second, each watched turn beside the unwatched ones next to it.
  Steps wait more than they compute, as where a GPU works; a run that needs all cores shares them with the dashboard.
- The peer is TensorBoard, on points of one rank that both have: from the start of the server to the data of a chart.
  It shows no steps, ranks, logs and findings, and thins a curve to 1,000 of its points, where ours has the lowest and
  highest of each pixel. Ray's dashboard shows no metrics of a training.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dashboard_scripts.browsing import (
    Browser,
    ServerFailed,
    processor_seconds,
    serving,
    sign_in,
    wait_for_start,
)
from harness import (
    Bound,
    Contender,
    MeasurementFailed,
    Outcome,
    Rounds,
    Row,
    conclude,
    interleave,
    median_ratio,
    parse_options,
    worst,
)

SCRIPTS = Path(__file__).resolve().parent / "dashboard_scripts"
#: The claims of the issue.
PAINT_AT_MOST_S, PAINT_AT_MOST_KB, LIST_AT_MOST_MS, STEPS_AT_LEAST = 1.0, 300.0, 300.0, 0.99
SETTINGS = {"points": 10_000_000, "ranks": 2048, "runs": 200, "compared": 20_000}
QUICK_SETTINGS = {"points": 200_000, "ranks": 256, "runs": 50, "compared": 10_000}
REPETITIONS, QUICK_REPETITIONS = 3, 1
VIEWERS = 10
#: Seconds of a turn of the watched run, and how many there are; the first and the last one are not watched.
TURN_SECONDS, QUICK_TURN_SECONDS, TURNS = 10.0, 3.0, 15
TIMEOUT_SECONDS = 900.0

POINTS, RANKS, RUNS = "a run of many points", "a run of many ranks", "the list"
OURS, TENSORBOARD = "Powertrain", "TensorBoard"


@dataclass(frozen=True)
class Shown:
    """A look at the dashboard: seconds and bytes at first, and seconds once more."""

    seconds: float
    kilobytes: float = 0.0
    seconds_again: float = 0.0
    #: Of the server's processor, at first: what a machine that others use too cannot stretch.
    processor_seconds: float = 0.0


def measure(root: Path, look: Callable[[Browser], Any]) -> Shown:
    """Start a server, and look twice."""
    try:
        with serving(root) as (port, name, process):
            browser = sign_in(port, name)
            wait_for_start(process)
            used, began = processor_seconds(process), time.perf_counter()
            look(browser)
            taken, received = time.perf_counter() - began, browser.received
            used, again = processor_seconds(process) - used, time.perf_counter()
            look(browser)
            return Shown(taken, received / 1000, time.perf_counter() - again, used)
    except (ServerFailed, OSError) as error:
        raise MeasurementFailed(f"The dashboard could not be asked: {error}") from error


def measure_chart(root: Path) -> Shown:
    """From the start of the server to the data of one chart."""
    began = time.perf_counter()
    try:
        with serving(root) as (port, name, _):
            browser = sign_in(port, name)
            reply = browser.get("/api/lines", run="points", metric="loss", pixels=1000)
            taken = time.perf_counter() - began
    except (ServerFailed, OSError) as error:
        raise MeasurementFailed(f"The dashboard could not be asked: {error}") from error
    if not reply["lines"]:
        raise MeasurementFailed("The chart has no values.")
    return Shown(taken, browser.received / 1000)


def measure_tensorboard(directory: Path, count: int) -> Shown:
    """The same of TensorBoard: until its chart has the last point."""
    port = 20_000 + os.getpid() % 20_000
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(directory), "--port", str(port)]
    began = time.perf_counter()
    process = subprocess.Popen(
        [*command, "--load_fast", "false"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while time.perf_counter() - began < TIMEOUT_SECONDS and process.poll() is None:
            data = _scalars(port)
            if data and json.loads(data)[-1][1] >= count:
                return Shown(time.perf_counter() - began, len(data) / 1000)
            time.sleep(0.02)
        raise MeasurementFailed("TensorBoard did not show the last point.")
    finally:
        process.terminate()
        process.wait(30)


def _scalars(port: int) -> bytes:
    """Return the data of TensorBoard's chart; b"" while it has none."""
    address = f"http://127.0.0.1:{port}/data/plugin/scalars/scalars?tag=loss&run=."
    try:
        with urllib.request.urlopen(address, timeout=60) as reply:
            return bytes(reply.read())
    except (urllib.error.URLError, ConnectionError):
        return b""


# --------------------------------------------------------------------------- viewers


@contextmanager
def training(directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A live run; ended by its own file."""
    process = subprocess.Popen(
        [sys.executable, str(SCRIPTS / "trained.py"), str(directory)], stdout=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        (directory / "enough").touch()
        try:
            process.wait(60)
        finally:
            process.kill()


def steps_made(directory: Path) -> tuple[int, float]:
    """Return the steps so far and when the last of them was noted: two of these make an exact rate."""
    file = directory / "steps"
    return int(file.read_text()), file.stat().st_mtime_ns / 1e9


def watch(turn_seconds: float) -> tuple[list[float], list[float], int]:
    """Return the steps a second of turns without and with viewers, and how often these asked for the page."""
    alone: list[float] = []
    watched: list[float] = []
    looks = 0
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "runs").mkdir()
        with training(directory) as process, serving(directory / "runs") as (port, host, _):
            deadline = time.monotonic() + 120
            while not (directory / "steps").exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise MeasurementFailed("The run that is watched did not begin to train.")
                time.sleep(0.1)
            browsers = [sign_in(port, host) for _ in range(VIEWERS)]
            time.sleep(turn_seconds)
            for turn in range(TURNS):
                is_watched = turn % 2 == 1
                before = steps_made(directory)
                looks += _look(browsers, turn_seconds) if is_watched else _wait(turn_seconds)
                after = steps_made(directory)
                (watched if is_watched else alone).append((after[0] - before[0]) / (after[1] - before[1]))
    return alone, watched, looks


def _wait(seconds: float) -> int:
    time.sleep(seconds)
    return 0


def _look(browsers: list[Browser], seconds: float) -> int:
    ended = threading.Event()
    with ThreadPoolExecutor(len(browsers)) as pool:
        jobs = [pool.submit(browser.follow, "watched", ended) for browser in browsers]
        time.sleep(seconds)
        ended.set()
        return sum(job.result() for job in jobs)


def ratios(alone: list[float], watched: list[float]) -> list[float]:
    """Return each watched turn over the mean of the unwatched ones before and after it."""
    return [one / statistics.mean(alone[place : place + 2]) for place, one in enumerate(watched)]


# --------------------------------------------------------------------------- all


def contenders_of(root: Path, settings: dict[str, int]) -> list[Contender[Shown]]:
    """Return the looks at the dashboard, and the peer."""
    compared = settings["compared"]
    return [
        Contender(POINTS, ("starlette",), partial(measure, root / "large", lambda one: one.paint("points"))),
        Contender(RANKS, ("starlette",), partial(measure, root / "wide", lambda one: one.paint("ranks"))),
        Contender(RUNS, ("starlette",), partial(measure, root / "many", lambda one: one.get("/api/runs"))),
        Contender(TENSORBOARD, ("tensorboard",), partial(measure_tensorboard, root / "tensorboard", compared)),
        Contender(OURS, ("starlette",), partial(measure_chart, root / "peer")),
    ]  # fmt: skip


def rows_of(
    rounds: Rounds[Shown], settings: dict[str, int], turns: tuple[list[float], list[float]]
) -> list[Row]:
    """Return the table."""
    names = {POINTS: f"{settings['points']:,} points", RANKS: f"{settings['ranks']:,} ranks"}
    rows = []
    for key, what in names.items():
        seconds, size = (
            rounds.numbers(key, lambda one: one.seconds),
            rounds.numbers(key, lambda one: one.kilobytes),
        )
        again = rounds.numbers(key, lambda one: one.seconds_again)
        used = rounds.numbers(key, lambda one: one.processor_seconds)
        rows += [
            Row(f"first paint, {what}", OURS, "s", seconds, limit=f"{PAINT_AT_MOST_S:g} s"),
            Row(f"its data, {what}", OURS, "kB", size, limit=f"{PAINT_AT_MOST_KB:g} kB"),
            Row(f"once more, {what}", OURS, "s", again),
            Row(f"processor time of the first, {what}", OURS, "s", used),
        ]
    listed = rounds.numbers(RUNS, lambda one: one.seconds * 1000)
    again = rounds.numbers(RUNS, lambda one: one.seconds_again * 1000)
    rows += [
        Row(f"list of {settings['runs']} runs", OURS, "ms", listed, limit=f"{LIST_AT_MOST_MS:g} ms"),
        Row("once more, list", OURS, "ms", again),
    ]
    ours, theirs = (rounds.numbers(name, lambda one: one.seconds) for name in (OURS, TENSORBOARD))
    what = f"start to a chart of {settings['compared']:,} points"
    rows += [
        Row(what, OURS, "s", ours),
        Row(what, TENSORBOARD, "s", theirs, median_ratio(ours, theirs)),
        Row("steps without viewers", "a live run", "/s", turns[0]),
        Row(f"steps with {VIEWERS} viewers", "a live run", "/s", turns[1]),
    ]
    return rows


def bounds_of(rounds: Rounds[Shown], turns: tuple[list[float], list[float]]) -> list[Bound]:
    """Return the claims, by the worst repetition; that about steps by the median of the turns."""
    bounds = []
    for name in (POINTS, RANKS):
        slowest, largest = (
            worst(rounds.numbers(name, take)) for take in (lambda one: one.seconds, lambda one: one.kilobytes)
        )
        bounds += [
            Bound(f"s to the first paint of {name}", slowest, at_most=PAINT_AT_MOST_S),
            Bound(f"kB of the first paint of {name}", largest, at_most=PAINT_AT_MOST_KB),
        ]  # fmt: skip
    listed = worst(rounds.numbers(RUNS, lambda one: one.seconds * 1000))
    ratio = statistics.median(ratios(*turns))
    return [
        *bounds,
        Bound("ms to the list of runs", listed, at_most=LIST_AT_MOST_MS),
        Bound(f"steps with {VIEWERS} viewers, of those without", ratio, at_least=STEPS_AT_LEAST),
    ]


def main() -> int:
    """Measure, print, and return the exit code."""
    options = parse_options("The dashboard: first paint, list, cost of viewers.")
    settings = QUICK_SETTINGS if options.quick else SETTINGS
    repetitions = QUICK_REPETITIONS if options.quick else REPETITIONS
    with tempfile.TemporaryDirectory() as name:
        made = [sys.executable, str(SCRIPTS / "make_runs.py"), name, json.dumps(settings)]
        subprocess.run(made, check=True, timeout=TIMEOUT_SECONDS)
        rounds = interleave(contenders_of(Path(name), settings), repetitions, warm_up=True)
    *turns, looks = watch(QUICK_TURN_SECONDS if options.quick else TURN_SECONDS)
    pair = (turns[0], turns[1])
    outcome = Outcome(
        title=f"The dashboard, {repetitions} x; {VIEWERS} viewers in {len(pair[1])} turns of a live run",
        repetitions=repetitions,
        rows=rows_of(rounds, settings, pair),
        bounds=bounds_of(rounds, pair),
        missing=rounds.missing,
        failures=rounds.failures,
        notes=[f"the viewers asked for the page {looks} times"],
        samples={
            **{
                key: [None if one is None else asdict(one) for one in kept]
                for key, kept in rounds.measured.items()
            },
            "without viewers": pair[0],
            "with viewers": pair[1],
        },
    )
    return conclude(outcome, options)


if __name__ == "__main__":
    raise SystemExit(main())
