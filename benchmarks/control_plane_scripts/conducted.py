"""One run of the real controller with simulated workers: python conducted.py DIRECTORY WORKERS REPORTS CROWDS ADDRESS
[singly]

The controller has its real journal, metrics store, hub and watchdog, and an engine whose workers are links in other
processes (``crowd.py``). They batch reports as the run requests, or, with ``singly``, send each separately. The last
rank has its own process. When every row is complete, one worker's link is closed while its process stays alive, and the
last rank's process is killed: the run ends by that failure, as expected.

Lines on standard output are JSON objects: phases with their moments, on the clock that all processes share, and the CPU
seconds of each thread until then; at last the findings.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from crowds import PATIENCE, end_crowds, start_crowds, tell, tell_phase

from powertrain.checkpoint.chain import Chain
from powertrain.engine import base
from powertrain.run import events as ev
from powertrain.run.controller import Controller
from powertrain.run.lifecycle import RunState
from powertrain.run.metrics.reading import read_table
from powertrain.run.spec import RunDirectories, RunSpec
from powertrain.storage import open_storage
from powertrain.wire.hub import Hub
from powertrain.worker.main import WorkerSpec
from powertrain.worker.place import RunIdentity

#: Workers on one node, as far as ranks are placed.
_ON_A_NODE = 8


@dataclass(frozen=True)
class _Claim:
    id: str


class CrowdEngine:
    """Engine whose processes are simulated workers, in ``crowds`` processes and one for the last rank."""

    name, restarts, replaces = "crowd", True, False
    owns_processes, shares_driver_process, rank_in_driver, forks_driver = True, False, None, False

    def __init__(self, workers: int, reports: int, crowds: int, address: str, gathers: bool) -> None:
        self._workers, self._reports, self._crowds, self._address = workers, reports, crowds, address
        self._gathers = gathers
        self._forked: list[tuple[base.Slot, WorkerSpec]] = []
        self._slots: list[base.Slot] = []
        self.processes: list[subprocess.Popen[str]] = []
        self._gone: set[str] = set()
        self._lock = threading.Lock()
        #: Time at which the first rank was ended because another had died.
        self.acted_at = 0.0
        self.hub: Hub | None = None

    def connect(self, hub: Hub) -> None:
        self.hub = hub

    def start(self, events: base.EventSink, output: base.OutputSink) -> None:
        self._events = events

    def wire_address(self) -> str:
        return self._address

    def request(self, count: int, shape: base.SlotShape) -> _Claim:
        self._slots = [
            base.Slot(f"slot-{n}", f"node-{n // _ON_A_NODE:04d}", "127.0.0.1", local=False)
            for n in range(count)
        ]
        self._events(base.Granted("all", tuple(self._slots)))
        return _Claim("all")

    def withdraw(self, claim: base.Claim) -> None: ...

    def watch_capacity(self, shape: base.SlotShape, wanted: int = 0) -> None: ...

    def fork(self, slot: base.Slot, spec: base.ProcessSpec) -> None:
        self._forked.append((slot, msgspec.msgpack.decode(spec.payload, type=WorkerSpec)))
        if len(self._forked) == self._workers:
            self._start_crowds()

    def attend(self, beside: base.Slot, spec: base.ProcessSpec) -> None: ...

    def signal(self, slot: base.Slot, number: signal.Signals) -> None:
        if number == signal.SIGKILL:
            self.acted_at = self.acted_at or time.monotonic()
            self._tell_gone(slot, -number)

    def inspect(self, slot: base.Slot, stacks: bool = False) -> base.Inspection:
        return base.Inspection(0, "unknown")

    def is_in_doubt(self, since: float) -> bool:
        return False

    def release(self, slots: Sequence[base.Slot]) -> None: ...

    def close(self) -> None:
        end_crowds(self.processes)

    def _start_crowds(self) -> None:
        connections = {spec.place.rank: spec.connection for _, spec in self._forked}
        self.processes = start_crowds(connections, self._reports, self._crowds, self._gathers)
        for slot, spec in self._forked:
            self._events(base.Started(slot, 5_000_000 + spec.place.rank))
        threading.Thread(target=self._await_last, args=(self._forked[-1][0],), daemon=True).start()

    def _await_last(self, slot: base.Slot) -> None:
        """Watch the last rank's process and report its exit, as any engine does."""
        self._tell_gone(slot, self.processes[-1].wait())

    def _tell_gone(self, slot: base.Slot, code: int) -> None:
        with self._lock:
            if slot.id in self._gone:
                return
            self._gone.add(slot.id)
        self._events(base.Exited(slot, 0, code))


