"""Asynchronous successive halving: a trial continues past a rung if it is among the best that have reached it."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

from powertrain.errors import ConfigError
from powertrain.tune.schedulers.base import Action, Decision, TrialScheduler, check_numbers


class AsyncHyperBandScheduler(TrialScheduler):
    """ASHA (Li et al., "A System for Massively Parallel Hyperparameter Tuning"), in its form that stops trials.

    Rungs are at ``grace_period * reduction_factor ** k``. A trial that reaches a rung is compared with all trials that
    have reached it before; it continues if it is among the best ``1 / reduction_factor`` of them, itself included, and
    at least one always continues. No trial waits for another.

    Args:
        time_attr: The report entry that measures time.
        metric: The metric to compare; by default that of ``TuneConfig``.
        mode: "max" or "min".
        max_t: Trials end at this time.
        grace_period: The first rung: no trial is stopped before it.
        reduction_factor: Number of trials that reach a rung for each that passes it.
        brackets: How many ladders of rungs, each beginning a rung later than the one before. Trials are dealt out to
            them at random, more to those with more rungs.
        stop_last_trials: Whether trials end at ``max_t``. False leaves that to them.

    Example::

        tune.TuneConfig(scheduler=ASHAScheduler(max_t=100, grace_period=5), metric="loss", mode="min")
    """

    def __init__(
        self,
        time_attr: str = "training_iteration",
        metric: str | None = None,
        mode: str | None = None,
        max_t: float = 100,
        grace_period: float = 1,
        reduction_factor: float = 4,
        brackets: int = 1,
        stop_last_trials: bool = True,
    ) -> None:
        super().__init__(time_attr, metric, mode)
        check_numbers(
            self, max_t=(max_t, 0), grace_period=(grace_period, 0), reduction_factor=(reduction_factor, 0)
        )
        check_numbers(self, brackets=(brackets, 1))
        if not 0 < grace_period <= max_t:
            raise ConfigError(
                f"{type(self).__name__}: grace_period={grace_period} must be above 0 and at most max_t={max_t}."
            )
        if reduction_factor <= 1:
            raise ConfigError(f"{type(self).__name__}: reduction_factor={reduction_factor} must be above 1.")
        self._max_t, self._factor = max_t, reduction_factor
        self._stops_at_end = stop_last_trials
        ladders = [
            milestones(grace_period, max_t, reduction_factor, number) for number in range(int(brackets))
        ]
        self._brackets = [_Bracket(ladder, reduction_factor) for ladder in ladders]
        self._bracket_of: dict[str, _Bracket] = {}

    def on_trial_add(self, trial: str, config: Mapping[str, Any]) -> None:
        """See :meth:`TrialScheduler.on_trial_add`."""
        weights = [math.exp(len(bracket.rungs)) for bracket in self._brackets]
        chance = random.Random(f"bracket {len(self._bracket_of)}")  # the same after a restart
        self._bracket_of[trial] = chance.choices(self._brackets, weights)[0]

    def on_trial_revive(self, trial: str, config: Mapping[str, Any], is_fresh: bool) -> None:
        """See :meth:`TrialScheduler.on_trial_revive`. The bracket is kept; a restarted trial has reached no rung."""
        for _, scores in self._bracket_of[trial].rungs:
            if is_fresh:
                scores.pop(trial, None)

    def on_trial_result(self, trial: str, result: Mapping[str, Any]) -> list[Decision]:
        """See :meth:`TrialScheduler.on_trial_result`."""
        time, score = self.time_of(result), self.score(result)
        if time is None:
            return []
        passes = score is None or self._bracket_of[trial].reach(trial, time, score)
        if not passes or (self._stops_at_end and time >= self._max_t):
            return [Decision(trial, Action.STOP)]
        return []


ASHAScheduler = AsyncHyperBandScheduler


def milestones(grace_period: float, max_t: float, factor: float, bracket: int = 0) -> list[float]:
    """Return the times of a bracket's rungs in ascending order. Rungs at or beyond ``max_t`` decide nothing."""
    found = []
    time = grace_period * factor**bracket
    while time < max_t:
        found.append(time)
        time *= factor
    return found


class _Bracket:
    """A ladder of rungs with the scores of the trials that have reached each."""

    def __init__(self, times: list[float], factor: float) -> None:
        self.rungs: list[tuple[float, dict[str, float]]] = [(time, {}) for time in times]
        self._factor = factor

    def reach(self, trial: str, time: float, score: float) -> bool:
        """Record the highest rung that a trial has newly reached; return whether it may continue."""
        for milestone, scores in reversed(self.rungs):
            if time < milestone or trial in scores:
                continue
            scores[trial] = score
            return score >= cutoff(scores.values(), self._factor)
        return True


def cutoff(scores: Any, factor: float) -> float:
    """Return the least score among the best ``1 / factor`` of some scores, at least one."""
    ordered = sorted(scores, reverse=True)
    return float(ordered[max(1, int(len(ordered) / factor)) - 1])
