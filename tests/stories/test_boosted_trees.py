"""Runs of XGBoost and LightGBM that go wrong: who is named, and what is left to continue from."""

from __future__ import annotations

import importlib
import os
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest
import story as stage
from tests.stories.tabular import digits_frame
from typer.testing import CliRunner

import powertrain
from powertrain import FailureConfig
from powertrain.cli.main import app
from powertrain.run import events as ev

ROUNDS = 8
TRAINERS = {"xgboost": "XGBoostTrainer", "lightgbm": "LightGBMTrainer"}
PARAMS = {
    "xgboost": {"objective": "binary:logistic", "nthread": 1},
    "lightgbm": {"objective": "binary", "metric": "binary_logloss", "verbosity": -1, "num_threads": 1},
}


@pytest.fixture(params=TRAINERS)
def name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    pytest.importorskip(name)
    return name


def large_digits() -> Any:
    """The digits; what is to be predicted is whether they are larger than four."""
    frame = digits_frame()
    return frame.assign(label=(frame["label"] > 4).astype("int64"))


def train(config: dict[str, Any]) -> dict[str, Any]:
    """Rank ``config["rank"]`` comes to grief in the sixth round of the first attempt; "resized" waits for a resize."""
    name = config["name"]
    callback = importlib.import_module(f"powertrain.{name}").RayTrainReportCallback
    checkpoint = powertrain.get_checkpoint()
    model = callback.get_model(checkpoint) if checkpoint else None
    begun = callback.library.count_rounds(model) if model else 0
    frame = powertrain.get_dataset_shard("train").materialize().to_pandas()
    features, labels = frame.drop(columns="label"), frame["label"]

    def come_to_grief(iteration: int) -> None:
        if config["grief"] == "resized" and checkpoint is None:
            stage.tell(f"round-{iteration}")
            stage.await_told("answer")
            time.sleep(0.05)  # a run learns of a resize between two rounds, and must not be over before
        elif (
            checkpoint is None
            and iteration == 5
            and powertrain.get_context().get_world_rank() == config["rank"]
        ):
            if config["grief"] == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if config["grief"] == "raised":
                raise ValueError("the trees are too high")
            time.sleep(1000)

    rounds, report = config["rounds"] - begun, callback(frequency=config["frequency"])
    if name == "xgboost":
        train_xgboost(features, labels, model, rounds, report, come_to_grief)
    else:
        train_lightgbm(features, labels, model, rounds, report, come_to_grief)
    return {"begun": begun, "workers": powertrain.get_context().get_world_size()}


def train_xgboost(features: Any, labels: Any, model: Any, rounds: int, report: Any, act: Any) -> None:
    import xgboost

    class Acting(xgboost.callback.TrainingCallback):
        def after_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
            act(epoch)
            return False

    matrix = xgboost.DMatrix(features, label=labels)
    xgboost.train(
        PARAMS["xgboost"], matrix, rounds, evals=[(matrix, "train")], verbose_eval=False, xgb_model=model,
        callbacks=[report, Acting()],
    )  # fmt: skip


def train_lightgbm(features: Any, labels: Any, model: Any, rounds: int, report: Any, act: Any) -> None:
    import lightgbm

    from powertrain.lightgbm import get_network_params

    def acting(env: Any) -> None:
        act(env.iteration)

    acting.order = 30  # type: ignore[attr-defined]  # after the report
    rows = lightgbm.Dataset(features, label=labels)
    network = {"tree_learner": "data_parallel", "pre_partition": True, **get_network_params()}
    lightgbm.train(
        {**PARAMS["lightgbm"], **network}, rows, rounds, valid_sets=[rows], valid_names=["train"],
        init_model=model, callbacks=[report, acting],
    )  # fmt: skip


def trainer_class(name: str) -> Any:
    return getattr(importlib.import_module(f"powertrain.{name}"), TRAINERS[name])


def trainer(
    fits: Any,
    name: str,
    grief: str,
    rank: int,
    failure_config: FailureConfig,
    *,
    rounds: int = ROUNDS,
    frequency: int = 2,
    **options: Any,
) -> Any:
    config = {"name": name, "grief": grief, "rank": rank, "rounds": rounds, "frequency": frequency}
    return fits.trainer(
        train,
        kind=trainer_class(name),
        name=grief,
        train_loop_config=config,
        datasets={"train": powertrain.data.from_pandas(large_digits())},
        failure_config=failure_config,
        **options,
    )


