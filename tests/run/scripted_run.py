"""A run of the real controller on a scripted engine, for the tests of the control plane."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tests.support.clock import ManualClock
from tests.support.scripted_engine import ScriptedEngine

from powertrain.checkpoint import committed
from powertrain.checkpoint.chain import Chain
from powertrain.engine import base
from powertrain.run import events as ev
from powertrain.run.controller import Controller
from powertrain.run.metrics.reading import read_table
from powertrain.run.outcome import RunOutcome
from powertrain.run.record import journal
from powertrain.run.spec import RunDirectories, RunSpec
from powertrain.storage import Storage, open_storage
from powertrain.worker.place import RunIdentity

#: Seconds after which a run that should have ended by itself is ended by force, and its test fails.
PATIENCE = 30.0

E = TypeVar("E")


class Watcher:
    """An observer that remembers, and that a test can wait on."""

    def __init__(self) -> None:
        self.events: list[ev.Event] = []
        self.rows: list[tuple[int, list[Mapping[str, Any] | None]]] = []
        self.late: list[tuple[int, list[int]]] = []
        self.printed: list[tuple[int, bytes]] = []
        self.read: list[str] = []
        self.is_held = False
        self.on_event: Callable[[ev.Event], None] = lambda _: None
        self.on_row: Callable[[int], None] = lambda _: None

    def event(self, event: ev.Event) -> None:
        self.events.append(event)
        self.on_event(event)

    def row(self, row: int, by_rank: Sequence[Mapping[str, Any] | None], at: float) -> None:
        self.rows.append((row, list(by_rank)))
        self.on_row(row)

    def waiting(self, row: int, ranks: Sequence[int], seconds: float) -> None:
        self.late.append((row, list(ranks)))

    def data(self, text: str) -> None:
        self.read.append(text)

    def output(self, rank: int, data: bytes) -> None:
        self.printed.append((rank, data))

    def hold(self) -> None:
        self.is_held = True

    def release(self) -> None:
        self.is_held = False

    def all_of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    def warnings(self) -> list[str]:
        return [event.message for event in self.all_of(ev.Warned)]


class Run:
    """One run of the real controller on a scripted engine."""

    def __init__(self, directory: Path, runtime: str) -> None:
        self.path, self.runtime = directory, runtime
        self.storage: Storage = open_storage(directory)
        self.watcher = Watcher()
        self.lease = 0
        #: The clock of the run, where a test moves it.
        self.clock: ManualClock | None = None
        self._movers: list[threading.Thread] = []
        #: Since the first go().
        self.controller: Controller

    def go(self, engine: ScriptedEngine, workers: int = 2, **options: Any) -> RunOutcome:
        """Run to the end. A run that does not end is ended by force, and that fails the test."""
        self.lease += 1
        self.controller = Controller(
            self._spec(workers, options),
            engine,
            self.storage,
            Chain.take_over(self.storage, self.lease),
            journal.replay(journal.read(self.storage)),
            self.watcher,
            committed.newest(self.storage),
            clock=self.clock,
        )
        overdue = threading.Timer(PATIENCE, self._end_by_force)
        overdue.start()
        try:
            outcome = self.controller.run()
        finally:
            forced = not overdue.is_alive()
            overdue.cancel()
            overdue.join()
            for mover in self._movers:
                mover.join()
        assert not forced, f"the run did not end by itself; its last facts: {self.watcher.events[-5:]}"
        return outcome

    def pass_time_after(self, kind: type[ev.Event], *seconds: float) -> None:
        """Once the first fact of this kind is recorded, let ``seconds`` pass while the controller waits.

        Several values pass one after the other, each when the controller waits again.
        """
        self.clock = ManualClock(start=1e6)
        seen: list[ev.Event] = []

        def on_event(event: ev.Event) -> None:
            if isinstance(event, kind) and not seen:
                seen.append(event)
                self.pass_time(*seconds)

        self.watcher.on_event = on_event

    def pass_time(self, *seconds: float) -> None:
        """Let ``seconds`` pass when the controller waits next. Call it on the controller's thread."""
        clock = self.clock
        assert clock is not None

        def move() -> None:
            for step in seconds:
                clock.advance_when_waiting(step)

        self._movers.append(threading.Thread(target=move))
        self._movers[-1].start()

    def _spec(self, workers: int, options: dict[str, Any]) -> RunSpec:
        settings: dict[str, Any] = {"min_workers": workers, "max_workers": workers, **options}
        return RunSpec(
            run=RunIdentity(
                name="scripted",
                path=str(self.path),
                storage_path=str(self.path.parent),
                launch_dir=str(self.path),
            ),
            directories=RunDirectories(runtime=self.runtime),
            shape=base.SlotShape(),
            **settings,
        )

    def _end_by_force(self) -> None:
        self.controller.interrupt()
        self.controller.interrupt()

    def interrupt(self) -> None:
        self.controller.interrupt()

    @property
    def points(self) -> list[tuple[int, int, int]]:
        """(attempt, rank, row) of every point on disk, sorted."""
        table = read_table(self.storage).to_pydict()
        return sorted(zip(table["attempt"], table["rank"], table["row"], strict=True))
