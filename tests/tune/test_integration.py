"""Callbacks report from the loops of LightGBM, XGBoost and Lightning: the real libraries, in inline runs."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from powertrain import DataParallelTrainer, Result, RunConfig, ScalingConfig
from powertrain.errors import ConfigError
from powertrain.worker import context

PACKAGES = {"lightgbm": "lightgbm", "xgboost": "xgboost", "pytorch_lightning": "lightning.pytorch"}


class Libraries:
    """The libraries and our modules for them, imported at their first use: that takes seconds."""

    def __getattr__(self, name: str) -> Any:
        library = name.removeprefix("tune_")
        if library not in PACKAGES:  # pytest looks for marks of its own
            raise AttributeError(name)
        package = pytest.importorskip(PACKAGES[library])
        return (
            package if library == name else importlib.import_module(f"powertrain.tune.integration.{library}")
        )


lib = Libraries()


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Import the libraries before the first test, which may not leave behind what that brings."""
    for name in PACKAGES.values():
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


ROUNDS = 4
X = np.random.default_rng(0).normal(size=(60, 3))
Y = (X.sum(axis=1) > 0).astype(int)


@pytest.fixture
def fit(tmp_path: Path) -> Callable[..., Result]:
    """Train in an inline run."""

    def run(function: Callable[[], Any], **run_config: Any) -> Result:
        return DataParallelTrainer(
            function,
            scaling_config=ScalingConfig(num_workers=0),
            run_config=RunConfig(name="run", storage_path=str(tmp_path), verbose=0, **run_config),
        ).fit()

    return run


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[dict[str, Any], list[str]]]:
    """What is reported outside a run: metrics, and the files of the checkpoint."""
    made: list[tuple[dict[str, Any], list[str]]] = []

    def report(metrics: dict[str, Any], checkpoint: Any = None) -> None:
        made.append((metrics, sorted(os.listdir(checkpoint.path)) if checkpoint is not None else []))

    class Directory(str):
        def __enter__(self) -> Directory:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(context, "report", report)
    monkeypatch.setattr(context, "should_checkpoint", lambda: False)
    monkeypatch.setattr(context, "checkpoint_dir", lambda: Directory(tempfile.mkdtemp(dir=tmp_path)))
    monkeypatch.setattr(context, "get_context", lambda: SimpleNamespace(get_world_rank=lambda: 0))
    return made


def rows_of(result: Result) -> list[dict[str, Any]]:
    return [
        {str(key): value for key, value in row.items() if value == value}
        for row in result.metrics_dataframe.to_dict("records")
    ]


# --------------------------------------------------------------------------- LightGBM


def train_lightgbm(callback: Any, rounds: int = ROUNDS, **more: Any) -> Any:
    data = lib.lightgbm.Dataset(X, Y)
    params = {
        "objective": "binary",
        "metric": ["binary_logloss", "binary_error"],
        "verbose": -1,
        "num_threads": 1,
    }
    return lib.lightgbm.train(
        params, data, rounds, valid_sets=[data], valid_names=["eval"], callbacks=[callback], **more
    )


def test_lightgbm_reports_each_iteration_and_saves_its_model(fit: Callable[..., Result]) -> None:
    models = []
    callback = lib.tune_lightgbm.TuneReportCheckpointCallback(
        metrics={"loss": "eval-binary_logloss"}, frequency=3
    )
    result = fit(lambda: models.append(train_lightgbm(callback)))
    losses = [row["loss"] for row in rows_of(result)]
    assert len(losses) == ROUNDS
    assert losses == sorted(losses, reverse=True)
    assert result.checkpoint is not None
    again = lib.tune_lightgbm.TuneReportCheckpointCallback.get_model(result.checkpoint)
    assert np.allclose(again.predict(X), models[0].predict(X))
    assert len(result.best_checkpoints) == 2


def test_lightgbm_is_stopped_by_the_run(fit: Callable[..., Result]) -> None:
    callback = lib.tune_lightgbm.TuneReportCallback()
    result = fit(lambda: train_lightgbm(callback, rounds=10**6), stop={"training_iteration": 3})
    assert 3 <= len(rows_of(result)) < 10**5


