"""The warm server's handle: workers are forked from it."""

from __future__ import annotations

import array
import atexit
import contextlib
import errno
import functools
import multiprocessing.process
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from powertrain import fork_server
from powertrain.backend import BackendConfig, first_calls_here, modules_of_others, preload_of
from powertrain.engine import process
from powertrain.engine.base import ProcessSpec
from powertrain.engine.forking import ServiceThread, quiet, why_fork_is_unsafe, working
from powertrain.engine.local import locks
from powertrain.errors import EngineError

#: Seconds after which a server that has not answered a SIGKILL hangs; and for processes to go when an engine is closed.
_ANSWER_TIMEOUT_S, CLOSE_TIMEOUT_S = 1.0, 5.0
#: Names the server in the environment of its workers and of all that they start.
_SERVER_VARIABLE = "POWERTRAIN_WARM_SERVER"
#: Modules that every worker of a run needs, whatever its framework.
_OF_EVERY_WORKER = (
    "powertrain.worker.main",
    "powertrain.trace.recording.patches",
    "powertrain.trace.machine.samplers",
)
#: Paths that the warm server must sweep, by owner: a new server must receive them too.
_sweeps: dict[str, list[str]] = {}


@dataclass
class _Child:
    """A forked process, as the driver knows it."""

    started: Callable[[int], None]
    ended: Callable[[int, int, bool], None]
    pid: int = 0
    #: Time (monotonic) of the first unanswered SIGKILL request; 0.0 otherwise.
    unanswered_since: float = 0.0


@dataclass
class _QueuedCommand:
    """A command that waits until the server has read those before it."""

    data: bytes
    #: Descriptors that go with it: copies, closed once it was sent.
    descriptors: list[int]
    #: The process that it starts; "" for other commands.
    starts: str = ""

    def close(self) -> None:
        for descriptor in self.descriptors:
            locks.close(descriptor)


