"""Lightning's ``ckpt_path="last"``: in a run that is the newest checkpoint which the run has committed."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from powertrain.errors import ConfigError
from powertrain.lightning.environment import LightningEnvironment
from powertrain.lightning.reporting import CHECKPOINT_NAME, ReportCallback
from powertrain.lightning.strategies import WorkerStrategy
from powertrain.worker import context

if TYPE_CHECKING:
    from powertrain.checkpoint.checkpoint import Checkpoint


def prepare_trainer(trainer: Any) -> Any:
    """Prepare Lightning's Trainer for a worker. Call it before ``fit()``.

    ``trainer.fit(ckpt_path="last")`` then goes on from the newest checkpoint that the run has committed, and from what
    Lightning takes for the last one where the run has none.

    Args:
        trainer: A Trainer with one of the strategies of this package.

    Returns:
        The same Trainer.

    Raises:
        ConfigError: Its strategy, or its cluster environment, is not one of this package.

    Example::

        trainer = prepare_trainer(lightning.Trainer(strategy=DDPStrategy(), callbacks=[ReportCallback()]))
        trainer.fit(model, loader, ckpt_path="last")
    """
    strategy = getattr(trainer, "strategy", None)
    if not isinstance(strategy, WorkerStrategy):
        raise ConfigError(
            f"prepare_trainer() was given a Trainer with the strategy {type(strategy).__name__}, which would start "
            "processes of its own. Give the Trainer one of powertrain.lightning: strategy=DDPStrategy(), "
            "FSDPStrategy() or DeepSpeedStrategy()."
        )
    environment = strategy.cluster_environment
    if environment is not None and not isinstance(environment, LightningEnvironment):
        raise ConfigError(
            f"prepare_trainer() was given a Trainer with the cluster environment {type(environment).__name__}. Leave "
            "it out, or use powertrain.lightning.LightningEnvironment()."
        )
    if not hasattr(trainer.fit, "is_prepared"):
        trainer.fit = _resuming(trainer.fit)
    return trainer


def _resuming(fit: Any) -> Any:
    """Return ``fit`` with another meaning of ``ckpt_path="last"``."""
    signature = inspect.signature(fit)

    @functools.wraps(fit)
    def resuming(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        if given.arguments.get("ckpt_path") != "last":
            return fit(*args, **kwargs)
        trainer = fit.__self__
        with _last_checkpoint(trainer) as path, trainer.strategy.own_path(path):
            given.arguments["ckpt_path"] = path or "last"
            return fit(*given.args, **given.kwargs)

    resuming.is_prepared = True  # type: ignore[attr-defined]
    return resuming


@contextmanager
def _last_checkpoint(trainer: Any) -> Iterator[str]:
    """Give the path of Lightning's part of the run's newest checkpoint; "" where there is none."""
    checkpoint: Checkpoint | None = context.get_checkpoint()
    if checkpoint is None:
        yield ""
        return
    with checkpoint.as_directory() as directory:
        path = os.path.join(directory, _name_of(trainer))
        yield path if os.path.exists(path) else ""


def _name_of(trainer: Any) -> str:
    names = [one.CHECKPOINT_NAME for one in trainer.callbacks if isinstance(one, ReportCallback)]
    return str(names[0]) if names else CHECKPOINT_NAME