def test_lightgbm_saves_at_the_requested_interval(reports: list[Any]) -> None:
    callback = lib.tune_lightgbm.TuneReportCheckpointCallback(
        "eval-binary_error", filename="m.txt", frequency=2, checkpoint_at_end=False
    )
    train_lightgbm(callback, rounds=5)
    assert [files for _, files in reports] == [[], ["m.txt"], [], ["m.txt"], []]
    assert all(list(metrics) == ["eval-binary_error"] for metrics, _ in reports)
    reports.clear()
    train_lightgbm(lib.tune_lightgbm.TuneReportCheckpointCallback(), rounds=2)
    assert [files for _, files in reports] == [[], ["model.txt"]]
    assert list(reports[0][0]) == ["eval-binary_logloss", "eval-binary_error"]


def test_lightgbm_reports_the_mean_of_a_cross_validation(reports: list[Any]) -> None:
    params = {"objective": "binary", "verbose": -1, "num_threads": 1}
    callback = lib.tune_lightgbm.TuneReportCallback(
        results_postprocessing_fn=lambda metrics: {"loss": metrics["valid-binary_logloss-mean"]}
    )
    found = lib.lightgbm.cv(params, lib.lightgbm.Dataset(X, Y), 2, nfold=2, callbacks=[callback])
    assert [metrics["loss"] for metrics, _ in reports] == found["valid binary_logloss-mean"]


def test_lightgbm_of_older_versions_is_understood(reports: list[Any]) -> None:
    def environment(*results: Any) -> Any:
        rounds = {"iteration": 0, "begin_iteration": 0, "end_iteration": 2}
        return SimpleNamespace(**rounds, model=None, evaluation_result_list=results)

    callback = lib.tune_lightgbm.TuneReportCheckpointCallback()
    callback(environment(("eval", "auc", 0.5, True), ("cv_agg", "valid l2", 0.25, False, 0.125)))
    assert reports == [({"eval-auc": 0.5, "cv_agg-valid l2-mean": 0.25, "cv_agg-valid l2-stdv": 0.125}, [])]


# --------------------------------------------------------------------------- XGBoost


def train_xgboost(callback: Any, rounds: int = ROUNDS, **more: Any) -> Any:
    data = lib.xgboost.DMatrix(X, Y)
    params = {"objective": "binary:logistic", "eval_metric": ["logloss", "error"], "nthread": 1}
    return lib.xgboost.train(
        params, data, rounds, evals=[(data, "eval")], callbacks=[callback], verbose_eval=False, **more
    )


def test_xgboost_reports_each_iteration_and_saves_its_model(fit: Callable[..., Result]) -> None:
    models = []
    callback = lib.tune_xgboost.TuneReportCheckpointCallback(metrics={"loss": "eval-logloss"}, frequency=2)
    result = fit(lambda: models.append(train_xgboost(callback)))
    losses = [row["loss"] for row in rows_of(result)]
    assert len(losses) == ROUNDS
    assert losses == sorted(losses, reverse=True)
    assert result.checkpoint is not None
    again = lib.tune_xgboost.TuneReportCheckpointCallback.get_model(result.checkpoint)
    data = lib.xgboost.DMatrix(X)
    assert np.allclose(again.predict(data), models[0].predict(data))
    assert len(result.best_checkpoints) == 2


def test_xgboost_is_stopped_by_the_run(fit: Callable[..., Result]) -> None:
    result = fit(
        lambda: train_xgboost(lib.tune_xgboost.TuneReportCallback(), rounds=10**6),
        stop={"training_iteration": 3},
    )
    assert 3 <= len(rows_of(result)) < 10**5


