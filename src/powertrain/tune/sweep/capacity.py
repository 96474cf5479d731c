"""Number of concurrent trials: as many as the machine or the cluster has room for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from powertrain.driver.engines import count_trials_with_room
from powertrain.errors import ConfigError

if TYPE_CHECKING:
    from powertrain.trainer import DataParallelTrainer


def count_concurrent_trials(trainer: DataParallelTrainer, most: int | None) -> int:
    """Return the number of concurrent trials of a trainer, at least one.

    Args:
        trainer: A trainer with the resources of a trial.
        most: The user's limit; None or 0 for none.

    Raises:
        ConfigError: The trainer runs under torchrun, whose processes are those of one run.
    """
    request = trainer._request
    if request.traits.has_launcher:
        raise ConfigError(
            "A sweep cannot run under torchrun, whose processes are all of one run. Start the script with python."
        )
    if request.traits.shares_driver_process:
        return 1
    room = count_trials_with_room(request, max(1, trainer.scaling_config.min_workers))
    return max(1, min(room, most or room))
