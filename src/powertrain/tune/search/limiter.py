"""A limit on how many trials of a searcher run at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from powertrain.errors import ConfigError
from powertrain.tune.search.base import Searcher, SearcherWrapper
from powertrain.values.arguments import as_flag, as_whole


@dataclass
class _LiveTrials:
    """The trials that count towards the limit."""

    running: set[str] = field(default_factory=set)
    #: Ended trials of a batch, in the order of their ends, with the arguments for the searcher.
    ended: dict[str, tuple[Mapping[str, Any] | None, bool]] = field(default_factory=dict)


class ConcurrencyLimiter(SearcherWrapper):
    """Limit the number of concurrent trials to ``max_concurrent``.

    Searchers that learn suggest better the more results they know; fewer trials at a time means better suggestions.

    Args:
        searcher: The searcher that suggests.
        max_concurrent: Maximum number of its concurrent trials.
        batch: Whether the searcher receives results only when all running trials have ended.

    Raises:
        ConfigError: An argument cannot be used.

    Example::

        tune.TuneConfig(search_alg=ConcurrencyLimiter(OptunaSearch(), max_concurrent=2), num_samples=16)
    """

    _progress: _LiveTrials

    def __init__(self, searcher: Searcher, max_concurrent: int, batch: bool = False) -> None:
        super().__init__(searcher)
        self.max_concurrent = as_whole(
            max_concurrent, "ConcurrencyLimiter(max_concurrent=...)", 1, 2**31, ConfigError
        )
        self.batch = as_flag(batch, "ConcurrencyLimiter(batch=...)", ConfigError)
        self._is_limited_inside = searcher.set_max_concurrency(self.max_concurrent)
        self._progress = _LiveTrials()

    def set_max_concurrency(self, max_concurrent: int) -> bool:
        """See :meth:`Searcher.set_max_concurrency`."""
        self.max_concurrent = max_concurrent
        self._is_limited_inside = self.searcher.set_max_concurrency(max_concurrent)
        return True

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        """See :meth:`Searcher.suggest`."""
        live = self._progress
        is_full = len(live.running) + len(live.ended) >= self.max_concurrent
        if is_full and not self._is_limited_inside:
            return None
        config = self.searcher.suggest(trial_id)
        if isinstance(config, dict):
            live.running.add(trial_id)
        return config

    def adopt(self, trial_id: str, config: Mapping[str, Any]) -> bool:
        """See :meth:`Searcher.adopt`. The trial counts towards the limit."""
        is_taken = self.searcher.adopt(trial_id, config)
        if is_taken:
            self._progress.ended.pop(trial_id, None)
            self._progress.running.add(trial_id)
        return is_taken

    def on_trial_result(self, trial_id: str, result: Mapping[str, Any]) -> None:
        """See :meth:`Searcher.on_trial_result`."""
        self.searcher.on_trial_result(trial_id, result)

    def on_trial_complete(
        self, trial_id: str, result: Mapping[str, Any] | None = None, error: bool = False
    ) -> None:
        """See :meth:`Searcher.on_trial_complete`."""
        live = self._progress
        if trial_id not in live.running:
            return
        live.running.remove(trial_id)
        live.ended[trial_id] = (result, error)
        if self.batch and live.running and not self._is_limited_inside:
            return
        ended, live.ended = live.ended, {}
        for each, (its_result, has_failed) in ended.items():
            self.searcher.on_trial_complete(each, its_result, has_failed)

    def restart(self) -> None:
        """See :meth:`Searcher.restart`."""
        super().restart()
        self._progress = _LiveTrials()
