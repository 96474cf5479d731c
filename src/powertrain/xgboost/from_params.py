"""The training function of an XGBoostTrainer that was given parameters and datasets."""

from __future__ import annotations

from dataclasses import dataclass

from powertrain.frameworks.boosting import Recipe, newest_model, read_frame


@dataclass(frozen=True)
class TrainFromParams:
    """Trains up to the recipe's number of rounds, from the newest checkpoint on."""

    recipe: Recipe

    def __call__(self) -> None:
        import xgboost

        from powertrain.xgboost.callback import ReportCallback

        recipe = self.recipe
        filename = recipe.filename(ReportCallback)
        model = newest_model(lambda checkpoint: ReportCallback.get_model(checkpoint, filename))
        left = recipe.rounds - (model.num_boosted_rounds() if model is not None else 0)
        if left <= 0:
            return
        matrices = {}
        for name in recipe.datasets:
            features, labels = read_frame(name, recipe.label_column)
            matrices[name] = xgboost.DMatrix(features, label=labels)
        options = {"verbose_eval": False, **recipe.options}
        options["evals"] = [*((matrix, name) for name, matrix in matrices.items()), *options.get("evals", ())]
        options["callbacks"] = recipe.callbacks(ReportCallback)
        xgboost.train(
            recipe.params, matrices[recipe.datasets[0]], num_boost_round=left, xgb_model=model, **options
        )