def test_the_death_of_rank_0_which_the_others_meet_at_is_survived(fits: Any, name: str) -> None:
    result = trainer(fits, name, "killed", 0, FailureConfig(max_failures=1)).fit()

    assert result.state == "finished"
    assert result.return_value["begun"] in (4, 6), "continues after a commit"
    [failed] = [fact for fact in fits.facts("killed") if isinstance(fact, ev.Failed)]
    assert "SIGKILL" in repr(failed)
    kind = trainer_class(name)
    assert kind.library.count_rounds(kind.get_model(result.checkpoint)) == ROUNDS


@pytest.mark.parametrize(
    ("grief", "words"),
    [
        ("killed", "Rank 1 was killed by SIGKILL"),
        ("raised", "Rank 1 raised ValueError: the trees are too high"),
    ],
)
def test_the_rank_that_failed_is_named_and_not_the_one_that_met_a_closed_connection(
    fits: Any, name: str, grief: str, words: str
) -> None:
    from powertrain.errors import WorkerGroupError

    with pytest.raises(WorkerGroupError) as raised:
        trainer(fits, name, grief, 1, FailureConfig()).fit()

    assert str(raised.value).startswith(words)
    assert raised.value.result.checkpoint is not None


def test_a_resize_saves_the_model_although_no_checkpoint_is_due(fits: Any, name: str) -> None:
    def resize() -> None:
        stage.await_told("round-0")
        storage = str(fits.directory / "storage")
        done = CliRunner().invoke(app, ["resize", "resized", "1", "--storage", storage])
        stage.tell("answer", done.output)

    asking = threading.Thread(target=resize)
    asking.start()
    try:
        elastic = trainer(fits, name, "resized", -1, FailureConfig(), rounds=400, frequency=0, workers=(1, 2))
        result = elastic.fit()
    finally:
        asking.join()

    assert result.state == "finished"
    facts = fits.facts("resized")
    assert [fact.world_size for fact in facts if isinstance(fact, ev.AttemptStarted)] == [2, 1]
    assert result.return_value["workers"] == 1
    assert 0 < result.return_value["begun"] < 400, "continues with the model of two workers"
    kind = trainer_class(name)
    assert kind.library.count_rounds(kind.get_model(result.checkpoint)) == 400


def test_a_rank_that_hangs_in_a_callback_is_named_with_its_line(fits: Any, name: str) -> None:
    from powertrain.errors import WorkerGroupError

    failing = trainer(fits, name, "hung", 1, FailureConfig(hang_timeout_s=4, on_hang="fail"))
    with pytest.raises(WorkerGroupError) as raised:
        failing.fit()

    # The library's own collectives are not known: the rank that waits inside of one is named beside the one that hangs.
    assert 1 in raised.value.worker_failures
    assert "time.sleep(1000)" in str(raised.value)
    assert raised.value.result.checkpoint is not None


def test_workers_of_lightgbm_evaluate_the_same_rows_and_stop_early_in_the_same_round(fits: Any) -> None:
    lightgbm = pytest.importorskip("lightgbm")
    kind, frame = trainer_class("lightgbm"), large_digits()
    noise = frame.iloc[:301].assign(label=np.random.default_rng(0).integers(0, 2, 301))
    result = kind(
        params=PARAMS["lightgbm"],
        label_column="label",
        num_boost_round=60,
        callbacks=[lightgbm.early_stopping(3, verbose=False)],
        datasets={
            "train": powertrain.data.from_pandas(frame),
            "valid": powertrain.data.from_pandas(noise),
        },
        scaling_config=stage.scaling(fits.engine, 2),
        run_config=stage.run_config("early"),
    ).fit()

    of_ranks = result.dataframe(ranks="all").groupby("rank")["valid-binary_logloss"].apply(list)
    assert of_ranks[0] == of_ranks[1]
    assert len(of_ranks[0]) < 60
    assert kind.get_model(result.checkpoint).current_iteration() == np.argmin(of_ranks[0]) + 1, (
        "the best round"
    )


def test_a_rank_without_rows_for_lightgbm_is_named(fits: Any) -> None:
    pytest.importorskip("lightgbm")
    failing = trainer_class("lightgbm")(
        params=PARAMS["lightgbm"],
        label_column="label",
        datasets={"train": powertrain.data.from_pandas(large_digits().iloc[:1])},
        scaling_config=stage.scaling(fits.engine, 2),
        run_config=stage.run_config("empty"),
    )
    with pytest.raises(
        powertrain.WorkerGroupError, match=r"of 2 has no rows of the dataset 'train'.*fewer workers"
    ):
        failing.fit()
