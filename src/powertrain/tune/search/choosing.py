"""Searchers by name, and replacements for unsupported searchers of Ray Tune."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from powertrain.errors import ConfigError
from powertrain.text.loggers import module_logger
from powertrain.tune.search import base, limiter
from powertrain.tune.search.base import Objective, Searcher
from powertrain.tune.search.basic_variant import BasicVariantGenerator
from powertrain.tune.search.optuna import OptunaSearch
from powertrain.tune.space import Function, find_domains, is_grid, walk
from powertrain.values.arguments import shorten

#: The searchers that ``search_alg`` and :func:`create_searcher` accept by name.
_BY_NAME: dict[str, type[Searcher]] = {
    "variant_generator": BasicVariantGenerator,
    "random": BasicVariantGenerator,
    "optuna": OptunaSearch,
}
#: Replacement for an unsupported searcher.
_TPE = "OptunaSearch()"
_GAUSSIAN = "OptunaSearch(sampler=optuna.samplers.GPSampler())"
_EVOLUTION = "OptunaSearch(sampler=optuna.samplers.CmaEsSampler())"
#: Unsupported searchers of Ray Tune, by the name of their module: their classes and replacements.
_NOT_HERE: dict[str, tuple[tuple[str, ...], str]] = {
    "ax": (("AxSearch",), _GAUSSIAN),
    "bayesopt": (("BayesOptSearch",), _GAUSSIAN),
    "bohb": (("TuneBOHB", "BOHB"), _TPE),
    "dragonfly": (("DragonflySearch",), _GAUSSIAN),
    "flaml": (("CFO", "BlendSearch"), _TPE),
    "hebo": (("HEBOSearch",), _GAUSSIAN),
    "hyperopt": (("HyperOptSearch",), _TPE),
    "nevergrad": (("NevergradSearch",), _EVOLUTION),
    "sigopt": (("SigOptSearch",), _GAUSSIAN),
    "skopt": (("SkOptSearch",), _GAUSSIAN),
    "zoopt": (("ZOOptSearch",), _EVOLUTION),
}
_NOT_HERE_CLASSES = {name: module for module, (names, _) in _NOT_HERE.items() for name in names}
#: Modules of ``ray.tune.search`` that have another name here.
_OTHER_PATHS: dict[str, ModuleType] = {"concurrency_limiter": limiter, "searcher": base}

_logger = module_logger(__name__)


def choose_searcher(
    search_alg: Any,
    space: Mapping[str, Any],
    metric: Objective = None,
    mode: Objective = None,
    seed: int | None = None,
) -> Searcher:
    """Return the searcher of a sweep, with metric, mode and space set.

    Args:
        search_alg: None for random draws and grids; a searcher; or a name: "random", "variant_generator", "optuna",
            or "auto" for Optuna if it is installed, the space has distributions and no grid, and there is a metric.
        space: The ``param_space``.
        metric: The metric of ``TuneConfig``.
        mode: The mode of ``TuneConfig``.
        seed: The seed of a searcher that is created here. A searcher object has its own.

    Raises:
        ConfigError: There is no such searcher, or it cannot search this space.
    """
    if search_alg is None or isinstance(search_alg, str):
        searcher = _make_searcher(search_alg, space, metric is not None and mode is not None, seed)
    elif isinstance(search_alg, Searcher):
        searcher = search_alg
    else:
        raise ConfigError(_describe_refusal(search_alg))
    if not searcher.set_search_properties(metric, mode, space) and _has_choices(space):
        raise ConfigError(
            f"{type(searcher).__name__} has a space of its own, and param_space has another. Give the distributions in "
            "one of the two; constants may be in param_space."
        )
    return searcher


def create_searcher(search_alg: str, **kwargs: Any) -> Searcher:
    """Return a new searcher by name.

    Args:
        search_alg: "random", "variant_generator" or "optuna".
        **kwargs: Arguments of its class. Unknown ones are accepted, as in Ray, without effect.

    Returns:
        The searcher, for ``TuneConfig``.

    Raises:
        ConfigError: There is no such searcher, or an argument cannot be used.

    Example::

        tune.create_searcher("optuna", metric="loss", mode="min")
    """
    found = _find_class(search_alg)
    known = inspect.signature(found).parameters
    ignored = sorted(set(kwargs) - set(known))
    if ignored:
        _logger.warning(
            "Accepted as in Ray, but without effect here: create_searcher(%s) (%s has no such argument).",
            ", ".join(f"{name}=..." for name in ignored),
            found.__name__,
        )
    return found(**{name: value for name, value in kwargs.items() if name in known})


def refuse_ray_searcher(name: str) -> None:
    """Raise :class:`ConfigError` for the module or class name of an unsupported searcher of Ray Tune."""
    module = name if name in _NOT_HERE else _NOT_HERE_CLASSES.get(name)
    if module is not None:
        raise ConfigError(_describe_missing(name, module))


def register_ray_paths(package: str) -> None:
    """Make imports of ``ray.tune.search`` work below ``package``, or name the replacement."""
    for name, module in _OTHER_PATHS.items():
        sys.modules.setdefault(f"{package}.{name}", module)
    for name in _NOT_HERE:
        sys.modules.setdefault(f"{package}.{name}", _MissingModule(f"{package}.{name}"))


class _MissingModule(ModuleType):
    """The module of an unsupported searcher. Importing its class names the replacement."""

    def __reduce__(self) -> tuple[Any, ...]:
        # cloudpickle pickles the submodules of a package along with a function that uses the package.
        return importlib.import_module, (self.__name__,)

    def __getattr__(self, name: str) -> Any:
        # Other names raise AttributeError as in any module: tools look up names in all loaded modules.
        if name in _NOT_HERE_CLASSES:
            refuse_ray_searcher(name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


def _make_searcher(
    name: str | None, space: Mapping[str, Any], has_metric: bool, seed: int | None
) -> Searcher:
    if name == "auto":
        name = "optuna" if has_metric and _is_for_optuna(space) else "random"
    if _find_class(name or "random") is OptunaSearch:
        return OptunaSearch(seed=seed)
    return BasicVariantGenerator(random_state=seed)


def _find_class(name: Any) -> type[Searcher]:
    lower = name.lower() if isinstance(name, str) else ""
    if lower in _BY_NAME:
        return _BY_NAME[lower]
    for known, (classes, _) in _NOT_HERE.items():
        if lower == known or lower in map(str.lower, classes):
            raise ConfigError(_describe_missing(name, known))
    raise ConfigError(
        f"search_alg={shorten(name)} is not the name of a searcher. Use 'auto', "
        f"{', '.join(map(repr, _BY_NAME))}."
    )


def _describe_missing(name: str, module: str) -> str:
    instead = _NOT_HERE[module][1]
    return f"Powertrain does not have Ray Tune's searcher {name!r}: use {instead} of powertrain.tune.search instead."


def _describe_refusal(search_alg: Any) -> str:
    """Return the reason why an object is not a searcher, and the accepted values."""
    if isinstance(search_alg, type):
        return f"search_alg={search_alg.__name__} is a class. Call it: search_alg={search_alg.__name__}()."
    of = type(search_alg)
    if of.__name__ in _NOT_HERE_CLASSES:
        return _describe_missing(of.__name__, _NOT_HERE_CLASSES[of.__name__])
    root = of.__module__.partition(".")[0]
    if root == "ray":
        return (
            f"search_alg is a {of.__name__} of Ray, which a sweep of Powertrain cannot call. Import {of.__name__} from "
            "powertrain.tune.search, or use OptunaSearch."
        )
    if root == "optuna":
        return f"search_alg is a {of.__name__} of Optuna. Write OptunaSearch(sampler={of.__name__}())."
    return (
        f"search_alg={shorten(search_alg)} is not a Searcher. Give an instance such as OptunaSearch(), a name such as "
        "'optuna', or None."
    )


def _is_for_optuna(space: Mapping[str, Any]) -> bool:
    """Return whether Optuna is installed and can learn from results."""
    if importlib.util.find_spec("optuna") is None or any(is_grid(value) for _, value in walk(space)):
        return False
    return any(not isinstance(domain, Function) for domain in find_domains(space).values())


def _has_choices(space: Mapping[str, Any]) -> bool:
    return bool(find_domains(space)) or any(is_grid(value) for _, value in walk(space))
