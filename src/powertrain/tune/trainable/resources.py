"""The resources of a trial: requests in the forms of Ray Tune, as sums by resource. Pure."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from powertrain.config.scaling import PLACEMENT_STRATEGIES, ScalingConfig
from powertrain.errors import ConfigError
from powertrain.text.loggers import module_logger
from powertrain.values.arguments import plain_scalar, shorten

logger = module_logger(__name__)

_EXAMPLE = 'Give amounts by name, such as {"cpu": 2, "gpu": 1}.'
#: Lowercase resource names, which the dict form also accepts.
_SPELLINGS = {"cpu": "CPU", "gpu": "GPU"}


class PlacementGroupFactory:
    """Resources of a trial in bundles: the first is the trainable's own, the others are those of its workers.

    Args:
        bundles: Amounts by resource, such as ``[{"CPU": 1}, {"CPU": 2, "GPU": 1}]``. The first may be empty.
        strategy: Placement of the bundles on nodes: "PACK", "SPREAD", "STRICT_PACK" or "STRICT_SPREAD".
        *args: Accepted for compatibility; no effect.
        **kwargs: Accepted for compatibility; no effect.

    Raises:
        ConfigError: There are no resources in the bundles, or no such strategy.

    Example::

        tune.with_resources(train, tune.PlacementGroupFactory([{"CPU": 1}, {"CPU": 2, "GPU": 1}]))
    """

    def __init__(
        self, bundles: Sequence[Mapping[str, float]], strategy: str = "PACK", *args: Any, **kwargs: Any
    ) -> None:
        if not isinstance(bundles, (list, tuple)) or not bundles:
            raise ConfigError(
                f"PlacementGroupFactory(bundles={shorten(bundles)}) takes a list of at least one dict, such as "
                '[{"CPU": 1}, {"GPU": 1}].'
            )
        if strategy not in PLACEMENT_STRATEGIES:
            raise ConfigError(
                f"PlacementGroupFactory(strategy={shorten(strategy)}) is none of {', '.join(PLACEMENT_STRATEGIES)}."
            )
        amounts = [
            _as_amounts(bundle, f"PlacementGroupFactory(bundles={shorten(bundles)})") for bundle in bundles
        ]
        if not any(amounts):
            raise ConfigError(
                f"PlacementGroupFactory(bundles={shorten(bundles)}) asks for nothing. {_EXAMPLE}"
            )
        if args or kwargs:
            given = ", ".join([*map(shorten, args), *(f"{name}={shorten(kwargs[name])}" for name in kwargs)])
            logger.warning(
                "Accepted as in Ray, but without effect here: PlacementGroupFactory(..., %s) (trials are placed by "
                "their amounts and strategy).",
                given,
            )
        self._head_bundle_is_empty = not amounts[0]
        self._bundles = amounts[1:] if self._head_bundle_is_empty else amounts
        self._strategy = strategy

    @property
    def bundles(self) -> list[dict[str, float]]:
        """The amounts of each bundle, without an empty first one."""
        return [dict(bundle) for bundle in self._bundles]

    @property
    def strategy(self) -> str:
        """The placement of the bundles on nodes."""
        return self._strategy

    @property
    def head_bundle_is_empty(self) -> bool:
        """True where the trainable itself needs no resources."""
        return self._head_bundle_is_empty

    @property
    def head_cpus(self) -> float:
        """CPUs of the trainable itself."""
        return 0.0 if self._head_bundle_is_empty else self._bundles[0].get("CPU", 0.0)

    @property
    def required_resources(self) -> dict[str, float]:
        """The sum of all bundles."""
        total: dict[str, float] = {}
        for bundle in self._bundles:
            for name, amount in bundle.items():
                total[name] = total.get(name, 0.0) + amount
        return total

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PlacementGroupFactory):
            return NotImplemented
        return self._compared() == other._compared()

    def __hash__(self) -> int:
        return hash(
            (self._strategy, self._head_bundle_is_empty, *(frozenset(b.items()) for b in self._bundles))
        )

    def __repr__(self) -> str:
        bundles = [{}, *self._bundles] if self._head_bundle_is_empty else self._bundles
        return f"PlacementGroupFactory({bundles}, strategy={self._strategy!r})"

    def _compared(self) -> tuple[Any, ...]:
        return self._bundles, self._strategy, self._head_bundle_is_empty


#: Stored requests of ``with_resources``. A function gets the configuration of a trial and returns one of the others.
Request = PlacementGroupFactory | ScalingConfig | Callable[[dict[str, Any]], Any]


def as_request(resources: Any) -> Request:
    """Check and convert the argument of ``with_resources``.

    Args:
        resources: A dict such as ``{"cpu": 2, "gpu": 0.5}``, a list of bundles, a :class:`PlacementGroupFactory`, a
            ``ScalingConfig``, or a function of the configuration that returns one of these.

    Raises:
        ConfigError: It is none of these, or an amount is not a number >= 0.
    """
    if isinstance(resources, (PlacementGroupFactory, ScalingConfig)):
        return resources
    if isinstance(resources, Mapping):
        # As in Ray, an empty dict means one CPU.
        return (
            PlacementGroupFactory([_as_bundle(resources)])
            if resources
            else PlacementGroupFactory([{"CPU": 1}])
        )
    if isinstance(resources, (list, tuple)):
        return PlacementGroupFactory(resources)
    if callable(resources) and not isinstance(resources, type):
        function: Callable[[dict[str, Any]], Any] = resources
        return function
    raise ConfigError(
        f"with_resources(resources={shorten(resources)}) takes a dict, a list of bundles, a PlacementGroupFactory, a "
        f"ScalingConfig or a function of the configuration. {_EXAMPLE}"
    )


def as_amounts(request: Request) -> dict[str, float] | Callable[[dict[str, Any]], dict[str, float]]:
    """Return a request as the sum of its amounts; for a function of the configuration, a function of the sum."""
    if isinstance(request, PlacementGroupFactory):
        return request.required_resources
    if isinstance(request, ScalingConfig):
        return request.total_resources
    return functools.partial(_amounts_for, request)


def _amounts_for(function: Callable[[dict[str, Any]], Any], config: dict[str, Any]) -> dict[str, float]:
    answer = function(config)
    if answer is None:
        return PlacementGroupFactory([{"CPU": 1}]).required_resources
    amounts = as_amounts(as_request(answer))
    if isinstance(amounts, dict):
        return amounts
    raise ConfigError(
        f"The resource function {shorten(function)} returned another function, {shorten(answer)}. Return amounts."
    )


def _as_bundle(resources: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the dict form to a bundle: "cpu" and "gpu" in any case, and "custom_resources" as separate entries."""
    custom = resources.get("custom_resources") or {}
    if not isinstance(custom, Mapping):
        raise ConfigError(
            f"with_resources({{'custom_resources': {shorten(custom)}}}) takes a dict. {_EXAMPLE}"
        )
    bundle: dict[str, Any] = {}
    for name, amount in [*custom.items(), *((n, a) for n, a in resources.items() if n != "custom_resources")]:
        spelled = _SPELLINGS.get(name, name) if isinstance(name, str) else name
        if spelled in bundle:
            raise ConfigError(f"with_resources({shorten(resources)}) names {spelled} twice. Give it once.")
        bundle[spelled] = amount
    return bundle


def _as_amounts(bundle: Any, given_as: str) -> dict[str, float]:
    """Return a bundle without zero amounts."""
    if not isinstance(bundle, Mapping):
        raise ConfigError(f"{given_as}: the bundle {shorten(bundle)} is no dict. {_EXAMPLE}")
    amounts = {}
    for name, value in bundle.items():
        amount = plain_scalar(value)
        is_number = (
            isinstance(amount, (int, float)) and not isinstance(amount, bool) and math.isfinite(amount)
        )
        if not isinstance(name, str) or not is_number or amount < 0:
            raise ConfigError(
                f"{given_as}: {shorten(name)}: {shorten(value)} is no amount of a resource. {_EXAMPLE}"
            )
        if amount:
            amounts[name] = float(amount)
    return amounts
