"""Facts about engines that are known before one is made."""

from __future__ import annotations

import pytest

from powertrain.engine import registry
from powertrain.engine.inline import InlineEngine
from powertrain.engine.local.engine import LocalEngine
from powertrain.engine.torchrun import TorchrunEngine

SHARED = ("name", "restarts", "replaces", "owns_processes", "shares_driver_process")


def _own_engines() -> list[type]:
    from powertrain.engine.ray.engine import RayEngine

    return [LocalEngine, InlineEngine, TorchrunEngine, RayEngine]


@pytest.mark.parametrize("engine", _own_engines(), ids=lambda engine: engine.__name__)
def test_an_engine_and_its_traits_agree(engine: type) -> None:
    traits = registry.traits_of(engine.name)  # type: ignore[attr-defined]
    assert {key: getattr(traits, key) for key in SHARED} == {key: getattr(engine, key) for key in SHARED}


def test_every_engine_of_this_package_is_compared() -> None:
    assert registry._OWN.keys() == {engine.name for engine in _own_engines()}  # type: ignore[attr-defined]


def test_a_recorded_run_of_an_engine_that_is_not_installed_has_the_usual_traits() -> None:
    assert registry.recorded_traits("not-installed-here").owns_processes
    assert not registry.recorded_traits("inline").owns_processes
