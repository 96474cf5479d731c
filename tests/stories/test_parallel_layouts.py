"""Tensor and pipeline parallel loops: a killed rank or another mesh, and the weights are those of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import parallelized
import pytest
import torch
from tests.stories.engines import on_cases

import powertrain
from powertrain import FailureConfig
from powertrain.result.result import Result
from powertrain.run import events as ev
from powertrain.torch import TorchConfig, TorchTrainer

STEPS = 6
TENSOR, PIPELINE = parallelized.tensor_parallel, parallelized.pipeline
BOTH = parallelized.tensor_parallel_pipeline


def run(fits: Any, loop: Callable[..., Any], workers: int, **options: Any) -> Result:
    """Train to the end, and return what is left of it."""
    config = {"steps": STEPS, **options.pop("config")}
    trainer = fits.trainer(
        loop,
        kind=TorchTrainer,
        workers=workers,
        train_loop_config=config,
        torch_config=TorchConfig(backend="gloo"),
        failure_config=FailureConfig(max_failures=1),
        **options,
    )
    return trainer.fit()


def assert_trained_as_one_process(result: Result, steps: int = STEPS) -> None:
    """The whole model, read here from the parts that the ranks have saved."""
    model = parallelized.Net()
    assert result.checkpoint is not None
    values = powertrain.load_state(result.checkpoint, model=model)
    assert values is not None
    assert values["step"] == steps - 1
    expected = parallelized.net_of_one_process(steps).state_dict()
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[key], rtol=1e-9, atol=1e-9, msg=lambda text: text)


@pytest.mark.timeout(180)
@on_cases(
    ("engine", "loop", "mesh"),
    [
        ("local", TENSOR, (2, 2)),
        ("local", PIPELINE, (2, 2)),
        ("local", BOTH, (2, 2)),
        ("ray", PIPELINE, (2, 2)),
    ],
)
def test_a_killed_rank_of_a_mesh_of_two_by_two_changes_nothing(
    fits: Any, loop: Callable[..., Any], mesh: tuple[int, int]
) -> None:
    result = run(fits, loop, 4, config={"mesh": mesh, "kills": True})
    facts = fits.facts(loop.__name__)
    assert len([fact for fact in facts if isinstance(fact, ev.Failed)]) == 1, "the rank was killed"
    assert result.metrics is not None
    assert result.metrics["resumed"] is True
    assert_trained_as_one_process(result)


@pytest.mark.timeout(180)
@on_cases(
    ("engine", "loop", "mesh", "later"),
    [
        ("local", TENSOR, (2, 2), (1, 2)),
        ("local", TENSOR, (2, 2), (2, 1)),
        ("local", PIPELINE, (1, 4), (2, 2)),
    ],
)
def test_another_mesh_goes_on_from_the_checkpoint(
    fits: Any, loop: Callable[..., Any], mesh: tuple[int, int], later: tuple[int, int]
) -> None:
    first = run(fits, loop, mesh[0] * mesh[1], config={"mesh": mesh, "steps": 3}, name="first")
    assert_trained_as_one_process(first, 3)
    second = run(
        fits,
        loop,
        later[0] * later[1],
        config={"mesh": later},
        name="second",
        resume_from_checkpoint=first.checkpoint,
    )
    assert second.metrics is not None
    assert second.metrics["resumed"] is True
    assert_trained_as_one_process(second)
