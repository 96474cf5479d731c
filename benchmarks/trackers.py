"""Cost of a tracker: steps without one, with MLflow, and with MLflow down for half of the steps.

One rank makes 10,000 steps of about a millisecond, and each is timed on the training thread with its report. The MLflow
server is a real one, on this machine, at the lowest priority: it stands for one that is elsewhere. For the run in which
it is down, connections to it are refused from a quarter to three quarters of the steps. Afterwards MLflow's own
store is read, and points that are missing or there twice are counted.

What the machine itself allows is measured in the same rounds: a run without a tracker, beside a process of the idle
scheduling class that uses as much CPU time as sender and server together. Where cores are short, that run is slower
than an undisturbed one, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from child_process import outlasting_programs, run_to_end
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
    percentile,
    worst,
)

SCRIPT = Path(__file__).resolve().parent / "trackers_scripts" / "train_tracked.py"
REPETITIONS, QUICK_REPETITIONS = 5, 1
STEPS, QUICK_STEPS = 10_000, 2_000
#: Side of the matrix that a step multiplies: about a millisecond.
SIZE = 160
TIMEOUT_SECONDS = 900.0
STARTS_WITHIN = 300.0
NONE, UP, DOWN = "no tracker", "MLflow", "MLflow, down for half of the steps"
BESIDE = "no tracker, an idle-class process beside it"
#: CPU seconds that the sender and the server of MLflow use for 10,000 points: 2.7 and 2.2.
BESIDE_CPU_SECONDS = 4.9
#: "No step slower", as ratios to the run without a tracker in the same round.
MEDIAN_AT_MOST, P99_AT_MOST, TOTAL_AT_MOST = 1.05, 1.25, 1.05


@dataclass(frozen=True)
class Tracked:
    """The steps of one run, and MLflow's points of it afterwards."""

    nanoseconds: tuple[int, ...]
    missing: int = 0
    doubled: int = 0
    runs: int = 0
    left_behind: tuple[str, ...] = ()

    def step_ms(self, share: float) -> float:
        """Return the milliseconds that a share of the steps did not exceed."""
        return percentile(self.nanoseconds, share) / 1e6

    @property
    def total_s(self) -> float:
        """Seconds of all steps."""
        return sum(self.nanoseconds) / 1e9


