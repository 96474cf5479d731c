"""The warm process that workers are forked from.

Importing torch takes about 2 s and the first optimizer as long again; forking a process that has done both takes 15 ms.
So one process per driver imports the modules of ``BackendConfig.preload`` once, and then only waits: it opens no socket
but its own and starts no thread. That makes each fork of it safe.

It watches its driver in two ways: by the control socket, and by a descriptor of the driver's process (a child of the
driver's that inherited the socket would keep it open). When either closes it kills every worker's scope, removes the
directories registered for sweeping, and exits. Workers follow it by the parent-death signal, which is reliable here
because this process has one thread only.

Processes that a worker started and left behind become children of this one (it is a subreaper), so they can
be found and ended when their worker is gone.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import os
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Union

import msgspec

from powertrain import fork_server
from powertrain.engine import process
from powertrain.storage.files.descriptors import remove_quietly
from powertrain.storage.files.private_roots import remove_empty_parents
from powertrain.trace.machine import processes

#: Seconds between looks at the kernel's count of processes killed for want of memory, while there are workers.
_POLL_INTERVAL_S = 1.0
#: Seconds for a resource tracker to clean up after a worker that is gone, and between looks at it.
_TRACKER_GRACE, _TRACKER_LOOK = 1.0, 0.005
#: Signals by which a scheduler, or a closed terminal, ends a job.
_ASK_FOR_AN_END = frozenset({signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2})
#: The largest control message; payloads travel as descriptors.
_MESSAGE_LIMIT = 1 << 18


class Fork(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Start a process. Descriptors that come along: the payload, the end to write output to, and of one that uses
    something of the machine the file of the claim, which it holds until it ends."""

    id: str
    entry: str
    env: dict[str, str | None]
    #: The child's ``sys.path``.
    path: list[str]
    cwd: str
    title: str
    #: True leaves it to the process to unblock the termination signals.
    shielded: bool = False


class KillWorker(msgspec.Struct, frozen=True, kw_only=True, tag="Kill"):
    id: str
    signal: int


