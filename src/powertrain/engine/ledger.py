"""Who holds what of this machine, over all processes of this user, and the queue of those who wait.

Each claim that holds something countable is a small file in ``claims`` below the user's runtime directory, locked
by its process for as long as the claim lives. So everybody sees what the others hold, and the claim of a dead process
is seen to be void, in whichever container the process was; the next who looks removes it. All of it happens under one
lock of that directory, which is there only while there are claims. Claims that hold nothing countable never come near
the disk.

Those who wait in one process are served in order; a later one passes only those who want other things. Between
processes there is no order: a thread looks again once a second, while somebody waits or watches, and who looks first
is served.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from powertrain.engine import locks
from powertrain.engine.base import SlotShape
from powertrain.engine.resources import (
    Holding,
    Machine,
    counted,
    free_gpus,
    missing,
    slots_free,
)
from powertrain.errors import EngineError

#: Seconds between looks at what other processes hold.
LOOK_EVERY = 1.0
#: Where claims lie in the runtime directory.
_DIRECTORY = "claims"
#: The largest file of a claim that is read.
_MOST_BYTES = 1 << 20
#: How many holders are named to one who waits.
_MOST_NAMED = 3

#: Called with the GPUs that a claim was given, as entries of ``Machine.visible``. Any thread.
GrantSink = Callable[[tuple[str, ...]], None]


@dataclass(frozen=True)
class Request:
    """``count`` slots of one shape, wanted whole."""

    id: str
    #: Which engine asks, and for which run.
    owner: str
    run: str
    host: str
    machine: Machine
    count: int
    shape: SlotShape

    @property
    def wanted(self) -> dict[str, float]:
        return counted(self.shape, self.count)

    def holding(self, slots: int, gpus: Sequence[str]) -> Holding:
        """What it holds while it has so many of its slots, and these entries of ``machine.visible``."""
        amounts = {name: amount for name, amount in counted(self.shape, slots).items() if name != "GPU"}
        return Holding(
            run=self.run,
            host=self.host,
            pid=os.getpid(),
            gpus=tuple(map(self.machine.identity, gpus)),
            amounts=amounts,
            cores=tuple(sorted(self.machine.cores)) if "CPU" in amounts else (),
        )


# --------------------------------------------------------------------------- the files


class ClaimFile:
    """One claim as the other processes see it. Made and changed only by who holds the lock of the directory."""

    def __init__(self, directory: Path, holding: Holding) -> None:
        # The number alone would not do: in another container a process may have the same.
        self.path = directory / f"{os.getpid()}-{os.urandom(4).hex()}.json"
        self._descriptor = locks.open_unshared(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            locks.try_lock(self._descriptor)
            self.change(holding)
        except OSError:
            self.remove()
            raise

    def change(self, holding: Holding) -> None:
        """In place: who dies half-way through it has let go of the lock, and then nobody reads the rest."""
        data = msgspec.json.encode(holding)
        if os.pwrite(self._descriptor, data, 0) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.ftruncate(self._descriptor, len(data))

    def remove(self) -> None:
        """The claim is over, whether or not its file can be removed."""
        with contextlib.suppress(OSError):
            self.path.unlink()
        locks.let_go(self._descriptor)


@contextlib.contextmanager
def _locked_claims(root: Path) -> Iterator[Path]:
    """Hold the directory of claims, made if absent, and removed afterwards if nobody's claim is in it."""
    directory = root / _DIRECTORY
    try:
        locks.make_private_directory(root)
        with locks.locked_directory(directory):
            yield directory
            with contextlib.suppress(OSError):
                directory.rmdir()
    except OSError as error:
        raise locks.unusable(directory, error) from error


def sweep(root: Path) -> None:
    """Remove the void claims in a runtime directory. Where there is no claim this costs one look."""
    if (root / _DIRECTORY).is_dir():
        with _locked_claims(root) as directory:
            read_claims(directory)


