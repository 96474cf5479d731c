"""The end of a fit that is stuck when it is asked for the second time to end."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powertrain.run import forced_end
from powertrain.run.forced_end import EndedAtOnce, ForcedEnd, ForcedEndRequest, next_force, second_request

kinds = st.sampled_from(["interrupt", "notice"])
requests = st.lists(st.tuples(kinds, st.floats(0, 100)), max_size=8).map(
    lambda found: [ForcedEndRequest(kind, at) for kind, at in sorted(found, key=lambda one: one[1])]
)


@given(requests, st.floats(0, 10))
def test_the_second_request_of_one_kind_forces_the_end(found: list[ForcedEndRequest], same: float) -> None:
    second = second_request(found, same)
    interrupts = [one for one in found if one.kind == "interrupt"]
    notices = [one for one in found if one.kind == "notice"]
    later = [one for one in notices if one.at - notices[0].at > same]
    candidates = [*interrupts[1:2], *later[:1]]
    assert (second is None) == (not candidates)
    if second is not None:
        assert second.at == min(one.at for one in candidates)


@given(st.floats(0, 1e6), st.lists(st.floats(0, 1e6), max_size=3), st.booleans())
def test_what_was_forced_is_forced_again_later(second: float, forced: list[float], is_noted: bool) -> None:
    due = next_force(second, forced, is_noted=is_noted)
    assert due > (forced[-1] if forced else second)
    if not forced:
        assert next_force(second, [], is_noted=False) <= due


@pytest.fixture
def handled() -> Iterator[list[Any]]:
    """SIGINT goes to the ForcedEnd that a test puts here."""
    ending: list[Any] = []
    before = signal.signal(signal.SIGINT, lambda *_: ending[0].request("interrupt"))
    yield ending
    signal.signal(signal.SIGINT, before)


def test_a_main_thread_that_waits_for_ever_is_ended_where_it_is(
    handled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forced_end, "ANSWER_TIMEOUT_S", 0.0)
    released = threading.Event()
    ending = ForcedEnd(lambda: False, 0.3, released.set)
    handled.append(ending)
    with pytest.raises(EndedAtOnce), ending.watching():
        ending.request("interrupt")
        ending.request("interrupt")
        threading.Event().wait(60)
    assert released.is_set()
    assert (ending.kind, ending.has_forced) == ("interrupt", True)
    assert "powertrain-forced-end" not in [thread.name for thread in threading.enumerate()]


def test_it_is_forced_again_where_what_unwinds_is_stuck_too(
    handled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forced_end, "ANSWER_TIMEOUT_S", 0.0)
    monkeypatch.setattr(forced_end, "FORCE_INTERVAL_S", 0.0)
    ending = ForcedEnd(lambda: False, 0.3, lambda: None)
    handled.append(ending)
    stuck = 0
    with pytest.raises(EndedAtOnce), ending.watching():
        ending.request("interrupt")
        ending.request("interrupt")
        for _ in range(2):
            try:
                threading.Event().wait(60)
            except EndedAtOnce:
                stuck += 1
        raise OSError("a failure while it was unwound does not matter")
    assert stuck == 2


def test_one_request_forces_nothing_and_after_the_block_nothing_is_forced(handled: list[Any]) -> None:
    ending = ForcedEnd(lambda: False, 0.3, lambda: None)
    handled.append(ending)
    with ending.watching():
        ending.request("notice")
        ending.request("notice")  # the same one, from a scheduler and a launcher
        ending.request("interrupt")
        assert ending.kind == ""
    ending.request("interrupt")
    ending.request("interrupt")
    assert not ending.has_forced
    assert time.monotonic() < next_force(time.monotonic(), [], is_noted=True)
