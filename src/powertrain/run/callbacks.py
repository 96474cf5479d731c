"""The user's own hooks into a run. An exception of a callback is reported and never ends the run."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from powertrain.run.events import Fact
from powertrain.run.forced_end import EndedAtOnce
from powertrain.text.errors import describe_error
from powertrain.text.loggers import module_logger

logger = module_logger(__name__)


@dataclass(frozen=True)
class RunContext:
    """The run that a callback is called for."""

    name: str
    #: The run's directory, and the storage path it lies under.
    path: str
    storage_path: str
    #: The trainer's own arguments.
    run_config: Any = None
    scaling_config: Any = None
    backend_config: Any = None
    train_loop_config: Any = None
    #: Call it with a reason to end the run at its next boundary, as a stop criterion does. Any thread.
    end_early: Callable[[str], None] = field(default=lambda reason: None, repr=False, compare=False)


class UserCallback:
    """Base class for ``RunConfig(callbacks=[...])``. Override the events you are interested in.

    The methods are called in the driver, on the controller's thread: keep them short.
    """

    def after_report(
        self, run_context: RunContext, metrics: list[dict[str, Any]], checkpoint: Any | None
    ) -> None:
        """Called when a row is complete. ``metrics`` has one dict per rank, in rank order, empty for ranks that did not
        report."""

    def after_exception(
        self, run_context: RunContext, worker_exceptions: Mapping[int, BaseException]
    ) -> None:
        """Called when an attempt failed. Has by rank its exception, as ``TrainingFailedError.worker_failures``; the
        first failing rank comes first."""

    def on_event(self, run_context: RunContext, event: Fact) -> None:
        """Called with each fact of the run, as the journal keeps it."""


class Callbacks:
    """Calls each callback in turn and survives them all."""

    def __init__(self, callbacks: Sequence[Any], context: RunContext, warn: Callable[[str], None]) -> None:
        """``warn`` is called once for each callback method that raised, once per method."""
        self._callbacks, self._context, self._warn = tuple(callbacks), context, warn
        self._told: set[tuple[int, str]] = set()
        self._is_closed = False

    def call(self, method: str, *arguments: Any) -> None:
        """Call ``method`` on every callback that has it. Only the forced end of the run is raised."""
        if self._is_closed:
            return
        for callback in self._callbacks:
            try:
                function = getattr(callback, method, None)
                if function is not None:
                    function(self._context, *arguments)
            except EndedAtOnce:
                self._is_closed = True  # it may be the callback that hangs: it is not called again
                raise
            except BaseException as error:  # also SystemExit: a callback does not decide how the run ends
                self._survive(callback, method, error)

    def close(self) -> None:
        """Call none of them any more."""
        self._is_closed = True

    def _survive(self, callback: Any, method: str, error: BaseException) -> None:
        logger.warning("%s.%s raised:\n%s", type(callback).__name__, method, traceback.format_exc())
        if (id(callback), method) not in self._told:
            self._told.add((id(callback), method))
            self._warn(
                f"The callback {type(callback).__name__}.{method} raised {describe_error(error)}. The run goes "
                "on; this warning is shown once."
            )
