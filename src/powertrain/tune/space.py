"""Search spaces: distributions for the entries of ``param_space``, and the draw of configurations. Pure.

A space is a dict whose values are constants, distributions, grids or dicts of them. :func:`check_space` names the key
of an entry that cannot be used; :func:`find_domains` lists the distributions by path, for searchers that model them;
:func:`resolve` draws one configuration.
"""

from __future__ import annotations

import inspect
import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from powertrain.errors import ConfigError
from powertrain.text.errors import describe_error
from powertrain.values.arguments import shorten

#: The keys that lead to an entry of a nested space.
Path = tuple[str, ...]
_GRID_KEY = "grid_search"


class Domain:
    """The values that an entry of a search space can take."""

    def sample(self, rng: random.Random | None = None, config: Mapping[str, Any] | None = None) -> Any:
        """Return a random value.

        Args:
            rng: The generator to draw from; a fresh one by default.
            config: The entries of the configuration that are known already, for :func:`sample_from`.

        Raises:
            ConfigError: The bounds of the distribution contradict each other.
        """
        if problem := self.find_problem():
            raise ConfigError(f"{self}: {problem}")
        return self._draw(rng or random.Random(), config or {})

    def find_problem(self) -> str:
        """Return the reason why no value can be drawn, as a sentence; "" if valid."""
        return ""

    def _draw(self, rng: random.Random, config: Mapping[str, Any]) -> Any:
        raise NotImplementedError


@dataclass(frozen=True)
class Float(Domain):
    """A float between two bounds, uniform on a linear or logarithmic scale, rounded to multiples of ``step``."""

    lower: float
    upper: float
    is_log: bool = False
    step: float | None = None

    def find_problem(self) -> str:
        """See :meth:`Domain.find_problem`."""
        problem = _find_problem_of_bounds(self.lower, self.upper, self.is_log, self.step)
        if not problem and self.step is not None and self._bounds()[0] > self._bounds()[1]:
            return f"there is no multiple of q={self.step} between {self.lower} and {self.upper}."
        return problem

    def _bounds(self) -> tuple[float, float]:
        """Return the smallest and the largest value: multiples of the step."""
        if self.step is None:
            return self.lower, self.upper
        # A quotient such as 0.3 / 0.1 is slightly below the exact integer.
        first, last = (round(bound / self.step, 9) for bound in (self.lower, self.upper))
        return _rounded(math.ceil(first) * self.step, self.step), _rounded(
            math.floor(last) * self.step, self.step
        )

    def _draw(self, rng: random.Random, config: Mapping[str, Any]) -> float:
        if self.is_log:
            value = math.exp(rng.uniform(math.log(self.lower), math.log(self.upper)))
        else:
            value = rng.uniform(self.lower, self.upper)
        first, last = self._bounds()
        return min(max(_rounded(value, self.step), first), last)


@dataclass(frozen=True)
class Normal(Domain):
    """A normally distributed float, rounded to multiples of ``step``."""

    mean: float = 0.0
    sd: float = 1.0
    step: float | None = None

    def find_problem(self) -> str:
        """See :meth:`Domain.find_problem`."""
        if not (_is_number(self.mean) and _is_number(self.sd)):
            return f"mean={shorten(self.mean)} and sd={shorten(self.sd)} must be finite numbers."
        if self.sd <= 0:
            return f"sd={self.sd} must be greater than 0."
        return _find_problem_of_step(self.step)

    def _draw(self, rng: random.Random, config: Mapping[str, Any]) -> float:
        return _rounded(rng.gauss(self.mean, self.sd), self.step)


