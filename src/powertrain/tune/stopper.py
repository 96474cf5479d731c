"""Early ends of trials, or of the whole sweep: ``RunConfig(stop=...)``.

A stopper is called once for each report, in the order in which the sweep receives them. After a restart the sweep
creates a new one and replays the recorded calls, so a stopper that depends only on its calls continues with the same
state. ``stop_all`` is called after each report, before the first trial and twice a second.
"""

from __future__ import annotations

import copy
import inspect
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from typing import Any

from powertrain.errors import ConfigError
from powertrain.run.stopping import reason_to_stop
from powertrain.tune.trial import flat_numbers
from powertrain.values.arguments import as_whole, shorten

#: Maximum count of an argument.
_MOST = 2**62


class Stopper:
    """Base class of stoppers. Subclasses define both methods.

    Example::

        class Enough(tune.Stopper):
            def __call__(self, trial_id, result):
                return result["accuracy"] > 0.99

            def stop_all(self):
                return False

        tune.Tuner(train, run_config=RunConfig(stop=Enough()))
    """

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Return whether a trial ends after a report.

        Args:
            trial_id: The trial that reported.
            result: Its metrics, with "training_iteration" and "time_total_s".
        """
        raise NotImplementedError

    def stop_all(self) -> bool:
        """Return whether all trials end and no more are started. Called after each report and twice a second."""
        raise NotImplementedError

    def forget(self, trial_id: str) -> None:
        """Forget the reports of a failed trial that begins anew.

        Args:
            trial_id: The trial.
        """


class NoopStopper(Stopper):
    """Stop nothing."""

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Return False."""
        return False

    def stop_all(self) -> bool:
        """Return False."""
        return False


class MaximumIterationStopper(NoopStopper):
    """Stop each trial after a number of reports.

    Args:
        max_iter: How many reports a trial makes.

    Example::

        tune.Tuner(train, run_config=RunConfig(stop=MaximumIterationStopper(100)))
    """

    def __init__(self, max_iter: int) -> None:
        self._max_iter = as_whole(max_iter, "MaximumIterationStopper(max_iter=...)", 1, _MOST, ConfigError)
        self._reports: dict[str, int] = {}

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Return whether this was the last report of the trial."""
        self._reports[trial_id] = self._reports.get(trial_id, 0) + 1
        return self._reports[trial_id] >= self._max_iter

    def forget(self, trial_id: str) -> None:
        """Count the reports of the trial from 0."""
        self._reports.pop(trial_id, None)


class FunctionStopper(NoopStopper):
    """Stop a trial if a function returns True.

    Args:
        function: Called with the id of a trial and its report.

    Example::

        RunConfig(stop=FunctionStopper(lambda trial_id, result: result["loss"] < 0.01))
    """

    def __init__(self, function: Callable[[str, dict[str, Any]], bool]) -> None:
        if not self.is_valid_function(function):
            raise ConfigError(
                f"FunctionStopper({shorten(function)}) needs a function of (trial_id, result) that returns whether the "
                "trial ends."
            )
        _check_takes_two(function)
        self._function = function

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Return the value of the function."""
        return bool(self._function(trial_id, result))

    @classmethod
    def is_valid_function(cls, fn: Any) -> bool:
        """Return whether a value can be used as the function.

        Raises:
            ConfigError: It has a ``stop_all`` of its own, which would never be called.
        """
        is_function = callable(fn) and not isinstance(fn, (Stopper, type))
        if is_function and hasattr(fn, "stop_all"):
            raise ConfigError(
                f"{shorten(fn)} has a method stop_all, but is no Stopper. Derive its class from "
                "powertrain.tune.Stopper."
            )
        return is_function


