"""Prepared loaders in loops of Accelerate: left as they are, read no batch ahead, and their end is known."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.torch.lone_rank import counting
from torch.utils.data import DataLoader

from powertrain.torch.data_loader.accelerated import follow_iteration
from powertrain.torch.data_loader.prepare import prepare_data_loader
from powertrain.worker.session import Session

accelerate = pytest.importorskip("accelerate")

AsRank = Callable[..., Session]


@pytest.fixture
def accelerator() -> Iterator[Any]:
    states = (
        accelerate.state.GradientState,
        accelerate.state.AcceleratorState,
        accelerate.state.PartialState,
    )
    yield accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    for state in states:
        state._reset_state()


def test_accelerate_leaves_a_prepared_loader_as_it_is(as_rank: AsRank, accelerator: Any) -> None:
    as_rank(0, 2)
    loader = prepare_data_loader(DataLoader(counting(12), batch_size=2))
    assert accelerator.prepare(loader) is loader
    mine = list(itertools.chain.from_iterable(batch.tolist() for batch in loader))
    as_rank(1, 2)
    others = accelerator.prepare(prepare_data_loader(DataLoader(counting(12), batch_size=2)))
    theirs = list(itertools.chain.from_iterable(batch.tolist() for batch in others))
    assert sorted(mine + theirs) == list(range(12)), "the rows were divided once"


def test_a_checkpoint_has_the_position_of_the_batch_that_was_handed_out(
    as_rank: AsRank, accelerator: Any
) -> None:
    as_rank(0, 1)
    loader: Any = accelerator.prepare(prepare_data_loader(DataLoader(counting(10), batch_size=2)))
    batches = iter(loader)
    next(batches), next(batches)
    assert loader.state_dict()["position"] == 4


def test_gradients_are_exchanged_at_the_last_batch_of_each_epoch(as_rank: AsRank, accelerator: Any) -> None:
    """Three batches, and two are accumulated: the third stands alone in each epoch."""
    as_rank(0, 1)
    loader: Any = accelerator.prepare(prepare_data_loader(DataLoader(counting(6), batch_size=2)))
    synced = []
    for _ in range(2):
        for _ in loader:
            with accelerator.accumulate():
                synced.append(accelerator.sync_gradients)
    assert synced == [False, True, True] * 2
    assert accelerator.gradient_state.active_dataloader is None


def test_a_loop_that_leaves_an_epoch_early_is_no_longer_in_it(as_rank: AsRank, accelerator: Any) -> None:
    as_rank(0, 1)
    loader: Any = accelerator.prepare(prepare_data_loader(DataLoader(counting(10), batch_size=2)))
    for number, _ in enumerate(loader):
        assert accelerator.gradient_state.in_dataloader
        if number == 2:
            break
    assert not accelerator.gradient_state.in_dataloader


def test_without_an_accelerator_there_is_no_device_to_follow() -> None:
    followed = follow_iteration()
    followed.end_of_dataloader = True
    followed.end()
    assert accelerate.state.GradientState._shared_state == {}
