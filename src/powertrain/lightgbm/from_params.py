"""The training function of a LightGBMTrainer that was given parameters and datasets."""

from __future__ import annotations

from dataclasses import dataclass

from powertrain.frameworks.boosting import Recipe, newest_model, read_frame
from powertrain.lightgbm.backend import get_network_params
from powertrain.lightgbm.frames import normalize_pandas_for_lightgbm


@dataclass(frozen=True)
class TrainFromParams:
    """Trains up to the recipe's number of rounds, from the newest checkpoint on."""

    recipe: Recipe

    def __call__(self) -> None:
        import lightgbm

        from powertrain.lightgbm.callback import ReportCallback

        recipe = self.recipe
        filename = recipe.filename(ReportCallback)
        model = newest_model(lambda checkpoint: ReportCallback.get_model(checkpoint, filename))
        left = recipe.rounds - (model.current_iteration() if model is not None else 0)
        if left <= 0:
            return
        sets: list[lightgbm.Dataset] = []
        for name in recipe.datasets:
            features, labels = read_frame(name, recipe.label_column)
            # The first is the one trained on, by whose bins the others are cut.
            sets.append(
                lightgbm.Dataset(
                    normalize_pandas_for_lightgbm(features), label=labels, reference=sets[0] if sets else None
                )
            )
        params = {
            "tree_learner": "data_parallel",
            "pre_partition": True,
            **recipe.params,
            **get_network_params(),
        }
        options = dict(recipe.options)
        options["valid_sets"] = [*sets, *options.get("valid_sets", ())]
        options["valid_names"] = [*recipe.datasets, *options.get("valid_names", ())]
        options["callbacks"] = recipe.callbacks(ReportCallback)
        lightgbm.train(params, sets[0], num_boost_round=left, init_model=model, **options)
