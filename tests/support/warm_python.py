"""A process with torch and Powertrain loaded that forks for each script, so that many scripts import them once.

A forked script sees what a script sees that has just imported torch: one thread, its own ``__main__``, session,
environment, directory, arguments and output. ``/proc/PID/environ`` shows its mark, so that it and what it has started
are found as if it had been started afresh.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import types
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support import leftovers

_ROOT = Path(__file__).parents[2]
#: What nearly every script imports, itself or in ``fit()``.
_IMPORTED = (
    "torch._dynamo",
    "pandas",
    "powertrain.torch.trainer",
    "powertrain.data",
    "powertrain.driver.fit",
    "powertrain.driver.conclusion",
    "powertrain.engine.local.engine",
    "powertrain.engine.local.server",
    "powertrain.run.controller",
    "powertrain.terminal.view",
    "powertrain.views.report.writing",
)
#: The variable that marks a script and all that comes from it; its value has this many characters.
MARK, MARK_LENGTH = "POWERTRAIN_TESTS_SCRIPT", 32
_NO_MARK = "-" * MARK_LENGTH
_LARGEST_ORDER = 1 << 17
#: Seconds for the process to exit.
_END_TIMEOUT_S = 10.0
#: The field of /proc/PID/stat with the address of the first environment (proc(5) counts from 1).
_ENV_START = 50


def new_mark() -> str:
    """Return a mark that no other script has."""
    return uuid.uuid4().hex


def processes_marked(mark: str) -> list[int]:
    """Return the processes of scripts that were started with this mark."""
    found, wanted = [], f"{MARK}={mark}".encode()
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if entry.isdigit() and wanted in Path("/proc", entry, "environ").read_bytes():
                found.append(int(entry))
    return found


class WarmPython:
    """The caller's end of the process, which is started with the first script."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def start(
        self,
        script: Path,
        *arguments: str,
        env: Mapping[str, str],
        cwd: Path,
        output: int,
        mark: str,
    ) -> ForkedScript:
        """Start a script in a session of its own; on return it can be found by its mark.

        Args:
            script: The script.
            arguments: Its arguments.
            env: Its whole environment. Variables that the interpreter reads when it starts have no effect.
            cwd: Its directory.
            output: The descriptor of its standard output and error.
            mark: The value of :data:`MARK` in its environment.
        """
        assert len(mark) == MARK_LENGTH
        if self._process is None or self._process.poll() is not None:
            self._close()
            self._control = self._launch()
        assert self._control is not None
        order = {"argv": [str(script), *arguments], "env": {**env, MARK: mark}, "cwd": str(cwd), "mark": mark}
        exit_read, exit_write = os.pipe()
        try:
            with open(exit_write, "wb"):
                socket.send_fds(self._control, [json.dumps(order).encode()], [output, exit_write])
            answer = self._control.recv(64)
            assert answer, "the warm process has died"
        except BaseException:  # also a test's timeout: a late answer would be taken for the next script's
            os.close(exit_read)
            self._close()
            raise
        return ForkedScript(int(answer), exit_read, [str(script), *arguments])

    def _launch(self) -> socket.socket:
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                cwd=_ROOT,
                env={**os.environ, MARK: _NO_MARK},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        leftovers.warm.append(self._process.pid)
        return control

    def __enter__(self) -> WarmPython:
        return self

    def __exit__(self, *_: object) -> None:
        """End the process. Its scripts continue to run."""
        self._close()

    def _close(self) -> None:
        if self._control is not None and self._process is not None:
            self._control.close()
            try:
                self._process.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            leftovers.warm.remove(self._process.pid)
        self._control = self._process = None


class ForkedScript:
    """A started script, with the methods of ``subprocess.Popen`` that tests use."""

    def __init__(self, pid: int, exit_read: int, args: list[str]) -> None:
        self.pid, self.args = pid, args
        self.returncode: int | None = None
        self._exit = open(exit_read, "rb", buffering=0)  # noqa: SIM115

    def poll(self) -> int | None:
        """Return the exit code, or None while the script runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, and return the exit code; minus the signal's number where a signal has ended it."""
        if self.returncode is None:
            ready, _, _ = select.select([self._exit], [], [], timeout)
            if not ready:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            code = os.read(self._exit.fileno(), 16)
            assert code, "the warm process has died"
            self.returncode = int(code)
            self._exit.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the script has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it ends at this moment
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


