"""Train boosted trees on scikit-learn's handwritten digits with two workers.

Each worker holds its part of the rows; XGBoost makes one model of all of them. A run is identified by its name:
interrupt this script and start it again, and it resumes from its newest checkpoint::

    python examples/xgboost_digits.py
    python examples/xgboost_digits.py --rounds 60      # 20 more rounds of the same run
    python examples/xgboost_digits.py --smoke          # a short run
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import pandas as pd
import xgboost
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import powertrain
from powertrain import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from powertrain.xgboost import ReportCallback, XGBoostTrainer


def digits() -> dict[str, pd.DataFrame]:
    """Return 1,437 images for training and 360 for testing, the same split every time."""
    pictures, labels = load_digits(return_X_y=True)
    frame = pd.DataFrame(pictures, columns=[f"pixel_{number:02}" for number in range(64)])
    frame["label"] = labels
    learn, test = train_test_split(frame, test_size=0.2, random_state=0, stratify=labels)
    return {"train": learn, "test": test}


def matrix(name: str) -> xgboost.DMatrix:
    """Return this worker's rows of a dataset."""
    frame = powertrain.get_dataset_shard(name).materialize().to_pandas()
    return xgboost.DMatrix(frame.drop(columns="label"), label=frame["label"])


def train(config: dict[str, Any]) -> None:
    """Training function of every worker: the rounds left after the newest checkpoint."""
    checkpoint = powertrain.get_checkpoint()
    model = ReportCallback.get_model(checkpoint) if checkpoint else None
    left = config["rounds"] - (model.num_boosted_rounds() if model else 0)
    learn, test = matrix("train"), matrix("test")
    if left > 0:
        xgboost.train(
            config["params"],
            learn,
            num_boost_round=left,
            evals=[(learn, "train"), (test, "test")],
            verbose_eval=False,
            xgb_model=model,
            callbacks=[ReportCallback(frequency=10)],
        )


def main() -> None:
    arguments = argparse.ArgumentParser(description="Train boosted trees on handwritten digits.")
    arguments.add_argument(
        "--name", default="xgboost-digits", help="the run; the same name again goes on with it"
    )
    arguments.add_argument("--storage-path", help="where runs are kept; the default when left out")
    arguments.add_argument("--workers", type=int, default=2)
    arguments.add_argument("--rounds", type=int, default=40)
    arguments.add_argument("--smoke", action="store_true", help="a short run, to see that it works")
    options = arguments.parse_args()

    params = {"objective": "multi:softprob", "num_class": 10, "max_depth": 4, "eta": 0.3}
    frames = digits()
    result = XGBoostTrainer(
        train,
        train_loop_config={"params": params, "rounds": 10 if options.smoke else options.rounds},
        datasets={name: powertrain.data.from_pandas(frame) for name, frame in frames.items()},
        scaling_config=ScalingConfig(num_workers=options.workers),
        run_config=RunConfig(
            name=options.name,
            storage_path=options.storage_path,
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            failure_config=FailureConfig(max_failures=2),
        ),
    ).fit()
    print(result)
    assert result.checkpoint is not None
    model = ReportCallback.get_model(result.checkpoint)
    test = frames["test"]
    guessed = model.predict(xgboost.DMatrix(test.drop(columns="label"))).argmax(axis=1)
    print(f"test accuracy: {np.mean(guessed == test['label']):.2%}")


if __name__ == "__main__":
    main()
