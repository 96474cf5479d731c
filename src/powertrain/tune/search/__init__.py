"""Search algorithms, which suggest configurations. Optuna is imported when it is first used."""

from typing import Any

from powertrain.tune.search.base import FINISHED, Searcher
from powertrain.tune.search.basic_variant import BasicVariantGenerator
from powertrain.tune.search.choosing import (
    choose_searcher,
    create_searcher,
    refuse_ray_searcher,
    register_ray_paths,
)
from powertrain.tune.search.limiter import ConcurrencyLimiter
from powertrain.tune.search.optuna import OptunaSearch
from powertrain.tune.search.repeater import TRIAL_INDEX, Repeater
from powertrain.tune.space import grid_search

__all__ = [
    "BasicVariantGenerator",
    "ConcurrencyLimiter",
    "FINISHED",
    "OptunaSearch",
    "Repeater",
    "Searcher",
    "TRIAL_INDEX",
    "choose_searcher",
    "create_searcher",
    "grid_search",
]

register_ray_paths(__name__)


def __getattr__(name: str) -> Any:
    refuse_ray_searcher(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
