"""Actors of this machine: one process that holds an object, and handles through which its methods are called.

::

    handle ── client ── socket ──▶ the actor's process
      └── owner (in the process that made it): starts the process, ends it with the last handle

A handle can be pickled into other processes of this machine, such as the workers of a run: each connects by itself.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import secrets
import select
import signal
import socket
import threading
import warnings
import weakref
from collections.abc import Mapping
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import cloudpickle

from powertrain.calls.actor_process import ENTRY, ActorSpec, MethodCall
from powertrain.calls.options import Meaning, check_method
from powertrain.calls.references import Reference, with_values
from powertrain.engine import base
from powertrain.engine.forking import ServiceThread, working
from powertrain.errors import EngineError, ResourceError, TaskError

#: Seconds for an actor to end by itself when its last handle is gone.
_LEAVE_TIMEOUT_S = 10.0
_GONE = "has no process any more: it has ended, or was ended"


class ActorHandle:
    """An actor: ``handle.method.remote(...)`` calls a method in its process.

    :func:`powertrain.get` waits for the value. Calls begin in the order in which they were made: one after the other,
    or up to ``max_concurrency`` at once. The process ends with the last handle in the process that made it, or with
    that process where ``lifetime="detached"``.
    """

    def __init__(self, name: str, client: ActorClient, methods: frozenset[str]) -> None:
        self._name, self._client, self._methods = name, client, methods

    def __getattr__(self, name: str) -> ActorMethod:
        if name.startswith("_") or name not in self._methods:
            raise AttributeError(f"The actor {self.__dict__.get('_name', '')} has no method {name!r}.")
        return ActorMethod(self, self._client, f"{self._name}.{name}", name)

    def __repr__(self) -> str:
        return f"ActorHandle({self._name})"

    def __reduce__(self) -> Any:
        return (_connected, (self._name, *self._client.address(), self._methods))


class ActorMethod:
    """A method of an actor."""

    def __init__(self, handle: ActorHandle, client: ActorClient, title: str, method: str) -> None:
        self._handle = handle  # keeps the actor alive
        self._client, self._title, self._method = client, title, method

    def remote(self, *args: Any, **kwargs: Any) -> Reference:
        """Call it; returns at once. The values of references among the arguments are waited for."""
        values = with_values(args, kwargs)
        return self._client.call(self._title, self._method, cloudpickle.dumps(values))

    def options(self, **options: Any) -> ActorMethod:
        """Return the method itself: Ray's options of a call have no effect on one machine, which is logged once.

        Raises:
            ConfigError: Ray has no such option, or it would change the result of the call.
        """
        check_method(options, self._title)
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise TypeError(f"{self._title} is a method of an actor: call {self._title}.remote(...).")


class ActorClient:
    """A process's connection to an actor: sends calls, gives out answers."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._pending: dict[int, Reference] = {}
        self._unsent: list[bytes] = []
        self._number = 0
        self._connection: Connection | None = None
        self._problem = ""
        self._pid = os.getpid()

    def address(self) -> tuple[str, bytes]:
        """Return the actor's address and key, once others can connect."""
        raise NotImplementedError

    def call(self, title: str, method: str, arguments: bytes) -> Reference:
        """Have a method called; returns at once."""
        if os.getpid() != self._pid:
            raise TaskError(
                f"{title} was called in a process that was forked from the one that has the handle. Pass the handle to "
                "it instead: then it connects by itself."
            )
        reference = Reference(title)
        with self._lock:
            if self._problem:
                reference.set_outcome(None, self._problem)
                return reference
            self._number += 1
            self._pending[self._number] = reference
            self._send(pickle.dumps(tuple(MethodCall(self._number, method, arguments))))
        return reference

    def _send(self, data: bytes) -> None:
        """Send a call, with the lock held. Unsent calls fail when the broken connection is detected."""
        if self._connection is None:
            self._unsent.append(data)
            return
        with contextlib.suppress(OSError):
            self._connection.send_bytes(data)

    def serve(self, address: str, key: bytes) -> None:
        """Connect, send the queued calls, and hand out replies until the connection ends."""
        with working():
            connection = self._connect(address, key)
        if connection is None:
            self.fail(self.reason())
            return
        with connection, contextlib.suppress(EOFError, OSError):
            while True:
                answer = connection.recv_bytes()
                with working():
                    number, result = pickle.loads(answer)
                    with self._lock:
                        reference = self._pending.pop(number)
                    reference.set_outcome(result)
        reason = self.reason()
        with working():
            self.fail(reason)

    def _connect(self, address: str, key: bytes) -> Connection | None:
        """Connect and send the queued calls; return None where the actor is gone."""
        try:
            connection: Connection = Client(address, "AF_UNIX", authkey=key)
        except (OSError, EOFError, AuthenticationError):
            return None
        with self._lock:
            self._connection = connection
            unsent, self._unsent = self._unsent, []
            for data in unsent:
                self._send(data)
        return connection

    def reason(self) -> str:
        """Return the reason for a missing reply, once the connection has ended."""
        return _GONE

    def fail(self, problem: str) -> None:
        """Answer all calls, those to come too, with a failure."""
        with self._lock:
            self._problem = self._problem or problem
            left, self._pending = list(self._pending.values()), {}
        for reference in left:
            reference.set_outcome(None, self._problem)