class Server:
    """An MLflow server, and a port in front of it that can be closed."""

    def __init__(self, directory: Path) -> None:
        self.store = f"sqlite:///{directory}/mlflow.db"
        self._port, self._front = _free_port(), _free_port()
        self.uri = f"http://127.0.0.1:{self._front}"
        command = [
            sys.executable,
            "-m",
            "mlflow",
            "server",
            "--backend-store-uri",
            self.store,
            "--workers",
            "1",
        ]
        command += ["--artifacts-destination", f"{directory}/artifacts", "--port", str(self._port)]
        command += ["--allowed-hosts", "*"]
        environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with open(directory / "server.log", "wb") as log:
            self.process = subprocess.Popen(
                ["nice", "-n", "19", *command],
                env=environment,
                cwd=directory,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._listener: socket.socket | None = None
        self._connections: list[socket.socket] = []
        self._await()
        self.open()

    def _await(self) -> None:
        deadline = time.monotonic() + STARTS_WITHIN
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{self._port}/health", timeout=5).close()
                return
            time.sleep(0.1)
        raise MeasurementFailed("The MLflow server did not start.")

    def open(self) -> None:
        """Accept connections."""
        if self._listener is None:
            self._listener = socket.create_server(("127.0.0.1", self._front))
            threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def shut(self) -> None:
        """Refuse connections, and close existing ones."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._connections.clear()

    def end(self) -> None:
        """End the server."""
        self.shut()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                behind = socket.create_connection(("127.0.0.1", self._port))
                self._connections += [client, behind]
                for source, target in ((client, behind), (behind, client)):
                    threading.Thread(target=_forward, args=(source, target), daemon=True).start()


def _forward(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@contextlib.contextmanager
def going_down(server: Server, workspace: Path) -> Iterator[None]:
    """Shut the server while the run is between a quarter and three quarters of its steps."""
    is_over = threading.Event()

    def watch() -> None:
        for name, act in (("quarter", server.shut), ("three-quarters", server.open)):
            while not (workspace / name).exists():
                if is_over.wait(0.005):
                    return
            act()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        is_over.set()
        watcher.join()
        server.open()


@contextlib.contextmanager
def using_cpu(seconds: float) -> Iterator[None]:
    """Use CPU time in a process that runs only where nothing else wants to."""
    code = "import os, time\nos.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\n"
    code += f"while time.process_time() < {seconds}: pass"
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        with outlasting_programs(lambda: {process.pid}):
            yield
    finally:
        process.kill()
        process.wait()


def measure(server: Server, kind: str, steps: int) -> Tracked:
    """Make one run of a kind, and read MLflow's store."""
    experiment = f"{kind} {time.time_ns()}"
    with tempfile.TemporaryDirectory(prefix="ptb-") as directory:
        workspace = Path(directory)
        is_tracked = kind in (UP, DOWN)
        uri = server.uri if is_tracked else ""
        settings = json.dumps({"steps": steps, "size": SIZE, "uri": uri, "experiment": experiment})
        circumstances: dict[str, contextlib.AbstractContextManager[None]] = {
            DOWN: going_down(server, workspace),
            BESIDE: using_cpu(BESIDE_CPU_SECONDS * steps / STEPS),
        }
        with circumstances.get(kind, contextlib.nullcontext()):
            ended = run_to_end(
                (sys.executable, str(SCRIPT), str(workspace), settings),
                workspace=workspace,
                timeout=TIMEOUT_SECONDS,
                grace=5.0,
            )
        nanoseconds = tuple(json.loads((workspace / "steps.json").read_text()))
    if not is_tracked:
        return Tracked(nanoseconds, left_behind=ended.left_behind)
    missing, doubled, runs = read_back(server.store, experiment, steps)
    return Tracked(nanoseconds, missing, doubled, runs, ended.left_behind)


def read_back(store: str, experiment: str, steps: int) -> tuple[int, int, int]:
    """Return the points missing in MLflow, the duplicated points, and the number of its runs."""
    code = (
        "import json, sys; from mlflow import MlflowClient; client = MlflowClient(sys.argv[1]); "
        "runs = client.search_runs([client.get_experiment_by_name(sys.argv[2]).experiment_id]); "
        "print(json.dumps([[m.step for m in client.get_metric_history(r.info.run_id, 'loss')] for r in runs]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, store, experiment],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    if done.returncode:
        raise MeasurementFailed(f"MLflow's store could not be read: {done.stderr[-500:]}")
    runs = json.loads(done.stdout.splitlines()[-1])
    count = Counter(step for run in runs for step in run)
    missing = sum(1 for step in range(1, steps + 1) if not count[step])
    return missing, sum(number - 1 for number in count.values()), len(runs)


def rows_of(rounds: Rounds[Tracked]) -> list[Row]:
    """Return the table."""
    rows = []
    for what, unit, take in (
        ("median step", "ms", lambda one: one.step_ms(0.5)),
        ("99 % of steps", "ms", lambda one: one.step_ms(0.99)),
        ("all steps", "s", lambda one: one.total_s),
    ):
        bare = rounds.numbers(NONE, take)
        for who in (NONE, BESIDE, UP, DOWN):
            numbers = rounds.numbers(who, take)
            ratio = None if who == NONE else median_ratio(numbers, bare)
            rows.append(Row(what, who, unit, numbers, ratio))
    for who in (UP, DOWN):
        rows.append(Row("points missing afterwards", who, "", rounds.numbers(who, lambda one: one.missing)))
        rows.append(Row("points doubled afterwards", who, "", rounds.numbers(who, lambda one: one.doubled)))
    return rows


def bounds_of(rounds: Rounds[Tracked]) -> list[Bound]:
    """Return the claims: no step slower, no point lost or duplicated, one run."""
    bounds = []
    for who in (UP, DOWN):
        for what, take, limit in (
            ("median step", lambda one: one.step_ms(0.5), MEDIAN_AT_MOST),
            ("99 % of steps", lambda one: one.step_ms(0.99), P99_AT_MOST),
            ("all steps", lambda one: one.total_s, TOTAL_AT_MOST),
        ):
            ratio = median_ratio(rounds.numbers(who, take), rounds.numbers(NONE, take))
            bounds.append(Bound(f"{what}, {who} / {NONE}", ratio, at_most=limit))
        wrong = rounds.numbers(who, lambda one: one.missing + one.doubled + abs(one.runs - 1))
        bounds.append(Bound(f"points lost or doubled, runs too many, {who}", worst(wrong), at_most=0))
    return bounds


def main() -> int:
    """Measure, print, check."""
    options = parse_options(__doc__ or "")
    steps = QUICK_STEPS if options.quick else STEPS
    repetitions = QUICK_REPETITIONS if options.quick else REPETITIONS
    with tempfile.TemporaryDirectory(prefix="ptb-mlflow-") as directory:
        server = Server(Path(directory))
        try:
            with outlasting_programs(lambda: _family(server.process.pid)):
                contenders = [
                    Contender(
                        kind, ("mlflow",) if kind in (UP, DOWN) else (), partial(measure, server, kind, steps)
                    )
                    for kind in (NONE, UP, BESIDE, DOWN)
                ]
                rounds = interleave(contenders, repetitions, warm_up=False)
        finally:
            server.end()
    return conclude(
        Outcome(
            title=f"{steps:,} steps of one rank, beside trackers",
            repetitions=repetitions,
            rows=rows_of(rounds),
            bounds=bounds_of(rounds),
            missing=rounds.missing,
            failures=rounds.failures,
            notes=["a ratio is that of the line to the run without a tracker in the same round"],
            samples={
                name: [None if one is None else asdict(one) | {"nanoseconds": []} for one in measured]
                for name, measured in rounds.measured.items()
            },
        ),
        options,
    )


def _family(pid: int) -> set[int]:
    import psutil

    with contextlib.suppress(psutil.Error):
        return {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
    return {pid}


if __name__ == "__main__":
    raise SystemExit(main())
