"""An actor's process: it makes the object, and calls its methods for every client.

Calls begin in the order in which they come, and are made as in Ray:

- one after the other, in the main thread of the process;
- with ``max_concurrency`` above 1 in so many threads;
- where the class has coroutines in one event loop, at most ``max_concurrency`` of them at once, 1000 by default. Its
  other methods are called in that loop too, and block it.

Clients connect to a Unix socket in a directory that only this user can enter, and prove a key. Calls and results are
pickled, because no other user can connect.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import pickle
import queue
import socket
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from typing import Any, NamedTuple

import cloudpickle

from powertrain.calls.failures import failed

#: "package.module:function" for :class:`powertrain.engine.base.ProcessSpec`.
ENTRY = "powertrain.calls.actor_process:run"
#: Calls that may wait until they are accepted.
_BACKLOG = 128
#: Calls of an actor with coroutines that may be under way at once, as in Ray.
_USUAL_FOR_COROUTINES = 1000


class ActorSpec(NamedTuple):
    """The start arguments of the process."""

    #: The address for clients, the key that they prove, and the address at which the owner waits for readiness.
    address: str
    key: bytes
    ready: str
    #: The pickled (class, args, kwargs).
    call: bytes
    #: How many calls may be under way at once; None for one, or 1000 where the class has coroutines.
    max_concurrency: int | None


class MethodCall(NamedTuple):
    """A method call of a client. A method "" ends the process after the calls before it."""

    number: int
    method: str
    #: The pickled (args, kwargs).
    arguments: bytes


def run(payload: bytes) -> int:
    """Serve the actor in this process until its owner ends it."""
    spec = ActorSpec(*pickle.loads(payload))
    calls: queue.SimpleQueue[tuple[_Peer, MethodCall]] = queue.SimpleQueue()
    with Listener(spec.address, "AF_UNIX", backlog=_BACKLOG, authkey=spec.key) as listener:
        threading.Thread(target=_accept, args=(listener, calls), daemon=True).start()
        with socket.socket(socket.AF_UNIX) as owner:
            owner.connect(spec.ready)  # the signal that the socket accepts clients
        with _caller_for(spec) as caller:
            while True:
                peer, call = calls.get()
                if not call.method:
                    return 0
                caller.take(peer, call)


class _Peer:
    """One client's connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()  # calls that are under way at once may end at once

    def calls(self) -> Any:
        """Give its calls until it is gone."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                yield MethodCall(*pickle.loads(self._connection.recv_bytes()))

    def answer(self, number: int, result: bytes) -> None:
        with self._lock, contextlib.suppress(OSError):  # the client has exited
            self._connection.send_bytes(pickle.dumps((number, result)))


class _OneAfterTheOther:
    """Calls methods in this thread."""

    def __init__(self, actor: Any, problem: bytes) -> None:
        """Create the caller. ``problem`` is the reply to every call of an object that could not be made."""
        self._actor, self._problem = actor, problem

    def __enter__(self) -> _OneAfterTheOther:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for calls that are under way."""

    def take(self, peer: _Peer, call: MethodCall) -> None:
        peer.answer(call.number, self._problem or _called(self._actor, call))


class _InThreads(_OneAfterTheOther):
    """Calls methods in several threads."""

    def __init__(self, actor: Any, problem: bytes, most: int) -> None:
        super().__init__(actor, problem)
        self._threads = ThreadPoolExecutor(most, "powertrain-actor-call")

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()

    def take(self, peer: _Peer, call: MethodCall) -> None:
        self._threads.submit(super().take, peer, call)


class _InALoop(_OneAfterTheOther):
    """Makes the object and calls its methods in the event loop of one thread, and awaits coroutines there."""

    def __init__(self, make: Callable[[], Any], most: int) -> None:
        self._loop, self._room = asyncio.new_event_loop(), asyncio.Semaphore(most)
        #: The loop itself holds tasks weakly.
        self._under_way: set[asyncio.Task[None]] = set()
        threading.Thread(target=self._loop.run_forever, name="powertrain-actor-loop", daemon=True).start()
        super().__init__(*self._run(self._made(make)))  # there, so that it may create tasks

    def __exit__(self, *_: object) -> None:
        self._run(self._all_made())

    def take(self, peer: _Peer, call: MethodCall) -> None:
        self._loop.call_soon_threadsafe(self._begin, peer, call)

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _made(self, make: Callable[[], Any]) -> tuple[Any, bytes]:
        return _made(make)

    def _begin(self, peer: _Peer, call: MethodCall) -> None:
        task = self._loop.create_task(self._make_call(peer, call))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _make_call(self, peer: _Peer, call: MethodCall) -> None:
        async with self._room:
            peer.answer(call.number, self._problem or await _awaited(self._actor, call))

    async def _all_made(self) -> None:
        while self._under_way:
            await asyncio.wait(self._under_way)


def _caller_for(spec: ActorSpec) -> _OneAfterTheOther:
    try:
        kind, args, kwargs = pickle.loads(spec.call)
    except BaseException as error:
        return _OneAfterTheOther(None, failed(error))
    make = partial(kind, *args, **kwargs)
    if _has_coroutines(kind):
        return _InALoop(make, spec.max_concurrency or _USUAL_FOR_COROUTINES)
    most = spec.max_concurrency or 1
    return _InThreads(*_made(make), most) if most > 1 else _OneAfterTheOther(*_made(make))


def _has_coroutines(kind: type) -> bool:
    """Return whether a method of a class is one. Descriptors of the user's own are not called."""
    found = [inspect.getattr_static(kind, name, None) for name in dir(kind)]
    return any(inspect.iscoroutinefunction(getattr(one, "__func__", one)) for one in found)


def _accept(listener: Listener, calls: queue.SimpleQueue[tuple[_Peer, MethodCall]]) -> None:
    while True:
        try:
            peer = _Peer(listener.accept())
        except AuthenticationError:
            continue
        except (OSError, EOFError):
            return  # the process ends
        threading.Thread(target=_read, args=(peer, calls), daemon=True).start()


def _read(peer: _Peer, calls: queue.SimpleQueue[tuple[_Peer, MethodCall]]) -> None:
    for call in peer.calls():
        calls.put((peer, call))


def _made(make: Callable[[], Any]) -> tuple[Any, bytes]:
    """Return the object; or None, and the answer to every call."""
    try:
        return make(), b""
    except BaseException as error:
        return None, failed(error)


def _called(actor: Any, call: MethodCall) -> bytes:
    """Return ``(True, value)`` or ``(False, Failure)``, pickled."""
    try:
        value = _value_of(actor, call)
        if inspect.iscoroutine(value):  # returned by a plain method
            value = asyncio.run(value)
        return _pickled(value)
    except BaseException as error:
        return failed(error)


async def _awaited(actor: Any, call: MethodCall) -> bytes:
    """Call a method in an event loop."""
    try:
        value = _value_of(actor, call)
        return _pickled(await value if inspect.isawaitable(value) else value)
    except BaseException as error:
        return failed(error)


def _value_of(actor: Any, call: MethodCall) -> Any:
    args, kwargs = pickle.loads(call.arguments)
    return getattr(actor, call.method)(*args, **kwargs)


def _pickled(value: Any) -> bytes:
    result: bytes = cloudpickle.dumps((True, value))
    return result
