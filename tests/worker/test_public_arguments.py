"""What a loop hands to public functions: scalars of numpy and torch count as Python's, all else is one clear error."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import powertrain
from powertrain import CheckpointConsistencyMode, RunConfig, ScalingConfig
from powertrain.errors import ArgumentError, CheckpointError, CollectiveError, ConfigError, ReportError
from powertrain.trainer import DataParallelTrainer

COMMITTED = CheckpointConsistencyMode.COMMITTED


class Awkward:
    """Raises when it is looked at."""

    def __repr__(self) -> str:
        raise ValueError("no repr")

    def __bool__(self) -> bool:
        raise ValueError("no bool")


def asked(timeout_s: Any) -> Any:
    return powertrain.get_all_reported_checkpoints(COMMITTED, timeout_s=timeout_s)


def batch_plan(*arguments: Any) -> Any:
    return powertrain.get_context().batch_plan(*arguments)


NOTHING: tuple[int, ...] = ()

#: Calls that a loop may make, each with what is right, though annotations say less than is taken.
ACCEPTED: dict[str, Callable[[], Any]] = {
    "barrier=np.bool_": lambda: powertrain.report({}, barrier=np.bool_(True)),  # type: ignore[arg-type]
    "barrier=tensor": lambda: powertrain.report({}, barrier=torch.tensor(True)),  # type: ignore[arg-type]
    "barrier=1": lambda: powertrain.report({}, barrier=1),  # type: ignore[arg-type]
    "solo=np.bool_": lambda: powertrain.report({}, solo=np.bool_(False)),  # type: ignore[arg-type]
    "validation=np.bool_": lambda: powertrain.report({}, validation=np.bool_(False)),  # type: ignore[arg-type]
    "metrics that raise": lambda: powertrain.report({"a": {Awkward(): 1}, "b": Awkward()}),
    "timeout_s=np.int64": lambda: asked(np.int64(1)),
    "timeout_s=tensor": lambda: asked(torch.tensor(1.5)),
    "timeout_s=inf": lambda: asked(float("inf")),
    "timeout_s=0": lambda: asked(0),
    "batch_plan of scalars": lambda: batch_plan(torch.tensor(8), np.int64(2)),
    "broadcast": lambda: powertrain.collective.broadcast_from_rank_zero({"a": np.float32(1)}),
}
#: Calls with what is wrong, mostly by its type already.
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "barrier=None": (lambda: powertrain.report({}, barrier=None), ReportError, r"barrier=\.\.\..*given None"),  # type: ignore[arg-type]
    "barrier=array": (
        lambda: powertrain.report({}, barrier=np.ones(2)),  # type: ignore[arg-type]
        ReportError,
        "neither True nor False",
    ),
    "barrier=awkward": (lambda: powertrain.report({}, barrier=Awkward()), ReportError, r"Awkward>"),  # type: ignore[arg-type]
    "solo=text": (lambda: powertrain.report({}, solo="yes"), ReportError, "'yes'"),  # type: ignore[arg-type]
    "validation=awkward": (lambda: powertrain.report({}, validation=Awkward()), ReportError, "validation="),  # type: ignore[arg-type]
    "validation with an object": (
        lambda: powertrain.report({}, validation=powertrain.ValidationTaskConfig(fn_kwargs={"a": object()})),
        ReportError,
        r"written as JSON.*the rest to the trainer: ValidationConfig\(task_config=",
    ),
    "timeout_s=text": (lambda: asked("5"), ReportError, r"timeout_s=.*'5'.*not a number of seconds"),
    "timeout_s=-1": (lambda: asked(-1), ReportError, "from 0 on"),
    "timeout_s=nan": (lambda: asked(float("nan")), ReportError, "nan"),
    "checkpoint=text": (lambda: powertrain.report({}, "dir"), ReportError, "given a str"),  # type: ignore[arg-type]
    "dataset_name=[]": (lambda: powertrain.get_dataset_shard([]), ArgumentError, "dataset_name="),  # type: ignore[arg-type]
    "load_state(checkpoint=5)": (lambda: powertrain.load_state(5), CheckpointError, "given 5"),  # type: ignore[arg-type]
    "batch_plan of text": (lambda: batch_plan("8"), ConfigError, "global_batch_size='8'"),
    "batch_plan of too many": (lambda: batch_plan(2**30, 1), ConfigError, "1,073,741,824 passes"),
    "broadcast of a generator": (
        lambda: powertrain.collective.broadcast_from_rank_zero(x for x in NOTHING),
        CollectiveError,
        "given a generator that cannot be pickled",
    ),
}


@pytest.fixture
def in_loop(tmp_path: Path) -> Callable[[Callable[[], Any]], Any]:
    """Make a call in the function of an inline run."""

    def call(action: Callable[[], Any]) -> Any:
        outcome: list[BaseException | None] = []

        def loop() -> None:
            try:
                action()
            except Exception as error:
                outcome.append(error)
            else:
                outcome.append(None)
            powertrain.report({"last": 1.0}, barrier=True)

        result = DataParallelTrainer(
            loop,
            scaling_config=ScalingConfig(num_workers=0),
            run_config=RunConfig(name="one", storage_path=str(tmp_path)),
        ).fit()
        assert result.metrics == {"last": 1.0}
        return outcome[0]

    return call


@pytest.mark.parametrize("call", ACCEPTED)
def test_scalars_of_numpy_and_torch_are_accepted(in_loop: Any, call: str) -> None:
    assert in_loop(ACCEPTED[call]) is None


@pytest.mark.parametrize("call", REFUSED)
def test_anything_else_is_one_clear_error_of_the_call(in_loop: Any, call: str) -> None:
    action, kind, message = REFUSED[call]
    error = in_loop(action)
    assert type(error) is kind
    with pytest.raises(kind, match=message):
        raise error


def test_what_a_broken_service_leaves_is_an_error_and_no_wait(in_loop: Any) -> None:
    """Whatever gets past the checks and cannot be encoded ends the wait."""

    def send_what_cannot_be_sent() -> None:
        from powertrain.worker import session as worker_session

        session = worker_session.current("test")
        session.service.query_checkpoints(0, False, Awkward())  # type: ignore[arg-type]

    with pytest.raises(powertrain.TrainingFailedError) as raised:
        in_loop(send_what_cannot_be_sent)
    assert "service thread failed" in str(raised.value.__cause__)


@pytest.mark.parametrize("value", [np.int64(2), torch.tensor(2), np.array(2)])
def test_configs_take_scalars_too(value: Any) -> None:
    assert ScalingConfig(num_workers=2, queue_timeout_s=value).queue_timeout_s == 2
    assert powertrain.FailureConfig(max_failures=value).max_failures == 2
    assert powertrain.ScalingConfig(use_gpu=np.bool_(False)).use_gpu is False  # type: ignore[arg-type]


def test_every_flag_and_number_of_report_is_looked_at() -> None:
    """A parameter that is added to ``report`` has to be checked too: this list is what is."""
    assert list(inspect.signature(powertrain.report).parameters) == [
        "metrics",
        "checkpoint",
        "checkpoint_dir_name",
        "checkpoint_upload_mode",
        "delete_local_checkpoint_after_upload",
        "checkpoint_upload_fn",
        "validation",
        "barrier",
        "solo",
    ]
