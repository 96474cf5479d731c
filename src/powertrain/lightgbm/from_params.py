"""The training function of a LightGBMTrainer that was given parameters and datasets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from powertrain.errors import DataError
from powertrain.frameworks.boosting.loop import Table, TrainFromParams
from powertrain.lightgbm.backend import get_network_params
from powertrain.lightgbm.frames import normalize_pandas_for_lightgbm
from powertrain.worker import context

if TYPE_CHECKING:
    from powertrain.frameworks.boosting.callback import BoosterReporting


class LightGBMFromParams(TrainFromParams):
    """Calls ``lightgbm.train``."""

    def callback_class(self) -> type[BoosterReporting]:
        """Return LightGBM's reporting callback."""
        from powertrain.lightgbm.callback import ReportCallback

        return ReportCallback

    def train(self, tables: list[Table], rounds: int, model: Any, options: dict[str, Any]) -> Any:
        """Train for some rounds and return the booster."""
        import lightgbm

        sets: list[lightgbm.Dataset] = []
        for table in tables:
            _refuse_absence_of_rows(table)
            features = normalize_pandas_for_lightgbm(table.features)
            # The first is the one trained on, by whose bins the others are cut.
            reference = sets[0] if sets else None
            sets.append(lightgbm.Dataset(features, label=table.labels, reference=reference, **table.options))
        params = {
            "tree_learner": "data_parallel",
            "pre_partition": True,
            **self.recipe.params,
            **get_network_params(),
        }
        options = dict(options)
        options["valid_sets"] = [*sets, *options.get("valid_sets", ())]
        options["valid_names"] = [*(table.name for table in tables), *options.get("valid_names", ())]
        return lightgbm.train(params, sets[0], num_boost_round=rounds, init_model=model, **options)


def _refuse_absence_of_rows(table: Table) -> None:
    """LightGBM takes no empty table, and says nothing of workers."""
    if len(table.features) == 0:
        here = context.get_context()
        raise DataError(
            f"Rank {here.get_world_rank()} of {here.get_world_size()} has no rows of the dataset {table.name!r}, and "
            "LightGBM needs some on every worker. Use fewer workers or more rows; rows to evaluate are whole on every "
            'worker with DataConfig(datasets_to_split=["train"]).'
        )
