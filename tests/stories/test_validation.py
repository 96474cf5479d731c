"""Validations beside the training: their metrics join their checkpoints, and nothing they do hurts the run.

On the cluster play those in which the process of a validation does something: its value, its death, its time, a slot of
its own, the end of the driver. GPUs are pretended on this machine only, and what a machine can never give a cluster
may.
"""

from __future__ import annotations

import functools
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import validating
from tests.stories.engines import ON_ALL, ON_ONE_MACHINE, on

from powertrain import CheckpointConfig, DataParallelTrainer, ValidationConfig, ValidationTaskConfig
from powertrain.checkpoint import committed
from powertrain.engine import resources
from powertrain.result.result import Result
from powertrain.run import events as ev
from powertrain.storage import open_storage


def fit(
    fits: Any,
    engine: str,
    validation: ValidationConfig | None,
    config: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """A run of three epochs with one worker and this validation."""
    outcome: dict[str, Any] = fits.outcome(
        validating.three_epochs,
        engine,
        kind=functools.partial(DataParallelTrainer, validation_config=validation),
        train_loop_config=config or {},
        workers=1,
        **options,
    )
    return outcome


def ended(fits: Any, name: str = "three_epochs") -> list[ev.ValidationEnded]:
    return [fact for fact in fits.facts(name) if isinstance(fact, ev.ValidationEnded)]


def statuses(outcome: dict[str, Any]) -> list[str]:
    return [found.status.value for found in committed.reported(open_storage(outcome["path"]))]


def is_alive(pid: str) -> bool:
    try:
        return " Z " not in Path("/proc", pid, "stat").read_text()
    except OSError:
        return False


@on("local", "inline", "ray", smoke=["local", "inline"])
def test_the_metrics_of_a_validation_join_its_checkpoint(fits: Any, engine: str) -> None:
    usual = {"best": 2, "distance": lambda epochs: abs(epochs) * 10}
    config = ValidationConfig(
        fn=validating.score, task_config=ValidationTaskConfig(fn_kwargs=usual, timeout_s=60)
    )
    outcome = fit(fits, engine, config, {"task": {"fn_kwargs": {"best": 1}}})

    assert (outcome["raised"], outcome["metrics"]) == ("", {"epoch": 2})
    result = Result.from_path(outcome["path"])
    assert [(m["epoch"], m["score"]) for _, m in result.best_checkpoints] == [(0, -10), (1, 0), (2, -10)]
    best = result.get_best_checkpoint("score", "max")
    assert best is not None
    assert validating.epoch_of(best) == 1
    assert statuses(outcome) == ["VALIDATED"] * 3
    assert [(fact.row, fact.metrics["score"], fact.reason) for fact in ended(fits)] == [
        (1, -10, ""),
        (2, 0, ""),
        (3, -10, ""),
    ]
    pids = {metrics["validated_by"] for _, metrics in result.best_checkpoints}
    assert len(pids) == 3
    assert os.getpid() not in pids
    for epoch, (checkpoint, _) in enumerate(result.best_checkpoints):
        log = Path(outcome["path"], "logs", f"validation-{Path(checkpoint.path).name}.log")
        assert log.read_text() == f"validating epoch {epoch}\n"


@ON_ONE_MACHINE
def test_a_validation_that_raises_fails_alone(fits: Any, engine: str) -> None:
    outcome = fit(fits, engine, ValidationConfig(fn=validating.refuse_the_first))

    assert (outcome["raised"], outcome["state"]) == ("", "finished")
    assert statuses(outcome) == ["VALIDATION_FAILED", "VALIDATED", "VALIDATED"]
    reason = ended(fits)[0].reason
    assert "ValueError: epoch 0 is not worth it" in reason
    assert "validating.py" in reason
    assert "in refuse_the_first: raise ValueError" in reason


@ON_ALL
def test_a_validation_whose_process_dies_fails_alone(fits: Any, engine: str) -> None:
    outcome = fit(fits, engine, ValidationConfig(fn=validating.die_at_the_first))

    assert (outcome["raised"], outcome["state"]) == ("", "finished")
    assert statuses(outcome) == ["VALIDATION_FAILED", "VALIDATED", "VALIDATED"]
    assert "was killed by SIGKILL" in ended(fits)[0].reason


def test_what_is_no_dict_of_metrics_is_a_failure_that_says_so(fits: Any) -> None:
    outcome = fit(fits, "local", ValidationConfig(fn=validating.return_a_number))

    assert statuses(outcome) == ["VALIDATION_FAILED"] * 3
    assert "returned a float, not a dict of metrics" in ended(fits)[0].reason


def test_a_value_of_a_validation_that_cannot_be_kept_is_left_out_with_one_warning(
    fits: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    outcome = fit(fits, "local", ValidationConfig(fn=validating.return_an_object))

    assert statuses(outcome) == ["VALIDATED"] * 3
    assert [fact.metrics for fact in ended(fits)] == [{"score": 1}] * 3
    shown = " ".join(capfd.readouterr().out.split())
    assert shown.count("Validation: The metric 'model' is a builtins.object, so it was left out") == 1


@on("local", "inline", "ray")
def test_a_validation_function_may_run_a_trainer_of_its_own(fits: Any, engine: str, directory: Path) -> None:
    config = ValidationConfig(
        fn=validating.score_with_a_trainer,
        task_config=ValidationTaskConfig(fn_kwargs={"directory": str(directory)}),
    )
    outcome = fit(fits, engine, config)

    assert statuses(outcome) == ["VALIDATED"] * 3
    result = Result.from_path(outcome["path"])
    assert [metrics["doubled"] for _, metrics in result.best_checkpoints] == [0, 2, 4]
    assert [metrics["workers"] for _, metrics in result.best_checkpoints] == [2, 2, 2]


@ON_ALL
def test_a_validation_that_takes_too_long_is_ended_with_all_it_started(
    fits: Any, engine: str, directory: Path
) -> None:
    config = ValidationConfig(fn=validating.sleep_with_a_child, task_config=ValidationTaskConfig(timeout_s=8))
    outcome = fit(fits, engine, config, {"epochs": 1})

    assert outcome["raised"] == ""
    assert statuses(outcome) == ["VALIDATION_TIMEOUT"]
    assert "timeout_s=8 s" in ended(fits)[0].reason
    assert not [pid for pid in (directory / "asleep").read_text().split() if is_alive(pid)]


def test_retention_waits_for_validations_and_then_goes_by_their_metrics(fits: Any) -> None:
    keep = CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="score")
    config = ValidationConfig(fn=validating.score_after_the_training)
    outcome = fit(fits, "local", config, {"told": "trained"}, checkpoint_config=keep)

    kept = Result.from_path(outcome["path"]).best_checkpoints
    assert [(metrics["epoch"], metrics["score"]) for _, metrics in kept] == [(0, 0), (2, -2)], (
        "the best and, because a restart needs it, the newest"
    )


@ON_ONE_MACHINE
def test_workers_can_wait_for_validations(fits: Any, engine: str) -> None:
    outcome = fit(fits, engine, ValidationConfig(fn=validating.score), {"consistency": "VALIDATED"})

    assert [(status, metrics["score"]) for status, metrics in outcome["return_value"]] == [
        ("VALIDATED", -1),
        ("VALIDATED", 0),
        ("VALIDATED", -1),
    ]


def test_workers_need_not_wait_for_validations(fits: Any) -> None:
    config = ValidationConfig(fn=validating.score_after_the_training)
    outcome = fit(fits, "local", config, {"consistency": "COMMITTED", "told": "trained"})

    assert [metrics["epoch"] for _, metrics in outcome["return_value"]] == [0, 1, 2]
    assert outcome["return_value"][2][0] == "PENDING_VALIDATION"
    assert statuses(outcome) == ["VALIDATED"] * 3


def test_a_validation_without_a_function_is_refused_at_the_report(fits: Any) -> None:
    outcome = fit(fits, "local", None)

    assert outcome["raised"] == "TrainingFailedError"
    assert outcome["failures"][0]["error_type"] == "powertrain.errors.ReportError"
    assert "validation_config=ValidationConfig(fn=...)" in outcome["failures"][0]["message"]


@ON_ONE_MACHINE
def test_a_machine_that_cannot_give_what_a_validation_needs_fails_the_validation_only(
    fits: Any, engine: str
) -> None:
    config = ValidationConfig(fn=validating.score, ray_remote_kwargs={"num_cpus": 4096})
    outcome = fit(fits, engine, config)

    assert (outcome["raised"], outcome["state"]) == ("", "finished")
    assert statuses(outcome) == ["VALIDATION_FAILED"] * 3
    assert "4096 CPU" in ended(fits)[0].reason


@ON_ALL
def test_a_validation_may_reserve_a_slot_of_its_own(fits: Any, engine: str) -> None:
    config = ValidationConfig(fn=validating.score, ray_remote_kwargs={"num_cpus": 1})
    outcome = fit(fits, engine, config)

    assert statuses(outcome) == ["VALIDATED"] * 3


@ON_ONE_MACHINE
def test_a_validation_sees_the_gpus_that_it_asked_for_and_no_others(
    fits: Any, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "_gpu_names", lambda: ("Pretended A100", "Pretended A100"))
    config = ValidationConfig(fn=validating.show_gpus, ray_remote_kwargs={"num_gpus": 1})
    outcome = fit(fits, engine, config, {"epochs": 2})

    assert [fact.metrics for fact in ended(fits)] == [{"gpus": "0", "rank": None}] * 2, statuses(outcome)


@ON_ONE_MACHINE
def test_a_validation_that_asked_for_no_gpu_sees_none(
    fits: Any, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "_gpu_names", lambda: ("Pretended A100",))
    fit(fits, engine, ValidationConfig(fn=validating.show_gpus), {"epochs": 1})

    assert [fact.metrics for fact in ended(fits)] == [{"gpus": "", "rank": None}]


def test_a_function_that_cannot_travel_is_refused_before_the_training(fits: Any) -> None:
    lock = threading.Lock()

    def guarded(checkpoint: Any) -> dict[str, Any]:
        with lock:
            return {}

    outcome = fit(fits, "local", ValidationConfig(fn=guarded))
    assert outcome["raised"] == "TrainFunctionError"
    assert "the captured variable 'lock'" in outcome["message"]


@ON_ALL
def test_a_killed_driver_leaves_no_validation_and_the_next_start_makes_it_again(
    stories: Any, engine: str
) -> None:
    driver = stories.start("validate_asleep", engine)
    driver.await_told("asleep")
    driver.kill()
    stories.assert_nothing_left()
    assert not [pid for pid in (stories.root / "asleep").read_text().split() if is_alive(pid)]

    outcome = stories.start("validate_asleep", engine).outcome()

    assert (outcome["raised"], outcome["state"]) == ("", "finished")
    assert statuses(outcome) == ["VALIDATED"] * 3
    metrics = [metrics for _, metrics in Result.from_path(outcome["path"]).best_checkpoints]
    assert [found["greeting"] for found in metrics] == ["hello"] * 3