class Watcher:
    """Observer that reports the start of training and the last complete row."""

    def __init__(self, reports: int) -> None:
        self._reports = reports
        self.rows = 0
        self.all_rows = threading.Event()
        self.remarks: list[str] = []

    def event(self, event: ev.Event) -> None:
        if isinstance(event, ev.TrainingStarted):
            tell_phase("training")
        elif isinstance(event, (ev.Warned, ev.HangNoticed)):
            self.remarks.append(event.message)

    def row(self, row: int, by_rank: Sequence[Mapping[str, Any] | None], at: float) -> None:
        self.rows += all(metrics is not None for metrics in by_rank)
        if row == self._reports:
            self.all_rows.set()

    def waiting(self, row: int, ranks: Sequence[int], seconds: float) -> None: ...

    def data(self, text: str) -> None: ...

    def output(self, rank: int, data: bytes) -> None: ...


def disturb(engine: CrowdEngine, watcher: Watcher, workers: int, reports: int) -> dict[str, float]:
    """Close a link, then kill a process; return the detection time of each, in seconds."""
    assert watcher.all_rows.wait(PATIENCE + reports)
    tell_phase("rows")
    assert engine.hub is not None
    crowd = engine.processes[0]
    assert crowd.stdin is not None
    assert crowd.stdout is not None
    crowd.stdin.write("close 0\n")
    crowd.stdin.flush()
    while engine.hub.count_connected() == workers:
        time.sleep(0.001)
    noticed = time.monotonic()
    socket_seconds = max(0.0, noticed - float(crowd.stdout.readline()))
    killed = time.monotonic()
    engine.processes[-1].kill()
    while not engine.acted_at:
        time.sleep(0.001)
    return {"socket_seconds": socket_seconds, "process_seconds": engine.acted_at - killed}


def spec_of(directory: Path, runtime: str, workers: int) -> RunSpec:
    return RunSpec(
        run=RunIdentity(
            name="crowd",
            path=str(directory / "crowd"),
            storage_path=str(directory),
            launch_dir=str(directory),
        ),
        directories=RunDirectories(runtime=runtime),
        min_workers=workers,
        max_workers=workers,
        shape=base.SlotShape(),
    )


def count(storage: Any, workers: int, reports: int) -> dict[str, int]:
    """Return the points missing from the store, and those that are duplicated."""
    table = read_table(storage)
    found = list(zip(table["rank"].to_pylist(), table["row"].to_pylist(), strict=True))
    expected = {(rank, row) for rank in range(workers) for row in range(1, reports + 1)}
    return {"lost": len(expected - set(found)), "twice": len(found) - len(set(found)), "points": len(found)}


def main() -> None:
    directory, address = Path(sys.argv[1]), sys.argv[5]
    workers, reports, crowds = (int(argument) for argument in sys.argv[2:5])
    storage = open_storage(directory / "crowd")
    engine = CrowdEngine(workers, reports, crowds, address, gathers="singly" not in sys.argv[6:])
    watcher = Watcher(reports)
    noticed: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="pt-") as runtime:
        controller = Controller(
            spec_of(directory, runtime, workers),
            engine,
            storage,
            Chain.take_over(storage, 1),
            RunState(),
            watcher,
        )

        def wait_and_disturb() -> None:
            try:
                noticed.update(disturb(engine, watcher, workers, reports))
            except BaseException:
                controller.interrupt()
                controller.interrupt()  # at once
                raise

        thread = threading.Thread(target=wait_and_disturb, daemon=True)
        thread.start()
        outcome = controller.run()
        thread.join()
    tell(
        **noticed,
        **count(storage, workers, reports),
        rows=watcher.rows,
        state=outcome.state,
        remarks=watcher.remarks,
    )


if __name__ == "__main__":
    main()