@dataclass(frozen=True)
class Integer(Domain):
    """An integer from ``lower`` up to and including ``last``, a multiple of ``step``."""

    lower: int
    last: int
    is_log: bool = False
    step: int = 1

    def find_problem(self) -> str:
        """See :meth:`Domain.find_problem`."""
        for name, value in (("lower", self.lower), ("upper", self.last), ("q", self.step)):
            if not _is_number(value) or value != int(value):
                return f"{name}={shorten(value)} must be a whole number."
        if self.last == self.lower and not self.is_log and self.step == 1:
            return ""
        problem = _find_problem_of_bounds(self.lower, self.last, self.is_log, self.step)
        if not problem and self._steps()[0] > self._steps()[1]:
            return f"there is no multiple of q={self.step} between {self.lower} and {self.last}."
        return problem

    def _steps(self) -> tuple[int, int]:
        return math.ceil(self.lower / self.step), math.floor(self.last / self.step)

    def _draw(self, rng: random.Random, config: Mapping[str, Any]) -> int:
        if self.is_log:
            value = math.exp(rng.uniform(math.log(self.lower), math.log(self.last + 1)))
            first, last = self._steps()
            return min(max(int(value // self.step), first), last) * int(self.step)
        return rng.randint(*self._steps()) * int(self.step)


@dataclass(frozen=True)
class Categorical(Domain):
    """One of several values, with equal probability."""

    categories: Sequence[Any]

    def find_problem(self) -> str:
        """See :meth:`Domain.find_problem`."""
        return _find_problem_of_values(self.categories, "choice")

    def grid(self) -> dict[str, Any]:
        """Return a grid over the values, all of which are tried."""
        return grid_search(self.categories)

    def _draw(self, rng: random.Random, config: Mapping[str, Any]) -> Any:
        return self.categories[rng.randrange(len(self.categories))]


@dataclass(frozen=True)
class Function(Domain):
    """A value computed by a user function; it may depend on other entries."""

    function: Callable[..., Any]

    def find_problem(self) -> str:
        """See :meth:`Domain.find_problem`."""
        if callable(self.function):
            return ""
        return f"sample_from takes a function, not a {type(self.function).__name__}. Write lambda spec: ..."

    def _draw(self, rng: random.Random, config: Mapping[str, Any]) -> Any:
        try:
            takes_spec = bool(inspect.signature(self.function).parameters)
        except (TypeError, ValueError):
            takes_spec = True
        return self.function(Spec(config)) if takes_spec else self.function()


class Spec(dict[str, Any]):
    """The configuration as :func:`sample_from` sees it: entries as items or attributes, also below ``config``."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            found = self[name]
            return Spec(found) if type(found) is dict else found
        if name == "config":
            return self
        raise AttributeError(name)


# --------------------------------------------------------------------------- the names of Ray Tune


def uniform(lower: float, upper: float) -> Float:
    """Return a float that is uniform between two bounds.

    Args:
        lower: The least value.
        upper: The greatest value.

    Example::

        tune.Tuner(train, param_space={"dropout": tune.uniform(0.0, 0.5)})
    """
    return Float(lower, upper)


def quniform(lower: float, upper: float, q: float) -> Float:
    """Return a float that is uniform between two bounds, rounded to multiples of ``q``.

    Args:
        lower: The least value.
        upper: The greatest value.
        q: The step.
    """
    return Float(lower, upper, step=q)


def loguniform(lower: float, upper: float, base: float = 10) -> Float:
    """Return a float whose logarithm is uniform.

    Args:
        lower: The least value, above 0.
        upper: The greatest value.
        base: Without effect: it does not change the distribution.

    Example::

        tune.Tuner(train, param_space={"lr": tune.loguniform(1e-4, 1e-1)})
    """
    return Float(lower, upper, is_log=True)


def qloguniform(lower: float, upper: float, q: float, base: float = 10) -> Float:
    """Return a float whose logarithm is uniform, rounded to multiples of ``q``.

    Args:
        lower: The least value, above 0.
        upper: The greatest value.
        q: The step.
        base: Without effect.
    """
    return Float(lower, upper, is_log=True, step=q)


def randn(mean: float = 0.0, sd: float = 1.0) -> Normal:
    """Return a normally distributed float.

    Args:
        mean: The mean.
        sd: The standard deviation.
    """
    return Normal(mean, sd)


def qrandn(mean: float, sd: float, q: float) -> Normal:
    """Return a normally distributed float, rounded to multiples of ``q``.

    Args:
        mean: The mean.
        sd: The standard deviation.
        q: The step.
    """
    return Normal(mean, sd, q)


def randint(lower: int, upper: int) -> Integer:
    """Return a whole number from ``lower`` up to, but without, ``upper``.

    Args:
        lower: The least value.
        upper: The first value above the greatest.

    Example::

        tune.Tuner(train, param_space={"layers": tune.randint(1, 5)})
    """
    return Integer(lower, upper - 1)


def qrandint(lower: int, upper: int, q: int = 1) -> Integer:
    """Return a multiple of ``q`` from ``lower`` up to and including ``upper``.

    Args:
        lower: The least value.
        upper: The greatest value.
        q: The step.
    """
    return Integer(lower, upper, step=q)


def lograndint(lower: int, upper: int, base: float = 10) -> Integer:
    """Return a whole number below ``upper`` whose logarithm is uniform.

    Args:
        lower: The least value, above 0.
        upper: The first value above the greatest.
        base: Without effect.
    """
    return Integer(lower, upper - 1, is_log=True)


def qlograndint(lower: int, upper: int, q: int, base: float = 10) -> Integer:
    """Return a multiple of ``q``, ``upper`` included, whose logarithm is uniform.

    Args:
        lower: The least value, above 0.
        upper: The greatest value.
        q: The step.
        base: Without effect.
    """
    return Integer(lower, upper, is_log=True, step=q)


def choice(categories: Sequence[Any]) -> Categorical:
    """Return one of some values.

    Args:
        categories: The values.

    Example::

        tune.Tuner(train, param_space={"activation": tune.choice(["relu", "gelu"])})
    """
    return Categorical(list(categories) if isinstance(categories, (set, frozenset, range)) else categories)


def sample_from(func: Callable[..., Any]) -> Function:
    """Return the value of a function.

    Args:
        func: Called with the entries drawn so far.

    Example::

        tune.Tuner(train, param_space={"x": tune.uniform(0, 1), "y": tune.sample_from(lambda spec: spec.config.x**2)})
    """
    return Function(func)


def grid_search(values: Sequence[Any]) -> dict[str, Any]:
    """Return an entry of which every value is tried: with two grids, every pair.

    Args:
        values: The values.

    Example::

        tune.Tuner(train, param_space={"batch_size": tune.grid_search([32, 64])})
    """
    return {_GRID_KEY: values}


# --------------------------------------------------------------------------- whole spaces


def is_grid(value: Any) -> bool:
    """Return whether an entry is a grid, made by :func:`grid_search` or by hand."""
    return isinstance(value, Mapping) and set(value) == {_GRID_KEY}


def walk(space: Mapping[str, Any], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the path and value of every entry that is not itself a dict of entries."""
    for key, value in space.items():
        if isinstance(value, Mapping) and value and not is_grid(value):
            yield from walk(value, (*path, key))
        else:
            yield (*path, key), value


def find_domains(space: Mapping[str, Any]) -> dict[Path, Domain]:
    """Return the distributions of a space by path."""
    return {path: value for path, value in walk(space) if isinstance(value, Domain)}


def check_space(space: Any) -> None:
    """Raise a :class:`ConfigError` that names the key of an entry that cannot be used."""
    if not isinstance(space, Mapping):
        raise ConfigError(
            f"param_space={shorten(space)} is not a dict. Give names and values: {{'lr': tune.loguniform(1e-4, 1e-1)}}."
        )
    for path, value in walk(space):
        if any(not isinstance(key, str) for key in path):
            raise ConfigError(
                f"{show_path(path)} of param_space: the key is not a string. Name entries by strings."
            )
        problem = ""
        if isinstance(value, Domain):
            problem = value.find_problem()
        elif is_grid(value):
            problem = _find_problem_of_values(value[_GRID_KEY], _GRID_KEY)
        elif isinstance(value, (list, tuple)) and any(
            isinstance(item, Domain) or is_grid(item) for item in value
        ):
            problem = "distributions in a list are not drawn. Give each an entry of its own."
        elif isinstance(value, type) and issubclass(value, Domain):
            problem = f"{value.__name__} is a class. Call the function, such as tune.uniform(0, 1)."
        if problem:
            raise ConfigError(f"{show_path(path)} of param_space cannot be used: {problem}")


def show_path(path: Path) -> str:
    """Return a path in display form: ``'a/b'``."""
    return repr("/".join(map(str, path)))


def grid_points(space: Mapping[str, Any]) -> list[dict[Path, Any]]:
    """Return every combination of a space's grids, the last grid varying fastest; one empty dict without grids."""
    grids = {path: value[_GRID_KEY] for path, value in walk(space) if is_grid(value)}
    return [dict(zip(grids, values, strict=True)) for values in itertools.product(*grids.values())]


def resolve(
    space: Mapping[str, Any], rng: random.Random, chosen: Mapping[Path, Any] | None = None
) -> dict[str, Any]:
    """Return one configuration of a space.

    Args:
        space: A space that :func:`check_space` accepts.
        rng: Draws the values that are not chosen. The same generator state gives the same configuration.
        chosen: Values by path, of grids or from a searcher.

    Raises:
        ConfigError: A function of :func:`sample_from` failed, or functions depend on each other in a cycle.
    """
    chosen = chosen or {}
    config = _plain_copy(space)
    waiting: dict[Path, Function] = {}
    for path, value in walk(space):
        if path in chosen:
            _put(config, path, chosen[path])
        elif isinstance(value, Function):
            waiting[path] = value
            _remove(config, path)
        elif isinstance(value, Domain):
            _put(config, path, value.sample(rng))
        elif is_grid(value):
            _put(config, path, value[_GRID_KEY][0])
    _call_functions(config, waiting, rng)
    return config


def _call_functions(config: dict[str, Any], waiting: dict[Path, Function], rng: random.Random) -> None:
    """Call each function once all entries that it depends on are known, in any order."""
    while waiting:
        missing: BaseException | None = None
        done = []
        for path, function in waiting.items():
            try:
                value = function.sample(rng, config)
            except (AttributeError, KeyError) as error:  # possibly the entry of another function
                missing = missing or error
                continue
            except Exception as error:
                raise ConfigError(
                    f"{show_path(path)} of param_space: the function of sample_from failed: {describe_error(error)}"
                ) from error
            _put(config, path, value.sample(rng, config) if isinstance(value, Domain) else value)
            done.append(path)
        if not done:
            names = ", ".join(map(show_path, waiting))
            raise ConfigError(
                f"{names} of param_space: the function of sample_from asks for {missing}, which the space does not "
                "have, or which depends on this entry itself."
            ) from missing
        for path in done:
            del waiting[path]


# --------------------------------------------------------------------------- helpers


def _plain_copy(space: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the dicts of a space, so that a configuration can be changed without changing the next one."""
    return {
        key: _plain_copy(value) if isinstance(value, Mapping) and not is_grid(value) else value
        for key, value in space.items()
    }


def _put(config: dict[str, Any], path: Path, value: Any) -> None:
    for key in path[:-1]:
        config = config[key]
    config[path[-1]] = value


def _remove(config: dict[str, Any], path: Path) -> None:
    for key in path[:-1]:
        config = config[key]
    del config[path[-1]]


def _is_number(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and math.isfinite(value)
    except TypeError:
        return False


def _find_problem_of_bounds(lower: Any, upper: Any, is_log: bool, step: Any) -> str:
    if not (_is_number(lower) and _is_number(upper)):
        return f"lower={shorten(lower)} and upper={shorten(upper)} must be finite numbers."
    if lower >= upper:
        return f"lower={lower} is not below upper={upper}."
    if is_log and lower <= 0:
        return f"lower={lower} must be greater than 0 on a logarithmic scale."
    return _find_problem_of_step(step)


def _find_problem_of_step(step: Any) -> str:
    if step is None or (_is_number(step) and step > 0):
        return ""
    return f"q={shorten(step)} must be a number greater than 0."


def _find_problem_of_values(values: Any, name: str) -> str:
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        return f"{name} takes a list of values, not {shorten(values)}."
    return "" if len(values) else f"{name} has no values. Give at least one."


def _rounded(value: float, step: float | None) -> float:
    if step is None:
        return value
    # Computed through the text of the step: 3 * 0.1 would be 0.30000000000000004.
    return round(round(value / step) * step, 12)


def with_values(space: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the space with some entries replaced by constants: points to evaluate first."""
    merged = _plain_copy(space)
    for key, value in values.items():
        if isinstance(value, Mapping) and isinstance(merged.get(key), dict) and not is_grid(merged[key]):
            merged[key] = with_values(merged[key], value)
        else:
            merged[key] = value
    return merged
