"""Training from ``params``, ``label_column`` and ``datasets``: what the trainers of boosted trees share.

Ray Train's older trainers take these in place of a training function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from powertrain.arguments import as_whole, shorten
from powertrain.config import TRAIN_DATASET_KEY, RunConfig, as_config, replace
from powertrain.errors import ConfigError
from powertrain.worker import context

if TYPE_CHECKING:
    import pandas as pd

_USUAL_ROUNDS = 10
_MOST_ROUNDS = 2**31 - 1


@dataclass(frozen=True)
class Recipe:
    """What to train, as data: the values that a run of a trainer without a training function is made of."""

    #: The library's own parameters.
    params: dict[str, Any]
    label_column: str
    #: Rounds of the whole model, also where training continues from a checkpoint.
    rounds: int
    #: Names of the datasets, the one to train on first.
    datasets: tuple[str, ...]
    #: How often checkpoints are saved, and whether one is at the end.
    frequency: int = 0
    saves_at_end: bool = True
    #: Further arguments of the library's ``train``.
    options: dict[str, Any] = field(default_factory=dict)

    def callbacks(self, kind: type[Any]) -> list[Any]:
        """The user's callbacks, and a reporting one of class ``kind`` unless it is among them."""
        given = list(self.options.get("callbacks") or ())
        if not any(isinstance(one, kind) for one in given):
            given.append(kind(frequency=self.frequency, checkpoint_at_end=self.saves_at_end))
        return given

    def filename(self, kind: type[Any]) -> str:
        """The name of the model's file in this run's checkpoints."""
        own = (one for one in self.callbacks(kind) if isinstance(one, kind))
        name: str = next(own).filename
        return name


def recipe(
    trainer: str,
    params: Any,
    label_column: Any,
    num_boost_round: Any,
    datasets: Mapping[str, Any] | None,
    run_config: Any,
    options: Mapping[str, Any],
) -> Recipe:
    """Check the arguments of a trainer that was given no training function.

    Args:
        trainer: The name of the trainer, for errors.
        params: The library's parameters, or None.
        label_column: The column to predict.
        num_boost_round: Rounds of the whole model; None for 10.
        datasets: The trainer's datasets.
        run_config: Its run config, whose checkpoint config says how often to save.
        options: Further arguments of the library's ``train``.

    Raises:
        ConfigError: An argument is missing or has a wrong value.
    """
    names = list(datasets or ())
    if TRAIN_DATASET_KEY not in names:
        raise ConfigError(
            f"{trainer} was given no training function, so it trains on datasets={{{TRAIN_DATASET_KEY!r}: ...}}; it "
            f"was given {', '.join(map(repr, names)) or 'none'}. Give the dataset under that name, or a training "
            "function."
        )
    if not isinstance(label_column, str) or not label_column:
        raise ConfigError(
            f"{trainer}(label_column={shorten(label_column)}) must name the column to predict where no training "
            'function is given, such as label_column="y".'
        )
    if params is not None and not isinstance(params, Mapping):
        raise ConfigError(f"{trainer}(params={shorten(params)}) takes a dict of the library's parameters.")
    rounds = _USUAL_ROUNDS if num_boost_round is None else num_boost_round
    checkpoints = as_config(run_config, RunConfig, "run_config").checkpoint_config
    at_end = checkpoints.checkpoint_at_end
    return Recipe(
        params=dict(params or {}),
        label_column=label_column,
        rounds=as_whole(rounds, f"{trainer}(num_boost_round=...)", 1, _MOST_ROUNDS, ConfigError),
        datasets=(TRAIN_DATASET_KEY, *(name for name in names if name != TRAIN_DATASET_KEY)),
        frequency=checkpoints.checkpoint_frequency or 0,
        saves_at_end=True if at_end is None else at_end,
        options=dict(options),
    )


def without_checkpoint_rules(run_config: Any) -> RunConfig:
    """The run config without the rules for checkpoints that a :class:`Recipe` follows itself."""
    run = as_config(run_config, RunConfig, "run_config")
    rules = replace(run.checkpoint_config, checkpoint_at_end=None, checkpoint_frequency=None)
    return replace(run, checkpoint_config=rules)


def about_unused(trainer: str, given: Mapping[str, Any]) -> list[str]:
    """A sentence about arguments that only count without a training function, where there is a function."""
    named = [f"{name}=" for name, value in given.items() if value is not None]
    if not named:
        return []
    return [
        f"{trainer} does not use {', '.join(named)} because it was given a training function. Use them in the "
        "function, or leave the function out."
    ]


def read_frame(name: str, label_column: str) -> tuple[pd.DataFrame, pd.Series[Any]]:
    """This rank's rows of a dataset, as features and labels.

    Raises:
        ConfigError: The dataset has no such column.
    """
    frame = context.get_dataset_shard(name).materialize().to_pandas()
    if label_column not in frame:
        raise ConfigError(
            f"label_column={label_column!r} is no column of the dataset {name!r}, which has "
            f"{', '.join(map(repr, frame.columns))}."
        )
    return frame.drop(columns=label_column), frame[label_column]


def newest_model(load: Callable[[Any], Any]) -> Any:
    """The model of this run's newest checkpoint; None at its first start."""
    checkpoint = context.get_checkpoint()
    return None if checkpoint is None else load(checkpoint)