class RemoteClient(ActorClient):
    """The client of a handle that came from another process."""

    def __init__(self, name: str, address: str, key: bytes) -> None:
        super().__init__(name)
        self._address, self._key = address, key
        ServiceThread(target=self.serve, args=(address, key), name="powertrain-actor", daemon=True).start()

    def address(self) -> tuple[str, bytes]:
        return self._address, self._key


class ActorOwner(ActorClient):
    """Starts an actor's process, and ends it."""

    def __init__(self, name: str, call: bytes, meaning: Meaning, resources: Mapping[str, float]) -> None:
        """Raises :class:`ResourceError` where the machine does not have the requested resources."""
        from powertrain.engine.local.engine import LocalEngine
        from powertrain.engine.local.runtime_directories import make_runtime_directory
        from powertrain.engine.local.warm_server import server_of_call

        super().__init__(name)
        self._cwd, self._env = os.getcwd(), meaning.env
        self._ready, self._exited, self._closed = threading.Event(), threading.Event(), threading.Event()
        self._why = _GONE
        self._slot: base.Slot | None = None
        self._server = server_of_call()
        self._engine = LocalEngine(self._server, resources)
        self._engine.start(self._on_event, self._print)
        self._directory: Path = make_runtime_directory(f"actor-{name}")
        self._key = secrets.token_bytes(32)
        self._spec = ActorSpec(
            str(self._directory / "actor"),
            self._key,
            str(self._directory / "ready"),
            call,
            meaning.max_concurrency,
        )
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self._spec.ready)
        self._listener.listen()
        #: Closing the first wakes the thread that has the second.
        self._alarm, self._woken = socket.socketpair()
        _owners.add(self)
        self._thread = ServiceThread(target=self._wait_and_serve, name="powertrain-actor", daemon=True)
        self._thread.start()
        try:
            self._engine.request(1, meaning.shape)
        except (ResourceError, EngineError):
            self.close()
            raise

    def address(self) -> tuple[str, bytes]:
        self._ready.wait()
        if self._problem:
            raise TaskError(f"The actor {self._name} {self._problem}.")
        return self._spec.address, self._key

    @property
    def is_of_this_process(self) -> bool:
        """False in a process that was forked from the one that made it."""
        return os.getpid() == self._pid

    def reason(self) -> str:
        self._exited.wait()  # the engine always reports the end
        return self._why

    def leave(self) -> None:
        """Let the process end once it has made all calls; it is killed if it does not. Returns at once."""
        if os.getpid() == self._pid and not self._closed.is_set():
            ServiceThread(target=self._leave, name="powertrain-actor-end", daemon=True).start()

    def kill(self) -> None:
        """End the process now: calls that it has not answered fail."""
        self._why = "was ended by kill()"
        if self._slot is not None:
            self._engine.signal(self._slot, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        """End the actor's processes."""
        from powertrain.engine.local.runtime_directories import remove_runtime_directory
        from powertrain.engine.local.warm_server import end_server_of_call

        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
        self._end(self._why)
        self._engine.close()
        end_server_of_call(self._server)
        self._thread.join()
        self._listener.close()
        self._woken.close()
        remove_runtime_directory(self._directory)
        _owners.discard(self)

    def _leave(self) -> None:
        with self._lock:
            waiting = list(self._pending.values())
        for reference in waiting:
            reference.wait()
        with working(), self._lock:
            is_there = self._connection is not None or self._slot is not None
            if is_there and not self._problem:
                self._send(pickle.dumps(tuple(MethodCall(0, "", b""))))
        if is_there:
            self._exited.wait(_LEAVE_TIMEOUT_S)
        with working():
            self.close()

    def _wait_and_serve(self) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        if self._listener.fileno() in dict(poll.poll()):
            self._ready.set()
            self.serve(self._spec.address, self._key)
        reason = self.reason()
        with working():
            self.fail(reason)
            self._ready.set()

    def _on_event(self, event: base.EngineEvent) -> None:
        if isinstance(event, base.Granted):
            self._slot = event.slots[0]
            env: dict[str, str | None] = {**self._env}
            if self._slot.gpus:
                env["CUDA_VISIBLE_DEVICES"] = ",".join(self._slot.gpus)
            payload = pickle.dumps(tuple(self._spec))
            self._engine.fork(
                self._slot,
                base.ProcessSpec(entry=ENTRY, payload=payload, env=env, cwd=self._cwd, title=self._name),
            )
        elif isinstance(event, base.Remark):
            warnings.warn(event.text, stacklevel=2)
        elif isinstance(event, base.Exited):
            self._end(base.describe_exit(event)[1])
        elif isinstance(event, base.SlotLost):
            self._end(f"was lost: {event.reason}")

    def _end(self, why: str) -> None:
        """Record why the process ended, and fail the calls that wait for it."""
        if not self._exited.is_set():
            self._why = why if self._why == _GONE else self._why
            self._exited.set()
        self._alarm.close()
        self.fail(self._why)

    def _print(self, _: base.Slot, data: bytes) -> None:
        print(data.decode("utf-8", "replace"), end="", flush=True)


#: Those whose process may be there.
_owners: set[ActorOwner] = set()


@atexit.register
def _close_all() -> None:
    """End the actors of this process with it, as Ray does."""
    for owner in list(_owners):
        if owner.is_of_this_process:
            owner.close()


def start(
    kind: type, args: Any, kwargs: Any, meaning: Meaning, resources: Mapping[str, float]
) -> ActorHandle:
    """Start the process of an actor; returns its handle at once."""
    name = kind.__name__
    owner = ActorOwner(name, cloudpickle.dumps((kind, args, kwargs)), meaning, resources)
    handle = ActorHandle(name, owner, methods_of(kind))
    if not meaning.detached:
        weakref.finalize(handle, owner.leave).atexit = False
    return handle


def kill(handle: ActorHandle) -> None:
    """End an actor's process; only in the process that made it."""
    client = handle._client
    if not isinstance(client, ActorOwner):
        raise TaskError(f"{handle!r} came from another process. An actor is killed where it was made.")
    client.kill()


def methods_of(kind: type) -> frozenset[str]:
    """Return the public methods of a class."""
    return frozenset(name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name)))


def _connected(name: str, address: str, key: bytes, methods: frozenset[str]) -> ActorHandle:
    return ActorHandle(name, RemoteClient(name, address, key), methods)
