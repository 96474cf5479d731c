"""User-defined hooks of a sweep: ``RunConfig(callbacks=[...])``. An exception in a hook never ends the sweep."""

from __future__ import annotations

import functools
import inspect
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from powertrain.errors import ConfigError
from powertrain.run.forced_end import EndedAtOnce
from powertrain.text.errors import describe_error
from powertrain.text.loggers import module_logger
from powertrain.values.arguments import shorten

if TYPE_CHECKING:
    from powertrain.checkpoint.checkpoint import Checkpoint
    from powertrain.tune.stopper import Stopper
    from powertrain.tune.trial import Trial

logger = module_logger(__name__)


class Callback:
    """Base class of callbacks of a sweep. Subclasses define the hooks that they need.

    The hooks are called in the process that called ``Tuner.fit``, one at a time, on threads of the sweep: keep them
    short. Each gets ``**info``, so that later versions can add arguments.

    Example::

        class Print(tune.Callback):
            def on_trial_result(self, iteration, trials, trial, result, **info):
                print(trial, result["loss"])

        tune.Tuner(train, run_config=RunConfig(callbacks=[Print()]))
    """

    def setup(
        self,
        stop: Stopper | None = None,
        num_samples: int | None = None,
        total_num_samples: int | None = None,
        **info: Any,
    ) -> None:
        """Prepare for a sweep. Called once, before anything else.

        Args:
            stop: When trials end early.
            num_samples: ``TuneConfig(num_samples=...)``.
            total_num_samples: Total number of trials, if known.
            **info: Reserved for later versions.
        """

    def on_step_begin(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        """Handle the beginning of a round of work.

        Args:
            iteration: Number of rounds so far.
            trials: All trials so far.
            **info: Reserved for later versions.
        """

    def on_step_end(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        """Handle the end of a round of work. Arguments as for :meth:`on_step_begin`."""

    def on_trial_start(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """Handle a trial that was started.

        Args:
            iteration: Number of rounds so far.
            trials: All trials so far.
            trial: The trial.
            **info: Reserved for later versions.
        """

    def on_trial_restore(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """Handle a trial that continues from a checkpoint. Arguments as for :meth:`on_trial_start`."""

    def on_trial_save(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """Handle a trial that has saved a checkpoint. Arguments as for :meth:`on_trial_start`."""

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict[str, Any], **info: Any
    ) -> None:
        """Handle a report. The search algorithm and the scheduler have seen it already.

        Args:
            iteration: Number of rounds so far.
            trials: All trials so far.
            trial: The trial that reported.
            result: Its metrics, with "training_iteration", "time_total_s", "trial_id" and "config".
            **info: Reserved for later versions.
        """

    def on_trial_complete(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """Handle a trial that finished or was stopped. Arguments as for :meth:`on_trial_start`."""

    def on_trial_recover(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """Handle a trial that failed and is started again. Arguments as for :meth:`on_trial_start`."""

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """Handle a trial that failed for good. Arguments as for :meth:`on_trial_start`."""

    def on_checkpoint(
        self, iteration: int, trials: list[Trial], trial: Trial, checkpoint: Checkpoint, **info: Any
    ) -> None:
        """Handle a checkpoint that was committed.

        Args:
            iteration: Number of rounds so far.
            trials: All trials so far.
            trial: The trial that reported it.
            checkpoint: The checkpoint.
            **info: Reserved for later versions.
        """

    def on_experiment_end(self, trials: list[Trial], **info: Any) -> None:
        """Handle the end of all trials.

        Args:
            trials: All trials.
            **info: Reserved for later versions.
        """

    def get_state(self) -> dict[str, Any] | None:
        """Return the state that :meth:`set_state` needs after a restart of the sweep; None for none."""
        return None

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the state that :meth:`get_state` returned before a restart of the sweep.

        Args:
            state: The state.
        """


#: Hooks that a sweep calls with keyword arguments.
HOOKS = frozenset(name for name in vars(Callback) if name == "setup" or name.startswith("on_"))


class CallbackList:
    """Calls each callback in turn and survives their exceptions.

    Args:
        callbacks: The callbacks. A callback without a method for a hook is skipped.
        warn: Called with one sentence for each callback and hook that raised, once.
    """

    def __init__(self, callbacks: Sequence[Any], warn: Callable[[str], None]) -> None:
        for callback in callbacks:
            if isinstance(callback, type):
                raise ConfigError(
                    f"callbacks=[{callback.__name__}] is a class. Give an object of it: "
                    f"callbacks=[{callback.__name__}()]."
                )
            if not any(callable(getattr(callback, hook, None)) for hook in HOOKS):
                raise ConfigError(
                    f"callbacks=[{shorten(callback)}] has none of the hooks of a callback. Derive its class from "
                    "powertrain.tune.Callback."
                )
        self._callbacks, self._warn = tuple(callbacks), warn
        self._shown: set[tuple[int, str]] = set()
        self._is_closed = False
        #: Number of rounds of the sweep: a round is a report and its consequences.
        self._rounds = 0
        self._guard = threading.RLock()

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def call(self, hook: str, **info: Any) -> None:
        """Call a hook of every callback that has it. Ctrl-C and the forced end of a run propagate.

        Args:
            hook: One of :data:`HOOKS`.
            **info: Its arguments, without ``iteration``, which is counted here.
        """
        if hook not in HOOKS:
            raise ConfigError(f"{hook!r} is no hook of a callback. There are {', '.join(sorted(HOOKS))}.")
        with self._guard:  # checkpoints are committed on the threads of their runs
            self._rounds += hook == "on_step_begin"
            if hook not in ("setup", "on_experiment_end"):
                info = {"iteration": self._rounds, **info}
            for place in range(len(self._callbacks)):
                self._survive(place, hook, lambda function: function(**_accepted(function, info)))

    def get_state(self) -> dict[int, dict[str, Any]] | None:
        """Return the states of the callbacks by their position in the list; None if no callback has one."""
        states = {}
        for place in range(len(self._callbacks)):
            if state := self._survive(place, "get_state", lambda function: function()):
                states[place] = state
        return states or None

    def set_state(self, state: Mapping[int, dict[str, Any]]) -> None:
        """Restore the state of each callback that :meth:`get_state` returned for its position."""
        for place, own in state.items():
            if place < len(self._callbacks):
                self._survive(place, "set_state", functools.partial(_apply, state=own))

    def close(self) -> None:
        """Stop calling the callbacks."""
        self._is_closed = True

    def _survive(self, place: int, method: str, call: Callable[[Any], Any]) -> Any:
        """Return the return value of a method call; None if the method is missing or raises."""
        if self._is_closed:
            return None
        callback = self._callbacks[place]
        try:
            function = getattr(callback, method, None)
            return call(function) if function is not None else None
        except KeyboardInterrupt:
            raise
        except EndedAtOnce:
            self._is_closed = True  # this callback may be the one that hangs: it is not called again
            raise
        except BaseException as error:  # also SystemExit: a callback does not decide how the sweep ends
            self._report(place, method, error)
            return None

    def _report(self, place: int, method: str, error: BaseException) -> None:
        name = f"{type(self._callbacks[place]).__name__}.{method}"
        if (place, method) not in self._shown:
            self._shown.add((place, method))
            logger.warning("%s raised:\n%s", name, traceback.format_exc())
            self._warn(
                f"The callback {name} raised {describe_error(error)}. The sweep continues; this message is shown once."
            )


def _apply(function: Callable[..., Any], state: dict[str, Any]) -> None:
    function(state)


def _accepted(function: Callable[..., Any], info: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments that a hook accepts: without ``**info``, only those that it names."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return info
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return info
    return {name: value for name, value in info.items() if name in parameters}
