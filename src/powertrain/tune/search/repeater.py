"""Repeated trials of a configuration, for metrics that vary between runs."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from powertrain.errors import ConfigError
from powertrain.text.loggers import module_logger
from powertrain.tune.search.base import Searcher, SearcherWrapper, find_number
from powertrain.values.arguments import as_flag, as_whole

#: The configuration entry with the index of a repetition, from 0.
TRIAL_INDEX = "__trial_index__"

_logger = module_logger(__name__)


@dataclass
class _Group:
    """The trials of one configuration. The searcher knows only the first."""

    first: str
    config: dict[str, Any]
    trials: list[str] = field(default_factory=list)
    #: The last report of each ended trial; None if it failed or has none.
    results: dict[str, Mapping[str, Any] | None] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)


@dataclass
class _Groups:
    """All groups by trial, and the one that is being filled."""

    by_trial: dict[str, _Group] = field(default_factory=dict)
    open: _Group | None = None


class Repeater(SearcherWrapper):
    """Try each suggestion several times and report the mean of the metric to the searcher.

    ``num_samples`` counts the repetitions: with ``num_samples=15`` and ``repeat=5`` there are 3 suggestions. Trials
    that fail or report no metric are left out of the mean. Schedulers that stop trials early compare repetitions with
    each other, and are not recommended.

    Args:
        searcher: The searcher that suggests.
        repeat: Number of trials per suggestion.
        set_index: Whether the configuration has an entry ``TRIAL_INDEX``, from 0 to ``repeat - 1``, to seed from.

    Raises:
        ConfigError: An argument cannot be used.

    Example::

        tune.TuneConfig(search_alg=Repeater(OptunaSearch(), repeat=5), metric="loss", mode="min", num_samples=15)
    """

    _progress: _Groups

    def __init__(self, searcher: Searcher, repeat: int = 1, set_index: bool = True) -> None:
        super().__init__(searcher)
        self.repeat = as_whole(repeat, "Repeater(repeat=...)", 1, 2**31, ConfigError)
        self._has_index = as_flag(set_index, "Repeater(set_index=...)", ConfigError)
        self._progress = _Groups()

    def set_num_samples(self, num_samples: int) -> None:
        """Set ``num_samples``, which counts the repetitions; -1 for no limit."""
        if num_samples > 0 and num_samples % self.repeat:
            _logger.warning(
                "num_samples=%d is not a multiple of Repeater(repeat=%d): the searcher learns nothing from the last, "
                "incomplete group of trials.",
                num_samples,
                self.repeat,
            )
        self.searcher.set_num_samples(num_samples if num_samples < 0 else -(-num_samples // self.repeat))

    def total_trials(self) -> int | None:
        """See :meth:`Searcher.total_trials`."""
        suggestions = self.searcher.total_trials()
        return None if suggestions is None else suggestions * self.repeat

    def drawn_values(self, trial_id: str) -> dict[str, Any]:
        """See :meth:`Searcher.drawn_values`."""
        group = self._progress.by_trial.get(trial_id)
        if group is None or trial_id in group.results:
            return {}
        index = {TRIAL_INDEX: group.trials.index(trial_id)} if self._has_index else {}
        return {**self.searcher.drawn_values(group.first), **index}

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        """See :meth:`Searcher.suggest`."""
        groups = self._progress
        if groups.open is None:
            config = self.searcher.suggest(trial_id)
            if not isinstance(config, dict):
                return config
            groups.open = _Group(trial_id, copy.deepcopy(config))
        group = groups.by_trial[trial_id] = groups.open
        config = copy.deepcopy(group.config)
        if self._has_index:
            config[TRIAL_INDEX] = len(group.trials)
        group.trials.append(trial_id)
        if len(group.trials) == self.repeat:
            groups.open = None
        return config

    def adopt(self, trial_id: str, config: Mapping[str, Any]) -> bool:
        """See :meth:`Searcher.adopt`. The first trial determines the configuration of its group."""
        group = self._progress.by_trial.get(trial_id)
        if group is None or len(group.results) == self.repeat:  # not in a group, or the searcher has its mean
            return False
        group.results.pop(trial_id, None)
        group.failed.discard(trial_id)
        own = {key: value for key, value in config.items() if not (self._has_index and key == TRIAL_INDEX)}
        if own == group.config or trial_id != group.first:
            return own == group.config
        group.config = copy.deepcopy(own)
        return self.searcher.adopt(trial_id, own)

    def on_trial_complete(
        self, trial_id: str, result: Mapping[str, Any] | None = None, error: bool = False
    ) -> None:
        """Report the mean to the searcher, once every trial of the group has ended."""
        group = self._progress.by_trial.get(trial_id)
        if group is None or trial_id in group.results:
            return
        group.results[trial_id] = None if error else result
        if error:
            group.failed.add(trial_id)
        if len(group.results) == self.repeat:
            has_failed = len(group.failed) == self.repeat
            self.searcher.on_trial_complete(group.first, self._average(group), has_failed)

    def _average(self, group: _Group) -> dict[str, float] | None:
        """Return the mean of each metric over the trials that have it; None if there are none."""
        names = self.metric if isinstance(self.metric, list) else [self.metric] if self.metric else []
        means = {}
        for name in names:
            found = [find_number(result, name) for result in group.results.values()]
            values = [value for value in found if value is not None]
            if values:
                means[name] = sum(values) / len(values)
        return means or None

    def restart(self) -> None:
        """See :meth:`Searcher.restart`."""
        super().restart()
        self._progress = _Groups()
