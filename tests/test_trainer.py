"""What a trainer refuses, each with one clear error and before any process is started."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import powertrain
from powertrain import (
    Checkpoint,
    DataParallelTrainer,
    Result,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
)
from powertrain.engine import resources
from powertrain.engine.local import warm_server
from powertrain.engine.local.warm_server import WarmServer
from powertrain.errors import ConfigError, ResourceError, RunInUseError, StorageError, TrainFunctionError
from powertrain.run.record.lease import Lease
from powertrain.storage import open_storage
from powertrain.torch import TorchTrainer


def train() -> None:
    """A function that would be fine."""


@pytest.fixture
def _no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test as soon as a process would be started."""

    def start(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was about to be started")

    monkeypatch.setattr(warm_server, "_shared", [])
    monkeypatch.setattr(warm_server, "_start_forked", start)
    monkeypatch.setattr(warm_server, "_start_clean", start)


@pytest.fixture
def under_torchrun() -> Iterator[pytest.MonkeyPatch]:
    """As one of two processes here, of four in all. Undone before the check for what the test left."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "2"), ("RANK", "0")):
            patch.setenv(name, value)
        patch.setenv("TORCHELASTIC_RUN_ID", "job")
        yield patch


def refusal(make: Callable[[], Any], kind: type[Exception]) -> str:
    with pytest.raises(kind) as refused:
        make()
    return str(refused.value)


@pytest.mark.usefixtures("_no_process")
class TestBeforeAnyProcess:
    def test_a_function_with_two_required_arguments(self) -> None:
        def two(config: dict[str, Any], model: str) -> None: ...

        message = refusal(lambda: DataParallelTrainer(two), TrainFunctionError)  # type: ignore[arg-type]
        assert "2 required arguments (config, model)" in message
        assert "train_loop_config" in message

    def test_something_that_is_no_function(self) -> None:
        assert "not int" in refusal(lambda: DataParallelTrainer(3), TrainFunctionError)  # type: ignore[arg-type]

    def test_a_captured_object_that_cannot_be_pickled_is_named(self) -> None:
        guard = threading.Lock()

        def uses_a_lock() -> None:
            guard.acquire()

        message = refusal(lambda: DataParallelTrainer(uses_a_lock), TrainFunctionError)
        assert "the captured variable 'guard' (a _thread.lock) cannot be pickled" in message
        assert "uses_a_lock()" in message

    def test_an_unpicklable_config_entry_is_named(self) -> None:
        message = refusal(
            lambda: DataParallelTrainer(lambda config: None, train_loop_config={"lock": threading.Lock()}),
            TrainFunctionError,
        )
        assert "train_loop_config['lock'] (a _thread.lock) cannot be pickled" in message

    def test_a_negative_number_of_workers(self) -> None:
        message = refusal(lambda: ScalingConfig(num_workers=-1), ConfigError)
        assert "num_workers" in message
        assert "-1" in message

    def test_a_gpu_on_a_machine_without_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(resources, "_gpu_names", tuple)
        message = refusal(
            lambda: TorchTrainer(train, scaling_config=ScalingConfig(num_workers=2, use_gpu=True)),
            ResourceError,
        )
        assert "no NVIDIA GPU" in message
        assert "use_gpu=False" in message

    def test_a_gpu_inline_on_a_machine_without_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(resources, "_gpu_names", tuple)
        scaling = ScalingConfig(num_workers=0, use_gpu=True)
        message = refusal(lambda: TorchTrainer(train, scaling_config=scaling), ResourceError)
        assert "1 worker(s) were to get 1 GPU(s) each" in message

    def test_a_gpu_under_torchrun_on_a_machine_without_one(self, under_torchrun: pytest.MonkeyPatch) -> None:
        under_torchrun.setattr(resources, "_gpu_names", tuple)
        scaling = ScalingConfig(num_workers=0, use_gpu=True)
        message = refusal(lambda: TorchTrainer(train, scaling_config=scaling), ResourceError)
        assert "2 worker(s) were to get 1 GPU(s) each" in message, (
            "those of this machine, not of all machines"
        )

    @pytest.mark.parametrize("option", [{"log_to_file": True}, {"working_dir": "."}])
    def test_output_and_directory_of_an_inline_rank(self, option: dict[str, Any]) -> None:
        trainer = refusal(
            lambda: DataParallelTrainer(
                train, scaling_config=ScalingConfig(num_workers=0), run_config=RunConfig(**option)
            ),
            ConfigError,
        )
        assert next(iter(option)) in trainer
        assert "output of inline ranks is this process's own" in trainer

    @pytest.mark.usefixtures("under_torchrun")
    def test_output_of_a_rank_under_torchrun(self) -> None:
        message = refusal(
            lambda: DataParallelTrainer(train, run_config=RunConfig(log_to_file=True)), ConfigError
        )
        assert "--log-dir" in message

    def test_more_cpus_than_the_machine_has_when_asked_by_name(self) -> None:
        scaling = ScalingConfig(num_workers=1, resources_per_worker={"CPU": 100_000})
        message = refusal(lambda: DataParallelTrainer(train, scaling_config=scaling), ResourceError)
        assert "100000 CPU" in message

    def test_an_accelerator_the_machine_does_not_have(self) -> None:
        scaling = ScalingConfig(num_workers=1, resources_per_worker={"accelerator_type:T4": 0.001})
        message = refusal(lambda: DataParallelTrainer(train, scaling_config=scaling), ResourceError)
        assert "accelerator_type:T4" in message

    def test_a_storage_path_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        path = str(tmp_path / "file" / "runs")
        message = refusal(
            lambda: DataParallelTrainer(train, run_config=RunConfig(storage_path=path)), StorageError
        )
        assert repr(path) in message
        assert f"{str(tmp_path / 'file')!r} is a file" in message

    def test_a_name_with_a_slash(self) -> None:
        message = refusal(lambda: RunConfig(name="a/b"), ConfigError)
        assert "'a/b'" in message

    def test_torchrun_asked_for_without_torchrun(self) -> None:
        message = refusal(
            lambda: DataParallelTrainer(train, scaling_config=ScalingConfig(engine="torchrun")), ConfigError
        )
        assert "was not started by it" in message

    def test_a_checkpoint_that_is_not_there(self, tmp_path: Path) -> None:
        from powertrain import Checkpoint

        missing = Checkpoint(tmp_path / "missing")
        message = refusal(lambda: DataParallelTrainer(train, resume_from_checkpoint=missing), ConfigError)
        assert repr(missing.path) in message


def test_a_live_run_is_refused_before_a_worker_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fork(*_: Any, **__: Any) -> None:
        raise AssertionError("a worker was about to be started")

    monkeypatch.setattr(WarmServer, "fork", fork)
    trainer = DataParallelTrainer(train, run_config=RunConfig(name="live", storage_path=str(tmp_path)))
    with Lease.take(open_storage(str(tmp_path)).child("live"), host="elsewhere", pid=4321):
        message = refusal(trainer.fit, RunInUseError)
    assert "process 4321 " in message
    assert "'elsewhere'" in message
    assert not (tmp_path / "live" / "journal").exists()


def test_a_second_inline_run_at_the_same_time_is_one_clear_error() -> None:
    def train_inside() -> None:
        DataParallelTrainer(lambda: None, scaling_config=ScalingConfig(num_workers=0)).fit()

    with pytest.raises(TrainingFailedError, match="only one rank at a time") as caught:
        DataParallelTrainer(train_inside, scaling_config=ScalingConfig(num_workers=0)).fit()
    assert isinstance(caught.value.worker_failures[0], ConfigError)


def test_a_checkpoint_name_that_would_not_be_found_again_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("x")

    def report_twice(config: dict[str, Any]) -> None:
        for name in config["names"]:
            powertrain.report({}, checkpoint=Checkpoint(config["path"]), checkpoint_dir_name=name)

    for names, words in (
        (["epoch/1"], "not a plain name"),
        (["a" * 300], "not a plain name"),
        (["a\nb"], "not a plain name"),
        (["latest", "latest"], "has already"),
    ):
        trainer = DataParallelTrainer(
            report_twice,
            train_loop_config={"names": names, "path": str(tmp_path)},
            scaling_config=ScalingConfig(num_workers=0),
        )
        with pytest.raises(TrainingFailedError, match=words):
            trainer.fit()


def test_checkpoints_are_found_although_run_json_is_gone(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("x")

    def save_and_tell(config: dict[str, str]) -> bool:
        found = powertrain.get_checkpoint() is not None
        powertrain.report({}, checkpoint=Checkpoint(config["path"]))
        return found

    def fit() -> Result:
        return DataParallelTrainer(
            save_and_tell,
            train_loop_config={"path": str(tmp_path)},
            scaling_config=ScalingConfig(num_workers=0),
            run_config=RunConfig(name="found"),
        ).fit()

    first = fit()
    os.unlink(os.path.join(first.path, "run.json"))
    assert (first.return_value, fit().return_value) == (False, True)
