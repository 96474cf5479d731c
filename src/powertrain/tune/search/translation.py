"""Translation of search spaces to Optuna: each distribution as a parameter of a study, and its values back."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from powertrain.errors import ConfigError
from powertrain.text.errors import describe_error
from powertrain.tune.space import Categorical, Float, Integer, Normal, Path, is_grid, show_path, walk
from powertrain.values.arguments import shorten

if TYPE_CHECKING:
    from types import ModuleType

    from optuna.distributions import BaseDistribution

#: A normal distribution is searched between these quantiles: 3.7 standard deviations to either side.
_LOWEST_QUANTILE, _HIGHEST_QUANTILE = 1e-4, 1 - 1e-4
#: Types that every storage of Optuna accepts as choices.
_PLAIN_CHOICES = (type(None), bool, int, float, str)


def _keep(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Parameter:
    """An entry of a search space as a parameter of a study.

    Attributes:
        path: The path of the entry.
        distribution: The distribution of the study.
        to_config: Converts a value of the study to the configuration.
        to_study: Converts a value of the configuration to the study.
    """

    path: Path
    distribution: BaseDistribution
    to_config: Callable[[Any], Any] = _keep
    to_study: Callable[[Any], Any] = _keep

    @property
    def name(self) -> str:
        """Its name in the study: "a/b"."""
        return "/".join(self.path)

    def encode(self, value: Any, given_as: str) -> Any:
        """Convert a value of a configuration to the study.

        Raises:
            ConfigError: The distribution cannot have this value.
        """
        try:
            encoded = self.to_study(value)
            self.distribution.to_internal_repr(encoded)
        except (TypeError, ValueError, ArithmeticError) as error:
            raise ConfigError(
                f"{given_as} has {show_path(self.path)}={shorten(value)}, which is not a value of that entry: "
                f"{describe_error(error)}. Give one of its own values."
            ) from error
        return encoded


def import_optuna() -> Any:
    """Return the module ``optuna``.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        import optuna
    except ImportError as error:
        raise ConfigError(
            f"OptunaSearch needs Optuna, which cannot be imported ({describe_error(error)}). Install it with: "
            "pip install 'powertrain[tune]'."
        ) from error
    return optuna


def translate_space(space: Mapping[str, Any]) -> dict[str, Parameter]:
    """Return the parameters of a space by name. Functions of ``sample_from`` and constants are not among them.

    Args:
        space: A space that ``check_space`` accepts; its entries may also be distributions of Optuna.

    Raises:
        ConfigError: Two entries have the same name.
    """
    distributions = import_optuna().distributions
    found: dict[str, Parameter] = {}
    for path, entry in walk(space):
        parameter = _translate(path, entry, distributions)
        if parameter is None:
            continue
        if parameter.name in found:
            raise ConfigError(
                f"{show_path(path)} stands twice in the search space: as one key, and as a key in a dict. Rename one."
            )
        found[parameter.name] = parameter
    return found


