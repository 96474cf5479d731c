"""The user's own hooks into a run. An exception in one is told, never fatal."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from powertrain.errors import WorkerFailedError
from powertrain.run.events import Fact

logger = logging.getLogger("powertrain")


@dataclass(frozen=True)
class RunContext:
    """Which run a callback is told about."""

    name: str
    #: The run's directory, and the storage path it lies under.
    path: str
    storage_path: str
    #: The trainer's own arguments.
    run_config: Any = None
    scaling_config: Any = None
    backend_config: Any = None
    train_loop_config: Any = None


class UserCallback:
    """Base class for ``RunConfig(callbacks=[...])``. Override what you want to hear of.

    The methods are called in the driver, on the controller's thread: keep them short.
    """

    def after_report(
        self, run_context: RunContext, metrics: list[dict[str, Any]], checkpoint: Any | None
    ) -> None:
        """A row is complete. ``metrics`` has one dict per rank, in rank order, empty for ranks that did not report."""

    def after_exception(
        self, run_context: RunContext, worker_exceptions: Mapping[int, WorkerFailedError]
    ) -> None:
        """An attempt failed; the first failing rank comes first."""

    def on_event(self, run_context: RunContext, event: Fact) -> None:
        """Any fact of the run, as the journal keeps it."""


class Callbacks:
    """Calls each callback in turn and survives them all."""

    def __init__(self, callbacks: Sequence[Any], context: RunContext, tell: Callable[[str], None]) -> None:
        """``tell`` gets one sentence for each callback method that raised, once per method."""
        self._callbacks, self._context, self._tell = tuple(callbacks), context, tell
        self._told: set[tuple[int, str]] = set()

    def call(self, method: str, *arguments: Any) -> None:
        """Call ``method`` on every callback that has it."""
        for callback in self._callbacks:
            function = getattr(callback, method, None)
            if function is None:
                continue
            try:
                function(self._context, *arguments)
            except Exception as error:
                self._survive(callback, method, error)

    def _survive(self, callback: Any, method: str, error: Exception) -> None:
        logger.warning("%s.%s raised:\n%s", type(callback).__name__, method, traceback.format_exc())
        if (id(callback), method) not in self._told:
            self._told.add((id(callback), method))
            self._tell(
                f"The callback {type(callback).__name__}.{method} raised {type(error).__name__}: {error}. The run goes "
                "on; this is said once."
            )
