"""The training function of an XGBoostTrainer that was given parameters and datasets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from powertrain.frameworks.boosting.loop import Table, TrainFromParams

if TYPE_CHECKING:
    from powertrain.frameworks.boosting.callback import BoosterReporting


class XGBoostFromParams(TrainFromParams):
    """Calls ``xgboost.train``."""

    def callback_class(self) -> type[BoosterReporting]:
        """Return XGBoost's reporting callback."""
        from powertrain.xgboost.callback import ReportCallback

        return ReportCallback

    def train(self, tables: list[Table], rounds: int, model: Any, options: dict[str, Any]) -> Any:
        """Train for some rounds and return the booster."""
        import xgboost

        matrices = [
            (xgboost.DMatrix(table.features, label=table.labels, **table.options), table.name)
            for table in tables
        ]
        options = {"verbose_eval": False, **options, "evals": [*matrices, *options.get("evals", ())]}
        return xgboost.train(
            self.recipe.params, matrices[0][0], num_boost_round=rounds, xgb_model=model, **options
        )
