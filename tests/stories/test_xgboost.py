"""XGBoost on two workers: the model of one process, also after the death of a rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.stories.engines import on
from tests.stories.tabular import digits_frame

import powertrain
from powertrain import FailureConfig
from powertrain.run import events as ev

xgboost = pytest.importorskip("xgboost", reason="xgboost is not installed: pip install xgboost")

ROUNDS = 12
PARAMS = {"objective": "multi:softprob", "num_class": 10, "max_depth": 4, "eta": 0.3, "tree_method": "hist"}
#: How far a probability may be from that of one process: sums of gradients are made in another order.
TOLERANCE = 1e-4
#: What the function returns on rank 0 after it was resumed.
EXPECTED = {"begun": 6, "rows": 898, "workers": 2, "has_torch": False}


def probabilities(booster: Any) -> Any:
    return booster.predict(xgboost.DMatrix(digits_frame().drop(columns="label")))


def of_one_process() -> Any:
    """What XGBoost itself predicts after training in one process."""
    frame = digits_frame()
    matrix = xgboost.DMatrix(frame.drop(columns="label"), label=frame["label"])
    return probabilities(xgboost.train({**PARAMS, "nthread": 1}, matrix, ROUNDS))


def train_digits(config: dict[str, Any]) -> dict[str, Any]:
    """A loop as Ray Train's guide has it: from the newest checkpoint on, up to ``ROUNDS``."""
    import xgboost

    from powertrain.xgboost import RayTrainReportCallback

    frame = powertrain.get_dataset_shard("train").materialize().to_pandas()
    matrix = xgboost.DMatrix(frame.drop(columns="label"), label=frame["label"])
    checkpoint = powertrain.get_checkpoint()
    model = RayTrainReportCallback.get_model(checkpoint) if checkpoint else None
    begun = model.num_boosted_rounds() if model else 0

    class Killer(xgboost.callback.TrainingCallback):
        def after_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
            if checkpoint is None and epoch == config.get("killed_in") and is_rank_one():
                assert powertrain.get_all_reported_checkpoints(), "nothing is committed to go on from"
                os.kill(os.getpid(), signal.SIGKILL)
            return False

    xgboost.train(
        config["params"],
        matrix,
        num_boost_round=config["rounds"] - begun,
        evals=[(matrix, "train")],
        verbose_eval=False,
        xgb_model=model,
        callbacks=[RayTrainReportCallback(frequency=3), Killer()],
    )
    return {
        "begun": begun,
        "rows": len(frame),
        "workers": xgboost.collective.get_world_size(),
        "has_torch": "torch" in sys.modules,
    }


def is_rank_one() -> bool:
    return powertrain.get_context().get_world_rank() == 1


def fit(fits: Any, **options: Any) -> Any:
    from powertrain.xgboost import XGBoostTrainer

    config = {"params": PARAMS, "rounds": ROUNDS, **options.pop("config", {})}
    trainer = fits.trainer(
        train_digits,
        kind=XGBoostTrainer,
        train_loop_config=config,
        datasets={"train": powertrain.data.from_pandas(digits_frame())},
        **options,
    )
    return trainer.fit()


@on("local", "ray", smoke=["local"])
def test_two_workers_make_the_model_of_one_process_also_after_a_rank_was_killed(
    fits: Any, record_property: Any
) -> None:
    from powertrain.xgboost import RayTrainReportCallback

    result = fit(fits, name="killed", config={"killed_in": 7}, failure_config=FailureConfig(max_failures=1))

    assert result.state == "finished"
    assert [fact.attempt for fact in fits.facts("killed") if isinstance(fact, ev.TrainingStarted)] == [0, 1]
    assert result.return_value == EXPECTED, "continues after the commit"
    model = RayTrainReportCallback.get_model(result.checkpoint)
    assert model.num_boosted_rounds() == ROUNDS
    difference = float(abs(probabilities(model) - of_one_process()).max())
    record_property("difference", difference)
    assert difference < TOLERANCE
    assert set(result.metrics) >= {"train-mlogloss"}
    of_ranks = result.dataframe(ranks="all").groupby("rank")["train-mlogloss"].last()
    assert of_ranks[0] == of_ranks[1] == result.metrics["train-mlogloss"], "evaluated on the rows of both"


def test_the_example_trains_and_continues_where_torch_is_not_installed(tmp_path: Path) -> None:
    absent = tmp_path / "packages" / "torch"
    absent.mkdir(parents=True)
    (absent / "__init__.py").write_text("raise ModuleNotFoundError('torch is not installed', name='torch')")
    example = Path(__file__).parents[2] / "examples" / "xgboost_digits.py"
    command = [sys.executable, str(example), "--storage", str(tmp_path / "runs"), "--smoke"]
    environment = {**os.environ, "PYTHONPATH": str(absent.parent)}
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, timeout=110, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        accuracy = float(done.stdout.split("test accuracy: ")[1].split("%")[0])
        assert accuracy > 90
