"""Which SIGKILL was the kernel's for want of memory, decided from its count of such kills alone."""

from __future__ import annotations

import signal

import pytest

from powertrain.engine.local.server import OomKills

KILLED = -signal.SIGKILL


class Kernel:
    """Counts, and lets seconds pass with a look in each."""

    def __init__(self) -> None:
        self.count, self.now = 7, 100.0
        self.kills = OomKills(lambda: self.count)
        for pid in (1, 2):
            self.kills.began(pid, self.count)
        self.pass_seconds(1)

    def pass_seconds(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1.0
            self.kills.look(self.now)


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


def test_a_kill_just_before_the_end_is_the_workers(kernel: Kernel) -> None:
    kernel.count += 1
    assert kernel.kills.ended(1, KILLED)


def test_a_large_process_may_take_seconds_to_end(kernel: Kernel) -> None:
    kernel.pass_seconds(100)
    kernel.count += 1
    kernel.pass_seconds(8)
    assert kernel.kills.ended(1, KILLED)


def test_an_old_kill_elsewhere_is_not_held_against_a_worker(kernel: Kernel) -> None:
    kernel.count += 1
    kernel.pass_seconds(30)
    assert not kernel.kills.ended(1, KILLED)


def test_one_kill_counts_for_one_worker(kernel: Kernel) -> None:
    kernel.count += 1
    assert kernel.kills.ended(1, KILLED)
    assert not kernel.kills.ended(2, KILLED)


def test_two_kills_count_for_two(kernel: Kernel) -> None:
    kernel.count += 2
    assert kernel.kills.ended(1, KILLED)
    assert kernel.kills.ended(2, KILLED)


def test_other_ends_are_not_for_want_of_memory(kernel: Kernel) -> None:
    kernel.count += 1
    assert not kernel.kills.ended(1, 1)
    assert not kernel.kills.ended(2, -signal.SIGTERM)
