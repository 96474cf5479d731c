"""The core of a fork server: a process with one thread that imports its children's modules, forks them, and waits.

The warm server of the engines (:mod:`powertrain.engine.local.server`) and the process pool of datasets
(:mod:`powertrain.data.operations.pool`) are made of it. They differ in their commands, their children, and the way they
end them.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import select
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36


def interpreter_command(entry: str, *arguments: object) -> list[str]:
    """Return the command of a fresh interpreter that finds modules as this one does, and calls a function.

    Args:
        entry: "package.module:function".
        arguments: Given to the function; each must be the value of its ``repr``.
    """
    module, _, function = entry.partition(":")
    given = ", ".join(map(repr, arguments))
    code = (
        f"import sys; sys.path[:] = {import_path()!r}; from {module} import {function}; {function}({given})"
    )
    return [sys.executable, "-c", code]


def import_path() -> list[str]:
    """Return where this process finds modules now, for a process in another directory. Entries of import hooks stay."""
    return [
        os.path.abspath(entry) if os.path.exists(entry or ".") else entry
        for entry in sys.path
        if isinstance(entry, str)
    ]


def preload(entries: Iterable[str], *, with_calls: bool = True) -> None:
    """Import modules before anything is forked.

    One that is missing or broken is skipped: the child that needs it raises the error, with its traceback.

    Args:
        entries: Names of modules; the function of an entry "package.module:function" is called, too.
        with_calls: False skips the functions.
    """
    for entry in entries:
        module, _, function = entry.partition(":")
        with contextlib.suppress(Exception):
            loaded = importlib.import_module(module)
            if function and with_calls:
                getattr(loaded, function)()


def exit_descriptor(pid: int) -> int:
    """Return a descriptor that becomes readable when a process ends, or -1 where the system has none."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return -1


def adopt_orphans() -> None:
    """Make this process the parent of its descendants' orphans."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_process_name(name: str) -> None:
    """Set the name that ``ps`` and ``top`` show."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:15]))


def _prctl(option: int, value: Any) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


@dataclass(frozen=True)
class Readiness:
    """The events that woke a server."""

    has_command: bool
    is_orphaned: bool
    has_ended_child: bool


class ForkServer:
    """The waiting and forking of a server.

    It waits for commands, for the end of its owner and for that of its children. The owner is watched by a descriptor
    of its process as well: a child of the owner that inherited the socket would keep that open.
    """

    def __init__(self, control: socket.socket, owner: int) -> None:
        self._control = control
        self._owner = exit_descriptor(owner)
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._poll = select.poll()
        for descriptor in (control.fileno(), self._owner, self._wake_read):
            if descriptor >= 0:
                self._poll.register(descriptor, select.POLLIN)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def wait(self, timeout_s: float | None = None) -> Readiness:
        """Wait for something to happen, or for the timeout."""
        ready = {found for found, _ in self._poll.poll(None if timeout_s is None else timeout_s * 1000)}
        if self._wake_read in ready:
            os.read(self._wake_read, 4096)
        return Readiness(
            self._control.fileno() in ready,
            self._owner >= 0 and self._owner in ready,
            self._wake_read in ready,
        )

    def reap(self) -> Iterator[tuple[int, int]]:
        """Yield the pid and the exit code, or minus the signal, of each child that has ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            yield pid, os.waitstatus_to_exitcode(status)

    def fork(self, live: Callable[[], NoReturn], closed: Sequence[socket.socket] = ()) -> int:
        """Fork a child that ends with this process, and return its pid.

        Args:
            live: Called in the child, without the descriptors and signal handlers of the server.
            closed: Other sockets that the child has no part in.
        """
        server = os.getpid()
        with warnings.catch_warnings():
            # Python warns about native threads. Those started by imports recover by themselves after a fork.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid:
            return pid
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for descriptor in (self._wake_read, self._wake_write, self._owner):
                if descriptor >= 0:
                    os.close(descriptor)
            for end in (self._control, *closed):
                end.close()
            # Reliable here because the server has one thread: the signal comes when the thread that forked ends.
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == server:  # otherwise it died before the signal was armed
                live()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