# --------------------------------------------------------------------------- in the process


class _Server:
    """Forks for each order, and reports exits, until its owner closes the socket or ends."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        #: The script behind each descriptor of a process, with the descriptor to which its exit is written.
        self._scripts: dict[int, tuple[int, int]] = {}
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)

    def serve(self) -> dict[str, Any]:
        """In a forked child, return its order. The server itself exits when its owner closes the socket or ends."""
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor in self._scripts:
                    self._report(descriptor)
                elif (order := self._take()) is not None:
                    return order

    def _take(self) -> dict[str, Any] | None:
        text, descriptors, _, _ = socket.recv_fds(self._control, _LARGEST_ORDER, 2)
        if not text:
            sys.exit(0)
        output, exit_write = descriptors
        order: dict[str, Any] = json.loads(text)
        ready_read, ready_write = os.pipe()
        child = os.fork()
        if child == 0:
            os.setsid()
            _show_mark(order["mark"])
            os.write(ready_write, b"x")
            for standard in (1, 2):
                os.dup2(output, standard)
            self._control.close()
            os.closerange(3, max(map(int, os.listdir("/proc/self/fd"))) + 1)
            return order
        os.close(output)
        os.close(ready_write)
        os.read(ready_read, 1)
        os.close(ready_read)
        descriptor = os.pidfd_open(child)
        self._scripts[descriptor] = (child, exit_write)
        self._poll.register(descriptor, select.POLLIN)
        self._control.send(str(child).encode())
        return None

    def _report(self, descriptor: int) -> None:
        child, exit_write = self._scripts.pop(descriptor)
        self._poll.unregister(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(child, 0)
        with contextlib.suppress(BrokenPipeError):  # no test waits for it any more
            os.write(exit_write, str(os.waitstatus_to_exitcode(status)).encode())
        os.close(exit_write)


def _show_mark(mark: str) -> None:
    """Overwrite the mark in the process's first environment, which ``/proc/PID/environ`` shows."""
    first = Path("/proc/self/environ").read_bytes()
    start = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[_ENV_START - 3])
    entry = f"{MARK}={_NO_MARK}".encode()
    ctypes.memmove(start + first.index(entry) + len(MARK) + 1, mark.encode(), MARK_LENGTH)


def _set_up(order: dict[str, Any]) -> None:
    """Set what a new process has of its own: environment, directory, arguments, streams, handlers."""
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    tempfile.tempdir = None
    if "numpy" in sys.modules:  # whose generator would give every script the same numbers
        sys.modules["numpy"].random.seed()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = io.TextIOWrapper(
            open(number, "wb", closefd=False),  # noqa: SIM115
            encoding="utf-8",
            errors=getattr(sys, name).errors,
            line_buffering=number == 2,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    sys.argv[:] = order["argv"]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))


def _run(script: str) -> None:
    """Run a script as ``python script`` does."""
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=script, __builtins__=builtins)
    sys.modules["__main__"] = main
    try:
        exec(compile(Path(script).read_bytes(), script, "exec", dont_inherit=True), main.__dict__)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # as Python shows it: without the lines of this file
        trace = error.__traceback__.tb_next if error.__traceback__ is not None else None
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(1)


if __name__ == "__main__":
    for module in _IMPORTED:
        importlib.import_module(module)
    from powertrain import fork_server
    from powertrain.backend import TORCH_PRELOAD
    from powertrain.engine.local.warm_server import _OF_EVERY_WORKER

    fork_server.preload((*_OF_EVERY_WORKER, *TORCH_PRELOAD), with_calls=False)
    gc.freeze()  # the end of a script then looks at what it has made itself, and copies no other pages
    _set_up(_Server(socket.socket(fileno=int(sys.argv[1]))).serve())
    _run(sys.argv[0])
