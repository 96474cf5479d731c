"""Decisions of a scheduler, and the interface that the sweep calls. Pure: no clock, no files, no processes.

A scheduler is a state machine. Its decisions follow from the calls that it has received, in order, and from nothing
else: after a restart the sweep repeats the calls of its journal and continues with the same state.
"""

from __future__ import annotations

import enum
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from powertrain.errors import ConfigError
from powertrain.tune.trial import flat_numbers
from powertrain.values.arguments import shorten


class Action(enum.Enum):
    """The action for a trial after a report."""

    CONTINUE = "continue"
    #: The trial ends: it has been good enough or bad enough.
    STOP = "stop"
    #: The trial saves a checkpoint and waits until the scheduler resumes or stops it.
    PAUSE = "pause"


@dataclass(frozen=True)
class Decision:
    """An action for a trial.

    Attributes:
        trial: The id of the trial.
        action: The action. A paused trial with CONTINUE resumes.
        source: A trial whose checkpoint this one continues from; "" for its own.
        config: The configuration that it continues with; None for its own.
    """

    trial: str
    action: Action
    source: str = ""
    config: Mapping[str, Any] | None = None


class TrialScheduler:
    """Base class of schedulers, which runs all trials to their end in order of creation.

    Args:
        time_attr: The report entry that measures time: "training_iteration", "time_total_s" or a metric.
        metric: The metric to compare; by default that of ``TuneConfig``.
        mode: "max" or "min".
    """

    #: Whether the scheduler needs a metric.
    needs_metric = True
    #: Whether trials pause so that all progress equally, and :meth:`choose` is also called for paused trials.
    takes_turns = False
    #: Set before a decision if trials take turns: whether other trials wait for a slot, and the reporting trial can
    #: yield its own without loss because the report includes a checkpoint.
    can_give_way = False
    #: Whether the sweep writes a file ``pbt_policy_<trial>.txt`` for each trial whose configuration changes.
    logs_policies = False

    def __init__(
        self, time_attr: str = "training_iteration", metric: str | None = None, mode: str | None = None
    ) -> None:
        if mode is not None and mode not in ("min", "max"):
            raise ConfigError(f"mode={shorten(mode)} is neither 'min' nor 'max'.")
        self.time_attr = time_attr
        self.metric = metric
        self.mode = mode

    def set_search_properties(self, metric: str | None, mode: str | None) -> None:
        """Set metric and mode from ``TuneConfig``.

        Raises:
            ConfigError: Both name one and they differ, or neither does.
        """
        for name, own, given in (("metric", self.metric, metric), ("mode", self.mode, mode)):
            if own is not None and given is not None and own != given:
                raise ConfigError(
                    f"TuneConfig({name}={given!r}) and {type(self).__name__}({name}={own!r}) differ. Give it once."
                )
        self.metric, self.mode = self.metric or metric, self.mode or mode
        if self.needs_metric and (self.metric is None or self.mode is None):
            raise ConfigError(
                f"{type(self).__name__} compares trials and needs to know by what. Set metric and mode in TuneConfig, "
                "such as metric='loss', mode='min'."
            )

    def score(self, result: Mapping[str, Any]) -> float | None:
        """Return the score of a report, greater for better; None if it has none. NaN is the worst."""
        value = number_of(result, self.metric or "")
        if value is None:
            return None
        return -math.inf if math.isnan(value) else value if self.mode == "max" else -value

    def time_of(self, result: Mapping[str, Any]) -> float | None:
        """Return the time of a report; None if it has none."""
        return number_of(result, self.time_attr)

    def fill_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the initial configuration of a new trial, given the suggested one."""
        return dict(config)

    def on_trial_add(self, trial: str, config: Mapping[str, Any]) -> None:
        """Add a new trial.

        Args:
            trial: The id of the trial.
            config: Its configuration.
        """

    def adopt(self, decision: Decision) -> None:
        """Adopt a decision of the journal after a restart: it stands, also where a replay has decided otherwise.

        Args:
            decision: The decision.
        """

    def on_trial_revive(self, trial: str, config: Mapping[str, Any], is_fresh: bool) -> None:
        """Add a failed trial again.

        Args:
            trial: The trial, which has ended before.
            config: Its configuration.
            is_fresh: Whether it starts over instead of resuming from its newest checkpoint.
        """
        self.on_trial_add(trial, config)

    def on_trials_complete(self) -> list[Decision]:
        """Return decisions about trials that wait for others, once no more trials will be added."""
        return []

    def on_trial_result(self, trial: str, result: Mapping[str, Any]) -> list[Decision]:
        """Decide after a report.

        Args:
            trial: The trial that reported.
            result: Its metrics, with "training_iteration" and "time_total_s".

        Returns:
            Decisions about this trial and others. Without a decision, this trial continues.
        """
        return []

    def on_stalled(self) -> list[Decision]:
        """Decide about waiting trials when nothing runs and no other trial can be added."""
        return []

    def on_trial_end(self, trial: str) -> list[Decision]:
        """Return decisions about other trials after one finished, failed or was stopped.

        Args:
            trial: The id of the trial that ended.
        """
        return []

    def choose(self, pending: Sequence[str]) -> str | None:
        """Return the next of the trials that wait for a place; None to wait.

        Args:
            pending: The ids of the trials that wait.
        """
        return pending[0] if pending else None


class FIFOScheduler(TrialScheduler):
    """Run every trial to its end, in order of creation."""

    needs_metric = False

    def __init__(self) -> None:
        super().__init__()


def find_other_signature(scheduler: TrialScheduler) -> str:
    """Return a scheduler method with an incompatible signature, with its arguments; "" for none."""
    for name, arguments in (("on_trial_add", 2), ("on_trial_result", 2), ("on_trial_end", 1)):
        method = getattr(scheduler, name)
        try:
            signature = inspect.signature(method)
            signature.bind(*range(arguments))
        except TypeError:
            return f"{type(scheduler).__name__}.{name}{signature}"
        except ValueError:  # some builtins have no signature; the call itself will fail
            continue
    return ""


def number_of(result: Mapping[str, Any], name: str) -> float | None:
    """Return a number of a report, "a/b" for a nested one; None if it is missing. NaN is returned unchanged."""
    value = result.get(name)
    if isinstance(value, (int, float)):
        return float(value)
    return dict(flat_numbers(result)).get(name)


def check_numbers(scheduler: object, **least: tuple[Any, float]) -> None:
    """Raise :class:`ConfigError` for the first named number that is not finite or below its minimum."""
    for name, (value, bound) in least.items():
        ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not ok or value < bound:
            raise ConfigError(
                f"{type(scheduler).__name__}({name}={shorten(value)}): must be a number of at least {bound:g}."
            )