class Sweep(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Directories to remove should the driver die; an empty list takes it back."""

    id: str
    paths: list[str]


Command = Union[Fork, KillWorker, Sweep]


class ServerReady(msgspec.Struct, frozen=True, kw_only=True, tag="Ready"):
    seconds: float
    #: How many of them went into imports, which are the last thing that it does before.
    imports: float = 0.0


class Forked(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    id: str
    pid: int


class WorkerEnded(msgspec.Struct, frozen=True, kw_only=True, tag="Ended"):
    id: str
    pid: int
    code: int
    out_of_memory: bool


class Signalled(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to ``KillWorker``: the signal was sent, so this process does not hang."""

    id: str


Report = Union[ServerReady, Forked, WorkerEnded, Signalled]

encode = msgspec.msgpack.Encoder().encode
decode_report = msgspec.msgpack.Decoder(Report).decode
_decode_command = msgspec.msgpack.Decoder(Command).decode


def serve(control: socket.socket, driver: int, started: float, preload: Sequence[str]) -> NoReturn:
    """Be the warm server until the driver is gone. Never returns.

    Args:
        control: The socket to the driver.
        driver: The driver's process.
        started: When the driver started this one (Unix seconds).
        preload: Modules to import first; an entry "package.module:function" is called, too.
    """
    code = 1
    try:
        _detach()
        began = time.monotonic()
        _preload(preload)
        imports = time.monotonic() - began
        _Server(control, driver).loop(ServerReady(seconds=time.time() - started, imports=imports))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def serve_clean(descriptor: int, driver: int, started: float, preload: Sequence[str]) -> NoReturn:
    """Run a server that was started as a fresh interpreter."""
    serve(socket.socket(fileno=descriptor), driver, started, preload)


def _detach() -> None:
    """Leave the driver's terminal and its signals: Ctrl-C is for the driver to handle."""
    with contextlib.suppress(OSError):
        os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # A scheduler may send them to every process of a job. The driver decides what follows; this ends with the driver.
    signal.pthread_sigmask(signal.SIG_BLOCK, _ASK_FOR_AN_END)
    fork_server.adopt_orphans()
    fork_server.set_process_name("powertrain-warm")


def _preload(entries: Sequence[str]) -> None:
    """Import the modules that every worker needs. The collector is off: it finds nothing and costs a tenth of the
    time."""
    gc.disable()
    fork_server.preload(entries)
    gc.freeze()  # shared pages stay shared: the collector of a worker does not touch them


class _Server:
    def __init__(self, control: socket.socket, driver: int) -> None:
        self._control = control
        self._workers: dict[int, str] = {}
        self._oom = OomKills(process.oom_kills)
        self._sweeps: dict[str, list[str]] = {}
        self._core = fork_server.ForkServer(control, driver)

    def loop(self, warmed: ServerReady) -> None:
        self._send_report(warmed)
        while True:
            ready = self._core.wait(_POLL_INTERVAL_S if self._workers else None)
            self._oom.look(time.monotonic())
            if ready.is_orphaned:
                return self._end()
            if ready.has_ended_child:
                self._reap()
            if ready.has_command and not self._command():
                return self._end()

    def _command(self) -> bool:
        """Handle one command; False when the driver has closed its end."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._control, _MESSAGE_LIMIT, 4)
        except ConnectionResetError:  # it is gone, with unread messages
            return False
        if not data:
            return False
        command = _decode_command(data)
        if isinstance(command, Fork):
            self._fork(command, *descriptors)
        elif isinstance(command, KillWorker):
            self._kill(command)
        elif command.paths:
            self._sweeps[command.id] = command.paths
        else:
            self._sweeps.pop(command.id, None)
        return True

    def _fork(self, command: Fork, payload: int, output: int, *claim: int) -> None:
        before = process.oom_kills()  # before the fork: it may be killed before we are back
        for descriptor in claim:  # the executed program must not inherit it
            os.set_inheritable(descriptor, False)
        pid = self._core.fork(lambda: _run_forked_process(command, payload, output))
        for descriptor in (payload, output, *claim):
            os.close(descriptor)
        self._workers[pid] = command.id
        self._oom.began(pid, before)
        self._send_report(Forked(id=command.id, pid=pid))

    def _kill(self, command: KillWorker) -> None:
        for pid, id in self._workers.items():
            if id == command.id:
                if command.signal == signal.SIGKILL:
                    process.kill_scope(pid)
                else:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, command.signal)
        self._send_report(Signalled(id=command.id))

    def _reap(self) -> None:
        for pid, code in self._core.reap():
            id = self._workers.pop(pid, None)
            if id is None:
                continue  # something a worker had left behind
            self._end_scope(pid)
            oom = self._oom.ended(pid, code)
            self._send_report(WorkerEnded(id=id, pid=pid, code=code, out_of_memory=oom))

    def _end_scope(self, leader: int) -> None:
        """Kill the processes of a dead worker: its group, and orphans reparented to this process, until none is left.

        A resource tracker among them gets a moment to clean up, which it begins when those it serves are gone.
        """
        patience = time.monotonic() + _TRACKER_GRACE
        while orphans := [pid for pid in processes.children(os.getpid()) if pid not in self._workers]:
            waits = time.monotonic() < patience
            trackers = [pid for pid in orphans if waits and process.is_resource_tracker(pid)]
            process.kill_all(pid for pid in orphans if pid not in trackers)
            for pid in orphans:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG if pid in trackers else 0)
            if trackers:
                time.sleep(_TRACKER_LOOK)
        with contextlib.suppress(OSError):
            os.killpg(leader, signal.SIGKILL)

    def _read_last_sweeps(self) -> None:
        """Read the sweep requests of a driver that died during the warm-up. Nothing is forked for it any more."""
        self._control.setblocking(False)
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(self._control, _MESSAGE_LIMIT, 4)
            except ConnectionResetError:
                continue  # reported once; data sent before follows
            except OSError:
                return
            for descriptor in descriptors:
                os.close(descriptor)
            if not data:
                return
            command = _decode_command(data)
            if isinstance(command, Sweep):
                self._sweeps[command.id] = command.paths

    def _end(self) -> None:
        self._read_last_sweeps()
        for pid in list(self._workers):
            process.kill_scope(pid)
        process.kill_all(processes.descendants(os.getpid()))
        for paths in self._sweeps.values():
            for path in paths:
                remove_quietly(path)
                remove_empty_parents(path)

    def _send_report(self, report: Report) -> None:
        with contextlib.suppress(OSError):  # a driver that is gone is noticed by the loop
            self._control.send(encode(report))


class OomKills:
    """Distinguishes workers killed by the kernel's OOM killer from those killed otherwise.

    The kernel only counts such kills. So one counts against a worker when it came shortly before that worker's end
    and is not accounted for by another worker's.
    """

    #: Seconds that a large process may take from its kill to its end.
    TEARDOWN_TIMEOUT_S = 10.0

    def __init__(self, count: Callable[[], int]) -> None:
        self._count = count
        #: By worker: how many kills are known not to be its own.
        self._others: dict[int, int] = {}
        #: Counts with their times; the first is the newest that is older than the teardown.
        self._seen: deque[tuple[float, int]] = deque()

    def began(self, pid: int, count: int) -> None:
        self._others[pid] = count

    def look(self, now: float) -> None:
        """Count new kills. Call at least every second while workers run: old kills are not attributed to a worker."""
        if not self._others:
            self._seen.clear()
            return
        if not self._seen or now - self._seen[-1][0] >= _POLL_INTERVAL_S / 2:
            self._seen.append((now, self._count()))
        while len(self._seen) > 1 and now - self._seen[1][0] >= self.TEARDOWN_TIMEOUT_S:
            self._seen.popleft()
        when, old = self._seen[0]
        if now - when >= self.TEARDOWN_TIMEOUT_S:
            self._others = {pid: max(others, old) for pid, others in self._others.items()}

    def ended(self, pid: int, code: int) -> bool:
        """Return True when the worker that has ended with ``code`` was killed for want of memory."""
        others = self._others.pop(pid)
        killed = code == -signal.SIGKILL and self._count() > others
        if killed:
            self._others = {other: count + 1 for other, count in self._others.items()}
        return killed


def _run_forked_process(command: Fork, payload: int, output: int) -> NoReturn:
    """Run the worker's entry in the new process, and exit."""
    code = 1
    try:
        os.setsid()
        fork_server.adopt_orphans()  # they come to the server only when this process is dead
        _take_over_output(output)
        _forget_parent()
        fork_server.set_process_name(command.title)
        apply_env(command.env)
        sys.path[:] = command.path
        importlib.invalidate_caches()
        if command.cwd:
            os.makedirs(command.cwd, exist_ok=True)
            os.chdir(command.cwd)
        if not command.shielded:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _ASK_FOR_AN_END)
        code = call_entry(command.entry, _read_all(payload))
    except BaseException:
        traceback.print_exc()
    finally:
        _leave(code)