def test_xgboost_saves_at_the_requested_interval(reports: list[Any]) -> None:
    callback = lib.tune_xgboost.TuneReportCheckpointCallback(filename="m.json")
    for _ in range(2):
        reports.clear()
        train_xgboost(callback, rounds=2)
        assert [files for _, files in reports] == [[], [], ["m.json"]]
        assert reports[2][0] == reports[1][0]
    reports.clear()
    train_xgboost(lib.tune_xgboost.TuneReportCheckpointCallback(["eval-error"], frequency=2), rounds=2)
    assert [files for _, files in reports] == [[], ["model.ubj"]]
    assert list(reports[0][0]) == ["eval-error"]


def test_xgboost_saves_at_the_end_after_an_early_stop(reports: list[Any]) -> None:
    callback = lib.tune_xgboost.TuneReportCheckpointCallback()
    model = train_xgboost(callback, rounds=1000, early_stopping_rounds=2)
    assert model.num_boosted_rounds() < 1000
    assert [bool(files) for _, files in reports] == [*[False] * model.num_boosted_rounds(), True]


def test_xgboost_reports_pairs_of_a_cross_validation(reports: list[Any]) -> None:
    callback = lib.tune_xgboost.TuneReportCheckpointCallback(
        results_postprocessing_fn=lambda metrics: {"loss": metrics["test-logloss"][0]}
    )
    params = {"objective": "binary:logistic", "nthread": 1}
    found = lib.xgboost.cv(
        params, lib.xgboost.DMatrix(X, Y), 2, nfold=2, metrics="logloss", callbacks=[callback]
    )
    assert [metrics["loss"] for metrics, _ in reports] == list(found["test-logloss-mean"])
    assert not any(files for _, files in reports)


# --------------------------------------------------------------------------- Lightning


def make_model() -> Any:
    class Model(lib.pytorch_lightning.LightningModule):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 1)

        def training_step(self, batch: Any, index: int) -> Any:
            loss = self.layer(batch).square().mean()
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val_loss", self.layer(batch).square().mean())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Model()


def train_lightning(callback: Any, directory: Path, epochs: int = 3) -> Any:
    model = make_model()
    data: Any = torch.utils.data.DataLoader(list(torch.ones(4, 3)), batch_size=2)  # type: ignore[arg-type]
    trainer = lib.pytorch_lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(directory),
    )
    trainer.fit(model, data, data)
    return model


