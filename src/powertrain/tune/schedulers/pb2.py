"""Population based bandits: population based training with a model of the gains of each configuration."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from powertrain.errors import ConfigError
from powertrain.tune.schedulers.base import Decision
from powertrain.tune.schedulers.pbt import PopulationBasedTraining
from powertrain.tune.space import uniform
from powertrain.values.arguments import plain_scalar, shorten

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

#: A path in a configuration: ("optimizer", "lr").
_Path = tuple[str, ...]
#: Maximum number of gains in the model, the newest.
_WINDOW = 300
#: Minimum number of gains for the model; values are drawn uniformly until then.
_LEAST_GAINS = 3
#: Number of candidates in the search for the best value: first anywhere, then near the best so far.
_CANDIDATES, _ROUNDS = 400, 3
#: Kernel parameters to try: length scales, forgetting per interval, noise.
_LENGTHS = (0.1, 0.2, 0.4, 0.8)
_FORGETTING = (0.0, 0.05, 0.2)
_NOISES = (0.01, 0.1)


@dataclass(frozen=True)
class _Gain:
    """The gain of a trial in an interval that ended at ``time``, in units of intervals, with ``values`` in 0..1."""

    time: float
    values: tuple[float, ...]
    gain: float


class PB2(PopulationBasedTraining):
    """Population based bandits (Parker-Holder et al., 2020).

    As in :class:`PopulationBasedTraining` the worst trials continue from checkpoints of the best. Their new values
    maximize the upper confidence bound of a Gaussian process, fitted to the gain of each trial in each interval. Older
    gains count less. Values that other trials run with now are taken into account, so that several trials try different
    ones.

    Args:
        time_attr: The report entry that measures time.
        metric: The metric to compare; by default that of ``TuneConfig``.
        mode: "max" or "min".
        perturbation_interval: How often a trial is compared, in units of ``time_attr``.
        hyperparam_bounds: By parameter its least and greatest value, ``{"lr": [1e-4, 1e-1]}``, or a dict of them for
            nested configurations. A whole number stays one. A trial begins with a draw of those that ``param_space``
            does not have.
        quantile_fraction: Which part of the population is best, and which is worst: at most 0.5.
        log_config: Whether the sweep writes ``pbt_policy_<trial>.txt`` files.
        require_attrs: Whether a report without the metric or the time is an error.
        synch: Whether trials wait for each other before they are compared.
        custom_explore_fn: Called with the changed configuration; returns the one to use.
        seed: The seed of all draws.

    Raises:
        ConfigError: An argument cannot be used.

    Example::

        scheduler = PB2(perturbation_interval=4, hyperparam_bounds={"lr": [1e-4, 1e-1]})
        tune.TuneConfig(scheduler=scheduler, num_samples=8, metric="loss", mode="min")
    """

    def __init__(
        self,
        time_attr: str = "time_total_s",
        metric: str | None = None,
        mode: str | None = None,
        perturbation_interval: float = 60.0,
        hyperparam_bounds: Mapping[str, Any] | None = None,
        quantile_fraction: float = 0.25,
        log_config: bool = True,
        require_attrs: bool = True,
        synch: bool = False,
        custom_explore_fn: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
        seed: int = 0,
    ) -> None:
        if not hyperparam_bounds:
            raise ConfigError(
                "PB2 needs hyperparam_bounds, such as {'lr': [1e-4, 1e-1]}: nothing would change."
            )
        self._bounds = _flat_bounds(hyperparam_bounds)
        super().__init__(
            time_attr=time_attr,
            metric=metric,
            mode=mode,
            perturbation_interval=perturbation_interval,
            hyperparam_mutations=_nested(
                {path: uniform(float(low), float(high)) for path, (low, high) in self._bounds.items()}
            ),
            quantile_fraction=quantile_fraction,
            resample_probability=0.0,
            custom_explore_fn=custom_explore_fn,
            log_config=log_config,
            require_attrs=require_attrs,
            synch=synch,
            seed=seed,
        )
        self._gains: deque[_Gain] = deque(maxlen=_WINDOW)
        #: The time and score of each trial from which its gain is counted.
        self._since: dict[str, tuple[float, float]] = {}

    def on_trial_add(self, trial: str, config: Mapping[str, Any]) -> None:
        """See :meth:`TrialScheduler.on_trial_add`."""
        super().on_trial_add(trial, config)
        self._since.pop(trial, None)

    def on_trial_result(self, trial: str, result: Mapping[str, Any]) -> list[Decision]:
        """See :meth:`TrialScheduler.on_trial_result`."""
        self._learn(trial, self.time_of(result), self.score(result))
        return super().on_trial_result(trial, result)

    def _learn(self, trial: str, time: float | None, score: float | None) -> None:
        member = self._members.get(trial)
        if member is None or time is None or score is None or not math.isfinite(score):
            return
        began, before = self._since.setdefault(trial, (time, score))
        if time <= began or time - member.perturbed_at < self._interval:  # as trials are compared
            return
        values = self._values_of(member.config)
        if values is not None:
            rate = (score - before) * self._interval / (time - began)
            self._gains.append(_Gain(time / self._interval, values, rate))
        self._since[trial] = time, score

    def _exploit(self, trial: str, worst: Sequence[str], best: Sequence[str]) -> list[Decision]:
        decisions = super()._exploit(trial, worst, best)
        for decision in decisions:  # its next gain is counted from the score of the state that it takes over
            score, own = self._members[decision.source].score, self._members[trial]
            if score is not None and math.isfinite(score):
                self._since[trial] = own.time, score
        return decisions

    def _change(self, config: Mapping[str, Any]) -> dict[str, Any]:
        best = self._most_promising()
        chosen: dict[_Path, Any] = {}
        for (path, (low, high)), share in zip(self._bounds.items(), best, strict=True):
            value = low + (high - low) * share
            chosen[path] = round(value) if type(_look_up(config, path)) is int else value
        return _with_values(config, chosen)

    def _values_of(self, config: Mapping[str, Any]) -> tuple[float, ...] | None:
        """Return the values of a configuration, scaled to 0..1 within their bounds; None if one is missing."""
        found = [plain_scalar(_look_up(config, path)) for path in self._bounds]
        if not all(isinstance(value, (int, float)) and math.isfinite(value) for value in found):
            return None
        return tuple(
            min(max((value - low) / (high - low), 0.0), 1.0)
            for value, (low, high) in zip(found, self._bounds.values(), strict=True)
        )

    def _most_promising(self) -> list[float]:
        import numpy as np

        draw = np.random.default_rng(self._rng.getrandbits(64))
        count = len(self._bounds)
        if len(self._gains) < _LEAST_GAINS:
            return [float(value) for value in draw.random(count)]
        now = max(gain.time for gain in self._gains) + 1.0
        running = [self._values_of(member.config) for member in self._members.values()]
        model = _GainModel(list(self._gains), [values for values in running if values is not None], now)
        candidates = draw.random((_CANDIDATES, count))
        for number in range(1, _ROUNDS + 1):
            best = candidates[int(np.argmax(model.promise(candidates)))]
            near = best + draw.normal(0.0, 0.2 / 2**number, (_CANDIDATES, count))
            candidates = np.vstack([best, np.clip(near, 0.0, 1.0)])
        return [float(value) for value in candidates[int(np.argmax(model.promise(candidates)))]]


class _GainModel:
    """A Gaussian process over time and values, with the kernel that maximizes the likelihood of the gains.

    Args:
        gains: The observed gains.
        running: Values that are being tried now. They count as if their gain were the expected one, which leaves the
            mean unchanged and reduces the variance.
        now: The time to predict gains for.
    """

    def __init__(self, gains: Sequence[_Gain], running: Sequence[tuple[float, ...]], now: float) -> None:
        import numpy as np

        values = np.array([gain.values for gain in gains])
        times = np.array([gain.time for gain in gains])
        gained = np.array([gain.gain for gain in gains])
        spread = float(gained.std())
        self._gained: Array = (gained - gained.mean()) / (spread if spread > 0 else 1.0)
        kernels = [(length, rate, noise) for length in _LENGTHS for rate in _FORGETTING for noise in _NOISES]
        self._kernel = max(kernels, key=lambda kernel: self._likelihood(values, times, kernel))
        self._now, self._count = now, len(gains)
        self._values: Array = np.vstack([values, *(np.array([each]) for each in running)])
        self._times: Array = np.concatenate([times, np.full(len(running), now)])
        known = self._covariance(values, times, values, times) + self._noise(len(times))
        self._weights: Array = np.linalg.solve(known, self._gained)
        whole = self._covariance(self._values, self._times, self._values, self._times)
        inverse = np.linalg.inv(whole + self._noise(len(self._times)))
        self._inverse: Array = np.asarray(inverse, dtype=np.float64)

    def promise(self, candidates: Array) -> Array:
        """Return the upper confidence bound of the gain of each candidate."""
        import numpy as np

        at = np.full(len(candidates), self._now)
        shared = self._covariance(candidates, at, self._values, self._times)
        expected = shared[:, : self._count] @ self._weights
        variance = 1.0 - np.einsum("ij,jk,ik->i", shared, self._inverse, shared)
        width = 0.2 + math.log(1 + 0.4 * self._count)  # grows slowly, so that no value stays untried
        bound: Array = expected + np.sqrt(width * np.clip(variance, 0.0, None))
        return bound

    def _likelihood(self, values: Array, times: Array, kernel: tuple[float, float, float]) -> float:
        import numpy as np

        self._kernel = kernel
        covariance = self._covariance(values, times, values, times) + self._noise(len(times))
        determinant = float(np.linalg.slogdet(covariance)[1])
        return -0.5 * (float(self._gained @ np.linalg.solve(covariance, self._gained)) + determinant)

    def _noise(self, size: int) -> Array:
        import numpy as np

        return np.eye(size) * self._kernel[2]

    def _covariance(self, one: Array, one_times: Array, other: Array, other_times: Array) -> Array:
        import numpy as np

        length, forgetting, _ = self._kernel
        squares = ((one[:, None, :] - other[None, :, :]) ** 2).sum(axis=2)
        apart = np.abs(one_times[:, None] - other_times[None, :])
        covariance: Array = np.exp(-squares / (2 * length**2)) * (1.0 - forgetting) ** (apart / 2)
        return covariance


def _flat_bounds(bounds: Mapping[str, Any], above: _Path = ()) -> dict[_Path, tuple[float, float]]:
    """Return bounds by path; raise :class:`ConfigError` that names the parameter whose bounds are none."""
    found: dict[_Path, tuple[float, float]] = {}
    for key, spec in bounds.items():
        path = (*above, str(key))
        if isinstance(spec, Mapping) and spec:
            found |= _flat_bounds(spec, path)
            continue
        pair = [plain_scalar(value) for value in spec] if isinstance(spec, (list, tuple)) else []
        is_numbers = all(isinstance(value, (int, float)) and math.isfinite(value) for value in pair)
        if len(pair) != 2 or not is_numbers or not pair[0] < pair[1]:
            raise ConfigError(
                f"PB2: hyperparam_bounds[{'/'.join(path)!r}]={shorten(spec)} must be a list of two numbers, the least "
                "and the greatest value, such as [1e-4, 1e-1]."
            )
        found[path] = pair[0], pair[1]
    return found


def _nested(by_path: Mapping[_Path, Any]) -> dict[str, Any]:
    return _with_values({}, by_path)


def _with_values(config: Mapping[str, Any], by_path: Mapping[_Path, Any]) -> dict[str, Any]:
    """Return a copy of a configuration with other values at some paths. Shared parts are not changed."""
    changed = dict(config)
    for path, value in by_path.items():
        if len(path) == 1:
            changed[path[0]] = value
        else:
            below = changed.get(path[0])
            changed[path[0]] = _with_values(below if isinstance(below, Mapping) else {}, {path[1:]: value})
    return changed


def _look_up(config: Mapping[str, Any], path: _Path) -> Any:
    value: Any = config
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