class WarmServer:
    """The driver's end of one warm server.

    Commands reach the server in the order in which they were given. No caller waits for it: where the socket is full,
    because the server still imports or is frozen, commands are queued, and the thread that reads reports sends them.
    """

    def __init__(
        self, *, preload: Sequence[str] = (), apart: bool = False, clean: bool = False, bare: bool = False
    ) -> None:
        """Start it; the server warms up in the background.

        Args:
            preload: Modules that workers will need, as in :attr:`powertrain.backend.BackendConfig.preload`.
            apart: Start it as a child of the system, for a process whose children others end together with it: the
                server must outlive this process to end what its workers have started.
            clean: Start a fresh interpreter also where this process could be forked.
            bare: Import nothing beyond ``preload``, not even what each worker of a run needs.
        """
        from powertrain.engine.local import server as protocol

        self._protocol = protocol
        self.owner, self.preload = os.getpid(), tuple(preload)
        entries = self.preload if bare else (*_OF_EVERY_WORKER, *self.preload)
        self.warmed: float | None = None
        #: When it was ready (monotonic), and how long its imports had taken until then.
        self._ready_at, self._imports = float("inf"), 0.0
        self._environ = dict(os.environ)
        self._mark = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._children: dict[str, _Child] = {}
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._is_child = not apart
        #: The reason why this process cannot be forked; and True when the server was forked, with everything this
        #: process had imported, set and patched.
        self.unsafe, self.is_forked = why_fork_is_unsafe(), False
        if not (apart or clean or self.unsafe):
            with quiet() as self.unsafe:
                if not self.unsafe:
                    self.pid, self.is_forked = _start_forked(theirs, entries), True
        if not self.is_forked:
            self.pid = (_start_apart if apart else _start_clean)(theirs, entries)
        theirs.close()
        self.alive = True
        self._commands: deque[_QueuedCommand] = deque()
        #: The largest command that the socket takes.
        self._largest = self._control.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) - 32
        #: The events that the listening thread polls for. Any thread may change them.
        self._readiness = select.epoll()
        self._readiness.register(self._control, select.EPOLLIN)
        # Not named powertrain-*: it lives as long as the server, not as long as a run.
        self._listener = ServiceThread(target=self._listen, name="warm-server", daemon=True)
        self._listener.start()

    def fork(
        self,
        id: str,
        spec: ProcessSpec,
        output: int,
        started: Callable[[int], None],
        ended: Callable[[int, int, bool], None],
        claim: int | None = None,
    ) -> None:
        """Fork a process, to be called ``id``, whose output goes to ``output`` (closed here). It keeps a descriptor of
        ``claim`` open for as long as it lives."""
        payload = os.memfd_create(f"powertrain-{id}")
        try:
            with os.fdopen(os.dup(payload), "wb") as file:
                file.write(spec.payload)
            command = self._protocol.Fork(
                id=id,
                entry=spec.entry,
                env={**changes(self._environ, os.environ), **spec.env, _SERVER_VARIABLE: self._mark},
                path=fork_server.import_path(),
                cwd=spec.cwd,
                title=spec.title,
                shielded=spec.shielded,
            )
            with self._lock:
                if not self.alive:
                    raise EngineError(
                        "The process that workers are forked from has ended; start the run again."
                    )
                self._children[id] = _Child(started, ended)
                kept = [claim] if claim is not None else []
                try:
                    self._send_or_queue(self._protocol.encode(command), [payload, output, *kept], id)
                except BaseException:
                    del self._children[id]
                    raise
        finally:
            os.close(payload)
            os.close(output)

    def kept_waiting(self, since: float) -> tuple[float, float]:
        """Return the seconds that a request made at ``since`` (monotonic) waited for the server, and the part of them
        spent in its imports."""
        waited = max(0.0, min(time.monotonic(), self._ready_at) - since)
        return waited, min(waited, self._imports)

    def kill(self, id: str, number: int) -> None:
        """Send a signal to a forked process; SIGKILL reaches its whole scope.

        SIGKILL again, when the server has not answered the first within a second, ends the server itself and all that
        it has forked: it is frozen, or still imports something that never comes.
        """
        child, now = self._children.get(id), time.monotonic()
        if number == signal.SIGKILL and child is not None:
            if child.unanswered_since and now - child.unanswered_since >= _ANSWER_TIMEOUT_S:
                self._end_hanging()
                return
            child.unanswered_since = child.unanswered_since or now
        self._send(self._protocol.KillWorker(id=id, signal=number))

    def _end_hanging(self) -> None:
        """End a server that does not answer. Its end is then noticed as if it had been killed by others."""
        for child in list(self._children.values()):
            if child.pid:
                process.kill_scope(child.pid)
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):  # it may be a while until the kernel lets go of it
            self._control.shutdown(socket.SHUT_RDWR)

    def sweep_if_orphaned(self, id: str, paths: Sequence[str]) -> None:
        """Register directories that the server removes should this process die; an empty list unregisters them, also
        from servers that have taken them over."""
        _sweeps[id] = list(paths)
        servers = [self] if paths else {self, *_shared, *_of_runs, *_of_calls}
        sweep = self._protocol.Sweep(id=id, paths=_sweeps[id] or _sweeps.pop(id))
        for server in servers:
            server._send(sweep)

    def take_over_sweeps(self) -> None:
        """Sweep also the paths that were registered with servers that have exited."""
        for id, paths in _sweeps.items():
            self._send(self._protocol.Sweep(id=id, paths=paths))

    def close(self) -> None:
        """Close the connection: the server kills its workers and exits. Does nothing in a forked child of the owner."""
        if os.getpid() != self.owner:
            return
        with self._lock, contextlib.suppress(OSError):
            # It reads nothing while it still imports, possibly for many seconds.
            if self._is_child and self.alive and self.warmed is None and not (self._children or _sweeps):
                os.kill(self.pid, signal.SIGKILL)
            elif self._is_child and self.alive:
                os.kill(self.pid, signal.SIGCONT)  # one that was frozen would stay for ever
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)

    def wait_for_end(self, timeout: float) -> None:
        """Wait after :meth:`close` until the server and the thread that listens to it have ended."""
        if os.getpid() == self.owner:
            self._listener.join(timeout)

    def _send(self, command: object) -> None:
        with self._lock, contextlib.suppress(OSError):
            if self.alive:
                self._send_or_queue(self._protocol.encode(command))

    def _send_or_queue(self, data: bytes, descriptors: Sequence[int] = (), starts: str = "") -> None:
        """Send a command now, or queue it where others wait or the socket is full. Never waits; the lock is held."""
        if len(data) > self._largest:
            raise OSError(errno.EMSGSIZE, os.strerror(errno.EMSGSIZE))
        if not self._commands:
            with contextlib.suppress(BlockingIOError):
                self._transmit(data, descriptors)
                return
        queued = _QueuedCommand(data, [], starts)
        try:
            for descriptor in descriptors:
                queued.descriptors.append(locks.unshared(functools.partial(os.dup, descriptor)))
        except BaseException:
            queued.close()
            raise
        self._commands.append(queued)
        self._readiness.modify(self._control, select.EPOLLIN | select.EPOLLOUT)

    def _transmit(self, data: bytes, descriptors: Sequence[int]) -> None:
        # Not socket.send_fds, which leaves flags out.
        rights = (
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        )
        self._control.sendmsg([data], rights, socket.MSG_DONTWAIT)

    def _flush_commands(self) -> None:
        """Send queued commands until the socket is full again."""
        unsent = []
        with self._lock:
            while self._commands:
                queued = self._commands[0]
                try:
                    self._transmit(queued.data, queued.descriptors)
                except (
                    BlockingIOError,
                    ConnectionError,
                ):  # of a server that is gone the next report is its end
                    break
                except OSError:
                    if child := self._children.pop(queued.starts, None):
                        unsent.append(child)
                self._commands.popleft().close()
            if not self._commands:
                self._readiness.modify(self._control, select.EPOLLIN)
        for child in unsent:
            child.ended(0, -signal.SIGKILL, False)

    def _listen(self) -> None:
        goes_on = True
        while goes_on:
            ((_, events),) = self._readiness.poll()
            with working():
                goes_on = self._react(events)

    def _react(self, events: int) -> bool:
        """Handle a writable socket or a report; return False when no more will come."""
        if events & select.EPOLLOUT:
            self._flush_commands()
        if not events & ~select.EPOLLOUT:
            return True
        try:
            data = self._control.recv(1 << 16)
        except OSError:
            data = b""
        if data:
            self._handle(self._protocol.decode_report(data))
        else:
            self._on_server_exit()
        return bool(data)

    def _handle(self, report: object) -> None:
        protocol = self._protocol
        if isinstance(report, protocol.ServerReady):
            self.warmed, self._imports = report.seconds, report.imports
            self._ready_at = time.monotonic()
        elif isinstance(report, protocol.Forked):
            child = self._children[report.id]
            child.pid = report.pid
            child.started(report.pid)
        elif isinstance(report, protocol.WorkerEnded):
            with self._lock:
                child = self._children.pop(report.id)
            child.ended(report.pid, report.code, report.out_of_memory)
        elif isinstance(report, protocol.Signalled) and report.id in self._children:
            self._children[report.id].unanswered_since = 0.0

    def _on_server_exit(self) -> None:
        """Kill the scopes of all workers, which die with the server, and report their exits."""
        with self._lock:
            self.alive = False
            orphans, self._children = list(self._children.values()), {}
            while self._commands:
                self._commands.popleft().close()
        for child in orphans:
            if child.pid:
                process.kill_scope(child.pid)
        if orphans:  # the kernel may have ended a worker before its children could be looked up
            process.kill_marked(_SERVER_VARIABLE, self._mark)
        for child in orphans:
            child.ended(child.pid, -signal.SIGKILL, False)
        with contextlib.suppress(ChildProcessError):  # last: a process stuck in the kernel takes long to exit
            os.waitpid(self.pid, 0)
        self._readiness.close()
        self._control.close()


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str | None]:
    """Return the changes from ``before`` to ``now``: new or different values, ``None`` for removed ones."""
    different: dict[str, str | None] = {
        name: value for name, value in now.items() if before.get(name) != value
    }
    return {**dict.fromkeys(before.keys() - now.keys()), **different}