def list_grids(space: Mapping[str, Any]) -> list[str]:
    """Return the display names of the grids of a space."""
    return [show_path(path) for path, entry in walk(space) if is_grid(entry)]


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dict with the key "a/b" nested as entry "b" of entry "a".

    Raises:
        ConfigError: An entry would have two values.
    """
    nested: dict[str, Any] = {}
    for (name, *below), value in walk(flat):
        *parents, last = [*name.split("/"), *below]
        level = nested
        for key in parents:
            level = level.setdefault(key, {})
            if not isinstance(level, dict):
                break
        if not isinstance(level, dict) or last in level:
            shown = "/".join(map(str, [*parents, last]))
            raise ConfigError(
                f"{shown!r} stands twice in the search space, or lies below a value. Rename one."
            )
        level[last] = value
    return nested


def look_up(config: Mapping[str, Any], path: Path) -> tuple[bool, Any]:
    """Return whether a configuration has an entry, and its value. A key may also be the whole path, "a/b"."""
    value: Any = config
    for key in path:
        if not isinstance(value, Mapping) or key not in value:
            name = "/".join(path)
            return (True, config[name]) if name in config else (False, None)
        value = value[key]
    return True, value


def _translate(path: Path, entry: Any, distributions: ModuleType) -> Parameter | None:
    if isinstance(entry, distributions.BaseDistribution):
        return Parameter(path, entry)
    if isinstance(entry, Float):
        return _translate_float(path, entry, distributions)
    if isinstance(entry, Integer):
        return _translate_integer(path, entry, distributions)
    if isinstance(entry, Normal):
        return _translate_normal(path, entry, distributions)
    if isinstance(entry, Categorical):
        return _translate_choice(path, entry.categories, distributions)
    if is_grid(entry):
        return _translate_choice(path, entry["grid_search"], distributions)
    return None


def _translate_float(path: Path, domain: Float, distributions: ModuleType) -> Parameter:
    step = domain.step
    if step is None:
        return Parameter(path, distributions.FloatDistribution(domain.lower, domain.upper, log=domain.is_log))
    # A quotient such as 0.3 / 0.1 is slightly below the exact integer.
    first, last = math.ceil(round(domain.lower / step, 9)), math.floor(round(domain.upper / step, 9))

    def round_to_step(value: float) -> float:
        return round(min(max(round(value / step), first), last) * step, 12)

    if domain.is_log:  # Optuna has no steps on a logarithmic scale: search without steps, round afterwards
        distribution = distributions.FloatDistribution(domain.lower, domain.upper, log=True)
    else:
        distribution = distributions.FloatDistribution(
            round_to_step(first * step), round_to_step(last * step), step=step
        )
    return Parameter(path, distribution, round_to_step)


def _translate_integer(path: Path, domain: Integer, distributions: ModuleType) -> Parameter:
    step = int(domain.step)
    first, last = math.ceil(domain.lower / step), math.floor(domain.last / step)
    if not domain.is_log:
        return Parameter(path, distributions.IntDistribution(first * step, last * step, step=step), int, int)
    # Optuna has no steps on a logarithmic scale: the number of steps is searched instead.
    return Parameter(
        path,
        distributions.IntDistribution(first, last, log=True),
        lambda value: int(value) * step,
        lambda value: round(value / step),
    )


def _translate_normal(path: Path, domain: Normal, distributions: ModuleType) -> Parameter:
    """Search the quantile, which is uniform where the value is normal."""
    normal, step = NormalDist(domain.mean, domain.sd), domain.step

    def to_config(quantile: float) -> float:
        value = normal.inv_cdf(quantile)
        return value if step is None else round(round(value / step) * step, 12)

    return Parameter(
        path,
        distributions.FloatDistribution(_LOWEST_QUANTILE, _HIGHEST_QUANTILE),
        to_config,
        lambda value: min(max(normal.cdf(value), _LOWEST_QUANTILE), _HIGHEST_QUANTILE),
    )


def _translate_choice(path: Path, values: Sequence[Any], distributions: ModuleType) -> Parameter:
    if all(type(value) in _PLAIN_CHOICES for value in values):
        return Parameter(path, distributions.CategoricalDistribution(tuple(values)))
    # Lists, dicts and objects are represented by text: storages cannot keep them.
    labels = [f"{number}: {shorten(value)}" for number, value in enumerate(values)]

    def find_label(value: Any) -> str:
        for label, candidate in zip(labels, values, strict=True):
            if candidate is value or _is_equal(candidate, value):
                return label
        raise ValueError(f"it is none of the {len(labels)} choices")

    return Parameter(
        path,
        distributions.CategoricalDistribution(tuple(labels)),
        lambda label: values[labels.index(label)],
        find_label,
    )


def _is_equal(first: Any, second: Any) -> bool:
    try:
        return type(first) is type(second) and bool(first == second)
    except Exception:  # comparing arrays gives an array
        return False
