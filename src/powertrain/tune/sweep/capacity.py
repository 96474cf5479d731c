"""How many trials run at a time: as many as the machine or the cluster has room for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from powertrain.errors import ConfigError

if TYPE_CHECKING:
    from powertrain.trainer import DataParallelTrainer


def count_concurrent_trials(trainer: DataParallelTrainer, most: int | None) -> int:
    """Return how many trials of a trainer run at a time, at least one.

    Args:
        trainer: A trainer with the resources of a trial.
        most: The user's bound; None or 0 for none.

    Raises:
        ConfigError: The trainer runs under torchrun, whose processes are those of one run.
    """
    engine = trainer._request.engine
    if engine == "torchrun":
        raise ConfigError(
            "A sweep cannot run under torchrun, whose processes are all of one run. Start the script with python."
        )
    if engine == "inline":
        return 1
    scaling = trainer.scaling_config
    workers = max(1, scaling.min_workers)
    room = _room_on_ray(scaling.resources, workers) if engine == "ray" else _room_here(trainer, workers)
    return max(1, min(room, most or room))


def _room_here(trainer: DataParallelTrainer, workers: int) -> int:
    from powertrain.driver.engines import custom_resources
    from powertrain.driver.engines import shape as _shape
    from powertrain.engine import resources

    machine = resources.detect(custom_resources())
    shape = _shape(trainer.scaling_config)
    slots = resources.slots_free(machine, shape, ())
    if shape.explicit and shape.cpus:  # so many share the cores as was asked for
        return slots // workers
    return min(slots, machine.cpus * workers) // workers


def _room_on_ray(amounts: Mapping[str, float], workers: int) -> int:
    from powertrain.engine.ray.client import cluster_resources

    return count_fitting(cluster_resources(), {name: amount * workers for name, amount in amounts.items()})


def count_fitting(there: Mapping[str, float], needed: Mapping[str, float]) -> int:
    """Return how often some amounts fit into those that are there. Amounts of zero need nothing."""
    fits = [math.floor(there.get(name, 0.0) / amount) for name, amount in needed.items() if amount > 0]
    return min(fits) if fits else max(1, int(there.get("CPU", 1)))
