"""Trainers of boosted trees: what they take in place of a training function, their checkpoints, their network."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import powertrain
from powertrain import CheckpointConfig, RunConfig, ScalingConfig
from powertrain.errors import CheckpointError, ConfigError

TRAINERS = {"xgboost": "XGBoostTrainer", "lightgbm": "LightGBMTrainer"}
PARAMS = {
    "xgboost": {"objective": "binary:logistic", "nthread": 1},
    "lightgbm": {"objective": "binary", "verbosity": -1, "num_threads": 1, "metric": "binary_logloss"},
}
LOSS = {"xgboost": "logloss", "lightgbm": "binary_logloss"}


@pytest.fixture(params=TRAINERS)
def name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    pytest.importorskip(name)
    return name


def frame(rows: int = 80) -> pd.DataFrame:
    values = np.random.default_rng(0).normal(size=(rows, 3))
    made = pd.DataFrame(values, columns=["a", "b", "c"])
    made["y"] = (values.sum(axis=1) > 0).astype(int)
    return made


def trainer(name: str, storage: Path, function: Any = None, **options: Any) -> Any:
    kind = getattr(importlib.import_module(f"powertrain.{name}"), TRAINERS[name])
    rules = options.pop("checkpoint_config", CheckpointConfig())
    return kind(
        function,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="run", storage_path=str(storage), checkpoint_config=rules, verbose=0),
        **options,
    )


def test_params_and_datasets_are_enough_and_more_rounds_continue_the_model(name: str, tmp_path: Path) -> None:
    datasets = {
        "valid": powertrain.data.from_pandas(frame(20)),
        "train": powertrain.data.from_pandas(frame()),
    }
    given = {"params": PARAMS[name], "label_column": "y", "datasets": datasets}
    rules = CheckpointConfig(checkpoint_frequency=2, checkpoint_at_end=True)
    result = trainer(name, tmp_path, **given, num_boost_round=5, checkpoint_config=rules).fit()
    assert set(result.metrics) == {f"train-{LOSS[name]}", f"valid-{LOSS[name]}"}
    assert len(result.best_checkpoints) == 3, "after the rounds 2 and 4, and at the end"

    longer = trainer(name, tmp_path, **given, num_boost_round=8, checkpoint_config=rules)
    model = type(longer).get_model(longer.fit().checkpoint)
    assert (model.num_boosted_rounds() if name == "xgboost" else model.current_iteration()) == 8


def test_a_finished_number_of_rounds_trains_nothing_more(name: str, tmp_path: Path) -> None:
    given = {
        "params": PARAMS[name], "label_column": "y", "num_boost_round": 2,
        "datasets": {"train": powertrain.data.from_pandas(frame())},
    }  # fmt: skip
    first = trainer(name, tmp_path, **given).fit()
    again = trainer(name, tmp_path, **given).fit()
    assert again.checkpoint.path == first.checkpoint.path


def test_what_is_missing_without_a_function_is_named(name: str, tmp_path: Path) -> None:
    train = powertrain.data.from_pandas(frame())
    with pytest.raises(
        ConfigError, match=r"no training function.*datasets=\{'train': \.\.\.\}; it was given none"
    ):
        trainer(name, tmp_path, params={}, label_column="y")
    with pytest.raises(ConfigError, match=r"it was given 'valid'"):
        trainer(name, tmp_path, label_column="y", datasets={"valid": train})
    with pytest.raises(ConfigError, match=r"label_column=None.*name the column"):
        trainer(name, tmp_path, datasets={"train": train})
    with pytest.raises(ConfigError, match=r"params=3.*dict"):
        trainer(name, tmp_path, params=3, label_column="y", datasets={"train": train})
    with pytest.raises(ConfigError, match=r"num_boost_round=\.\.\."):
        trainer(name, tmp_path, num_boost_round=0, label_column="y", datasets={"train": train})


def rounds(name: str, model: Any) -> int:
    return int(model.num_boosted_rounds() if name == "xgboost" else model.current_iteration())


def test_training_begins_from_a_checkpoint_of_another_run(name: str, tmp_path: Path) -> None:
    given = {
        "params": PARAMS[name], "label_column": "y",
        "datasets": {"train": powertrain.data.from_pandas(frame())},
    }  # fmt: skip
    first = trainer(name, tmp_path / "first", **given, num_boost_round=3).fit()
    second = trainer(
        name, tmp_path / "second", **given, num_boost_round=5, resume_from_checkpoint=first.checkpoint
    )
    result = second.fit()
    assert len(result.metrics_dataframe) in (2, 3), "two rounds, and with XGBoost the report of the end"
    assert rounds(name, second.get_model(result.checkpoint)) == 5


def test_a_restored_run_takes_another_number_of_rounds(name: str, tmp_path: Path) -> None:
    train = {"train": powertrain.data.from_pandas(frame())}
    kind = getattr(importlib.import_module(f"powertrain.{name}"), TRAINERS[name])
    first = trainer(name, tmp_path, params=PARAMS[name], label_column="y", num_boost_round=2, datasets=train)
    first.fit()
    again = kind.restore(
        tmp_path / "run",
        first._request.function,
        num_boost_round=4,
        datasets=train,
        scaling_config=ScalingConfig(num_workers=0),
    )
    assert again._request.standing_remarks == []
    assert rounds(name, kind.get_model(again.fit().checkpoint)) == 4


def test_a_checkpoint_without_a_model_is_refused_with_the_names_of_its_files(
    name: str, tmp_path: Path
) -> None:
    module = importlib.import_module(f"powertrain.{name}")
    kind, callback = getattr(module, TRAINERS[name]), module.RayTrainReportCallback
    (tmp_path / "weights.pt").write_bytes(b"x")
    other = powertrain.Checkpoint.from_directory(tmp_path)
    usual = callback.CHECKPOINT_NAME
    with pytest.raises(CheckpointError, match=rf"no {usual}; it has weights\.pt\. .*filename=\.\.\."):
        kind.get_model(other)
    with pytest.raises(CheckpointError, match=r"weights\.pt of .* is not a model that"):
        callback.get_model(other, "weights.pt")


def test_the_file_of_the_users_own_callback_is_saved_renamed_and_resumed_from(
    name: str, tmp_path: Path
) -> None:
    callback = importlib.import_module(f"powertrain.{name}").RayTrainReportCallback
    own = callback(
        metrics={"loss": f"train-{LOSS[name]}"},
        filename="mine.json" if name == "xgboost" else "mine.txt",
        frequency=2,
        checkpoint_at_end=False,
        results_postprocessing_fn=lambda metrics: {**metrics, "twice": 2 * metrics["loss"]},
    )
    given = {
        "params": PARAMS[name], "label_column": "y", "callbacks": [own],
        "datasets": {"train": powertrain.data.from_pandas(frame())},
    }  # fmt: skip
    result = trainer(name, tmp_path, **given, num_boost_round=5).fit()
    assert result.metrics["twice"] == 2 * result.metrics["loss"]
    assert rounds(name, callback.get_model(result.checkpoint, own.filename)) == 4, "none at the end"
    longer = trainer(name, tmp_path, **given, num_boost_round=8).fit()
    assert rounds(name, callback.get_model(longer.checkpoint, filename=own.filename)) == 8


def test_an_early_stop_leaves_the_model_in_a_checkpoint(name: str, tmp_path: Path) -> None:
    library = importlib.import_module(name)
    noise = frame(40).assign(y=np.random.default_rng(1).integers(0, 2, 40))
    stopping = (
        {"early_stopping_rounds": 2}
        if name == "xgboost"
        else {"callbacks": [library.early_stopping(2, verbose=False)]}
    )
    result = trainer(
        name,
        tmp_path,
        params=PARAMS[name],
        label_column="y",
        num_boost_round=50,
        datasets={
            "train": powertrain.data.from_pandas(frame()),
            "valid": powertrain.data.from_pandas(noise),
        },
        **stopping,
    ).fit()
    assert len(result.metrics_dataframe) < 50
    assert result.checkpoint is not None
    assert rounds(name, importlib.import_module(f"powertrain.{name}").RayTrainReportCallback.get_model(
        result.checkpoint)) > 0  # fmt: skip


def test_dmatrix_params_name_columns_with_weights(name: str, tmp_path: Path) -> None:
    weighted = frame().assign(w=1.0)
    weighted.loc[40:, "w"] = 0.0
    given = {"params": PARAMS[name], "label_column": "y", "num_boost_round": 3}
    run = trainer(
        name,
        tmp_path / "weighted",
        **given,
        datasets={"train": powertrain.data.from_pandas(weighted)},
        dmatrix_params={"train": {"weight": "w"}},
    )
    plain = trainer(
        name, tmp_path / "plain", **given, datasets={"train": powertrain.data.from_pandas(frame())}
    )
    models = [one.get_model(one.fit().checkpoint) for one in (run, plain)]
    names = [model.feature_names if name == "xgboost" else model.feature_name() for model in models]
    assert names == [["a", "b", "c"]] * 2, "the weights are no feature"
    dumps = [model.get_dump() if name == "xgboost" else model.model_to_string() for model in models]
    assert dumps[0] != dumps[1]


def test_wrong_dmatrix_params_and_columns_are_named(name: str, tmp_path: Path) -> None:
    given = {"label_column": "y", "datasets": {"train": powertrain.data.from_pandas(frame())}}
    with pytest.raises(ConfigError, match=r"dmatrix_params=.*the datasets are 'train'"):
        trainer(name, tmp_path, **given, dmatrix_params={"valid": {}})
    for changed in ({"label_column": "z"}, {"dmatrix_params": {"train": {"weight": "z"}}}):
        failing = trainer(name, tmp_path, **{**given, **changed})
        with pytest.raises(
            powertrain.WorkerGroupError, match=r"='z' is not a column .*Name one of 'a', 'b', 'c', 'y'"
        ):
            failing.fit()


def test_params_beside_a_function_are_accepted_and_said_to_be_unused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = trainer(
        name, tmp_path, lambda: None, params={"eta": 1}, num_boost_round=3, early_stopping_rounds=2
    )
    assert given._request.standing_remarks == [
        f"{TRAINERS[name]} does not use params=, num_boost_round=, early_stopping_rounds= because it was given a "
        "training function. Use them in the function, or leave the function out."
    ]


def test_a_checkpoint_holds_one_booster(name: str, tmp_path: Path) -> None:
    library = importlib.import_module(name)
    data = frame()
    matrix = (library.DMatrix if name == "xgboost" else library.Dataset)(
        data[["a", "b", "c"]], label=data["y"]
    )
    booster = library.train(PARAMS[name], matrix, 3)
    kind = getattr(
        importlib.import_module(f"powertrain.{name}"), TRAINERS[name].replace("Trainer", "Checkpoint")
    )
    for checkpoint in (kind.from_model(booster), kind.from_model(booster, path=str(tmp_path))):
        model = checkpoint.get_model()
        assert (model.num_boosted_rounds() if name == "xgboost" else model.current_iteration()) == 3
        assert checkpoint.get_preprocessor() is None
    with pytest.raises(CheckpointError, match="not a directory"):
        kind.from_model(booster, path=str(tmp_path / "none"))
    with pytest.raises(CheckpointError, match="update_metadata"):
        kind.from_model(booster, preprocessor=object())


def test_the_names_of_ray_are_the_same_callbacks(name: str) -> None:
    module = importlib.import_module(f"powertrain.{name}")
    assert module.RayTrainReportCallback is module.ReportCallback


def test_network_params_outside_of_a_run_are_none_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    from powertrain.lightgbm import get_network_params

    with caplog.at_level(logging.WARNING, "powertrain"):
        assert get_network_params() == {}
    assert "only the training function of a LightGBMTrainer" in caplog.text


def test_arrow_types_become_types_that_lightgbm_takes() -> None:
    from powertrain.lightgbm import normalize_pandas_for_lightgbm

    table = pa.table(
        {"i": pa.array([1, 2], pa.int32()), "f": [0.5, 1.5], "b": [True, False], "t": ["x", "y"]}
    )
    arrow = table.to_pandas(types_mapper=pd.ArrowDtype)
    made = normalize_pandas_for_lightgbm(arrow)
    assert [str(kind) for kind in made.dtypes[:3]] == ["Int32", "Float64", "boolean"]
    assert made.dtypes["t"] == arrow.dtypes["t"]
    plain = frame()
    assert normalize_pandas_for_lightgbm(plain) is plain
