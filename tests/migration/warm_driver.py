"""A process with torch and Powertrain loaded that forks for each program, so that a hundred programs import them once.

A program sees what a script sees that has just imported torch: one thread, its own ``__main__``, directory, arguments
and output. The programs of the smoke tests are started as plain scripts instead.
"""

from __future__ import annotations

import builtins
import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.migration.running import _EXIT_TIMEOUT_S, _POLL_INTERVAL_S, Ended

from powertrain.trace.machine import processes

#: What nearly every program imports, itself or in ``fit()``.
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
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LARGEST_MESSAGE = 1 << 16


class WarmDriver:
    """The caller's end of the process."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
        theirs.close()

    def run(self, text: str, directory: Path, timeout_s: float) -> Ended:
        """Run the text of a program in an empty directory, and wait until its processes are gone."""
        script, output = directory / "program.py", directory / ".output"
        script.write_text(text, "utf-8")
        began = time.monotonic()
        with output.open("wb") as file:
            socket.send_fds(self._control, [str(script).encode()], [file.fileno()])
        self._control.settimeout(timeout_s)
        pid = self._reply()["pid"]
        try:
            ended, note = self._reply(), ""
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            self._control.settimeout(None)
            ended, note = self._reply(), f"\nended after {timeout_s:g} s"
        return Ended(
            ended["code"], output.read_text(errors="replace") + note, time.monotonic() - began, ended["left"]
        )

    def close(self) -> None:
        """End the process and all that it has forked."""
        self._control.close()
        self._process.wait()

    def _reply(self) -> dict[str, Any]:
        data = self._control.recv(_LARGEST_MESSAGE)
        assert data, "the warm driver has died"
        found: dict[str, Any] = json.loads(data)
        return found


@contextmanager
def warm_driver() -> Iterator[WarmDriver]:
    """A driver for the block."""
    driver = WarmDriver()
    try:
        yield driver
    finally:
        driver.close()


def _serve(control: socket.socket) -> str:
    """Fork for each order until the caller is gone; returns, in the new process, the path of its program."""
    libc = ctypes.CDLL(None)
    libc.prctl(
        _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0
    )  # what a program leaves behind becomes a child of this one
    me = os.getpid()
    while True:
        order, descriptors, _, _ = socket.recv_fds(control, _LARGEST_MESSAGE, 1)
        if not order:
            sys.exit(0)
        child = os.fork()
        if child == 0:
            control.close()
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != me:
                os._exit(1)
            os.dup2(descriptors[0], 1)
            os.dup2(descriptors[0], 2)
            os.close(descriptors[0])
            return order.decode()
        os.close(descriptors[0])
        control.send(json.dumps({"pid": child}).encode())
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        control.send(json.dumps({"code": code, "left": _outliving(me)}).encode())


def _outliving(parent: int) -> list[str]:
    """Command lines of the orphans that have not exited after a while; those are killed."""
    deadline = time.monotonic() + float(os.environ.get("MIGRATION_EXIT_TIMEOUT_S", _EXIT_TIMEOUT_S))
    while left := list(processes.children(parent)):
        for pid in left:
            os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL_INTERVAL_S)
    found = []
    for pid in left:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        found.append(f"{pid}: {command}")
        os.kill(pid, signal.SIGKILL)
    return found


def _become(script: str) -> None:
    """Run a script as ``python script`` does."""
    os.chdir(os.path.dirname(script))
    sys.argv[:] = [script]
    sys.path[0] = os.path.dirname(script)
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=script, __builtins__=builtins)
    sys.modules["__main__"] = main
    with open(script, encoding="utf-8") as file:
        code = compile(file.read(), script, "exec")
    exec(code, main.__dict__)


if __name__ == "__main__":
    for name in _IMPORTED:
        importlib.import_module(name)
    from powertrain import fork_server
    from powertrain.backend import TORCH_PRELOAD
    from powertrain.engine.local.warm_server import _OF_EVERY_WORKER

    fork_server.preload((*_OF_EVERY_WORKER, *TORCH_PRELOAD), with_calls=False)
    gc.freeze()  # the end of a program then looks at what it has made itself, and copies no other pages
    _become(_serve(socket.socket(fileno=int(sys.argv[1]))))
