"""Random draws and grids: configurations that do not depend on results."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from powertrain.errors import ConfigError
from powertrain.tune.search.base import (
    FINISHED,
    Objective,
    Searcher,
    check_point_in_space,
    check_points,
    pick_values,
)
from powertrain.tune.space import (
    Domain,
    Function,
    Path,
    check_space,
    find_domains,
    grid_points,
    is_grid,
    resolve,
    walk,
    with_values,
)
from powertrain.values.arguments import as_flag, as_whole, shorten


@dataclass
class _Draws:
    """The progress of a generator."""

    configs: Iterator[dict[str, Any]]
    #: The draws of the trials that have not ended.
    live: dict[str, dict[str, Any]] = field(default_factory=dict)


class BasicVariantGenerator(Searcher):
    """Draw configurations at random and try every combination of the grids. The default.

    With ``num_samples=4`` and a grid of 3 values there are 12 trials: the whole grid 4 times, the distributions drawn
    again for each trial. The same seed gives the same configurations in the same order.

    Args:
        points_to_evaluate: Configurations to try first. Entries that a point leaves out are drawn; grids that it
            leaves out are tried whole. Each point counts as one of ``num_samples``.
        max_concurrent: Maximum number of concurrent trials; 0 for no limit.
        constant_grid_search: Whether distributions are drawn once for all combinations of a grid instead of again for
            each. Functions of ``sample_from`` that read a grid are still called for each.
        random_state: A seed or a generator of numpy or ``random`` to take one from. By default it is taken from
            numpy's global generator, so that ``numpy.random.seed`` has its effect.

    Raises:
        ConfigError: An argument cannot be used.

    Example::

        tune.TuneConfig(search_alg=BasicVariantGenerator(points_to_evaluate=[{"lr": 1e-3}]), num_samples=16)
    """

    _transient = ("_progress",)
    _progress: _Draws

    def __init__(
        self,
        points_to_evaluate: Sequence[Mapping[str, Any]] | None = None,
        max_concurrent: int = 0,
        constant_grid_search: bool = False,
        random_state: Any = None,
    ) -> None:
        super().__init__()
        self._points = check_points(points_to_evaluate, "BasicVariantGenerator(points_to_evaluate=...)")
        self.max_concurrent = as_whole(
            max_concurrent, "BasicVariantGenerator(max_concurrent=...)", 0, 2**31, ConfigError
        )
        self._is_constant = as_flag(
            constant_grid_search, "BasicVariantGenerator(constant_grid_search=...)", ConfigError
        )
        #: The seed of all draws.
        self.seed = make_seed(random_state)
        self._has_given_seed = random_state is not None
        self._space: Mapping[str, Any] = {}
        self._drawn_paths: list[Path] = []
        self._num_samples = 1
        self.restart()

    def set_search_properties(
        self, metric: Objective, mode: Objective, config: Mapping[str, Any], **spec: Any
    ) -> bool:
        """See :meth:`Searcher.set_search_properties`."""
        check_space(config)
        for number, point in enumerate(self._points):
            check_point_in_space(point, config, f"points_to_evaluate[{number}]")
        self._space = config
        self._drawn_paths = [
            path for path, entry in walk(config) if isinstance(entry, Domain) or is_grid(entry)
        ]
        return super().set_search_properties(metric, mode, config)

    def set_num_samples(self, num_samples: int) -> None:
        """Set the number of repetitions of the whole grid; -1 for no limit."""
        self._num_samples = as_whole(num_samples, "TuneConfig(num_samples=...)", -1, 2**62, ConfigError)
        self.restart()

    def total_trials(self) -> int | None:
        """Return the number of trials; None if unlimited."""
        if self._num_samples < 0:
            return None
        of_points = sum(len(grid_points(with_values(self._space, point))) for point in self._points)
        return of_points + max(0, self._num_samples - len(self._points)) * len(grid_points(self._space))

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        """See :meth:`Searcher.suggest`."""
        draws = self._progress
        if self.max_concurrent and len(draws.live) >= self.max_concurrent:
            return None
        config = next(draws.configs, None)
        if config is None:
            return FINISHED
        draws.live[trial_id] = pick_values(config, self._drawn_paths)
        return config

    def adopt(self, trial_id: str, config: Mapping[str, Any]) -> bool:
        """See :meth:`Searcher.adopt`."""
        self._progress.live[trial_id] = pick_values(config, self._drawn_paths)
        return True

    def on_trial_complete(
        self, trial_id: str, result: Mapping[str, Any] | None = None, error: bool = False
    ) -> None:
        """See :meth:`Searcher.on_trial_complete`."""
        self._progress.live.pop(trial_id, None)

    def drawn_values(self, trial_id: str) -> dict[str, Any]:
        """See :meth:`Searcher.drawn_values`."""
        return self._progress.live.get(trial_id, {})

    def restart(self) -> None:
        """See :meth:`Searcher.restart`."""
        self._progress = _Draws(self._generate())

    def _generate(self) -> Iterator[dict[str, Any]]:
        rng = random.Random(self.seed)
        for point in self._points:
            yield from self._generate_sample(with_values(self._space, point), rng)
        left = self._num_samples - len(self._points)
        while self._num_samples < 0 or left > 0:
            yield from self._generate_sample(self._space, rng)
            left -= 1

    def _generate_sample(self, space: Mapping[str, Any], rng: random.Random) -> Iterator[dict[str, Any]]:
        constants = _draw_constants(space, rng) if self._is_constant else {}
        for combination in grid_points(space):
            yield resolve(space, rng, {**constants, **combination})


def _draw_constants(space: Mapping[str, Any], rng: random.Random) -> dict[Path, Any]:
    """Draw every distribution, and call every function that reads no grid."""
    domains = find_domains(space)
    drawn = {path: domain.sample(rng) for path, domain in domains.items() if not isinstance(domain, Function)}
    waiting = {path: domain for path, domain in domains.items() if isinstance(domain, Function)}
    has_changed = True
    while waiting and has_changed:
        has_changed = False
        for path, function in list(waiting.items()):
            try:
                value = function.sample(rng, _without_unknown(space, drawn))
            except (
                Exception
            ):  # it depends on a grid or another function; a real failure is raised again in resolve
                continue
            drawn[path] = value.sample(rng) if isinstance(value, Domain) else value
            del waiting[path]
            has_changed = True
    return drawn


def _without_unknown(space: Mapping[str, Any], drawn: Mapping[Path, Any]) -> dict[str, Any]:
    """Return the known part of the configuration: without grids, and without functions that have not been called."""
    config: dict[str, Any] = {}
    for path, value in walk(space):
        if path not in drawn and (isinstance(value, Domain) or is_grid(value)):
            continue
        level = config
        for key in path[:-1]:
            level = level.setdefault(key, {})
        level[path[-1]] = drawn.get(path, value)
    return config


def make_seed(random_state: Any) -> int:
    """Return the seed for a seed or generator.

    Args:
        random_state: A whole number, a ``random.Random``, a ``RandomState`` or ``Generator`` of numpy, of which one
            number is drawn, or None for numpy's global generator.

    Raises:
        ConfigError: It is none of them.
    """
    import numpy as np

    if random_state is None:
        return int(np.random.randint(2**63 - 1, dtype=np.int64))
    if isinstance(random_state, random.Random):
        return random_state.getrandbits(63)
    if isinstance(random_state, np.random.RandomState):
        return int(random_state.randint(2**63 - 1, dtype=np.int64))
    if isinstance(random_state, np.random.Generator):
        return int(random_state.integers(2**63 - 1))
    if isinstance(random_state, (int, np.integer)) and not isinstance(random_state, bool):
        return int(random_state)
    raise ConfigError(
        f"random_state={shorten(random_state)} is neither a whole number nor a generator of numpy or random. Give a "
        "seed such as 42."
    )
