"""The training function of a trainer that was given parameters and datasets in place of one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from powertrain.errors import ConfigError
from powertrain.worker import context

if TYPE_CHECKING:
    import pandas as pd

    from powertrain.frameworks.boosting.callback import BoosterReporting
    from powertrain.frameworks.boosting.recipe import Recipe

#: Arguments of matrices that may name a column, whose values they then have.
_OF_ROWS = ("weight", "base_margin", "init_score", "qid", "group", "label_lower_bound", "label_upper_bound")


@dataclass(frozen=True)
class Table:
    """This rank's rows of a dataset."""

    name: str
    features: pd.DataFrame
    labels: Any
    #: Further arguments of the library's matrix.
    options: dict[str, Any]


@dataclass(frozen=True)
class TrainFromParams:
    """Trains up to the recipe's number of rounds, from the newest checkpoint on."""

    recipe: Recipe

    def __call__(self) -> None:
        recipe, kind = self.recipe, self.callback_class()
        report, callbacks = recipe.callbacks(kind)
        checkpoint = context.get_checkpoint()
        model = None if checkpoint is None else kind.get_model(checkpoint, report.filename)
        left = recipe.rounds - (kind.library.count_rounds(model) if model is not None else 0)
        if left <= 0:
            return
        tables = [read_table(name, recipe) for name in recipe.datasets]
        report.finish(self.train(tables, left, model, {**recipe.options, "callbacks": callbacks}))

    def callback_class(self) -> type[BoosterReporting]:
        """Return the library's reporting callback."""
        raise NotImplementedError

    def train(self, tables: list[Table], rounds: int, model: Any, options: dict[str, Any]) -> Any:
        """Train for some rounds and return the booster.

        Args:
            tables: The rows, those to train on first; all of them are evaluated.
            rounds: How many rounds to train for.
            model: The booster to continue from, or None.
            options: Further arguments of the library's ``train``.
        """
        raise NotImplementedError


def read_table(name: str, recipe: Recipe) -> Table:
    """Return this rank's rows of a dataset.

    Raises:
        ConfigError: The dataset lacks a column that the recipe names.
    """
    frame = context.get_dataset_shard(name).materialize().to_pandas()
    options = dict(recipe.matrix_options.get(name, {}))
    columns = {key: options[key] for key in _OF_ROWS if isinstance(options.get(key), str)}
    for argument, column in {"label_column": recipe.label_column, **columns}.items():
        if column not in frame:
            raise ConfigError(
                f"{argument}={column!r} is not a column of the dataset {name!r}. Name one of "
                f"{', '.join(map(repr, frame.columns)) or 'its columns: it has none'}."
            )
    options |= {key: frame[column] for key, column in columns.items()}
    features = frame.drop(columns=[recipe.label_column, *columns.values()])
    return Table(name, features, frame[recipe.label_column], options)
