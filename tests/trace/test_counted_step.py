"""The operations of one step, counted while a loop trains."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode

from powertrain.trace.device.counted_step import CountedStep
from powertrain.trace.recording import phases
from powertrain.trace.recording.recorder import Recorder


class Loop:
    """A loop whose steps reach the recorder, and the counter of one of them."""

    def __init__(self, after: int = 2) -> None:
        self.model = nn.Sequential(nn.Conv1d(3, 8, 3), nn.Flatten(), nn.Linear(48, 16), nn.Linear(16, 4))
        self.optimizers = [torch.optim.SGD(self.model.parameters(), lr=0.1)]
        self.recorder = Recorder()
        self.count = CountedStep(self.recorder, after)

    def counted_flops(self) -> int | None:
        return None if self.count.counted is None else self.count.counted.flops

    def compute(self) -> None:
        self.model(torch.ones(2, 3, 8)).square().mean().backward()

    def step(self) -> None:
        for optimizer in self.optimizers:
            self.compute()
            self.recorder.optimizer_begins(optimizer)
            self.recorder.optimizer_ended(optimizer)


def expected(loop: Loop) -> int:
    with FlopCounterMode(display=False) as counter:
        loop.compute()
    return int(counter.get_total_flops())


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.count.close()
    assert not _get_current_dispatch_mode_stack()


def test_one_step_is_counted_as_torch_counts_it_and_then_no_other(loop: Loop) -> None:
    for _ in range(2):
        loop.step()
    assert loop.count.counted is None
    loop.step()
    assert loop.counted_flops() == expected(loop) > 0
    assert not _get_current_dispatch_mode_stack()
    assert not loop.recorder.at_step_end


def test_with_two_optimizers_a_step_is_all_from_one_to_the_same_again(loop: Loop) -> None:
    loop.optimizers.append(torch.optim.SGD(loop.model.parameters(), lr=0.1))
    for _ in range(4):
        loop.step()
    assert loop.counted_flops() == 2 * expected(loop)


def test_a_loop_that_ends_in_the_counted_step_leaves_nothing_behind(loop: Loop) -> None:
    for _ in range(2):
        loop.step()
    loop.compute()
    loop.count.close()
    assert loop.count.counted is None
    assert not _get_current_dispatch_mode_stack()
    assert not loop.recorder.at_step_end


class Own(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_mode_of_the_loops_own_is_respected(loop: Loop) -> None:
    with Own():
        for _ in range(4):
            loop.step()
        assert loop.count.counted is None
        assert [type(mode) for mode in _get_current_dispatch_mode_stack()] == [Own]


def test_a_mode_that_the_loop_enters_in_the_counted_step_is_not_taken_away(loop: Loop) -> None:
    for _ in range(2):
        loop.step()
    with Own():
        loop.step()
        assert len(_get_current_dispatch_mode_stack()) == 2
    loop.step()
    assert not _get_current_dispatch_mode_stack()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_process_forked_in_the_counted_step_does_not_count(loop: Loop) -> None:
    for _ in range(2):
        loop.step()
    assert _get_current_dispatch_mode_stack()
    child = os.fork()
    if not child:
        os._exit(len(_get_current_dispatch_mode_stack()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    loop.step()
    assert loop.counted_flops() == expected(loop)


def test_an_operator_that_fails_fails_as_without_the_count(loop: Loop) -> None:
    for _ in range(2):
        loop.step()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        torch.ones(2, 3) @ torch.ones(2, 3)
    loop.step()
    assert loop.counted_flops() == expected(loop)


def test_operators_of_a_closure_are_not_the_optimizers(loop: Loop) -> None:
    for _ in range(2):
        loop.step()
    optimizer = loop.optimizers[0]
    loop.recorder.optimizer_begins(optimizer)
    depth = loop.recorder.enter(phases.FORWARD)
    loop.compute()
    loop.recorder.leave(depth)
    torch.ones(2).add_(1)
    loop.recorder.optimizer_ended(optimizer)
    counted = loop.count.counted
    assert counted is not None
    assert counted.optimizer_operators == 2, "ones and add_"
    assert counted.operators > 10
