"""``params``, ``label_column`` and ``datasets`` as data that a training function follows.

Ray Train's older trainers take these in place of a training function.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from dataclasses import replace as replace_fields
from typing import Any

from powertrain.config.checks import as_config, replace
from powertrain.config.data import TRAIN_DATASET_KEY
from powertrain.config.run import RunConfig
from powertrain.errors import ConfigError
from powertrain.values.arguments import as_whole, shorten

_USUAL_ROUNDS = 10
_MOST_ROUNDS = 2**31 - 1


@dataclass(frozen=True)
class Recipe:
    """The training as data: the values of a run of a trainer without a training function."""

    #: The library's own parameters.
    params: dict[str, Any]
    label_column: str
    #: Rounds of the whole model, also where training continues from a checkpoint.
    rounds: int
    #: Names of the datasets, the one to train on first.
    datasets: tuple[str, ...]
    #: The interval of checkpoints, and whether one is saved at the end.
    frequency: int = 0
    saves_at_end: bool = True
    #: Further arguments of the library's ``train``.
    options: dict[str, Any] = field(default_factory=dict)
    #: By dataset further arguments of the library's matrix; texts among them name columns.
    matrix_options: dict[str, dict[str, Any]] = field(default_factory=dict)

    def callbacks(self, kind: type[Any]) -> tuple[Any, list[Any]]:
        """The callback of class ``kind`` that reports, which may be the user's own, and all callbacks."""
        given = list(self.options.get("callbacks") or ())
        for one in given:
            if isinstance(one, kind):
                return one, given
        own = kind(frequency=self.frequency, checkpoint_at_end=self.saves_at_end)
        return own, [*given, own]

    def changed(self, trainer: str, params: Any, label_column: Any, num_boost_round: Any) -> Recipe:
        """This recipe with other values where one is given, for a run that continues."""
        given: dict[str, Any] = {
            "params": None if params is None else _as_params(trainer, params),
            "label_column": None if label_column is None else _as_label(trainer, label_column),
            "rounds": None if num_boost_round is None else _as_rounds(trainer, num_boost_round),
        }
        return replace_fields(self, **{name: value for name, value in given.items() if value is not None})


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
    checkpoints = as_config(run_config, RunConfig, "run_config").checkpoint_config
    at_end = checkpoints.checkpoint_at_end
    rest = dict(options)
    return Recipe(
        params=_as_params(trainer, params),
        label_column=_as_label(trainer, label_column),
        rounds=_as_rounds(trainer, _USUAL_ROUNDS if num_boost_round is None else num_boost_round),
        datasets=(TRAIN_DATASET_KEY, *(name for name in names if name != TRAIN_DATASET_KEY)),
        frequency=checkpoints.checkpoint_frequency or 0,
        saves_at_end=True if at_end is None else at_end,
        matrix_options=_as_matrix_options(trainer, rest.pop("dmatrix_params", None), names),
        options=rest,
    )


def _as_params(trainer: str, params: Any) -> dict[str, Any]:
    if params is not None and not isinstance(params, Mapping):
        raise ConfigError(f"{trainer}(params={shorten(params)}) takes a dict of the library's parameters.")
    return dict(params or {})


def _as_label(trainer: str, label_column: Any) -> str:
    if isinstance(label_column, str) and label_column:
        return label_column
    raise ConfigError(
        f"{trainer}(label_column={shorten(label_column)}) must name the column to predict where no training "
        'function is given, such as label_column="y".'
    )


def _as_rounds(trainer: str, num_boost_round: Any) -> int:
    return as_whole(num_boost_round, f"{trainer}(num_boost_round=...)", 1, _MOST_ROUNDS, ConfigError)


def _as_matrix_options(trainer: str, given: Any, names: list[str]) -> dict[str, dict[str, Any]]:
    if given is None:
        return {}
    if isinstance(given, Mapping) and all(
        name in names and isinstance(options, Mapping) for name, options in given.items()
    ):
        return {name: dict(options) for name, options in given.items()}
    raise ConfigError(
        f"{trainer}(dmatrix_params={shorten(given)}) takes by name of a dataset a dict of arguments for its matrix, "
        f"such as {{'train': {{'weight': 'column'}}}}; the datasets are {', '.join(map(repr, names))}."
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
