"""Diaries of ranks: timed entries, written so that a rank's death loses nothing, and read by the benchmark.

One file a rank, one line an entry: kind, process, step, seconds of ``time.monotonic()``, which all processes of a
machine share. An attempt is identified by its process: every restart of a rank starts a new one.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

#: The training function was entered; a step's gradients were averaged over the ranks and applied.
ENTERED, STEPPED = "entered", "stepped"
#: The ranks end when this file exists.
_STOP = "stop"


class Diary:
    """The diary of one rank, in this process."""

    def __init__(self, directory: str | Path, rank: int) -> None:
        self._directory = Path(directory)
        file = self._directory / f"rank-{rank}"
        self._descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(self, kind: str, step: int = 0) -> None:
        """Record an event with the current time."""
        os.write(self._descriptor, f"{kind} {os.getpid()} {step} {time.monotonic()!r}\n".encode())

    def asks_to_stop(self) -> bool:
        """Return whether the benchmark has requested the end."""
        return (self._directory / _STOP).exists()


@dataclass(frozen=True)
class Entry:
    """One line."""

    kind: str
    pid: int
    step: int
    at: float


def read(directory: Path, rank: int) -> list[Entry]:
    """Return all complete entries of a rank, oldest first; none if it has not begun."""
    try:
        lines = (directory / f"rank-{rank}").read_text().split("\n")[:-1]
    except FileNotFoundError:
        return []
    fields = [line.split(" ") for line in lines]
    return [Entry(kind, int(pid), int(step), float(at)) for kind, pid, step, at in fields]


def ask_to_stop(directory: Path) -> None:
    """Tell the ranks to end after their current step."""
    (directory / _STOP).touch()
