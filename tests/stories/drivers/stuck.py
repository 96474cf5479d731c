"""Drivers in which something hangs or fails that is no rank: the warm server, a callback, a part of the controller."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any

import story

from powertrain import UserCallback
from powertrain.run import controller, parts
from powertrain.run.scaling import notices
from powertrain.worker import signals


def every_notice_counts() -> None:
    """Two SIGTERMs are two, however soon the second comes."""
    signals.SAME_NOTICE_INTERVAL_S = 0.0
    notices.SAME_NOTICE_INTERVAL_S = 0.0  # type: ignore[attr-defined]  # the name it imported from signals


def tell_of_interrupts() -> None:
    """Tell "SIGINT 1", "SIGINT 2" and so on when a handler of ``fit`` has taken note of one."""
    install, count = signal.signal, 0

    def installing(number: int, handler: Any) -> Any:
        if number != signal.SIGINT or not callable(handler):
            return install(number, handler)

        def handle(*arguments: Any) -> None:
            nonlocal count
            try:
                handler(*arguments)
            finally:
                count += 1
                story.tell(f"SIGINT {count}")

        return install(number, handle)

    signal.signal = installing  # type: ignore[assignment]


class ImportsForEver:
    """A finder that never finds a module that every worker needs, in the process that workers are forked from."""

    def __init__(self) -> None:
        self._driver = os.getpid()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if (
            name in ("powertrain.trace.recording.patches", "powertrain.trace.machine.samplers")
            and os.getpid() != self._driver
        ):
            story.tell("the server imports", str(os.getpid()))
            signal.pause()
        return None


def import_for_ever(fit: Callable[[], Any]) -> dict[str, Any]:
    sys.meta_path.insert(0, ImportsForEver())
    return story.outcome_of(fit)


class Hangs(UserCallback):
    """Never returns from the first report."""

    def after_report(self, *_: Any) -> None:
        story.tell("the callback hangs")
        threading.Event().wait()


def report_for_ever() -> None:
    from powertrain import report

    while True:
        report({"x": 1})
        time.sleep(0.01)


def outcome_without(part: str, fit: Callable[[], Any]) -> dict[str, Any]:
    """The outcome where a part of the controller cannot be made, and the threads that are left."""

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError(f"no {part}")

    setattr(controller if hasattr(controller, part) else parts, part, fail)
    outcome = story.outcome_of(fit)
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("powertrain-")]
    return {**outcome, "threads": left}
