"""Progress of work that takes longer than a second: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, TextIO

#: Seconds of work before anything is shown, and between two lines where there is no terminal.
_SHOWN_AFTER_S, _LINE_INTERVAL_S = 1.0, 30.0


class ProgressBar:
    """Shows how much of a piece of work is done. A context manager; any thread may call :meth:`advance`.

    Nothing is shown of work that ends within a second. Errors of the display never reach the work.
    """

    def __init__(
        self,
        what: str,
        total: int | None = None,
        unit: str = "bytes",
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a bar.

        Args:
            what: The work, such as "downloading checkpoint_000010".
            total: All of it; None if unknown.
            unit: What is counted: "bytes", or the plural of a noun.
            stream: Where it is shown; None for standard error.
            clock: Returns seconds.
        """
        self._what, self._total, self._unit = what, total, unit
        self._stream, self._clock = sys.stderr if stream is None else stream, clock
        self._lock = threading.Lock()
        self._done = 0
        self._next = clock() + _SHOWN_AFTER_S
        self._bar: Any = None
        self._has_written = False

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock, contextlib.suppress(Exception):  # of the stream or its terminal
            if self._bar is not None:
                self._bar.stop()
            elif self._has_written and kind is None:
                self._write_line("done")

    def advance(self, amount: int) -> None:
        """Note that ``amount`` more is done."""
        with self._lock:
            self._done += amount
            try:
                self._show()
            except Exception:  # of the stream or its terminal
                self._next = float("inf")

    def _show(self) -> None:
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._done)
        elif self._clock() >= self._next:
            if self._stream.isatty():
                self._bar = _bar_on(self._stream, self._what, self._total, self._unit)
                self._bar.start()
                self._bar.update(self._bar.task_ids[0], completed=self._done)
            else:
                self._next = self._clock() + _LINE_INTERVAL_S
                self._write_line("")

    def _write_line(self, end: str) -> None:
        self._has_written = True
        share = f", {self._done / self._total:.0%}" if self._total else ""
        self._stream.write(f"{self._what}: {end or _amount(self._done, self._unit) + share}\n")
        self._stream.flush()


def _amount(number: int, unit: str) -> str:
    return f"{number / 2**20:,.0f} MiB" if unit == "bytes" else f"{number:,} {unit}"


def _bar_on(stream: TextIO, what: str, total: int | None, unit: str) -> Any:
    """Return a bar that disappears at its end. Loads rich."""
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    amounts = DownloadColumn(binary_units=True) if unit == "bytes" else MofNCompleteColumn()
    columns = [TextColumn("{task.description}"), BarColumn(), amounts, TimeRemainingColumn()]
    if unit != "bytes":
        columns.insert(3, TextColumn(unit))
    bar = Progress(*columns, console=Console(file=stream), transient=True)
    bar.add_task(escape(what), total=total)
    return bar
