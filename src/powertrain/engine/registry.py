"""Engines by name: the facts about an engine that are known before it is made, and engines of other packages.

A package adds an engine with an entry point of the group ``powertrain.engines`` that names an :class:`EngineProvider`.
The engines of this package are known without a look at entry points.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from powertrain import plugins
from powertrain.config.scaling import ENGINE_OPTIONS
from powertrain.errors import ConfigError

if TYPE_CHECKING:
    from powertrain.engine.base import Engine


@dataclass(frozen=True)
class EngineTraits:
    """Facts about an engine that hold for each of its runs."""

    name: str
    #: These four as in :class:`powertrain.engine.base.Engine`.
    restarts: bool = True
    replaces: bool = False
    owns_processes: bool = True
    shares_driver_process: bool = False
    #: True where a launcher has started the ranks, and each of them calls ``fit()`` in its own process.
    has_launcher: bool = False
    #: True where slots may be on other machines than the driver's: nothing is checked against this one.
    spans_nodes: bool = False
    #: True where workers can be fed with datasets of Ray's while they train.
    streams_ray_datasets: bool = False
    #: True where directories of a run are removed even if the driver is killed.
    removes_directories: bool = False
    #: Keys of ``ScalingConfig(engine_options=...)`` that the engine understands.
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class EngineRun:
    """The run that an engine is made for."""

    #: The name of the run.
    name: str
    #: An empty directory of this user on this machine, removed when the run has ended.
    runtime_dir: str
    #: ``ScalingConfig(engine_options=...)``.
    options: Mapping[str, Any] = field(default_factory=dict)
    #: Custom resources that ``powertrain.init(resources=...)`` declared.
    custom_resources: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineProvider:
    """An engine of another package, as its entry point names it.

    Attributes:
        traits: Facts about the engine; ``traits.name`` is the name of the entry point.
        make: Makes the engine of one run. Raises :class:`~powertrain.errors.ConfigError` for options it cannot use.
    """

    traits: EngineTraits
    make: Callable[[EngineRun], Engine]


#: The engines of this package.
_OWN = {
    traits.name: traits
    for traits in (
        EngineTraits("local", removes_directories=True),
        EngineTraits(
            "ray",
            replaces=True,
            spans_nodes=True,
            streams_ray_datasets=True,
            options=ENGINE_OPTIONS["ray"],
        ),
        EngineTraits("inline", owns_processes=False, shares_driver_process=True),
        EngineTraits("torchrun", restarts=False, owns_processes=False, has_launcher=True),
    )
}
#: Engines of other packages that this process has loaded.
_loaded: dict[str, EngineProvider] = {}


def traits_of(name: str) -> EngineTraits:
    """Return the facts about an engine.

    Raises:
        ConfigError: No engine has this name, or its package cannot be used.
    """
    return _OWN[name] if name in _OWN else provider_of(name).traits


def recorded_traits(name: str) -> EngineTraits:
    """Return the facts about the engine of a recorded run, whose package need not be installed here."""
    if name in _OWN:
        return _OWN[name]
    return _loaded[name].traits if name in _loaded else EngineTraits(name)


def provider_of(name: str) -> EngineProvider:
    """Return the engine of another package.

    Raises:
        ConfigError: No package has an engine of this name, or it cannot be used.
    """
    if name not in _loaded:
        found = plugins.load(plugins.ENGINES, name)
        if not isinstance(found, EngineProvider) or found.traits.name != name:
            raise ConfigError(
                f"The entry point {name!r} of the group {plugins.ENGINES!r} must name an EngineProvider whose traits "
                f"have the name {name!r}, and it names {found!r:.200}. Correct the package that registers it; see "
                "docs/engines.md."
            )
        _loaded[name] = found
    return _loaded[name]