def _start_forked(theirs: socket.socket, preload: Sequence[str]) -> int:
    from powertrain.engine.local.server import serve

    started, driver = time.time(), os.getpid()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    pid = os.fork()
    if pid == 0:
        _blank_descriptors(keep={0, 1, 2, theirs.fileno()})
        serve(theirs, driver, started, preload)
    return pid


def _blank_descriptors(keep: set[int]) -> None:
    """Point every inherited descriptor at /dev/null, so that the driver's files and sockets close when it does.

    They are not closed: a Python object of the driver's may still own the number and close it later, when it
    has come to mean something else.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for entry in os.listdir("/proc/self/fd"):
        number = int(entry)
        if number not in keep and number != null:
            with contextlib.suppress(OSError):
                os.fstat(number)
                os.dup2(null, number, inheritable=False)


def _start_clean(theirs: socket.socket, preload: Sequence[str]) -> int:
    server = subprocess.Popen(
        _clean_command(theirs, preload), pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
    )
    server.returncode = 0  # reaped by its pid: the object must not warn about it
    return server.pid


def _start_apart(theirs: socket.socket, preload: Sequence[str]) -> int:
    """Start the server through a shell that exits at once, so that it becomes a child of the system."""
    shell = subprocess.run(
        ["/bin/sh", "-c", '"$@" >&2 & echo $!', "sh", *_clean_command(theirs, preload)],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        check=True,
    )
    return int(shell.stdout)


def _clean_command(theirs: socket.socket, preload: Sequence[str]) -> list[str]:
    """Return the command line of a fresh interpreter that becomes the server."""
    entry = "powertrain.engine.local.server:serve_clean"
    return fork_server.interpreter_command(entry, theirs.fileno(), os.getpid(), time.time(), list(preload))


#: The servers with the lifetime of this process, and those of runs.
_shared: list[WarmServer] = []
_of_runs: list[WarmServer] = []
#: Those of tasks and actors, with how many use each; and how many there are at most.
_of_calls: dict[WarmServer, int] = {}
_MOST_OF_CALLS = 64
_server_lock = threading.Lock()


def warm_up(*, clean: bool = False, preload: Sequence[str] = ()) -> WarmServer:
    """Return the shared warm server of this process, started where there is none.

    Args:
        clean: True requires a server without anything that this process has set or patched.
        preload: Modules that it imports. A server with other modules of others is not used: it may hold state that
            must not be forked.
    """
    needed = modules_of_others(preload)
    with _server_lock:
        for server in _shared:
            is_alike = modules_of_others(server.preload) == needed
            if server.alive and is_alike and not (clean and server.is_forked):
                return server
        server = WarmServer(clean=clean, preload=preload)
        server.take_over_sweeps()
        _shared[:] = [*(other for other in _shared if other.alive), server]
        atexit.register(server.close)
        return server


def prepare_server(preload: Sequence[str]) -> None:
    """Warm up for a later ``fit()``, if its needs do not depend on the time of the call."""
    if _of_runs:  # a sweep, whose trials share one
        return
    if not is_loading_main() and why_fork_is_unsafe():
        warm_up(clean=True, preload=preload)


@contextlib.contextmanager
def server_of_run(preload: Sequence[str]) -> Iterator[WarmServer]:
    """Yield a warm server with the state of this process as it is now; the shared clean one where forking is unsafe.

    Args:
        preload: Modules that workers will need.
    """
    global _has_forked
    if not why_fork_is_unsafe():
        if _has_forked:  # a script that fits repeatedly pays for these imports once, not in each server
            fork_server.preload((*_OF_EVERY_WORKER, *preload), with_calls=False)
        if not why_fork_is_unsafe():
            _has_forked = True
            server = WarmServer(preload=preload)
            _of_runs.append(server)
            try:
                yield server
            finally:
                server.close()
                server.wait_for_end(CLOSE_TIMEOUT_S)
                _of_runs.remove(server)
            return
    yield warm_up(clean=True, preload=preload)


def server_of_call() -> WarmServer:
    """Return a warm server for one task or actor, as :func:`server_of_run`, to be given to :func:`end_server_of_call`.

    It imports nothing, so that it costs some milliseconds. Where very many calls wait, those beyond share one.
    """
    with _server_lock:
        alive = [server for server in _of_calls if server.alive]
        if len(alive) >= _MOST_OF_CALLS:
            _of_calls[alive[-1]] += 1
            return alive[-1]
    if why_fork_is_unsafe():
        return warm_up(clean=True, preload=preload_of(BackendConfig()))
    server = WarmServer(preload=first_calls_here(), bare=True)
    with _server_lock:
        _of_calls[server] = 1
    return server


def end_server_of_call(server: WarmServer) -> None:
    """Close the server of a finished call, unless others use it."""
    with _server_lock:
        if server not in _of_calls:
            return
        _of_calls[server] -= 1
        if _of_calls[server] > 0:
            return
        del _of_calls[server]
    server.close()
    server.wait_for_end(CLOSE_TIMEOUT_S)


#: Whether this process has forked a server for a run.
_has_forked = False


def is_loading_main() -> bool:
    """Return True in a multiprocessing child that is importing the script's module again."""
    return bool(getattr(multiprocessing.process.current_process(), "_inheriting", False))


def _forget_inherited_servers() -> None:
    """Forget the parent's servers, their sweeps and their lock, in a forked child."""
    global _server_lock
    _server_lock = threading.Lock()
    _shared.clear()
    _of_runs.clear()
    _of_calls.clear()
    _sweeps.clear()


os.register_at_fork(after_in_child=_forget_inherited_servers)


def server_pids() -> list[int]:
    """Return the pids of the live warm servers of this process."""
    return [server.pid for server in (*_shared, *_of_runs, *_of_calls) if server.alive]
