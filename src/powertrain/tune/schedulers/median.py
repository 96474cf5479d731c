"""Median stopping: a trial ends when its best result is below the median of the others' running averages."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

from powertrain.tune.schedulers.base import Action, Decision, TrialScheduler, check_numbers


class MedianStoppingRule(TrialScheduler):
    """The rule of Google Vizier (Golovin et al., 2017).

    Args:
        time_attr: The report entry that measures time.
        metric: The metric to compare; by default that of ``TuneConfig``.
        mode: "max" or "min".
        grace_period: No trial is stopped before this time.
        min_samples_required: Number of other trials that must have reached a time before a trial is judged at it.
        min_time_slice: A trial is judged at most once in this much of its time.
        hard_stop: True stops a trial for good; False pauses it, and it resumes when all trials have begun.

    Example::

        tune.TuneConfig(scheduler=MedianStoppingRule(grace_period=10), metric="loss", mode="min")
    """

    def __init__(
        self,
        time_attr: str = "time_total_s",
        metric: str | None = None,
        mode: str | None = None,
        grace_period: float = 60.0,
        min_samples_required: int = 3,
        min_time_slice: float = 0.0,
        hard_stop: bool = True,
    ) -> None:
        super().__init__(time_attr, metric, mode)
        check_numbers(
            self,
            grace_period=(grace_period, 0),
            min_samples_required=(min_samples_required, 1),
            min_time_slice=(min_time_slice, 0),
        )
        self._grace, self._least, self._slice = grace_period, int(min_samples_required), min_time_slice
        self._is_hard = bool(hard_stop)
        #: The (time, score) pairs of each trial, in order.
        self._results: dict[str, list[tuple[float, float]]] = {}
        self._judged_at: dict[str, float] = {}
        self._paused: list[str] = []
        #: Whether no more trials will be added that could use the slot of a paused one.
        self._is_complete = False

    def on_trial_add(self, trial: str, config: Mapping[str, Any]) -> None:
        """See :meth:`TrialScheduler.on_trial_add`."""
        self._results[trial] = []
        self._judged_at.pop(trial, None)

    def on_trial_result(self, trial: str, result: Mapping[str, Any]) -> list[Decision]:
        """See :meth:`TrialScheduler.on_trial_result`."""
        time, score = self.time_of(result), self.score(result)
        if time is None or score is None:
            return []
        own = self._results[trial]
        own.append((time, score))
        if time < self._grace or time - self._judged_at.get(trial, -self._slice) < self._slice:
            return []
        self._judged_at[trial] = time
        averages = [
            _average([value for at, value in results if at <= time])
            for other, results in self._results.items()
            if other != trial and results and results[0][0] <= time <= results[-1][0]
        ]
        if len(averages) < self._least or max(value for _, value in own) >= statistics.median(averages):
            return []
        if self._is_hard:
            return [Decision(trial, Action.STOP)]
        if self._is_complete:
            return []
        self._paused.append(trial)
        return [Decision(trial, Action.PAUSE)]

    def adopt(self, decision: Decision) -> None:
        """See :meth:`TrialScheduler.adopt`."""
        if decision.action is not Action.PAUSE and decision.trial in self._paused:
            self._paused.remove(decision.trial)

    def on_trials_complete(self) -> list[Decision]:
        """See :meth:`TrialScheduler.on_trials_complete`."""
        self._is_complete = True
        paused, self._paused = self._paused, []
        return [Decision(trial, Action.CONTINUE) for trial in paused]

    def on_stalled(self) -> list[Decision]:
        """See :meth:`TrialScheduler.on_stalled`: the searcher waits for a trial that is paused."""
        return [Decision(self._paused.pop(0), Action.CONTINUE)] if self._paused else []

    def on_trial_end(self, trial: str) -> list[Decision]:
        """See :meth:`TrialScheduler.on_trial_end`."""
        if trial in self._paused:
            self._paused.remove(trial)
        return []


def _average(scores: list[float]) -> float:
    return -math.inf if -math.inf in scores else statistics.fmean(scores)