class BoundStopper(NoopStopper):
    """Stop a trial when one of its metrics reaches a bound: the dict form of ``stop``.

    Args:
        bounds: The bound of each metric; "a/b" means ``result["a"]["b"]``.
    """

    def __init__(self, bounds: Mapping[str, float]) -> None:
        example = 'Give bounds by metric, such as {"training_iteration": 100}.'
        if not bounds:
            raise ConfigError(f"stop={shorten(bounds)} has no entries. {example}")
        for metric, bound in bounds.items():
            if not isinstance(metric, str):
                raise ConfigError(
                    f"stop={shorten(bounds)}: the key {shorten(metric)} is no string. {example}"
                )
            if not isinstance(bound, (int, float)) or math.isnan(
                bound
            ):  # True is reached by a metric that is true
                raise ConfigError(f"stop={{{metric!r}: {shorten(bound)}}}: the bound is no number. {example}")
        self._bounds = dict(bounds)

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Return whether a metric has reached its bound."""
        return bool(self.reason(trial_id, result))

    def reason(self, trial_id: str, result: Mapping[str, Any]) -> str:
        """Return the metric that has reached its bound, as part of a sentence; "" for none."""
        return reason_to_stop(self._bounds, trial_id, 0, result, 0.0)


class TrialPlateauStopper(NoopStopper):
    """Stop a trial when its metric no longer changes.

    A report without the metric, or with NaN, keeps the trial running as long as it is among the last ``num_results``.

    Args:
        metric: The metric to watch.
        std: The trial ends when the standard deviation of its last reports is below this.
        num_results: Number of reports for the standard deviation.
        grace_period: Minimum number of reports of a trial.
        metric_threshold: A value that the metric must have reached first: at most this for mode "min", at least
            this for mode "max".
        mode: "min" or "max"; only needed with ``metric_threshold``.

    Example::

        RunConfig(stop=TrialPlateauStopper("loss", std=0.001, num_results=10))
    """

    def __init__(
        self,
        metric: str,
        std: float = 0.01,
        num_results: int = 4,
        grace_period: int = 4,
        metric_threshold: float | None = None,
        mode: str | None = None,
    ) -> None:
        name = type(self).__name__
        if metric_threshold is not None:
            _check_number(metric_threshold, f"{name}(metric_threshold=...)")
            _check_mode(mode, f"{name}(metric_threshold={metric_threshold!r}, mode=...)")
        self._metric, self._mode, self._threshold = metric, mode, metric_threshold
        self._std = _check_number(std, f"{name}(std=...)", at_least=0)
        self._num_results = as_whole(num_results, f"{name}(num_results=...)", 1, _MOST, ConfigError)
        self._grace_period = as_whole(grace_period, f"{name}(grace_period=...)", 0, _MOST, ConfigError)
        self._reports: dict[str, int] = {}
        self._recent: dict[str, deque[float]] = {}

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Return whether the trial has reached a plateau."""
        value = _number(result, self._metric)
        recent = self._recent.setdefault(trial_id, deque(maxlen=self._num_results))
        recent.append(value)
        self._reports[trial_id] = self._reports.get(trial_id, 0) + 1
        if self._reports[trial_id] < self._grace_period or len(recent) < self._num_results:
            return False
        return self._is_past_threshold(value) and _deviation(recent) < self._std

    def forget(self, trial_id: str) -> None:
        """Drop the earlier reports of the trial."""
        self._reports.pop(trial_id, None)
        self._recent.pop(trial_id, None)

    def _is_past_threshold(self, value: float) -> bool:
        if self._threshold is None:
            return True
        return value <= self._threshold if self._mode == "min" else value >= self._threshold


class ExperimentPlateauStopper(Stopper):
    """Stop the whole sweep when its best results no longer change.

    Reports without the metric, or with NaN, are skipped.

    Args:
        metric: The metric to watch.
        std: The best results are on a plateau when their standard deviation is at most this.
        top: Number of best results to compare.
        mode: "min" or "max".
        patience: How many reports the plateau must last.

    Example::

        RunConfig(stop=ExperimentPlateauStopper("loss", std=0.001, mode="min"))
    """

    def __init__(
        self, metric: str, std: float = 0.001, top: int = 10, mode: str = "min", patience: int = 0
    ) -> None:
        name = type(self).__name__
        self._metric, self._mode = metric, _check_mode(mode, f"{name}(mode=...)")
        self._std = _check_number(std, f"{name}(std=...)", at_least=0)
        if self._std == 0:
            raise ConfigError(f"{name}(std={std!r}) must be greater than 0.")
        self._top = as_whole(top, f"{name}(top=...)", 2, _MOST, ConfigError)
        self._patience = as_whole(patience, f"{name}(patience=...)", 0, _MOST, ConfigError)
        self._best: list[float] = []
        self._lasted = 0

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Return whether the sweep ends."""
        value = _number(result, self._metric)
        if math.isnan(value):
            return self.stop_all()
        self._best = sorted([*self._best, value], reverse=self._mode == "max")[: self._top]
        self._lasted = self._lasted + 1 if self.has_plateaued() else 0
        return self.stop_all()

    def has_plateaued(self) -> bool:
        """Return whether the best results are close to each other."""
        return len(self._best) == self._top and _deviation(self._best) <= self._std

    def stop_all(self) -> bool:
        """Return whether the plateau has lasted long enough."""
        return self.has_plateaued() and self._lasted >= self._patience


class TimeoutStopper(NoopStopper):
    """Stop the whole sweep after a time, counted from the first call of :meth:`stop_all`: the start of the sweep.

    Args:
        timeout: Seconds, or a ``datetime.timedelta``.
        clock: Returns the time in seconds.

    Example::

        RunConfig(stop=TimeoutStopper(datetime.timedelta(hours=2)))
    """

    def __init__(self, timeout: float | timedelta, clock: Callable[[], float] = time.monotonic) -> None:
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        self._timeout = _check_number(seconds, "TimeoutStopper(timeout=...)", at_least=0, is_finite=False)
        self._clock = clock
        self._spent = 0.0
        self._last_look: float | None = None

    @property
    def spent(self) -> float:
        """Seconds counted towards the timeout so far."""
        return self._spent

    def add_spent(self, seconds: float) -> None:
        """Add time spent in an earlier process of the same sweep."""
        self._spent += _check_number(seconds, "TimeoutStopper.add_spent(seconds=...)", at_least=0)

    def stop_all(self) -> bool:
        """Return whether the timeout has expired."""
        now = self._clock()
        if self._last_look is not None:
            self._spent += max(0.0, now - self._last_look)
        self._last_look = now
        return self._spent >= self._timeout

    def __getstate__(self) -> dict[str, Any]:
        # The clock of another process may have another epoch.
        return {**vars(self), "_last_look": None}


class CombinedStopper(Stopper):
    """Stop if one of several stoppers does. Each receives every report.

    Args:
        *stoppers: The stoppers.

    Example::

        RunConfig(stop=CombinedStopper(MaximumIterationStopper(100), TimeoutStopper(3600)))
    """

    def __init__(self, *stoppers: Stopper) -> None:
        for stopper in stoppers:
            if not isinstance(stopper, Stopper):
                raise ConfigError(f"CombinedStopper({shorten(stopper)}, ...) takes objects of Stopper only.")
        self._stoppers = stoppers

    @property
    def stoppers(self) -> tuple[Stopper, ...]:
        """The stoppers that are combined."""
        return self._stoppers

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Return whether one of them stops the trial."""
        # Call all of them: those after the first match need the report, too.
        answers = [stopper(trial_id, result) for stopper in self._stoppers]
        return any(answers)

    def stop_all(self) -> bool:
        """Return whether one of them stops the sweep."""
        answers = [stopper.stop_all() for stopper in self._stoppers]
        return any(answers)

    def forget(self, trial_id: str) -> None:
        """Forget the trial in each stopper."""
        for stopper in self._stoppers:
            stopper.forget(trial_id)


