"""TransformersTrainer: which functions it takes, and what it makes of them."""

from __future__ import annotations

from typing import Any

import pytest

from powertrain import ScalingConfig
from powertrain.data import from_items
from powertrain.errors import ConfigError
from powertrain.huggingface import TransformersTrainer
from powertrain.huggingface.transformers.trainer import per_worker, takes_datasets

pytest.importorskip("transformers")

INLINE = ScalingConfig(num_workers=0)


def trains(config: dict[str, Any]) -> None:
    pass


def trains_without_config() -> None:
    pass


def makes(train_dataset: Any, eval_dataset: Any, **config: Any) -> Any:
    pass


def makes_of_one(train_dataset: Any) -> Any:
    pass


def makes_by_other_names(rows: Any, held_out: Any, lr: float = 0.1) -> Any:
    pass


@pytest.mark.parametrize(
    ("function", "does"),
    [
        (trains, False),
        (trains_without_config, False),
        (makes, True),
        (makes_of_one, True),
        (makes_by_other_names, True),
    ],
)
def test_functions_that_make_a_trainer_are_recognized_by_their_parameters(function: Any, does: bool) -> None:
    assert takes_datasets(function) is does


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "was given no function"),
        (
            {"trainer_init_per_worker": trains, "train_loop_per_worker": trains},
            "trainer_init_per_worker and train_loop_per_worker, which mean the same",
        ),
        (
            {
                "train_loop_per_worker": trains,
                "train_loop_config": {"a": 1},
                "trainer_init_config": {"a": 1},
            },
            "trainer_init_config and train_loop_config, which mean the same",
        ),
        (
            {"trainer_init_per_worker": makes},
            r"makes\(\) takes a train_dataset.*datasets=\{'train': \.\.\.\}",
        ),
        (
            {"trainer_init_per_worker": makes, "datasets": {"evaluation": from_items([1])}},
            "takes a train_dataset",
        ),
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TransformersTrainer(**arguments, scaling_config=INLINE)


def test_the_function_keeps_its_name_and_is_wrapped_once() -> None:
    wrapped = per_worker(trains)
    assert wrapped.__name__ == "trains"
    assert per_worker(wrapped) is wrapped, "a run that is restored brings its own"
    assert not takes_datasets(per_worker(makes))
