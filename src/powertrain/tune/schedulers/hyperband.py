"""HyperBand: brackets of trials that are halved together, each trial waiting at a rung for the others."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from powertrain.errors import ConfigError
from powertrain.tune.schedulers.base import Action, Decision, TrialScheduler, check_numbers


@dataclass
class _Bracket:
    """Trials that are halved together.

    Attributes:
        size: Capacity in trials.
        milestone: The time at which its trials pause next.
        live: The running and paused trials, with their newest score; None before the first.
        paused: Trials that have reached the milestone.
        is_full: Whether no more trials join.
    """

    size: int
    milestone: float
    live: dict[str, float | None] = field(default_factory=dict)
    paused: set[str] = field(default_factory=set)
    is_full: bool = False


class HyperBandScheduler(TrialScheduler):
    """HyperBand (Li et al., 2018). Trials pause at rungs, so they need checkpoints to resume from.

    Args:
        time_attr: The report entry that measures time.
        metric: The metric to compare; by default that of ``TuneConfig``.
        mode: "max" or "min".
        max_t: Trials end at this time.
        reduction_factor: One of this many trials of a bracket passes each rung.
        stop_last_trials: Whether the trials that reach ``max_t`` end there.

    Example::

        tune.TuneConfig(scheduler=HyperBandScheduler(max_t=81), metric="loss", mode="min")
    """

    def __init__(
        self,
        time_attr: str = "training_iteration",
        metric: str | None = None,
        mode: str | None = None,
        max_t: float = 81,
        reduction_factor: float = 3,
        stop_last_trials: bool = True,
    ) -> None:
        super().__init__(time_attr, metric, mode)
        check_numbers(self, max_t=(max_t, 1), reduction_factor=(reduction_factor, 0))
        if reduction_factor <= 1:
            raise ConfigError(f"{type(self).__name__}: reduction_factor={reduction_factor} must be above 1.")
        self._max_t, self._factor, self._stops_at_end = max_t, reduction_factor, stop_last_trials
        self._largest = int(round(math.log(max_t) / math.log(reduction_factor), 9))
        self._brackets: list[_Bracket] = []
        self._bracket_of: dict[str, _Bracket] = {}

    def on_trial_add(self, trial: str, config: Mapping[str, Any]) -> None:
        """See :meth:`TrialScheduler.on_trial_add`."""
        if not self._brackets or self._brackets[-1].is_full:
            self._brackets.append(self._new_bracket(len(self._brackets)))
        bracket = self._bracket_of[trial] = self._brackets[-1]
        bracket.live[trial] = None
        bracket.is_full = len(bracket.live) >= bracket.size

    def on_trial_revive(self, trial: str, config: Mapping[str, Any], is_fresh: bool) -> None:
        """See :meth:`TrialScheduler.on_trial_revive`. The trial rejoins its bracket at the current rung."""
        self._bracket_of[trial].live[trial] = None

    def on_trials_complete(self) -> list[Decision]:
        """See :meth:`TrialScheduler.on_trials_complete`."""
        decisions = []
        for bracket in self._brackets:
            bracket.is_full = True
            decisions += self._halve(bracket)
        return decisions

    def on_trial_result(self, trial: str, result: Mapping[str, Any]) -> list[Decision]:
        """See :meth:`TrialScheduler.on_trial_result`."""
        time, score = self.time_of(result), self.score(result)
        bracket = self._bracket_of[trial]
        if time is None or trial not in bracket.live:
            return []
        bracket.live[trial] = score if score is not None else bracket.live[trial]
        if time >= self._max_t:
            return [Decision(trial, Action.STOP)] if self._stops_at_end else []
        if time < bracket.milestone:
            return []
        bracket.paused.add(trial)
        decisions = self._halve(bracket)
        return decisions or [Decision(trial, Action.PAUSE)]

    def on_trial_end(self, trial: str) -> list[Decision]:
        """See :meth:`TrialScheduler.on_trial_end`."""
        bracket = self._bracket_of[trial]
        bracket.live.pop(trial, None)
        bracket.paused.discard(trial)
        return self._halve(bracket)

    def _new_bracket(self, number: int) -> _Bracket:
        """Return the next bracket of the paper's cycle: the one with the most trials and the shortest rung first."""
        steps = self._largest - number % (self._largest + 1)
        size = math.ceil((self._largest + 1) / (steps + 1) * self._factor**steps)
        return _Bracket(size, max(1.0, self._max_t * self._factor**-steps))

    def _halve(self, bracket: _Bracket) -> list[Decision]:
        """Decide about all trials of a bracket, once all wait and no more will join."""
        if not bracket.is_full or not bracket.paused or bracket.paused != bracket.live.keys():
            return []
        ranked = sorted(bracket.live, key=lambda trial: _ascending(bracket.live[trial]), reverse=True)
        kept = ranked[: max(1, int(len(ranked) / self._factor))]
        bracket.milestone *= self._factor
        bracket.paused.clear()
        for trial in ranked[len(kept) :]:
            del bracket.live[trial]
        return [
            *(Decision(trial, Action.CONTINUE) for trial in kept),
            *(Decision(trial, Action.STOP) for trial in ranked[len(kept) :]),
        ]


def _ascending(score: float | None) -> float:
    return -math.inf if score is None else score
