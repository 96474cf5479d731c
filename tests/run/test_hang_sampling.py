"""Which suspects of a hang are looked at from outside, which stops their process for a moment."""

from __future__ import annotations

import pytest

from powertrain.run.health.hangs import fails_when_stopped
from powertrain.wire.values import Frame, ProcessStack, ThreadStack

UPDATE = Frame(file="/site-packages/lightgbm/basic.py", line=4000, function="update")
OWN = Frame(file="/home/me/train.py", line=12, function="train")


def rank(*threads: tuple[bool, list[Frame]]) -> ProcessStack:
    stacks = [ThreadStack(name="thread", main=main, frames=frames) for main, frames in threads]
    return ProcessStack(pid=1, title="rank 0", state="sleeping", threads=stacks)


@pytest.mark.parametrize(
    ("processes", "expected"),
    [
        ((rank((True, [UPDATE, OWN])),), True),
        ((rank((True, [OWN])),), False),
        ((rank((True, [OWN]), (False, [UPDATE])),), False),
        ((rank((True, [OWN])), rank((True, [UPDATE]))), False),
        ((), False),
    ],
    ids=["waits in it", "elsewhere", "another thread", "a child", "nothing known"],
)
def test_a_rank_whose_main_thread_is_in_lightgbm_is_not_stopped(
    processes: tuple[ProcessStack, ...], expected: bool
) -> None:
    assert fails_when_stopped(processes) is expected
