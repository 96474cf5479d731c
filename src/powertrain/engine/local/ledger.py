"""What this process holds of the machine and waits for, beside all others of this user.

What is held and wanted lies in files that everybody sees (``claims.py``); whose turn it is follows from them alone
(``waiting_line.py``), so that every process comes to the same answer, and each takes what is its own. No process serves
another. Who has to wait writes a ticket, and a thread sleeps until something changes in the directory: a claim that is
given back, or whose process has ended, reaches the first in line in some milliseconds. Claims that hold nothing
countable never come near the disk.
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
from powertrain.engine.local.waiting_line import Wish
from powertrain.engine.resources import Holding, Machine, counted
from powertrain.errors import EngineError
from powertrain.storage.files.private_roots import unusable

#: Seconds between looks where the kernel tells nothing of changes, or something went wrong.
LOOK_EVERY = 1.0
#: And where it does: for file systems that more than one machine uses, of which the kernel knows only its own part.
_LOOK_AT_LEAST_EVERY = 10.0
#: Seconds until a file is looked at again whose process is ending: the kernel tells it before it lets go of the lock.
_CLOSING_FIRST, _CLOSING_LAST = 0.001, 1.0
#: The longest rest between two looks for the sake of this process's other threads, in seconds.
_REST_AT_MOST = 0.1
#: Seconds between two reasons told to one who waits, at first and at most: in a busy line they change all the time.
_REASON_FIRST, _REASON_MOST = 0.5, 10.0

#: Called with the GPUs that a claim was given, as entries of ``Machine.visible``. Any thread.
GrantSink = Callable[[tuple[str, ...]], None]
#: Called with what is waited for, in words: soon, then on change. Never after the grant.
ReasonSink = Callable[[str], None]


@dataclass(frozen=True)
class SlotRequest:
    """``count`` slots of one shape, wanted whole."""

    id: str
    #: Which engine asks, and who that is to others: "run digits".
    owner: str
    run: str
    host: str
    machine: Machine
    count: int
    shape: SlotShape

    @cached_property
    def wish(self) -> Wish:
        wanted = counted(self.shape, self.count)
        return Wish(run=self.run, host=self.host, pid=os.getpid(), wanted=wanted, machine=self.machine)

    def holding(self, slots: int, gpus: Sequence[str]) -> Holding:
        """What it holds while it has so many of its slots, and these entries of ``machine.visible``."""
        return waiting_line.holding_of(self.wish, counted(self.shape, slots), gpus)


@dataclass(eq=False)
class _Waiting:
    request: SlotRequest
    granted: GrantSink
    tell: ReasonSink
    number: int = 0
    ticket: claims.OwnFile | None = None
    #: The reason told last, when the next may be told, and how long after it the one that follows.
    reason: str = ""
    due: float = 0.0
    pause: float = _REASON_FIRST
    over: bool = False
    #: Held while something is told, so that nothing is told after the grant, or once it was withdrawn.
    telling: threading.RLock = field(default_factory=threading.RLock)

    def say(self, reason: str) -> float:
        """Tell it if it is new. Answers with how many seconds later it should be told, if it is too early now."""
        with self.telling:
            now = time.monotonic()
            if self.over or reason == self.reason:
                return _LOOK_AT_LEAST_EVERY
            if now < self.due:
                return self.due - now
            self.reason, self.due = reason, now + self.pause
            self.pause = min(2 * self.pause, _REASON_MOST)
            self.tell(reason)
            return _LOOK_AT_LEAST_EVERY

    def hand_out(self, gpus: tuple[str, ...]) -> None:
        with self.telling:
            self.over = True
            self.granted(gpus)

    def leave(self) -> None:
        """Wait no more; nothing is told when this returns."""
        with self.telling:
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
    tell: Callable[[int], None]
    last: int = -1
    over: bool = False
    #: Held while something is told, so that nothing is told once ``end`` has returned.
    telling: threading.RLock = field(default_factory=threading.RLock)

    def deliver(self, count: int) -> None:
        with self.telling:
            if not self.over and count != self.last:
                self.last = count
                self.tell(count)

    def end(self) -> None:
        with self.telling:
            self.over = True


@dataclass
class _Sight:
    """What a look has found, once those of this process have taken what was theirs."""

    #: The live files of the others.
    names: set[str] = field(default_factory=set)
    #: What the others hold, and what this process does.
    others: list[Holding] = field(default_factory=list)
    own: list[Holding] = field(default_factory=list)
    #: All who wait on, in order; with each of this process's own what it is.
    line: list[tuple[Wish, _Waiting | None]] = field(default_factory=list)


class Ledger:
    """The claims of this process beside those of the others."""

    def __init__(self, root: Callable[[], Path]) -> None:
        """``root`` answers with the user's runtime directory, which is made when there is something to hold."""
        self._root = root
        self._lock = threading.Lock()
        self._held: dict[str, _Held] = {}
        self._queue: list[_Waiting] = []
        self._watches: dict[str, _Watch] = {}
        #: Claims that have what they want and have not been told.
        self._ready: deque[tuple[_Waiting, tuple[str, ...]]] = deque()
        #: What the thread waits at; None while there is none.
        self._changes: DirectoryWatch | None = None

    def claim(self, request: SlotRequest, granted: GrantSink, waits: ReasonSink) -> None:
        """Take what is wanted, or wait in line for it.

        Raises :class:`EngineError`, with nothing held or queued, where claims cannot be written down.
        """
        if not request.wish.wanted:
            granted(())
            return
        newcomer = _Waiting(request, granted, waits)
        try:
            with self._lock:
                self._serve(newcomer)
                try:
                    self._stir()
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
            self._serve_again()  # it may have stood in somebody's way
        for waiting in leaving:
            waiting.leave()
        self._hand_out()

    def lend(self, claim: str) -> int | None:
        """A descriptor by which a process that uses what is claimed holds it too, until it ends; None where nothing is
        held. To be closed with :func:`locks.close`."""
        with self._lock:
            held = self._held.get(claim)
            return held.file.lend() if held else None

    def give_back_slot(self, claim: str, gpus: Collection[str]) -> None:
        """One slot of a claim is free for others, and so are these GPUs; then those who wait are served."""
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

    def watch(self, owner: str, machine: Machine, shape: SlotShape, tell: Callable[[int], None]) -> None:
        """From now on tell how many slots of this shape an engine could have, those that it holds included.

        Told by the ledger's thread: soon, then on change, until :meth:`unwatch`. Who waits comes first, in whichever
        process: what they want counts as held, but never takes from the number what the engine has. One watch for each
        owner.
        """
        self.unwatch(owner)
        with self._lock:
            self._watches[owner] = _Watch(owner, machine, shape, tell)
            self._stir()

    def unwatch(self, owner: str) -> None:
        """Nothing is told any more when this returns."""
        with self._lock:
            watch = self._watches.pop(owner, None)
            self._stir()
        if watch is not None:
            watch.end()

    # -- how it works; ``_lock`` is held

    def _serve(self, newcomer: _Waiting | None = None) -> _Sight:
        """Take what those of this process can have now; a newcomer who cannot gets a ticket, at the end of the line."""
        if not (self._queue or newcomer or claims.directory_of(self._root()).is_dir()):
            return _Sight()  # making the directory only to look into it would tell everybody of a change
        with claims.locked(self._root()) as directory:
            found = claims.read(directory, {file.name for file in self._own_files()})
            line = self._line_with(found, newcomer)
            held = [*found.held, *(held.holding for held in self._held.values())]
            shares = waiting_line.shares(held, [wish for wish, _ in line])
            left = list[tuple[Wish, _Waiting | None]]()
            for (wish, waiting), share in zip(line, shares, strict=True):
                if waiting is None or share is None:
                    left.append((wish, waiting))
                else:
                    self._take(directory, waiting, share)
            if newcomer and any(waiting is newcomer for _, waiting in left):
                newcomer.number = 1 + max([found.last, *(waiting.number for waiting in self._queue)])
                newcomer.ticket = claims.write_ticket(directory, newcomer.number, newcomer.request.wish)
                self._queue.append(newcomer)
        return _Sight(found.names, found.held, [held.holding for held in self._held.values()], left)

    def _line_with(
        self, found: claims.Found, newcomer: _Waiting | None
    ) -> list[tuple[Wish, _Waiting | None]]:
        """All who wait, in the order of their numbers, and who has just come behind them."""
        numbered: list[tuple[int, Wish, _Waiting | None]] = [
            *((number, wish, None) for number, wish in found.line),
            *((waiting.number, waiting.request.wish, waiting) for waiting in self._queue),
        ]
        numbered.sort(key=lambda entry: entry[0])
        line = [(wish, waiting) for _, wish, waiting in numbered]
        return [*line, (newcomer.request.wish, newcomer)] if newcomer else line

    def _take(self, directory: Path, waiting: _Waiting, share: Holding) -> None:
        """It is the turn of one of this process. Where its claim cannot be written it waits on."""
        request, machine = waiting.request, waiting.request.machine
        gpus = tuple(machine.visible[machine.identities.index(gpu)] for gpu in share.gpus)
        file = claims.write_claim(directory, share)
        self._held[request.id] = _Held(request, request.count, gpus, file)
        self._ready.append((waiting, gpus))
        self._forget(waiting)

    def _forget(self, waiting: _Waiting) -> None:
        """It waits no more, and its place is free."""
        if waiting in self._queue:
            self._queue.remove(waiting)
        if waiting.ticket is not None:
            waiting.ticket.remove()
            waiting.ticket = None

    def _own_files(self) -> Iterator[claims.OwnFile]:
        yield from (held.file for held in self._held.values())
        yield from (waiting.ticket for waiting in self._queue if waiting.ticket)

    def _serve_again(self) -> None:
        with contextlib.suppress(EngineError):  # as long as somebody waits the thread tries again
            self._serve()
        self._stir()

    def _room(self, watch: _Watch, sight: _Sight) -> int:
        """How many slots the watching engine could have: what it holds of this shape counts as free."""
        own = [
            held
            for held in self._held.values()
            if held.request.owner == watch.owner and held.request.shape == watch.shape
        ]
        taken = [*sight.others, *(held.holding for held in self._held.values() if held not in own)]
        first = [wish for wish, waiting in sight.line if not waiting or waiting.request.owner != watch.owner]
        room = waiting_line.room(watch.machine, watch.shape, taken, first)
        return max(sum(held.slots for held in own), room)

    def _stir(self) -> None:
        """Something changed: the thread looks again, and is there while it is needed. Raises :class:`EngineError` where
        there can be none."""
        if self._changes is not None:
            self._changes.wake()
        elif self._queue or self._watches:
            directory = claims.directory_of(self._root())
            try:
                self._changes = DirectoryWatch(directory)
            except OSError as error:  # no descriptor is left
                raise unusable(directory, error) from error
            ServiceThread(
                target=self._look, args=(self._changes,), name="powertrain-capacity", daemon=True
            ).start()

    # -- without ``_lock``

    def _hand_out(self) -> None:
        while True:
            try:
                waiting, gpus = self._ready.popleft()
            except IndexError:
                return
            waiting.hand_out(gpus)

    def _look(self, changes: DirectoryWatch) -> None:
        """The thread: serve and tell, now and whenever something may have changed, while anybody waits or watches."""
        closing = _Closing()
        while True:
            began = time.monotonic()
            with working():
                pause = self._look_once(changes, closing)
            if pause is None:
                return
            # While much happens in a long line, the other threads of this process have half of the time.
            time.sleep(min(time.monotonic() - began, _REST_AT_MOST))
            closing.told(changes.wait(pause))

    def _look_once(self, changes: DirectoryWatch, closing: _Closing) -> float | None:
        """Serve and tell. Returns the seconds after which to look again in any case; None where nobody waits."""
        with self._lock:
            if not (self._queue or self._watches):
                self._changes = None
                changes.close()
                return None
            changes.arm()
            sight, problem = self._see()
            rooms = [(watch, self._room(watch, sight)) for watch in self._watches.values() if sight]
            reasons = [(waiting, problem) for waiting in self._queue if problem]
        self._hand_out()
        for watch, count in rooms:
            watch.deliver(count)
        pauses = [LOOK_EVERY if changes.problem or problem else _LOOK_AT_LEAST_EVERY]
        if sight:
            reasons = _reasons(sight, changes.problem)
            pauses.append(closing.pause(sight.names))
        pauses += [waiting.say(reason) for waiting, reason in reasons]
        return min(pauses)

    def _see(self) -> tuple[_Sight | None, str]:
        """One look; what went wrong, in words, in place of a sight. ``_lock`` is held."""
        try:
            return self._serve(), ""
        except EngineError as error:
            return None, f"waiting, because there was a problem: {error}"


class _Closing:
    """Files whose process is ending: the kernel tells it a moment before it lets go of the lock."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._pause = _CLOSING_FIRST

    def told(self, names: set[str]) -> None:
        if names:
            self._names, self._pause = self._names | names, _CLOSING_FIRST

    def pause(self, live: set[str]) -> float:
        """Seconds until the next look, given the files that are still locked."""
        self._names &= live
        if not self._names or self._pause > _CLOSING_LAST:
            return _LOOK_AT_LEAST_EVERY
        self._pause *= 2
        return self._pause / 2


def _reasons(sight: _Sight, slow: str) -> list[tuple[_Waiting, str]]:
    """What each of this process waits for, and who has it; ``slow`` says why changes are not told by the kernel."""
    held, line = [*sight.others, *sight.own], [wish for wish, _ in sight.line]
    looked = f" (looked at every {LOOK_EVERY:g} s, because inotify cannot be used: {slow})" if slow else ""
    return [
        (waiting, waiting_line.reason(wish, held, place) + looked)
        for (wish, waiting), place in zip(sight.line, waiting_line.places(line), strict=True)
        if waiting is not None
    ]
