"""A run's directory, written as its controller writes it: points and facts, without any process."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from powertrain.run import events as ev
from powertrain.run.metrics.points import PointRecord
from powertrain.run.metrics.store import MetricsStore
from powertrain.run.record.journal import Journal
from powertrain.storage import Storage, open_storage
from powertrain.trackers import RunEnding, TrackedPoint, TrackedRun, Tracker, TrackerSession
from powertrain.trackers.sending import Sender, Unsent

#: The moment at which row 0 would have been reported.
BEGAN = 1_700_000_000.0


class RecordedRun:
    """One start of a run."""

    def __init__(self, path: Path, lease: int = 1) -> None:
        self.storage: Storage = open_storage(path)
        self._journal = Journal(self.storage, lease)
        self._store = MetricsStore(self.storage, lease)
        self._fact(ev.RunStarted, name=path.name, lease=lease, host="h", pid=1, version="1", engine="local")

    def _fact(self, kind: Callable[..., Any], **fields: Any) -> None:
        self._journal.append(kind(time=time.time(), **fields))

    def begin(self, attempt: int, first_row: int = 1) -> None:
        self._fact(ev.SlotsRequested, attempt=attempt, count=2)
        self._fact(ev.AttemptStarted, attempt=attempt, world_size=2, first_row=first_row)
        self._fact(ev.TrainingStarted, attempt=attempt)

    def fail(self, attempt: int) -> None:
        self._fact(ev.Failed, attempt=attempt, failures=(), decision="retry", reason="")

    def report(self, rows: Iterable[int], attempt: int = 0, rank: int = 0, **metrics: Any) -> None:
        """Report each row with ``loss = attempt + 1/row``, unless other metrics are given; returns when it is kept."""
        self._store.add(
            [
                PointRecord(
                    rank=rank,
                    attempt=attempt,
                    row=row,
                    at=BEGAN + row,
                    solo=row == 0,
                    metrics=metrics or {"loss": loss(attempt, row)},
                )
                for row in rows
            ]
        )
        assert self._store.wait_spooled(60)

    def end(self, state: str = "finished") -> None:
        self._fact(ev.Ended, state=state, reason="")
        self.close()

    def close(self) -> None:
        """What a killed controller leaves is the same, but for the spool."""
        self._store.close()
        self._journal.close()


def loss(attempt: int, row: int) -> float:
    """What :meth:`RecordedRun.report` reports."""
    return attempt + 1 / max(1, row)


def facts_of(run: RecordedRun, **fields: Any) -> TrackedRun:
    """The calls that trackers get from a run."""
    path = run.storage.local_path("x")
    assert path is not None
    values: dict[str, Any] = {"params": {"lr": 0.1, "net/depth": 3}, "tags": {"team": "a"}, **fields}
    return TrackedRun(
        name="run", path=str(path.parent), key="", started=BEGAN, directory=str(path.parent), **values
    )


def send_all(
    run: RecordedRun, tracker: Tracker, state: str | None = None, tell: Callable[[str], None] = print
) -> Unsent | None:
    """Bring a tracker up to date, as a process of its own would; with a state the run has ended."""
    sender = Sender(tracker, run.storage, facts_of(run), tell)
    sender.end(RunEnding(state) if state else None, 60.0)
    return sender.follow()


class Killed(BaseException):
    """Ends a sender at once, as SIGKILL would: nothing catches it."""


class Board:
    """A tracker's server: runs by key, each with its points in the order of their arrival."""

    def __init__(self) -> None:
        self.runs: dict[str, list[tuple[int, float]]] = {}
        self.opened: list[TrackedRun] = []
        self.endings: list[RunEnding] = []
        self.is_down = False
        #: Points of one call that are taken before the caller is killed; -1 for all, and the caller lives.
        self.kills_after = -1

    def only(self) -> list[tuple[int, float]]:
        (points,) = self.runs.values()
        return points


class BoardTracker(Tracker):
    """A tracker as a user writes one."""

    def __init__(
        self, board: Board, *, rewinds: bool = False, looks: bool = True, name: str = "board"
    ) -> None:
        self.name = name
        self.board, self.rewinds, self.looks = board, rewinds, looks

    def open(self, run: TrackedRun) -> TrackerSession:
        if self.board.is_down:
            raise ConnectionError("the board is down")
        self.board.opened.append(run)
        return BoardSession(self, run)


class BoardSession(TrackerSession):
    def __init__(self, tracker: BoardTracker, run: TrackedRun) -> None:
        self._tracker, self._board = tracker, tracker.board
        self._points = self._board.runs.setdefault(run.key, [])
        self.id = f"board-{run.key}"
        self.last_step = run.last_step
        if tracker.looks:
            self.last_step = max((step for step, _ in self._points), default=0)

    def log(self, points: Sequence[TrackedPoint]) -> None:
        if self._board.is_down:
            raise ConnectionError("the board is down")
        for number, point in enumerate(points):
            if number == self._board.kills_after:
                raise Killed
            self._points.append((point.step, point.numbers["loss"]))
        if self._board.kills_after == len(points):
            raise Killed

    def rewind(self, step: int) -> bool:
        if self._tracker.rewinds:
            self._points[:] = [point for point in self._points if point[0] < step]
        return self._tracker.rewinds

    def finish(self, ending: RunEnding) -> None:
        self._board.endings.append(ending)


def approx(found: Iterable[tuple[int, float]], expected: Iterable[tuple[int, float]]) -> bool:
    """Whether points are the same, up to the precision of a 32-bit float."""
    left, right = list(found), list(expected)
    return [step for step, _ in left] == [step for step, _ in right] and all(
        math.isclose(one, other, rel_tol=1e-6) for (_, one), (_, other) in zip(left, right, strict=True)
    )
