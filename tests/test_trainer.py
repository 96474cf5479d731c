"""What a trainer refuses, each with one clear error and before any process is started."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from powertrain import DataParallelTrainer, RunConfig, ScalingConfig
from powertrain.engine import local, resources
from powertrain.errors import ConfigError, ResourceError, RunInUseError, StorageError, TrainFunctionError
from powertrain.run.lease import Lease
from powertrain.storage import open_storage
from powertrain.torch import TorchTrainer


def train() -> None:
    """A function that would be fine."""


@pytest.fixture
def _no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test as soon as a process would be started."""

    def start(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was about to be started")

    monkeypatch.setattr(local, "_server", None)
    monkeypatch.setattr(local, "_start_forked", start)
    monkeypatch.setattr(local, "_start_clean", start)


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

    monkeypatch.setattr(local.WarmServer, "fork", fork)
    trainer = DataParallelTrainer(train, run_config=RunConfig(name="live", storage_path=str(tmp_path)))
    with Lease.take(open_storage(str(tmp_path)).child("live"), host="elsewhere", pid=4321):
        message = refusal(trainer.fit, RunInUseError)
    assert "process 4321 " in message
    assert "'elsewhere'" in message
    assert not (tmp_path / "live" / "journal").exists()
