"""A process beside this one, for engines that start none: a fresh interpreter that never outlives this process.

It is the leader of a session of its own, so Ctrl-C does not reach it, and its group is what is killed with it. Should
this process be killed, the child sees that itself and ends its group.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import IO, NoReturn

from powertrain.engine.base import Exited, ProcessSpec, Slot
from powertrain.storage.files.descriptors import open_log

#: Seconds between two checks for the parent, where the system has no descriptor for it.
_POLL_INTERVAL_S = 0.5
#: Seconds for a killed child to exit.
_KILL_TIMEOUT_S = 5.0


class Child:
    """One such process. It runs ``spec.entry``, and ``ended`` is called once, on a thread of its own."""

    def __init__(self, slot: Slot, spec: ProcessSpec, ended: Callable[[Exited], None]) -> None:
        """Start it. Raises ``OSError`` where that cannot be."""
        self._slot, self._payload, self._ended = slot, spec.payload, ended
        path = [os.path.abspath(entry) if os.path.exists(entry or ".") else entry for entry in sys.path]
        code = (
            f"import sys; sys.path[:] = {path!r}; from powertrain.run.workers.child import live; "
            f"live({spec.entry!r}, {os.getpid()})"
        )
        with _open_log(spec.log_path) as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment(os.environ, spec.env),
                cwd=spec.cwd or None,
                start_new_session=True,
            )
        self._thread = threading.Thread(target=self._attend, name=f"powertrain-{spec.title}", daemon=True)
        self._thread.start()

    def kill(self) -> None:
        """End it and its group."""
        if self._process.poll() is None:
            _kill_group(self._process.pid)

    def close(self) -> None:
        """End it and wait until it is gone."""
        self.kill()
        self._thread.join(_KILL_TIMEOUT_S)

    def _attend(self) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError), stdin:
            stdin.write(self._payload)
        code = self._process.wait()
        _kill_group(self._process.pid)  # its remaining children
        self._ended(Exited(self._slot, self._process.pid, code))


def live(entry: str, parent: int) -> NoReturn:
    """In the child: read the payload, call the entry, end with the code it returns."""
    payload = sys.stdin.buffer.read()
    threading.Thread(target=end_with_parent, args=(parent,), name="powertrain-parent", daemon=True).start()
    module, _, name = entry.partition(":")
    function = getattr(importlib.import_module(module), name)
    sys.exit(function(payload))


def end_with_parent(parent: int) -> None:
    """Wait until ``parent`` is gone, then end this process and its group."""
    with contextlib.suppress(OSError, AttributeError):  # no such process any more, or no such call here
        poll = select.poll()
        poll.register(os.pidfd_open(parent), select.POLLIN)
        if os.getppid() == parent:
            poll.poll()
    while os.getppid() == parent:
        time.sleep(_POLL_INTERVAL_S)
    _kill_group(os.getpid())


def _kill_group(leader: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(leader, signal.SIGKILL)


def _environment(inherited: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in {**inherited, **changes}.items() if value is not None}


def _open_log(path: str) -> IO[bytes]:
    return open(open_log(path) if path else os.devnull, "ab")
