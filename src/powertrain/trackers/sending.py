"""One tracker brought up to date, and kept so: points are read after its cursor, sent, and the cursor is moved.

Each point arrives once because of the order: send, then record. A crash in between sends points again, which the
tracker's session leaves out where it can see them. The tracker's run is made under a key that was recorded before, so
that a crash while it is made does not lead to a second one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec

from powertrain.run.lifecycle import RunState
from powertrain.run.record import journal
from powertrain.storage import Storage
from powertrain.text.errors import describe_error
from powertrain.text.redaction import redact
from powertrain.trackers import cursor as cursors
from powertrain.trackers.base import RunEnding, TrackedRun, Tracker, TrackerSession
from powertrain.trackers.reading import PointReader, ReadPosition, StoredPoint

#: Points that are read and sent together.
PAGE_POINTS = 2000
#: Seconds between two checks for new points, where storage is of this machine and where it is not.
LOOK_INTERVAL_S, REMOTE_LOOK_INTERVAL_S = 1.0, 5.0
#: Seconds until a tracker that refused points is tried again: the first time, and at most.
RETRY_DELAY_S, LONGEST_RETRY_DELAY_S = 1.0, 15.0
#: Seconds for which a tracker that refuses is tried again once the run is over. One that takes points has longer.
REFUSED_TIMEOUT_S = 5.0
#: Characters of a reason that are shown.
_REASON_LIMIT = 500


@dataclass(frozen=True)
class Unsent:
    """The points that a tracker has not received when it is given up."""

    tracker: str
    points: int
    reason: str

    def sentence(self, command: str) -> str:
        """Say it, with the command that sends it."""
        many = "1 point" if self.points == 1 else f"{self.points:,} points"
        what = many if self.points else "the end of the run"
        return f"The tracker {self.tracker!r} has not got {what}: {self.reason}. Send it later: {command}"


class Sender:
    """Sends the points of one run to one tracker."""

    def __init__(
        self, tracker: Tracker, storage: Storage, run: TrackedRun, show: Callable[[str], None]
    ) -> None:
        """``run`` has no key and no id: these come from the run's directory. ``show`` shows a sentence."""
        self.name = tracker.name
        self._tracker, self._storage, self._facts, self._show = tracker, storage, run, show
        self._reader = PointReader(storage)
        self._session: TrackerSession | None = None
        self._cursor: cursors.Cursor | None = None
        #: The tracker's last error, in words; "" while there is none.
        self.problem = ""
        self._ending: RunEnding | None = None
        self._deadline = float("inf")
        self._refused_since = 0.0
        #: The state of the journal when the newest attempt was first seen.
        self._state = RunState()
        self._wake = threading.Event()
        self._is_over = False

    # -- the loop

    def follow(self) -> Unsent | None:
        """Send new points until :meth:`end` is called; return the unsent ones."""
        is_local = self._storage.local_path("x") is not None
        look_again = LOOK_INTERVAL_S if is_local else REMOTE_LOOK_INTERVAL_S
        delay = RETRY_DELAY_S
        while not self._is_over:
            # Asked before the page is read: a run that ends meanwhile has written points that the page lacks.
            is_complete = self._ending is not None
            try:
                more = self._send_page()
                self._mark_well()
                delay = RETRY_DELAY_S
                if is_complete and not more:
                    self._finish()
                wait = 0.0 if more or self._is_over else look_again
            except Exception as error:
                self._mark_problem(error)
                wait, delay = delay, min(2 * delay, LONGEST_RETRY_DELAY_S)
            if self._is_over:
                break
            if self._ending is not None:
                if self.problem and self._refused_too_long():
                    break
                if time.monotonic() > self._deadline:
                    break
                wait = min(wait, RETRY_DELAY_S)
            self._wake.wait(wait)
            self._wake.clear()
        self._close()
        return None if self._is_over else self.describe_unsent()

    def end(self, ending: RunEnding | None, within: float) -> None:
        """Have :meth:`follow` send the rest, and return after ``within`` seconds at the latest. Any thread.

        ``ending`` is None for a run that has not ended: its trackers' runs stay open.
        """
        self._deadline = time.monotonic() + within
        self._ending = ending or RunEnding("")
        self._wake.set()

    def _refused_too_long(self) -> bool:
        now = time.monotonic()
        self._refused_since = self._refused_since or now
        return now - self._refused_since >= min(REFUSED_TIMEOUT_S, max(0.0, self._deadline - now))

    # -- one round

    def _send_page(self) -> bool:
        """Send points that are new; returns whether more follow at once. The first point opens the tracker's run."""
        cursor = self._read_cursor()
        page = self._reader.page(cursor.position, PAGE_POINTS)
        if self._session is None:
            if not page.points and not self._has_end_to_record():
                return False
            self._open()
            return True  # which may have moved the cursor
        if any(stored.attempt > self._state.attempt for stored in page.points):
            self._state = _state_of(self._storage)
        live = [stored for stored in page.points if self._state.is_live(stored.attempt, stored.point.step)]
        for attempt, points in _by_attempt(live):
            self._send(attempt, points)
        self._reader.advance(page)
        return page.is_full

    def _has_end_to_record(self) -> bool:
        ending = self._ending
        return ending is not None and ending.state not in ("", self._read_cursor().finished)

    def _send(self, attempt: int, points: list[StoredPoint]) -> None:
        assert self._session is not None
        cursor = self._read_cursor()
        if attempt > cursor.attempt:
            self._begin_attempt(attempt, points[0].point.step)
            cursor = self._read_cursor()
        new = [stored.point for stored in points if stored.point.step > cursor.row]
        if new:
            self._session.log(new)
            self._move(ReadPosition(attempt, new[-1].step))

    def _begin_attempt(self, attempt: int, step: int) -> None:
        """Go back where a restart did: the tracker forgets rows that are trained again, or keeps its values of them."""
        assert self._session is not None
        row = self._read_cursor().row
        first = min(step, self._first_row(attempt))
        if first <= row and self._session.rewind(first):
            row = first - 1
        self._move(ReadPosition(attempt, row))

    def _first_row(self, attempt: int) -> int:
        """The first row that attempts after the cursor's have trained again, as the journal knows it."""
        known, branches = self._read_cursor().attempt, self._state.branches
        return min((b.first_row for b in branches if known < b.attempt <= attempt), default=1 << 62)

    # -- the tracker's run

    def _open(self) -> None:
        cursor, self._state = self._read_cursor(), _state_of(self._storage)
        run = replace(self._facts, key=cursor.key, id=cursor.id, last_step=cursor.row)
        session = self._tracker.open(run)
        self._session = session
        cursor = msgspec.structs.replace(cursor, id=session.id, finished="")
        if session.last_step < cursor.row:  # it has lost points, or never got them
            cursor = cursor.moved_to(ReadPosition(self._attempt_of(session.last_step + 1), session.last_step))
            self._reader = PointReader(self._storage)
        elif session.last_step > cursor.row:
            cursor = cursor.moved_to(ReadPosition(cursor.attempt, session.last_step))
        self._write_cursor(cursor)

    def _attempt_of(self, row: int) -> int:
        """The attempt that a row of the lineage belongs to."""
        return max((b.attempt for b in self._state.branches if b.first_row <= row), default=-1)

    def _finish(self) -> None:
        """Everything is sent: record the end of the run, where it has one."""
        ending = self._ending
        if self._session is not None and ending is not None:
            self._state = _state_of(self._storage)
            self._forget_abandoned(self._session)
            if ending.state:
                self._session.finish(ending)
                self._write_cursor(msgspec.structs.replace(self._read_cursor(), finished=ending.state))
            self._session.close()
            self._session = None
        self._is_over = True

    def _forget_abandoned(self, session: TrackerSession) -> None:
        """Take back rows that a later attempt, which reported nothing, would have trained again."""
        cursor = self._read_cursor()
        first = self._first_row(1 << 62)
        if first <= cursor.row and session.rewind(first):
            self._move(ReadPosition(cursor.attempt, first - 1))

    def _close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            try:
                session.close()
            except Exception as error:
                self.problem = self.problem or _in_words(error)

    # -- the cursor

    def _read_cursor(self) -> cursors.Cursor:
        if self._cursor is None:
            self._cursor = cursors.read(self._storage, self.name)
            if self._cursor is None:
                self._write_cursor(cursors.new())
        assert self._cursor is not None
        return self._cursor

    def _write_cursor(self, cursor: cursors.Cursor) -> None:
        cursors.write(self._storage, self.name, cursor)
        self._cursor = cursor

    def _move(self, position: ReadPosition) -> None:
        self._write_cursor(self._read_cursor().moved_to(position))

    # -- messages

    def _mark_well(self) -> None:
        self._refused_since = 0.0
        if self.problem and self._session is not None:
            self.problem = ""
            self._show(f"The tracker {self.name!r} takes points again; what it missed is being sent.")

    def _mark_problem(self, error: Exception) -> None:
        """Make a new session after an error: the state of the old one may be wrong."""
        was_well, self.problem = not self.problem, _in_words(error)
        self._close()
        if was_well and self._ending is None:
            self._show(
                f"The tracker {self.name!r} refuses points: {self.problem}. Training is not affected; the points are "
                "in the run's directory, and sending them is tried again."
            )

    def describe_unsent(self) -> Unsent:
        """Count the points that the tracker has not received, and give the reason."""
        reason = self.problem or "there was not enough time"
        try:
            return Unsent(self.name, self._reader.count(self._read_cursor().position), reason)
        except Exception as error:  # storage that does not answer, say
            return Unsent(self.name, 0, f"{reason}; {_in_words(error)}")


def _by_attempt(points: list[StoredPoint]) -> list[tuple[int, list[StoredPoint]]]:
    """The points of each attempt, without those of earlier ones that came after points of a later one."""
    found: list[tuple[int, list[StoredPoint]]] = []
    for stored in points:
        if not found or stored.attempt > found[-1][0]:
            found.append((stored.attempt, [stored]))
        elif stored.attempt == found[-1][0]:
            found[-1][1].append(stored)
    return found


def _state_of(storage: Storage) -> RunState:
    return journal.replay(journal.read(storage))


def _in_words(error: Exception) -> str:
    """One line that is fit to be shown: requests' errors are long, and quote addresses."""
    line = " ".join(redact(describe_error(error)).split()).rstrip(".")
    return line if len(line) <= _REASON_LIMIT else f"{line[:_REASON_LIMIT]}…"
