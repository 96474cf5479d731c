"""Tracing in a script that is no run: what it keeps, and what it says at its end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import powertrain
from powertrain import trace
from powertrain.diagnosis.tables.steps import RECORD
from powertrain.trace.recording import current, patches, standalone
from powertrain.trace.recording.phases import INPUT, RECORD_SIZE
from powertrain.trace.recording.recorder import Recorder

SOURCES = str(Path(powertrain.__file__).parents[1])


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    patches.uninstall()
    standalone.forget()
    current.use(None)


def take_steps(count: int, fetch: float = 0.0) -> None:
    recorder = current.current()
    for _ in range(count):
        with recorder.phase(INPUT):
            time.sleep(fetch)
        with trace.trace_step():
            pass


def numbers(kept: standalone.RecordedProcess) -> list[int]:
    return list(np.frombuffer(kept.steps, RECORD)["step"])


# --------------------------------------------------------------------------- what is kept


def test_init_begins_to_record_and_a_second_one_goes_on() -> None:
    trace.init(mode="manual")
    take_steps(3)
    trace.init(mode="manual")
    take_steps(2)
    own = standalone.newest()
    assert own is not None
    assert numbers(own.kept()) == [0, 1, 2, 3, 4]


def test_init_begins_to_record_although_something_wrapped_was_used_before() -> None:
    current.current()  # as a wrapped model does when it is called
    trace.init()
    own = standalone.newest()
    assert own is not None
    assert current.recording() is own.recorder
    standalone.end()
    current.current()
    trace.init()
    assert standalone.newest() is not own


def test_init_in_a_process_that_records_already_begins_nothing_of_its_own() -> None:
    current.use(recorder := Recorder())
    trace.init(mode="manual")
    assert current.recording() is recorder
    assert standalone.newest() is None


def test_what_was_recorded_stays_after_the_end_and_nothing_is_added() -> None:
    trace.init(mode="manual")
    take_steps(3)
    own = standalone.newest()
    assert own is not None
    standalone.end()
    standalone.end()
    assert current.recording() is None
    assert patches.installed() is None
    assert "powertrain-trace" not in [thread.name for thread in threading.enumerate()]
    take_steps(1)
    assert numbers(own.kept()) == [0, 1, 2]


def test_more_steps_than_there_is_room_for_are_thinned_evenly() -> None:
    own = standalone.Alone(most=100 * RECORD_SIZE)
    for _ in range(20):
        for _ in range(50):
            own.recorder.begin_marked_step()
            own.recorder.end_marked_step()
        kept = numbers(own.kept())
        assert len(kept) <= 100
        assert kept == sorted(set(kept))
    own.end()
    assert kept[-50:] == list(range(950, 1000)), "the newest steps are all there"
    assert kept[0] < 50, "and some of the oldest"
    assert max(np.diff(kept)) < 250, "and of all in between"


def test_the_machine_is_looked_at_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standalone, "_GLANCE_EVERY", 0.001)
    own = standalone.Alone()
    deadline = time.monotonic() + 10
    while not own.kept().samples and time.monotonic() < deadline:
        time.sleep(0.005)
    own.end()
    assert own.kept().samples


@pytest.mark.parametrize(("told", "rank"), [("", 0), ("3", 3), ("none", 0)])
def test_the_rank_is_what_a_launcher_says(told: str, rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", told)
        assert standalone.own_rank() == rank


# --------------------------------------------------------------------------- the end of a script

SCRIPT = """
import os, time
from powertrain import trace
trace.init(mode="manual")
batches = trace.wrap_dataloader_fetch(time.sleep(0.01) for _ in range(100))
for batch in batches:
    with trace.trace_step():
        time.sleep(0.001)
"""


def said_at_the_end_of(script: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": SOURCES, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == ""
    return done.stderr


def test_a_script_says_at_its_end_what_was_found() -> None:
    assert "input_bound" in said_at_the_end_of(SCRIPT)


def test_a_script_that_fails_says_it_too() -> None:
    said = said_at_the_end_of(SCRIPT + "raise ValueError('too late')")
    assert "too late" in said
    assert "input_bound" in said


@pytest.mark.parametrize(
    ("more", "environment"),
    [
        ("if os.fork() == 0: raise SystemExit\nos.wait()\ntrace.final_summary()", {}),
        ("", {"RANK": "1"}),
    ],
    ids=["asked before, and in a forked child", "on another rank"],
)
def test_nothing_is_said_where_it_would_be_too_much(more: str, environment: dict[str, str]) -> None:
    assert said_at_the_end_of(SCRIPT + more, **environment) == ""


def test_nothing_is_said_without_a_step() -> None:
    assert said_at_the_end_of("from powertrain import trace; trace.init(mode='manual')") == ""
