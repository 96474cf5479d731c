"""LightGBM on two workers: the model of one process, also after the death of a rank."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import numpy as np
import pytest
from tests.stories.engines import on
from tests.stories.tabular import digits, digits_frame

import powertrain
from powertrain import FailureConfig
from powertrain.run import events as ev

lightgbm = pytest.importorskip("lightgbm", reason="lightgbm is not installed: pip install lightgbm")

ROUNDS = 12
PARAMS = {
    "objective": "multiclass", "num_class": 10, "num_leaves": 15, "learning_rate": 0.3, "verbosity": -1,
    "num_threads": 1, "metric": "multi_logloss",
}  # fmt: skip
#: How far a probability may be from that of an undisturbed run of as many workers.
TOLERANCE = 1e-6
#: How far the loss may be from that of one process: LightGBM finds the bins of a feature from the rows of one worker.
LOSS_TOLERANCE = 0.005
#: What the function returns on rank 0 after it was resumed.
EXPECTED = {"begun": 6, "rows": 898, "workers": 2, "has_torch": False}


def probabilities(booster: Any) -> Any:
    features, _ = digits()
    return booster.predict(features)


def of_one_process() -> Any:
    """What LightGBM itself predicts after training in one process."""
    features, labels = digits()
    return probabilities(lightgbm.train(PARAMS, lightgbm.Dataset(features, label=labels), ROUNDS))


def train_digits(config: dict[str, Any]) -> dict[str, Any]:
    """A loop as Ray Train's guide has it: from the newest checkpoint on, up to ``ROUNDS``."""
    import lightgbm

    from powertrain.lightgbm import RayTrainReportCallback, get_network_params, normalize_pandas_for_lightgbm

    frame = powertrain.get_dataset_shard("train").materialize().to_pandas()
    frame = normalize_pandas_for_lightgbm(frame)
    train_set = lightgbm.Dataset(frame.drop(columns="label"), label=frame["label"])
    checkpoint = powertrain.get_checkpoint()
    model = RayTrainReportCallback.get_model(checkpoint) if checkpoint else None
    begun = model.current_iteration() if model else 0

    def kill(env: Any) -> None:
        if checkpoint is None and env.iteration == config.get("killed_in") and is_rank_one():
            assert powertrain.get_all_reported_checkpoints(), "nothing is committed to go on from"
            os.kill(os.getpid(), signal.SIGKILL)

    kill.order = 30  # type: ignore[attr-defined]  # after the report
    network = get_network_params()
    lightgbm.train(
        {**config["params"], "tree_learner": "data_parallel", "pre_partition": True, **network},
        train_set,
        num_boost_round=config["rounds"] - begun,
        valid_sets=[train_set],
        valid_names=["train"],
        init_model=model,
        callbacks=[RayTrainReportCallback(frequency=3), kill],
    )
    return {
        "begun": begun,
        "rows": len(frame),
        "workers": network.get("num_machines", 1),
        "has_torch": "torch" in sys.modules,
    }


def is_rank_one() -> bool:
    return powertrain.get_context().get_world_rank() == 1


def fit(fits: Any, **options: Any) -> Any:
    from powertrain.lightgbm import LightGBMTrainer

    config = {"params": PARAMS, "rounds": ROUNDS, **options.pop("config", {})}
    trainer = fits.trainer(
        train_digits,
        kind=LightGBMTrainer,
        train_loop_config=config,
        datasets={"train": powertrain.data.from_pandas(digits_frame())},
        **options,
    )
    return trainer.fit()


def loss(guessed: Any) -> float:
    _, labels = digits()
    return float(-np.log(guessed[np.arange(len(labels)), labels]).mean())


@on("local", "ray")
def test_two_workers_make_nearly_the_model_of_one_process_and_the_same_after_a_rank_was_killed(
    fits: Any, record_property: Any
) -> None:
    from powertrain.lightgbm import RayTrainReportCallback

    undisturbed = fit(fits, name="undisturbed")
    result = fit(fits, name="killed", config={"killed_in": 7}, failure_config=FailureConfig(max_failures=1))

    assert result.state == "finished"
    assert [fact.attempt for fact in fits.facts("killed") if isinstance(fact, ev.TrainingStarted)] == [0, 1]
    assert result.return_value == EXPECTED, "continues after the commit"
    model = RayTrainReportCallback.get_model(result.checkpoint)
    assert model.current_iteration() == ROUNDS
    found, expected = (
        probabilities(RayTrainReportCallback.get_model(one.checkpoint)) for one in (result, undisturbed)
    )
    difference, of_loss = float(abs(found - expected).max()), abs(loss(found) - loss(of_one_process()))
    record_property("difference", difference)
    record_property("difference of the loss", of_loss)
    assert difference < TOLERANCE
    assert of_loss < LOSS_TOLERANCE
    assert set(result.metrics) == {"train-multi_logloss"}
