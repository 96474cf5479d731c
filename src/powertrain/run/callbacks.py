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
    """The run that a callback is called for.

    Attributes:
        name: The run's name.
        path: The run's directory.
        storage_path: The storage path that the directory lies under.
        run_config: The trainer's ``run_config``.
        scaling_config: The trainer's ``scaling_config``.
        backend_config: The trainer's ``backend_config``, or ``torch_config`` and the like.
        train_loop_config: The trainer's ``train_loop_config``.
        end_early: Call it with a reason to end the run at its next boundary, as a stop criterion does. Any thread.
    """

    name: str
    path: str
    storage_path: str
    run_config: Any = None
    scaling_config: Any = None
    backend_config: Any = None
    train_loop_config: Any = None
    end_early: Callable[[str], None] = field(default=lambda reason: None, repr=False, compare=False)


class UserCallback:
    """Base class for ``RunConfig(callbacks=[...])``. Override the events you are interested in.

    The methods are called in the driver, on the controller's thread: keep them short. An exception is logged and shown
    as a warning, and does not end the run.

    Example::

        class Print(UserCallback):
            def after_report(self, run_context, metrics, checkpoint):
                print(run_context.name, metrics[0])

        trainer = TorchTrainer(train_func, run_config=RunConfig(callbacks=[Print()]))
    """

    def after_report(
        self, run_context: RunContext, metrics: list[dict[str, Any]], checkpoint: Any | None
    ) -> None:
        """Handle a complete row of reports.

        Args:
            run_context: The run.
            metrics: One dict per rank, in rank order, empty for ranks that did not report.
            checkpoint: The checkpoint that was reported with the row; None without one.
        """

    def after_exception(
        self, run_context: RunContext, worker_exceptions: Mapping[int, BaseException]
    ) -> None:
        """Handle a failed attempt.

        Args:
            run_context: The run.
            worker_exceptions: The exception of each failed rank, as in ``TrainingFailedError.worker_failures``; that
                of the first failing rank comes first.
        """

    def on_event(self, run_context: RunContext, event: Fact) -> None:
        """Handle a fact of the run, as the journal keeps it.

        Args:
            run_context: The run.
            event: The fact: see :mod:`powertrain.run.events`.
        """


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
