"""Interface of search algorithms, which suggest the next configuration.

A searcher is called by the sweep alone, in the order of its journal. After a restart the sweep creates a new searcher
and replays the calls of the journal, so a searcher that draws from a seeded generator continues with the same state.
Pickling one of Powertrain's searchers keeps its arguments, seed and space, and leaves its trials out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from powertrain.errors import ConfigError
from powertrain.tune.space import Path, is_grid, show_path, walk
from powertrain.values.arguments import plain_scalar, shorten

#: Return value of ``suggest`` when there are no more suggestions.
FINISHED = "FINISHED"
#: A metric or a mode: a list for several objectives.
Objective = str | list[str] | None


class Searcher:
    """Base class of searchers. Subclasses define :meth:`suggest` and :meth:`on_trial_complete`.

    Args:
        metric: The metric to improve; a list for several objectives. By default that of ``TuneConfig``.
        mode: "max" or "min"; a list for several objectives.

    Raises:
        ConfigError: ``mode`` is neither, or there are not as many modes as metrics.

    Example::

        class Halving(tune.search.Searcher):
            def suggest(self, trial_id):
                self.lr = getattr(self, "lr", 1.0) / 2
                return {"lr": self.lr}

            def on_trial_complete(self, trial_id, result=None, error=False):
                pass
    """

    FINISHED = FINISHED
    #: Whether the searcher cannot suggest without a metric.
    needs_metric = False
    #: Attributes that the sweep's calls change. Pickling omits them, and :meth:`restart` creates them again.
    _transient: tuple[str, ...] = ()
    # Class defaults, for user subclasses that do not call __init__.
    _metric: Objective = None
    _mode: Objective = None

    def __init__(self, metric: Objective = None, mode: Objective = None) -> None:
        _check_objectives(type(self).__name__, metric, mode)
        self._metric, self._mode = metric, mode

    @property
    def metric(self) -> Objective:
        """The metric to improve."""
        return self._metric

    @property
    def mode(self) -> Objective:
        """Whether the metric is to be large ("max") or small ("min")."""
        return self._mode

    def set_search_properties(
        self, metric: Objective, mode: Objective, config: Mapping[str, Any], **spec: Any
    ) -> bool:
        """Set metric, mode and space from the Tuner, if the searcher was created without them.

        Args:
            metric: The metric of ``TuneConfig``.
            mode: The mode of ``TuneConfig``.
            config: The ``param_space``.
            **spec: Accepted for compatibility; no effect.

        Returns:
            False if the searcher has a space already and cannot accept another.

        Raises:
            ConfigError: Both name a metric or mode and they differ, or neither does and the searcher needs one.
        """
        for name, own, given in (("metric", self.metric, metric), ("mode", self.mode, mode)):
            if own is not None and given is not None and own != given:
                raise ConfigError(
                    f"TuneConfig({name}={given!r}) and {type(self).__name__}({name}={own!r}) differ. Give it once."
                )
        metric, mode = self._metric or metric, self._mode or mode
        _check_objectives("TuneConfig", metric, mode)
        if self.needs_metric and not (metric and mode):
            raise ConfigError(
                f"{type(self).__name__} needs to know what to improve, and has metric={shorten(metric)} and "
                f"mode={shorten(mode)}. Set both in TuneConfig, such as metric='loss', mode='min'."
            )
        self._metric, self._mode = metric, mode
        self.restart()
        return True

    def set_num_samples(self, num_samples: int) -> None:
        """Set ``num_samples`` from ``TuneConfig``; -1 for no limit. Has no effect if :meth:`total_trials` is None."""

    def set_max_concurrency(self, max_concurrent: int) -> bool:
        """Set the limit of :class:`ConcurrencyLimiter`; return whether the searcher enforces it by itself."""
        return False

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        """Suggest the configuration of a new trial.

        Args:
            trial_id: The id of the trial.

        Returns:
            The configuration; None to be called again later, FINISHED for no more.
        """
        raise NotImplementedError

    def on_trial_result(self, trial_id: str, result: Mapping[str, Any]) -> None:
        """Handle a report.

        Args:
            trial_id: The trial that reported.
            result: Its metrics.
        """

    def on_trial_complete(
        self, trial_id: str, result: Mapping[str, Any] | None = None, error: bool = False
    ) -> None:
        """Handle the end of a trial.

        Args:
            trial_id: The trial.
            result: Its last report; None without one.
            error: Whether it failed.
        """

    def adopt(self, trial_id: str, config: Mapping[str, Any]) -> bool:
        """Adopt the configuration of a trial that was not suggested like this, or that runs again after its end.

        Args:
            trial_id: A trial of the sweep. Its end is passed to :meth:`on_trial_complete`, as for any other.
            config: Its configuration, in place of the suggested one.

        Returns:
            False where the searcher cannot: the sweep then marks its suggestion as failed, and passes on no result of
            it.
        """
        return False

    def add_evaluated_point(
        self,
        parameters: Mapping[str, Any],
        value: float | Sequence[float],
        error: bool = False,
        pruned: bool = False,
        intermediate_values: Sequence[float] | None = None,
    ) -> None:
        """Add a configuration that was tried elsewhere.

        Args:
            parameters: The configuration.
            value: Its metric; one for each objective.
            error: Whether it failed.
            pruned: Whether it was stopped early.
            intermediate_values: The metric after each iteration.

        Raises:
            ConfigError: The searcher does not learn from results, or the configuration is not one of its space.
        """
        raise ConfigError(
            f"{type(self).__name__} does not learn from results and cannot take an evaluated point. Use OptunaSearch."
        )

    def drawn_values(self, trial_id: str) -> dict[str, Any]:
        """Return the values that were drawn or chosen for a trial that has not ended, by path: {"a/b": 0.1}."""
        return {}

    def total_trials(self) -> int | None:
        """Return the total number of trials, if known."""
        return None

    def restart(self) -> None:
        """Forget every trial: return to the state before the first suggestion."""

    def save(self, checkpoint_path: str) -> None:
        """Raise :class:`ConfigError`: the journal of the sweep has the results that a searcher learns from."""
        raise ConfigError(
            f"{type(self).__name__}.save({checkpoint_path!r}) is not needed: the sweep's journal has what was learned, "
            "and Tuner.restore(path) continues with it. For another sweep, use OptunaSearch(storage=...) in both."
        )

    def restore(self, checkpoint_path: str) -> None:
        """Raise :class:`ConfigError`: see :meth:`save`."""
        raise ConfigError(
            f"{type(self).__name__}.restore({checkpoint_path!r}) has nothing to read: use Tuner.restore(path) to "
            "continue a sweep, and OptunaSearch(storage=...) to learn from an earlier one."
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in self._transient}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.restart()


class SearcherWrapper(Searcher):
    """A searcher that forwards the suggestions of another. Metric, mode and space are those of the other.

    Args:
        searcher: The searcher that suggests.

    Raises:
        ConfigError: ``searcher`` is not a searcher.
    """

    _transient = ("_progress",)

    def __init__(self, searcher: Searcher) -> None:
        if not isinstance(searcher, Searcher):
            raise ConfigError(
                f"{type(self).__name__}(searcher={shorten(searcher)}) is not a Searcher. Give an instance, such as "
                "OptunaSearch()."
            )
        self.searcher = searcher
        super().__init__()

    @property
    def metric(self) -> Objective:
        """The metric of the wrapped searcher."""
        return self.searcher.metric

    @property
    def mode(self) -> Objective:
        """The mode of the wrapped searcher."""
        return self.searcher.mode

    def set_search_properties(
        self, metric: Objective, mode: Objective, config: Mapping[str, Any], **spec: Any
    ) -> bool:
        """See :meth:`Searcher.set_search_properties`."""
        is_taken = self.searcher.set_search_properties(metric, mode, config, **spec)
        self.restart()
        return is_taken

    def set_num_samples(self, num_samples: int) -> None:
        """See :meth:`Searcher.set_num_samples`."""
        self.searcher.set_num_samples(num_samples)

    def add_evaluated_point(
        self,
        parameters: Mapping[str, Any],
        value: float | Sequence[float],
        error: bool = False,
        pruned: bool = False,
        intermediate_values: Sequence[float] | None = None,
    ) -> None:
        """See :meth:`Searcher.add_evaluated_point`."""
        self.searcher.add_evaluated_point(parameters, value, error, pruned, intermediate_values)

    def drawn_values(self, trial_id: str) -> dict[str, Any]:
        """See :meth:`Searcher.drawn_values`."""
        return self.searcher.drawn_values(trial_id)

    def total_trials(self) -> int | None:
        """See :meth:`Searcher.total_trials`."""
        return self.searcher.total_trials()

    def restart(self) -> None:
        """See :meth:`Searcher.restart`."""
        self.searcher.restart()


def find_number(result: Mapping[str, Any] | None, name: str) -> float | None:
    """Return a metric of a report, "a/b" for a nested one; True is 1. None if missing, NaN or not a number."""
    value: Any = result
    if result is not None and name in result:
        value = result[name]
    else:
        for key in name.split("/"):
            value = value.get(key) if isinstance(value, Mapping) else None
    value = plain_scalar(value)
    if not isinstance(value, (int, float)) or math.isnan(value):
        return None
    return float(value)


def pick_values(config: Mapping[str, Any], paths: Iterable[Path]) -> dict[str, Any]:
    """Return the entries that a configuration has, by path: {"a/b": 0.1}."""
    picked = {}
    for path in paths:
        value: Any = config
        for key in path:
            if not isinstance(value, Mapping) or key not in value:
                break
            value = value[key]
        else:
            picked["/".join(path)] = value
    return picked


def check_points(points: Any, given_as: str) -> list[dict[str, Any]]:
    """Return the points to evaluate first; raise :class:`ConfigError` unless they are a list of dicts."""
    if points is None:
        return []
    if not isinstance(points, (list, tuple)) or not all(isinstance(point, Mapping) for point in points):
        raise ConfigError(
            f"{given_as} was given {shorten(points)}, which is not a list of dicts. Write [{{'lr': 0.1}}]."
        )
    return [dict(point) for point in points]


def check_point_in_space(point: Mapping[str, Any], space: Mapping[str, Any], given_as: str) -> None:
    """Raise a :class:`ConfigError` that names the first entry of a point that the space does not have."""
    for path, _ in walk(point):
        entry: Any = space
        for key in path:
            if not isinstance(entry, Mapping) or is_grid(entry):
                break  # below an entry with dicts as values
            if key not in entry:
                raise ConfigError(
                    f"{given_as} has the entry {show_path(path)}, which the search space does not have. Add it to "
                    f"param_space, or use one of {', '.join(show_path(known) for known, _ in walk(space)) or 'none'}."
                )
            entry = entry[key]


def _check_objectives(owner: str, metric: Objective, mode: Objective) -> None:
    modes = mode if isinstance(mode, list) else [] if mode is None else [mode]
    for each in modes:
        if each not in ("min", "max"):
            raise ConfigError(f"{owner}(mode={shorten(mode)}): {shorten(each)} is neither 'min' nor 'max'.")
    if metric is None or mode is None:
        return
    if isinstance(metric, list) != isinstance(mode, list) or (
        isinstance(metric, list) and (len(metric) != len(modes) or not metric)
    ):
        raise ConfigError(
            f"{owner}(metric={shorten(metric)}, mode={shorten(mode)}): give one mode for each metric, both as a "
            "string or both as lists of the same length."
        )
