"""A person at a pseudo-terminal: starts a program in it, reads what it shows, and types."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from typing import Self  # of Python 3.11

#: Seconds for the program to show what is waited for.
_PATIENCE = 30.0
#: Seconds for it to end when the block does.
_END_WITHIN = 10.0
#: Readings without any processor time after which a program is at rest.
_READINGS = 10
_CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class AtTerminal:
    """A program whose controlling terminal is ours. At the end of the block it is gone."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], cwd: Path) -> None:
        self._ours, theirs = pty.openpty()
        try:
            self.process = subprocess.Popen(
                command,
                env={**env, "TERM": "xterm", "COLUMNS": "200"},
                cwd=cwd,
                stdin=theirs,
                stdout=theirs,
                stderr=theirs,
                start_new_session=True,
                preexec_fn=_take_terminal,
            )
        finally:
            os.close(theirs)
        self._shown = ""
        self._seen = 0
        #: All bytes that the terminal was given.
        self.raw = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.ended(_END_WITHIN)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        finally:
            os.close(self._ours)

    def type(self, text: str) -> None:
        """Type a line."""
        self.press(text + "\n")

    def press(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def await_reading(self, within: float = _PATIENCE) -> None:
        """Wait until the program's main thread sleeps, as it does when it has shown a prompt and reads.

        Python notices a signal that comes in between only with the next key.
        """
        stat, deadline, seen = Path(f"/proc/{self.process.pid}/stat"), time.monotonic() + within, 0
        while seen < _READINGS:
            state, times = _state_and_times(stat)
            time.sleep(0.02)
            seen = seen + 1 if state == "S" and _state_and_times(stat) == (state, times) else 0
            assert time.monotonic() < deadline, "the program does not come to rest"

    def expect(self, text: str, within: float = _PATIENCE) -> str:
        """Wait for ``text``; returns what was shown before it, since what was expected last."""
        deadline = time.monotonic() + within
        while (found := self._shown.find(text, self._seen)) < 0:
            if not self._read(deadline):
                pytest.fail(f"{text!r} was not shown; but since then: {self._shown[self._seen :]}")
        before = self._shown[self._seen : found]
        self._seen = found + len(text)
        return before

    def expect_all(self, *texts: str) -> str:
        """Wait for all of these, in whatever order; returns what was shown up to the last of them."""
        start, ends = self._seen, []
        for text in texts:
            self._seen = start
            self.expect(text)
            ends.append(self._seen)
        self._seen = max(ends)
        return self._shown[start : self._seen]

    def ended(self, within: float = _PATIENCE) -> int:
        """The exit code, once the program has ended; what it shows meanwhile is read."""
        deadline = time.monotonic() + within
        while self._read(deadline):
            pass
        return self.process.wait(max(0.0, deadline - time.monotonic()))

    def watch_until(self, come: Callable[[], bool], what: str, within: float = _PATIENCE) -> str:
        """Read on until something has come; returns what was shown meanwhile."""
        deadline = time.monotonic() + within
        while not come():
            if time.monotonic() > deadline or self.process.poll() is not None:
                pytest.fail(f"there was no {what}; but this was shown: {self._shown[self._seen :]}")
            self._read(min(deadline, time.monotonic() + 0.02))
        while self._read(time.monotonic()):  # what was shown before it came
            pass
        shown, self._seen = self._shown[self._seen :], len(self._shown)
        return shown

    def _read(self, deadline: float) -> bool:
        """False where nothing more will come in time."""
        ready = select.select([self._ours], [], [], max(0.0, deadline - time.monotonic()))[0]
        try:
            data = os.read(self._ours, 2**16) if ready else b""
        except OSError:  # the program has closed it
            return False
        self.raw += data
        self._shown += _CONTROLS.sub("", data.decode(errors="replace")).replace("\r", "")
        return bool(data)


def _state_and_times(stat: Path) -> tuple[str, list[str]]:
    """The state of a process, and the processor time that it has used in user and system mode."""
    fields = stat.read_text().rpartition(")")[2].split()
    return fields[0], fields[11:13]


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
