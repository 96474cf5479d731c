"""The clock and the deadlines of a run: what is due, when, and what stands still while a debugger is open."""

from __future__ import annotations

import queue
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.clock import ManualClock

from powertrain.run.deadlines import Deadline, Deadlines

NAMES = st.sampled_from([Deadline.LATE, Deadline.ABSENT, Deadline.GRACE, Deadline.RETRY])
SECONDS = st.floats(0.0, 1000.0)


def never(seconds: float) -> None:
    pytest.fail(f"this process did not stand still for {seconds:g} s")


@given(st.lists(st.tuples(NAMES, SECONDS), max_size=12))
def test_deadlines_pass_in_their_order_each_with_the_last_time_that_was_set(
    given: list[tuple[Deadline, float]],
) -> None:
    clock, inbox = ManualClock(), queue.SimpleQueue[Any]()
    deadlines = Deadlines(clock)
    for name, seconds in given:
        deadlines.set(name, seconds)
    clock.advance(1000.0)
    expected = dict(given)
    passed = [deadlines.next(inbox, lambda _: None) for _ in expected]
    assert {name: expected[name] for name in passed} == expected
    assert [expected[name] for name in passed] == sorted(expected.values())


@given(SECONDS, SECONDS, SECONDS)
def test_a_paused_deadline_has_the_same_time_left_when_it_is_resumed(
    seconds: float, before: float, during: float
) -> None:
    clock = ManualClock()
    deadlines = Deadlines(clock)
    deadlines.set(Deadline.LATE, seconds)
    clock.advance(before)
    deadlines.pause([Deadline.LATE, Deadline.ABSENT])
    clock.advance(during)
    assert Deadline.LATE in deadlines
    assert Deadline.ABSENT not in deadlines
    deadlines.resume()
    assert deadlines.seconds_left(Deadline.LATE) == pytest.approx(seconds - before)
    assert deadlines.seconds_left(Deadline.ABSENT) is None


def test_a_deadline_that_is_set_or_cancelled_while_paused_counts_from_the_resumption() -> None:
    clock = ManualClock()
    deadlines = Deadlines(clock)
    deadlines.set(Deadline.LATE, 5.0)
    deadlines.pause([Deadline.LATE, Deadline.ABSENT])
    deadlines.cancel(Deadline.LATE)
    deadlines.set(Deadline.ABSENT, 7.0)
    clock.advance(100.0)
    deadlines.resume()
    assert Deadline.LATE not in deadlines
    assert deadlines.seconds_left(Deadline.ABSENT) == 7.0


def test_an_item_comes_before_a_deadline_that_has_passed() -> None:
    clock, inbox = ManualClock(), queue.SimpleQueue[Any]()
    deadlines = Deadlines(clock)
    deadlines.set(Deadline.GRACE, 0.5)
    inbox.put("a message")
    clock.advance(1.0)
    assert deadlines.next(inbox, never) == "a message"
    assert deadlines.next(inbox, never) is Deadline.GRACE


def test_time_in_which_the_process_did_not_run_is_reported() -> None:
    clock, stalls = ManualClock(), list[float]()
    deadlines = Deadlines(clock)
    deadlines.set(Deadline.WATCH, 1.0)

    class Stopped(queue.SimpleQueue[Any]):
        def get(self, *_: Any, **__: Any) -> Any:
            clock.advance(31.0)  # the machine slept in the middle of the wait
            raise queue.Empty

    assert deadlines.next(Stopped(), stalls.append) is Deadline.WATCH
    assert stalls == [30.0]


def test_a_deadline_can_only_be_shortened() -> None:
    clock = ManualClock()
    deadlines = Deadlines(clock)
    deadlines.set(Deadline.SETTLED, 10.0)
    deadlines.shorten(Deadline.SETTLED, 60.0)
    assert deadlines.seconds_left(Deadline.SETTLED) == 10.0
    deadlines.shorten(Deadline.SETTLED, 2.0)
    assert deadlines.seconds_left(Deadline.SETTLED) == 2.0
    deadlines.set_if_unset(Deadline.SETTLED, 1.0)
    assert deadlines.seconds_left(Deadline.SETTLED) == 2.0
    deadlines.set_at(Deadline.SETTLED, float("inf"))
    assert Deadline.SETTLED not in deadlines
