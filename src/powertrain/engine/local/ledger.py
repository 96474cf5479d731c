"""The resources of the machine that this process holds and waits for, beside this user's other processes.

Claims and tickets are files that all of the user's processes see (``claims.py``). The order of service follows from
them alone (``waiting_line.py``), so every process comes to the same result and takes only its own share; there is no
server. A process that has to wait writes a ticket, and a thread sleeps until something changes in the directory: a
claim that is given back, or whose process has exited, reaches the first in line within milliseconds. Claims that hold
nothing countable never touch the disk.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from powertrain.engine.base import SlotShape
from powertrain.engine.forking import ServiceThread, working
from powertrain.engine.local import claims, waiting_line
from powertrain.engine.local.directory_watch import DirectoryWatch
from powertrain.engine.local.waiting_line import ResourceRequest
from powertrain.engine.resources import Holding, Machine, counted
from powertrain.errors import EngineError
from powertrain.storage.files.private_roots import unusable

#: Seconds between polls where inotify cannot be used, or after an error.
POLL_INTERVAL_S = 1.0
#: The same with inotify: on a file system shared between machines the kernel reports only local changes.
_MAX_POLL_INTERVAL_S = 10.0
#: Backoff for checking the file of an exiting process again: the kernel reports the exit before it releases the lock.
_FIRST_CLOSING_DELAY_S, _LAST_CLOSING_DELAY_S = 0.001, 1.0
#: The longest pause between two polls that leaves time to this process's other threads.
_MAX_REST_DELAY_S = 0.1
#: Backoff between two reasons reported to a waiting claim: in a busy queue they change all the time.
_FIRST_REASON_INTERVAL_S, _LAST_REASON_INTERVAL_S = 0.5, 10.0

#: Called with the GPUs that a claim was given, as entries of ``Machine.visible``. Any thread.
GrantSink = Callable[[tuple[str, ...]], None]
#: Called with the reason for the wait: soon, then on change. Never after the grant.
ReasonSink = Callable[[str], None]


@dataclass(frozen=True)
class SlotRequest:
    """``count`` slots of one shape, wanted whole."""

    id: str
    #: The engine's id, and its display name for others: "run digits".
    owner: str
    run: str
    host: str
    machine: Machine
    count: int
    shape: SlotShape

    @cached_property
    def resources(self) -> ResourceRequest:
        wanted = counted(self.shape, self.count)
        return ResourceRequest(
            run=self.run, host=self.host, pid=os.getpid(), wanted=wanted, machine=self.machine
        )

    def holding(self, slots: int, gpus: Sequence[str]) -> Holding:
        """Return its holding with ``slots`` of its slots and these entries of ``machine.visible``."""
        return waiting_line.holding_of(self.resources, counted(self.shape, slots), gpus)


@dataclass(eq=False)
class _Waiting:
    request: SlotRequest
    granted: GrantSink
    notify: ReasonSink
    number: int = 0
    ticket: claims.OwnFile | None = None
    #: The last reported reason, the earliest time for the next, and the interval after that one.
    reason: str = ""
    due: float = 0.0
    pause: float = _FIRST_REASON_INTERVAL_S
    over: bool = False
    #: Held during a notification, so that none follows the grant or the withdrawal.
    notify_lock: threading.RLock = field(default_factory=threading.RLock)

    def report(self, reason: str) -> float:
        """Report the reason if it is new. Return the seconds until it should be reported, if it is too early now."""
        with self.notify_lock:
            now = time.monotonic()
            if self.over or reason == self.reason:
                return _MAX_POLL_INTERVAL_S
            if now < self.due:
                return self.due - now
            self.reason, self.due = reason, now + self.pause
            self.pause = min(2 * self.pause, _LAST_REASON_INTERVAL_S)
            self.notify(reason)
            return _MAX_POLL_INTERVAL_S

    def hand_out(self, gpus: tuple[str, ...]) -> None:
        with self.notify_lock:
            self.over = True
            self.granted(gpus)

    def leave(self) -> None:
        """Stop waiting; no notification follows once this returns."""
        with self.notify_lock:
            self.over = True


@dataclass(eq=False)
class _Held:
    request: SlotRequest
    slots: int
    gpus: tuple[str, ...]
    file: claims.OwnFile

    @property
    def holding(self) -> Holding:
        return self.request.holding(self.slots, self.gpus)


@dataclass(eq=False)
class _Watch:
    owner: str
    machine: Machine
    shape: SlotShape
    notify: Callable[[int], None]
    last: int = -1
    over: bool = False
    #: Held during a notification, so that none follows once ``end`` has returned.
    notify_lock: threading.RLock = field(default_factory=threading.RLock)

    def deliver(self, count: int) -> None:
        with self.notify_lock:
            if not self.over and count != self.last:
                self.last = count
                self.notify(count)

    def end(self) -> None:
        with self.notify_lock:
            self.over = True


@dataclass
class _LedgerView:
    """The state of the directory, once this process's claims have taken their shares."""

    #: The live files of the others.
    names: set[str] = field(default_factory=set)
    #: The holdings of other processes, and this process's own.
    others: list[Holding] = field(default_factory=list)
    own: list[Holding] = field(default_factory=list)
    #: The requests that keep waiting, in order, each with the waiting claim where it is this process's own.
    line: list[tuple[ResourceRequest, _Waiting | None]] = field(default_factory=list)


