"""Classes train as functions do: they report, save, continue where they were, and clean up after themselves."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

import powertrain
from powertrain import CheckpointConfig, DataParallelTrainer, FailureConfig, Result, RunConfig, ScalingConfig
from powertrain.errors import ConfigError
from powertrain.functions import check_shape
from powertrain.tune import trainable as t


class Steps(t.Trainable):
    """Counts its steps, and keeps a dict."""

    events: list[str] = []

    def setup(self, config: dict[str, Any]) -> None:
        self.events.append("setup")
        self.count = 0
        config["seen"] = True  # a copy: the next one does not see it

    def step(self) -> dict[str, Any]:
        self.count += 1
        if self.count == self.config.get("fails_at") and not self.config["failed"]:
            self.config["failed"].append(True)
            raise ValueError("once")
        return {"count": self.count, "timesteps_this_iter": 10, "done": self.count >= self.config["steps"]}

    def save_checkpoint(self, checkpoint_dir: str) -> Any:
        self.events.append(f"save {self.count}")
        return {"count": self.count}

    def load_checkpoint(self, checkpoint: Any) -> None:
        self.events.append(f"load {checkpoint['count']}")
        self.count = checkpoint["count"]

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.events.append("reset")
        self.count = 0
        return bool(new_config.get("can_reset", True))

    def cleanup(self) -> None:
        self.events.append("cleanup")


class FileSteps(Steps):
    """Keeps files."""

    def save_checkpoint(self, checkpoint_dir: str) -> Any:
        self.events.append(f"save {self.count}")
        Path(checkpoint_dir, "count.txt").write_text(str(self.count))
        return checkpoint_dir

    def load_checkpoint(self, checkpoint: Any) -> None:
        self.count = int(Path(checkpoint, "count.txt").read_text())
        self.events.append(f"load {self.count}")


class Unsaved(t.Trainable):
    def step(self) -> dict[str, Any]:
        return {"iteration": self.iteration, "done": self.iteration == 1}


@pytest.fixture(autouse=True)
def events() -> list[str]:
    Steps.events.clear()
    return Steps.events


@pytest.fixture
def fit(tmp_path: Path) -> Callable[..., Result]:
    """Train in an inline run."""

    def run(
        function: Callable[..., Any], config: dict[str, Any], name: str = "run", **run_config: Any
    ) -> Result:
        return DataParallelTrainer(
            function,
            train_loop_config=config,
            scaling_config=ScalingConfig(num_workers=0),
            run_config=RunConfig(name=name, storage_path=str(tmp_path), verbose=0, **run_config),
        ).fit()

    return run


# --------------------------------------------------------------------------- in a run


def test_a_class_trains_until_it_is_done(fit: Callable[..., Result], events: list[str]) -> None:
    result = fit(t.as_function(Steps), {"steps": 3})
    assert result.metrics is not None
    assert {key: result.metrics[key] for key in ("count", "timesteps_total")} == {
        "count": 3,
        "timesteps_total": 30,
    }
    assert (
        not {"done", "config", "trial_id", "training_iteration", "should_checkpoint"} & result.metrics.keys()
    )
    assert list(result.metrics_dataframe["count"]) == [1, 2, 3]
    assert events == ["setup", "cleanup"]


@pytest.mark.parametrize("kind", [Steps, FileSteps])
def test_a_class_continues_from_its_checkpoint(
    kind: type[Steps], fit: Callable[..., Result], events: list[str]
) -> None:
    config = {"steps": 5, "fails_at": 4, "failed": []}
    function = t.as_function(kind, checkpoint_frequency=2)
    result = fit(function, config, failure_config=FailureConfig(max_failures=1))
    assert events == ["setup", "save 2", "cleanup", "setup", "load 2", "save 4", "cleanup"]
    assert result.metrics is not None
    assert result.metrics["count"] == 5
    assert result.metrics["timesteps_total"] == 50


def test_checkpoints_are_saved_at_the_end_where_that_is_wanted(
    fit: Callable[..., Result], events: list[str]
) -> None:
    result = fit(t.as_function(Steps, checkpoint_at_end=True), {"steps": 2})
    assert events == ["setup", "save 2", "cleanup"]
    assert result.checkpoint is not None
    again = Steps({"steps": 9})
    again.restore(result.checkpoint)
    assert (again.count, again.iteration) == (2, 2)


def test_a_step_can_ask_for_a_checkpoint(fit: Callable[..., Result], events: list[str]) -> None:
    class Asking(Steps):
        def step(self) -> dict[str, Any]:
            return {**super().step(), "should_checkpoint": self.count == 2}

    fit(t.as_function(Asking), {"steps": 3})
    assert events == ["setup", "save 2", "cleanup"]


def test_a_trial_that_is_stopped_saves_first_and_continues_there(
    fit: Callable[..., Result], events: list[str]
) -> None:
    first = fit(t.as_function(Steps), {"steps": 10**9}, stop={"count": 3})
    assert first.metrics is not None
    count = first.metrics["count"]
    assert events == ["setup", f"save {count}", "cleanup"]
    fit(t.as_function(Steps), {"steps": count + 2})
    assert events[3:] == ["setup", f"load {count}", "cleanup"]


def test_a_class_without_checkpoints_can_be_stopped(fit: Callable[..., Result]) -> None:
    class Endless(Unsaved):
        def step(self) -> dict[str, Any]:
            return {"iteration": self.iteration}

    result = fit(t.as_function(Endless), {}, stop={"iteration": 3})
    assert result.metrics is not None
    assert result.metrics["iteration"] >= 3
    assert result.checkpoint is None


def test_an_error_in_a_step_cleans_up(fit: Callable[..., Result], events: list[str]) -> None:
    class Failing(Steps):
        def step(self) -> dict[str, Any]:
            raise ValueError("bad step")

    with pytest.raises(powertrain.TrainingFailedError, match="bad step"):
        fit(t.as_function(Failing), {})
    assert events == ["setup", "cleanup"]


def test_an_object_is_kept_for_the_next_trial_where_it_can_be_reset(
    fit: Callable[..., Result], events: list[str]
) -> None:
    function = t.as_function(Steps, reuse=True)
    fit(function, {"steps": 2}, name="one")
    result = fit(function, {"steps": 3}, name="two")
    assert result.metrics is not None
    assert (result.metrics["count"], result.metrics["timesteps_total"]) == (3, 30)
    assert events == ["setup", "reset"]
    fit(function, {"steps": 1, "can_reset": False}, name="three")
    assert events == ["setup", "reset", "reset", "cleanup", "setup"]
    function.close()
    function.close()
    assert events[-2:] == ["setup", "cleanup"]


def test_an_object_whose_trial_was_stopped_is_kept(fit: Callable[..., Result], events: list[str]) -> None:
    function = t.as_function(Steps, reuse=True)
    fit(function, {"steps": 10**9}, name="one", stop={"count": 2})
    fit(function, {"steps": 1}, name="two")
    assert [event for event in events if "save" not in event] == ["setup", "reset"]
    function.close()


def test_an_object_that_failed_is_not_kept(fit: Callable[..., Result], events: list[str]) -> None:
    function = t.as_function(Steps, reuse=True)
    with pytest.raises(powertrain.TrainingFailedError):
        fit(function, {"steps": 2, "fails_at": 1, "failed": []})
    assert events == ["setup", "cleanup"]


def test_a_trial_knows_its_name_and_its_directory(fit: Callable[..., Result], tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    class Looking(Unsaved):
        def setup(self, config: dict[str, Any]) -> None:
            seen.update(
                name=self.trial_name, id=self.trial_id, logdir=self.logdir, given=self.trial_resources
            )

    fit(t.as_function(Looking), {}, name="trial-7")
    assert (seen["name"], seen["id"]) == ("trial-7", "trial-7")
    assert seen["logdir"] == str(tmp_path / "trial-7")
    assert isinstance(seen["given"], dict)
    assert (tmp_path / "trial-7").is_dir()


# --------------------------------------------------------------------------- alone


def test_an_object_can_be_trained_by_hand() -> None:
    trainable = Steps({"steps": 2})
    first, second = trainable.train(), trainable.train()
    assert [first["done"], second["done"]] == [False, True]
    assert (second["training_iteration"], trainable.iteration, trainable.training_iteration) == (2, 2, 2)
    assert second["timesteps_total"] == second["timesteps_since_restore"] == 20
    assert second["time_total_s"] >= second["time_this_iter_s"] >= 0
    assert second["config"] == trainable.get_config() == {"steps": 2}
    assert (second["trial_id"], trainable.trial_name, trainable.trial_resources) == (
        "default",
        "default",
        None,
    )
    assert {"pid", "hostname", "node_ip", "date", "timestamp"} <= second.keys()
    trainable.stop()


@pytest.mark.parametrize("kind", [Steps, FileSteps])
def test_an_object_can_be_saved_and_restored_by_hand(kind: type[Steps], tmp_path: Path) -> None:
    trainable = kind({"steps": 9})
    for _ in range(3):
        trainable.train()
    saved = trainable.save(str(tmp_path / "saved"))
    assert saved.metrics["count"] == 3
    assert saved.checkpoint.path == str(tmp_path / "saved")
    for source in (saved, saved.checkpoint, saved.checkpoint.path):
        again = kind({"steps": 9})
        again.restore(source)
        result = again.train()
        assert (result["count"], result["training_iteration"], result["timesteps_total"]) == (4, 4, 40)
        assert result["iterations_since_restore"] == 1


def test_a_checkpoint_without_a_directory_gets_a_temporary_one() -> None:
    saved = Steps({"steps": 9}).save()
    try:
        assert os.path.isdir(saved.checkpoint.path)
    finally:
        shutil.rmtree(saved.checkpoint.path)


def test_a_temporary_checkpoint_that_fails_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fails(Steps):
        def save_checkpoint(self, checkpoint_dir: str) -> Any:
            raise OSError("no disk")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(OSError, match="no disk"):
        Fails({"steps": 9}).save()
    assert not list(tmp_path.glob("powertrain-checkpoint-*"))


def test_a_directory_of_its_own_is_removed_at_the_end() -> None:
    trainable = Unsaved()
    logdir = trainable.logdir
    assert os.path.isdir(logdir)
    assert trainable.logdir == logdir
    trainable.stop()
    assert not os.path.exists(logdir)


def test_results_and_exports_go_to_the_methods_of_a_subclass(tmp_path: Path) -> None:
    class Exporting(Unsaved):
        logged: list[Any] = []

        def log_result(self, result: dict[str, Any]) -> None:
            self.logged.append(result["training_iteration"])

        def _export_model(self, export_formats: list[str], export_dir: str) -> dict[str, Any]:
            return dict.fromkeys(export_formats, export_dir)

    trainable = Exporting()
    trainable.train()
    assert trainable.logged == [1]
    assert trainable.export_model("onnx", str(tmp_path)) == {"onnx": str(tmp_path)}
    assert trainable.resource_help({}) == ""


def test_a_reset_counts_from_the_beginning() -> None:
    trainable = Steps({"steps": 9})
    trainable.train()
    assert trainable.reset({"steps": 1})
    assert (trainable.iteration, trainable.config) == (0, {"steps": 1})
    assert not Unsaved().reset({})


def test_storage_is_accepted_without_effect(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "powertrain"):
        Unsaved({}, storage=object())
    assert "without effect here: Unsaved(storage=...)" in caplog.text


@pytest.mark.parametrize("returned", ["/somewhere/else", 3])
def test_a_checkpoint_elsewhere_is_refused(returned: Any, tmp_path: Path) -> None:
    class Elsewhere(Steps):
        def save_checkpoint(self, checkpoint_dir: str) -> Any:
            return returned

    with pytest.raises(ConfigError, match="Return a dict to be kept, or write files"):
        Elsewhere().save(str(tmp_path))


def test_a_step_that_returns_no_dict_is_refused() -> None:
    class Wrong(t.Trainable):
        def step(self) -> Any:
            return 0.5

    with pytest.raises(ConfigError, match=r"Wrong.step\(\) returned 0.5. Return a dict of metrics"):
        Wrong().train()


class NoStep(t.Trainable):
    pass


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: t.as_function(dict), "no class that is derived from powertrain.tune.Trainable"),  # type: ignore[arg-type]
        (lambda: t.as_function(NoStep), "has no method step"),
        (lambda: t.as_function(Unsaved, checkpoint_frequency=3), "has no method save_checkpoint"),
        (lambda: t.as_function(Unsaved, checkpoint_at_end=True), "has no method save_checkpoint"),
        (lambda: t.as_function(Steps, checkpoint_frequency=-1), "checkpoint_frequency"),
    ],
)
def test_a_class_that_cannot_be_trained_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_frequencies_are_taken_as_a_checkpoint_config_has_them() -> None:
    config = CheckpointConfig()
    t.as_function(
        Unsaved,
        checkpoint_frequency=config.checkpoint_frequency,
        checkpoint_at_end=config.checkpoint_at_end,
    )


def test_a_class_travels_as_a_function() -> None:
    function = t.as_function(Steps, reuse=True)
    check_shape(function)
    again = cloudpickle.loads(cloudpickle.dumps(function))
    assert (again.__name__, again.__module__, again.trainable_class.__name__) == ("Steps", __name__, "Steps")


# --------------------------------------------------------------------------- parameters


def train_with(config: dict[str, Any], data: Any = None, *, scale: float = 1.0) -> None:
    """Report the sum of some data."""
    powertrain.report({"sum": sum(data) * scale * config["factor"]})


class Fed(Steps):
    def setup(self, config: dict[str, Any], data: Any = None, scale: float = 1.0) -> None:
        super().setup(config)
        self.data, self.scale = data, scale

    def step(self) -> dict[str, Any]:
        return {"sum": sum(self.data) * self.scale * self.config["factor"], "done": True}


@pytest.mark.parametrize("trainable", [train_with, Fed])
def test_parameters_reach_the_trial(trainable: Any, fit: Callable[..., Result]) -> None:
    bound = t.with_parameters(t.with_parameters(trainable, data=[1, 2]), scale=10)
    assert bound.__name__ == trainable.__name__
    again = cloudpickle.loads(cloudpickle.dumps(bound))
    function = again if trainable is train_with else t.as_function(again)
    check_shape(function)
    result = fit(function, {"factor": 2})
    assert result.metrics is not None
    assert result.metrics["sum"] == 60


def test_a_function_with_parameters_can_be_pickled_plainly() -> None:
    bound = pickle.loads(pickle.dumps(t.with_parameters(functools.partial(max, 3), key=abs)))
    assert bound(-5) == -5


@pytest.mark.parametrize(
    ("trainable", "parameters", "message"),
    [
        (train_with, {"datas": 1}, "datas"),
        (train_with, {"config": 1}, "multiple values"),
        (Fed, {"datas": 1}, r"Fed.setup\(\).*datas"),
        (3, {}, "takes a function of the configuration"),
        (dict, {"data": 1}, "takes a function of the configuration"),
    ],
)
def test_parameters_that_a_trainable_does_not_take_are_refused(
    trainable: Any, parameters: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        t.with_parameters(trainable, **parameters)


def test_resources_and_parameters_go_together(fit: Callable[..., Result]) -> None:
    for trainable in (train_with, Fed):
        one = t.with_parameters(t.with_resources(trainable, {"cpu": 3}), data=[1])
        two = t.with_resources(t.with_parameters(trainable, data=[1]), {"cpu": 3})
        assert t.resources_of(one) == t.resources_of(two) == {"CPU": 3.0}
    function = t.as_function(t.with_resources(t.with_parameters(Fed, data=[1, 2]), {"cpu": 3}))
    assert t.resources_of(function) == {"CPU": 3.0}
    result = fit(function, {"factor": 1})
    assert result.metrics is not None
    assert result.metrics["sum"] == 3


def test_the_methods_are_those_of_ray_tune() -> None:
    for name in (
        "setup",
        "step",
        "save_checkpoint",
        "load_checkpoint",
        "reset_config",
        "cleanup",
        "log_result",
    ):
        assert callable(getattr(t.Trainable, name))
    assert list(inspect.signature(t.Trainable).parameters) == ["config", "storage"]
    with pytest.raises(NotImplementedError):
        t.Trainable().step()
    with pytest.raises(NotImplementedError):
        t.Trainable().save_checkpoint("")
    with pytest.raises(NotImplementedError):
        t.Trainable().load_checkpoint({})