def as_stopper(stop: Any) -> Stopper:
    """Convert the value of ``RunConfig(stop=...)`` to one stopper.

    Args:
        stop: None, a dict of bounds by metric, a function of (trial_id, result), a :class:`Stopper`, or a list of them.

    Raises:
        ConfigError: It is none of these.
    """
    if stop is None:
        return NoopStopper()
    if isinstance(stop, Stopper):
        return stop
    if isinstance(stop, Mapping):
        return BoundStopper(stop)
    if isinstance(stop, (list, tuple)) and stop:
        return CombinedStopper(*(as_stopper(one) for one in stop))
    if FunctionStopper.is_valid_function(stop):
        return FunctionStopper(stop)
    raise ConfigError(
        f"stop={shorten(stop)} cannot say when a trial ends. Give a dict such as {{'training_iteration': 100}}, a "
        "function of (trial_id, result), a Stopper object, or a list of them."
    )


def copy_stopper(stop: Any) -> Any:
    """Return a copy of the value of ``RunConfig(stop=...)``, so that the next sweep finds it unchanged.

    An object that cannot be copied, such as one with a lock, is returned itself.
    """
    try:
        return copy.deepcopy(stop)
    except Exception:
        return stop


def bounds_of(stopper: Stopper) -> list[str]:
    """Return the metrics with bounds in these stoppers."""
    if isinstance(stopper, CombinedStopper):
        return [name for one in stopper.stoppers for name in bounds_of(one)]
    return list(stopper._bounds) if isinstance(stopper, BoundStopper) else []


def add_spent(stopper: Stopper, seconds: float) -> None:
    """Add seconds spent by earlier drivers to the timeouts among these stoppers."""
    if isinstance(stopper, TimeoutStopper):
        stopper.add_spent(seconds)
    elif isinstance(stopper, CombinedStopper):
        for one in stopper.stoppers:
            add_spent(one, seconds)


def _number(result: Mapping[str, Any], metric: str) -> float:
    """Return a metric of a report, also a nested one; NaN if it is missing."""
    return dict(flat_numbers(result)).get(metric, math.nan)


def _deviation(values: Collection[float]) -> float:
    """Return the standard deviation of a population; NaN if a value is not finite."""
    if not all(map(math.isfinite, values)):
        return math.nan
    try:
        return statistics.pstdev(values)
    except OverflowError:  # values so far apart that their squares overflow
        return math.inf


def _check_takes_two(function: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # some builtins have no signature; the call itself will fail
    try:
        signature.bind("trial_id", {})
    except TypeError as error:
        raise ConfigError(
            f"The stop function {shorten(function)} takes {signature}, but is called with the id of a trial and its "
            "report. Define it as (trial_id, result)."
        ) from error


def _check_mode(mode: str | None, given_as: str) -> str:
    if mode not in ("min", "max"):
        raise ConfigError(f"{given_as} was given {shorten(mode)}, which is neither 'min' nor 'max'.")
    return mode


def _check_number(value: Any, given_as: str, at_least: float = -math.inf, is_finite: bool = True) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and value >= at_least and (math.isfinite(value) or not is_finite):
        return float(value)
    bound = "" if at_least == -math.inf else f" of at least {at_least:g}"
    raise ConfigError(f"{given_as} was given {shorten(value)}. Give a number{bound}.")