class Ledger:
    """The claims of this process beside those of the others."""

    def __init__(self, root: Callable[[], Path]) -> None:
        """Create a ledger. ``root`` returns the user's runtime directory, which is made with the first claim."""
        self._root = root
        self._lock = threading.Lock()
        self._held: dict[str, _Held] = {}
        self._queue: list[_Waiting] = []
        self._watches: dict[str, _Watch] = {}
        #: Granted claims that have not been notified.
        self._ready: deque[tuple[_Waiting, tuple[str, ...]]] = deque()
        #: The directory watch of the thread; None while no thread runs.
        self._changes: DirectoryWatch | None = None

    def claim(self, request: SlotRequest, granted: GrantSink, waits: ReasonSink) -> None:
        """Claim the requested resources, or queue for them.

        Raises :class:`EngineError`, with nothing held or queued, where claims cannot be written down.
        """
        if not request.resources.wanted:
            granted(())
            return
        newcomer = _Waiting(request, granted, waits)
        try:
            with self._lock:
                self._serve(newcomer)
                try:
                    self._wake_watcher()
                except EngineError:
                    self._forget(newcomer)
                    raise
        finally:
            self._hand_out()

    def withdraw(self, claim: str) -> None:
        """Give up waiting. A claim that has been granted stays, and so does one that is not known here."""
        with self._lock:
            leaving = [waiting for waiting in self._queue if waiting.request.id == claim]
            if not leaving:
                return
            for waiting in leaving:
                self._forget(waiting)
            self._serve_again()  # it may have blocked others
        for waiting in leaving:
            waiting.leave()
        self._hand_out()

    def lend(self, claim: str) -> int | None:
        """Return a descriptor with which another process holds the claim too, until it exits; None where nothing is
        held. To be closed with :func:`locks.close`."""
        with self._lock:
            held = self._held.get(claim)
            return held.file.lend() if held else None

    def give_back_slot(self, claim: str, gpus: Collection[str]) -> None:
        """Free one slot of a claim and these GPUs for others; then serve the queue."""
        with self._lock:
            held = self._held.get(claim)
            if held is None:
                return
            held.slots -= 1
            held.gpus = tuple(gpu for gpu in held.gpus if gpu not in gpus)
            if held.slots == 0:
                self._held.pop(claim).file.remove()
            else:
                # Where that fails the others see the larger claim: they wait too long, and take nothing twice.
                with contextlib.suppress(EngineError), claims.locked(self._root()):
                    held.file.change(held.holding)
            self._serve_again()
        self._hand_out()

    def watch(self, owner: str, machine: Machine, shape: SlotShape, notify: Callable[[int], None]) -> None:
        """Report from now on how many slots of this shape an engine could have, including those it holds.

        Reported on the ledger's thread: soon, then on change, until :meth:`unwatch`. Waiting requests of all processes
        come first: their wants count as held, but never reduce the number below what the engine has. One watch per
        owner.
        """
        self.unwatch(owner)
        with self._lock:
            self._watches[owner] = _Watch(owner, machine, shape, notify)
            self._wake_watcher()

    def unwatch(self, owner: str) -> None:
        """Stop reporting; no notification follows once this returns."""
        with self._lock:
            watch = self._watches.pop(owner, None)
            self._wake_watcher()
        if watch is not None:
            watch.end()

    # -- how it works; ``_lock`` is held

    def _serve(self, newcomer: _Waiting | None = None) -> _LedgerView:
        """Grant what this process's claims can have now; a newcomer that has to wait gets a ticket at the end."""
        if not (self._queue or newcomer or claims.directory_of(self._root()).is_dir()):
            return _LedgerView()  # making the directory only to list it would wake all watchers
        with claims.locked(self._root()) as directory:
            found = claims.read(directory, {file.name for file in self._own_files()})
            line = self._line_with(found, newcomer)
            held = [*found.held, *(held.holding for held in self._held.values())]
            shares = waiting_line.shares(held, [resources for resources, _ in line])
            left = list[tuple[ResourceRequest, _Waiting | None]]()
            for (resources, waiting), share in zip(line, shares, strict=True):
                if waiting is None or share is None:
                    left.append((resources, waiting))
                else:
                    self._take(directory, waiting, share)
            if newcomer and any(waiting is newcomer for _, waiting in left):
                newcomer.number = 1 + max([found.last, *(waiting.number for waiting in self._queue)])
                newcomer.ticket = claims.write_ticket(directory, newcomer.number, newcomer.request.resources)
                self._queue.append(newcomer)
        return _LedgerView(found.names, found.held, [held.holding for held in self._held.values()], left)

    def _line_with(
        self, found: claims.Found, newcomer: _Waiting | None
    ) -> list[tuple[ResourceRequest, _Waiting | None]]:
        """Return all waiting requests in the order of their numbers, the newcomer last."""
        numbered: list[tuple[int, ResourceRequest, _Waiting | None]] = [
            *((number, resources, None) for number, resources in found.line),
            *((waiting.number, waiting.request.resources, waiting) for waiting in self._queue),
        ]
        numbered.sort(key=lambda entry: entry[0])
        line = [(resources, waiting) for _, resources, waiting in numbered]
        return [*line, (newcomer.request.resources, newcomer)] if newcomer else line

    def _take(self, directory: Path, waiting: _Waiting, share: Holding) -> None:
        """Grant a claim of this process. Where its file cannot be written it keeps waiting."""
        request, machine = waiting.request, waiting.request.machine
        gpus = tuple(machine.visible[machine.identities.index(gpu)] for gpu in share.gpus)
        file = claims.write_claim(directory, share)
        self._held[request.id] = _Held(request, request.count, gpus, file)
        self._ready.append((waiting, gpus))
        self._forget(waiting)

    def _forget(self, waiting: _Waiting) -> None:
        """Remove a claim from the queue, with its ticket."""
        if waiting in self._queue:
            self._queue.remove(waiting)
        if waiting.ticket is not None:
            waiting.ticket.remove()
            waiting.ticket = None

    def _own_files(self) -> Iterator[claims.OwnFile]:
        yield from (held.file for held in self._held.values())
        yield from (waiting.ticket for waiting in self._queue if waiting.ticket)

    def _serve_again(self) -> None:
        with contextlib.suppress(EngineError):  # the thread retries while any claim waits
            self._serve()
        self._wake_watcher()

    def _room(self, watch: _Watch, view: _LedgerView) -> int:
        """Return the number of slots the watching engine could have: its own of this shape count as free."""
        own = [
            held
            for held in self._held.values()
            if held.request.owner == watch.owner and held.request.shape == watch.shape
        ]
        taken = [*view.others, *(held.holding for held in self._held.values() if held not in own)]
        first = [
            resources
            for resources, waiting in view.line
            if not waiting or waiting.request.owner != watch.owner
        ]
        room = waiting_line.room(watch.machine, watch.shape, taken, first)
        return max(sum(held.slots for held in own), room)

    def _wake_watcher(self) -> None:
        """Wake the thread after a change, and start it when it is needed. Raises :class:`EngineError` where it cannot
        start."""
        if self._changes is not None:
            self._changes.wake()
        elif self._queue or self._watches:
            directory = claims.directory_of(self._root())
            try:
                self._changes = DirectoryWatch(directory)
            except OSError as error:  # no descriptor is left
                raise unusable(directory, error) from error
            ServiceThread(
                target=self._watch_changes, args=(self._changes,), name="powertrain-capacity", daemon=True
            ).start()

    # -- without ``_lock``

    def _hand_out(self) -> None:
        while True:
            try:
                waiting, gpus = self._ready.popleft()
            except IndexError:
                return
            waiting.hand_out(gpus)

    def _watch_changes(self, changes: DirectoryWatch) -> None:
        """Serve and notify on each change, while any claim or watch is left. Runs on the ledger's thread."""
        closing = _Closing()
        while True:
            began = time.monotonic()
            with working():
                pause = self._serve_and_notify(changes, closing)
            if pause is None:
                return
            # While much happens in a long line, the other threads of this process have half of the time.
            time.sleep(min(time.monotonic() - began, _MAX_REST_DELAY_S))
            closing.add(changes.wait(pause))

    def _serve_and_notify(self, changes: DirectoryWatch, closing: _Closing) -> float | None:
        """Serve and notify. Return the seconds until the next poll in any case; None where no claim or watch is
        left."""
        with self._lock:
            if not (self._queue or self._watches):
                self._changes = None
                changes.close()
                return None
            changes.arm()
            view, problem = self._see()
            rooms = [(watch, self._room(watch, view)) for watch in self._watches.values() if view]
            reasons = [(waiting, problem) for waiting in self._queue if problem]
        self._hand_out()
        for watch, count in rooms:
            watch.deliver(count)
        pauses = [POLL_INTERVAL_S if changes.problem or problem else _MAX_POLL_INTERVAL_S]
        if view:
            reasons = _reasons(view, changes.problem)
            pauses.append(closing.pause(view.names))
        pauses += [waiting.report(reason) for waiting, reason in reasons]
        return min(pauses)

    def _see(self) -> tuple[_LedgerView | None, str]:
        """Serve once; return the error message in place of a view on failure. ``_lock`` is held."""
        try:
            return self._serve(), ""
        except EngineError as error:
            return None, f"waiting, because there was a problem: {error}"


class _Closing:
    """Files of exiting processes: the kernel reports the exit a moment before it releases the lock."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._pause = _FIRST_CLOSING_DELAY_S

    def add(self, names: set[str]) -> None:
        if names:
            self._names, self._pause = self._names | names, _FIRST_CLOSING_DELAY_S

    def pause(self, live: set[str]) -> float:
        """Return the seconds until the next poll, given the files that are still locked."""
        self._names &= live
        if not self._names or self._pause > _LAST_CLOSING_DELAY_S:
            return _MAX_POLL_INTERVAL_S
        self._pause *= 2
        return self._pause / 2


def _reasons(view: _LedgerView, slow: str) -> list[tuple[_Waiting, str]]:
    """Return each waiting claim's reason; ``slow`` is the reason why inotify cannot be used, or ""."""
    held, line = [*view.others, *view.own], [resources for resources, _ in view.line]
    looked = (
        f" (looked at every {POLL_INTERVAL_S:g} s, because inotify cannot be used: {slow})" if slow else ""
    )
    return [
        (waiting, waiting_line.reason(resources, held, place) + looked)
        for (resources, waiting), place in zip(view.line, waiting_line.places(line), strict=True)
        if waiting is not None
    ]