def read_claims(directory: Path, leave_out: Collection[str] = ()) -> list[Holding]:
    """What the live claims hold, except the files named; removes void ones. The directory's lock must be held."""
    found = (_read_claim(directory / name) for name in sorted(os.listdir(directory)) if name not in leave_out)
    return [holding for holding in found if holding is not None]


def _read_claim(path: Path) -> Holding | None:
    try:
        descriptor = locks.open_unshared(path, os.O_RDONLY)
    except OSError:
        return None  # given back since it was listed
    try:
        if locks.try_lock(descriptor):
            path.unlink()
            return None
        return msgspec.json.decode(os.read(descriptor, _MOST_BYTES), type=Holding)
    except (msgspec.DecodeError, OSError):
        return None  # of a version that wrote something else: one such file must not keep everybody from starting
    finally:
        locks.let_go(descriptor)


# --------------------------------------------------------------------------- the ledger


@dataclass(eq=False)
class _Waiting:
    request: Request
    granted: GrantSink


@dataclass(eq=False)
class _Held:
    request: Request
    slots: int
    gpus: tuple[str, ...]
    file: ClaimFile

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
            if not self.over:
                self.tell(count)

    def end(self) -> None:
        with self.telling:
            self.over = True


class Ledger:
    """The claims of this process beside those of the others."""

    def __init__(self, root: Callable[[], Path]) -> None:
        """``root`` answers with the user's runtime directory, which is made when there is something to hold."""
        self._root = root
        self._changed = threading.Condition()
        self._held: dict[str, _Held] = {}
        self._queue: list[_Waiting] = []
        self._watches: dict[str, _Watch] = {}
        #: Claims that have what they want and have not been told.
        self._ready: deque[tuple[GrantSink, tuple[str, ...]]] = deque()
        self._thread: threading.Thread | None = None
        self._stirred = False

    def claim(self, request: Request, granted: GrantSink) -> str:
        """Take what is wanted, or queue. Returns "" or, in words, what is waited for.

        Raises :class:`EngineError`, with nothing held or queued, where claims cannot be written down.
        """
        if not request.wanted:
            granted(())
            return ""
        waiting = _Waiting(request, granted)
        try:
            with self._changed:
                self._queue.append(waiting)
                try:
                    others = self._serve()
                except EngineError:
                    self._queue.remove(waiting)
                    raise
                self._stir()
                return self._reason(request, others) if waiting in self._queue else ""
        finally:
            self._hand_out()

    def withdraw(self, claim: str) -> None:
        """Give up waiting. A claim that has been granted stays, and so does one that is not known here."""
        with self._changed:
            if not any(waiting.request.id == claim for waiting in self._queue):
                return
            self._queue = [waiting for waiting in self._queue if waiting.request.id != claim]
            self._serve_again()  # it may have stood in somebody's way
        self._hand_out()

    def give_back_slot(self, claim: str, gpus: Collection[str]) -> None:
        """One slot of a claim is free for others, and so are these GPUs; then those who wait are served."""
        with self._changed:
            held = self._held.get(claim)
            if held is None:
                return
            held.slots -= 1
            held.gpus = tuple(gpu for gpu in held.gpus if gpu not in gpus)
            if held.slots == 0:
                self._held.pop(claim).file.remove()
            else:
                # Where that fails the others see the larger claim: they wait too long, and take nothing twice.
                with contextlib.suppress(EngineError), _locked_claims(self._root()):
                    held.file.change(held.holding)
            self._serve_again()
        self._hand_out()

    def watch(self, owner: str, machine: Machine, shape: SlotShape, tell: Callable[[int], None]) -> None:
        """From now on tell how many slots of this shape an engine could have, those that it holds included.

        Told by the ledger's thread: soon, then on change, until :meth:`unwatch`. Who waits in this process comes first:
        what they want counts as held, but never takes from the number what the engine has. One watch for each owner.
        """
        self.unwatch(owner)
        with self._changed:
            self._watches[owner] = _Watch(owner, machine, shape, tell)
            self._stir()

    def unwatch(self, owner: str) -> None:
        """Nothing is told any more when this returns."""
        with self._changed:
            watch = self._watches.pop(owner, None)
            self._stir()
        if watch is not None:
            watch.end()

    # -- how it works; ``_changed`` is held

    def _serve(self) -> list[Holding]:
        """Give what is free to those who wait, in order; answers with what other processes hold."""
        with _locked_claims(self._root()) as directory:
            others = read_claims(directory, {held.file.path.name for held in self._held.values()})
            spoken_for: set[str] = set()
            for waiting in list(self._queue):
                request, held = waiting.request, [*others, *self._own_holdings()]
                if spoken_for & request.wanted.keys() or missing(request.machine, held, request.wanted):
                    spoken_for |= request.wanted.keys()
                    continue
                gpus = free_gpus(request.machine, held)[: int(request.wanted.get("GPU", 0))]
                file = ClaimFile(directory, request.holding(request.count, gpus))
                self._held[request.id] = _Held(request, request.count, gpus, file)
                self._queue.remove(waiting)
                self._ready.append((waiting.granted, gpus))
        return others

    def _serve_again(self) -> None:
        with contextlib.suppress(EngineError):  # as long as somebody waits the thread tries again
            self._serve()
        self._stir()

    def _own_holdings(self) -> list[Holding]:
        return [held.holding for held in self._held.values()]

    def _reason(self, request: Request, others: list[Holding]) -> str:
        """What a claim waits for, and who has it."""
        held = [*others, *self._own_holdings()]
        lacking = missing(request.machine, held, request.wanted)
        if not lacking:
            names = " and ".join(f"{amount:g} {name}" for name, amount in request.wanted.items())
            return f"{names}, for which others of this process have waited longer"
        parts = " and ".join(
            f"{request.wanted[name]:g} {name} ({left:g} free)" for name, left in lacking.items()
        )
        holders = [
            f"{holding.run} (pid {holding.pid} on {holding.host})"
            for holding in held
            if lacking.keys() & {*holding.amounts, *(["GPU"] if holding.gpus else [])}
        ]
        return f"{parts}, held by {_listed(list(dict.fromkeys(holders)))}"

    def _room(self, watch: _Watch, others: list[Holding]) -> int:
        """How many slots the watching engine could have: what it holds of this shape counts as free."""
        own = [
            held
            for held in self._held.values()
            if held.request.owner == watch.owner and held.request.shape == watch.shape
        ]
        taken = [*others, *(held.holding for held in self._held.values() if held not in own)]
        first = [waiting.request.wanted for waiting in self._queue if waiting.request.owner != watch.owner]
        return max(sum(held.slots for held in own), slots_free(watch.machine, watch.shape, taken, first))

    def _stir(self) -> None:
        """Something changed: the thread looks again, and is there while it is needed."""
        self._stirred = True
        self._changed.notify_all()
        if self._thread is None and (self._queue or self._watches):
            self._thread = threading.Thread(target=self._look, name="powertrain-capacity", daemon=True)
            self._thread.start()

    # -- without ``_changed``

    def _hand_out(self) -> None:
        while True:
            try:
                granted, gpus = self._ready.popleft()
            except IndexError:
                return
            granted(gpus)

    def _look(self) -> None:
        """The thread: serve and tell, now and whenever something may have changed, while anybody waits or watches."""
        while True:
            news: list[tuple[_Watch, int]] = []
            with self._changed:
                if not (self._queue or self._watches):
                    self._thread = None
                    return
                self._stirred = False
                with contextlib.suppress(EngineError):  # looked at again in a second
                    others = self._serve()
                    news = [(watch, self._room(watch, others)) for watch in self._watches.values()]
            self._hand_out()
            for watch, count in news:
                if count != watch.last:
                    watch.last = count
                    watch.deliver(count)
            with self._changed:
                self._changed.wait_for(lambda: self._stirred, timeout=LOOK_EVERY)


def _listed(names: list[str]) -> str:
    shown, more = names[:_MOST_NAMED], len(names) - _MOST_NAMED
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")
