"""Handling of Ctrl-C and preemption notices: the sweep ends so that it can be resumed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from powertrain.worker import signals

if TYPE_CHECKING:
    from powertrain.tune.sweep.loop import SweepLoop


@contextmanager
def interrupts_of(loop: SweepLoop) -> Iterator[list[str]]:
    """Interrupt a sweep on Ctrl-C and on preemption notices within the block. In the main thread only.

    Yields:
        The events so far: "interrupt" or "notice".
    """
    received: list[str] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def interrupt(*_: Any) -> None:
        received.append("interrupt")
        loop.interrupt()

    def notice(_: signal.Signals) -> None:
        received.append("notice")
        loop.interrupt()

    previous = signal.signal(signal.SIGINT, interrupt)
    try:
        with signals.handling(notice):
            yield received
    finally:
        signal.signal(signal.SIGINT, previous)
