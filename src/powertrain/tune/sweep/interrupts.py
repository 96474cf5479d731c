"""Ctrl-C and notices of the system end a sweep so that it can be continued."""

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
    """Interrupt a sweep at Ctrl-C and at notices, for as long as the block lasts. In the main thread only.

    Yields:
        What has come so far: "interrupt" or "notice".
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