@pytest.fixture(autouse=True)
def _quiet_lightning() -> Iterator[None]:
    """Lightning writes about processes and devices to loggers of its own."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.mark.filterwarnings("ignore")
def test_lightning_reports_each_validation_and_saves_its_state(
    fit: Callable[..., Result], tmp_path: Path
) -> None:
    models = []
    callback = lib.tune_pytorch_lightning.TuneReportCheckpointCallback(
        metrics={"loss": "val_loss"}, filename="trainer.ckpt"
    )
    result = fit(lambda: models.append(train_lightning(callback, tmp_path)))
    losses = [row["loss"] for row in rows_of(result)]
    assert len(losses) == 3, "without the sanity check"
    assert losses == sorted(losses, reverse=True)
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as directory:
        saved = torch.load(os.path.join(directory, "trainer.ckpt"), weights_only=False)
    assert torch.equal(saved["state_dict"]["layer.weight"], models[0].layer.weight)
    assert saved["epoch"] == 2


@pytest.mark.filterwarnings("ignore")
def test_lightning_is_stopped_by_the_run(fit: Callable[..., Result], tmp_path: Path) -> None:
    callback = lib.tune_pytorch_lightning.TuneReportCallback("val_loss")
    result = fit(lambda: train_lightning(callback, tmp_path, epochs=10**5), stop={"training_iteration": 2})
    assert 2 <= len(rows_of(result)) < 1000
    assert result.checkpoint is None


@pytest.mark.filterwarnings("ignore")
def test_lightning_reports_at_the_hooks_that_were_chosen(
    reports: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback = lib.tune_pytorch_lightning.TuneReportCallback(
        ["train_loss", "missing"], on=["train_batch_end", "train_end"]
    )
    with caplog.at_level(logging.WARNING, "powertrain"):
        train_lightning(callback, tmp_path, epochs=2)
    assert len(reports) == 2 * 2 + 1
    assert all(
        list(metrics) == ["train_loss"] and type(metrics["train_loss"]) is float for metrics, _ in reports
    )
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("powertrain.")]
    assert len(messages) == 1
    assert "names 'missing', which is not logged" in messages[0]


@pytest.mark.filterwarnings("ignore")
def test_lightning_reports_all_metrics_by_default(reports: list[Any], tmp_path: Path) -> None:
    train_lightning(lib.tune_pytorch_lightning.TuneReportCheckpointCallback(), tmp_path, epochs=1)
    assert [(sorted(metrics), files) for metrics, files in reports] == [
        (["train_loss", "val_loss"], ["checkpoint"])
    ]


@pytest.mark.filterwarnings("ignore")
def test_lightning_calls_a_callback_of_the_users_own(tmp_path: Path) -> None:
    class Own(lib.tune_pytorch_lightning.TuneCallback):  # type: ignore[name-defined]
        handled: list[Any] = []
        started: list[Any] = []

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.started.append(pl_module)

        def _handle(self, trainer: Any, pl_module: Any) -> None:
            self.handled.append((trainer.current_epoch, pl_module))

    model = train_lightning(Own(on="train_epoch_end"), tmp_path, epochs=2)
    assert Own.handled == [(0, model), (1, model)]
    assert Own.started == [model]
    with pytest.raises(NotImplementedError):
        lib.tune_pytorch_lightning.TuneCallback()._handle(None, None)


def test_lightning_hooks_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"on='lunch'.*validation_end"):
        lib.tune_pytorch_lightning.TuneReportCallback(on="lunch")


# --------------------------------------------------------------------------- arguments


def make_callback(library: str, **arguments: Any) -> Any:
    return getattr(lib, f"tune_{library}").TuneReportCheckpointCallback(**arguments)


@pytest.mark.parametrize("library", PACKAGES)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"metrics": 3}, r"metrics=3\) takes the name"),
        ({"metrics": [1]}, "takes the name"),
        ({"filename": "a/b"}, "takes the name of a file"),
        ({"filename": ""}, "takes the name of a file"),
        ({"filename": ".."}, "takes the name of a file"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    library: str, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_callback(library, **arguments)


@pytest.mark.parametrize("library", ["lightgbm", "xgboost"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"frequency": -1}, "frequency="),
        ({"checkpoint_at_end": "no"}, "checkpoint_at_end="),
        ({"results_postprocessing_fn": 3}, "takes a function of a dict"),
    ],
)
def test_arguments_of_boosters_that_make_no_sense_are_refused(
    library: str, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_callback(library, **arguments)


@pytest.mark.parametrize(("train", "library"), [(train_lightgbm, "lightgbm"), (train_xgboost, "xgboost")])
def test_a_metric_that_was_not_evaluated_is_refused_with_those_that_were(
    train: Any, library: str, reports: list[Any]
) -> None:
    with pytest.raises(ConfigError, match=r"names 'eval-rmse', and .* has evaluated 'eval-"):
        train(make_callback(library, metrics=["eval-rmse"]))
    assert not reports


def test_of_several_ranks_the_first_saves(reports: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "get_context", lambda: SimpleNamespace(get_world_rank=lambda: 1))
    train_lightgbm(lib.tune_lightgbm.TuneReportCheckpointCallback(), rounds=1)
    assert [files for _, files in reports] == [[]]


@pytest.mark.parametrize(
    ("module", "missing", "message"),
    [
        ("xgboost", ["xgboost"], "pip install xgboost"),
        ("pytorch_lightning", ["lightning.pytorch", "pytorch_lightning"], "pip install lightning"),
    ],
)
def test_without_the_library_the_error_says_what_to_install(
    module: str, missing: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"powertrain.tune.integration.{module}"
    for ours in (name, f"powertrain.{module}.callback"):
        monkeypatch.delitem(sys.modules, ours, raising=False)
    for other in missing:
        monkeypatch.setitem(sys.modules, other, None)
    with pytest.raises(ImportError, match=message):
        importlib.import_module(name)