def apply_env(env: Mapping[str, str | None]) -> None:
    """Set the given variables; ``None`` removes one."""
    for name, value in env.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def call_entry(entry: str, payload: bytes) -> int:
    """Call "package.module:function" with the payload; its return value is the exit code."""
    module, _, name = entry.partition(":")
    function: Any = getattr(importlib.import_module(module), name)
    return int(function(payload) or 0)


def _take_over_output(output: int) -> None:
    """Send descriptors 1 and 2, and Python's own streams, to the worker's output."""
    _KEPT.extend((sys.stdout, sys.stderr, sys.stdin))  # never flushed again: their buffers are the driver's
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(null)
    os.close(output)
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        stream = io.TextIOWrapper(
            open(number, mode + "b", closefd=False),  # noqa: SIM115 (lives as long as the process)
            "utf-8",
            "backslashreplace",
            line_buffering=True,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


_KEPT: list[Any] = []


def _forget_parent() -> None:
    """Drop state inherited from the parent processes: handlers, exit functions, child lists."""
    import atexit
    from multiprocessing import process as mp_process
    from multiprocessing import util as mp_util

    signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit._clear()
    mp_process._children.clear()  # type: ignore[attr-defined]
    mp_util._finalizer_registry.clear()  # type: ignore[attr-defined]
    mp_util._run_after_forkers()  # type: ignore[attr-defined]
    gc.enable()


def _leave(code: int) -> NoReturn:
    """End as an interpreter would: threads, exit functions, children, output; then without its finalisation."""
    import atexit
    import threading
    from multiprocessing import util as mp_util

    ends: list[Any] = [threading._shutdown, mp_util._exit_function, atexit._run_exitfuncs]  # type: ignore[attr-defined]
    for finish in (*ends, sys.stdout.flush, sys.stderr.flush):
        try:
            finish()
        except BaseException:
            traceback.print_exc()
    os._exit(code)


def _read_all(descriptor: int) -> bytes:
    os.lseek(descriptor, 0, os.SEEK_SET)
    with os.fdopen(descriptor, "rb") as file:
        return file.read()
