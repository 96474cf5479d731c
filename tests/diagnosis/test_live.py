"""Findings of a run that goes on are said when they come up, and when they go."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.diagnosis import run_directory, synthetic

from powertrain.diagnosis import live, recorded
from powertrain.diagnosis.finding import Finding
from powertrain.diagnosis.goodput import TimeShare
from powertrain.diagnosis.live import Live, efficiency, news, until_next
from powertrain.diagnosis.summary import Report, Throughput
from powertrain.errors import StorageError
from powertrain.storage import open_storage
from powertrain.trace.recording import phases


def finding(kind: str, *ranks: int) -> Finding:
    return Finding(kind=kind, severity="warning", summary=f"It is {kind}.", action="Mend it.", ranks=ranks)


def test_a_finding_is_said_once_and_its_end_too() -> None:
    late = Report(findings=(finding("input_straggler", 1),), steps=100, step_seconds=0.01)
    lines, told = news(late, set())
    assert lines == [
        "input_straggler: It is input_straggler. Do: Mend it. (100 steps, 10.0 ms each on average)"
    ]
    assert news(late, told)[0] == []
    other = Report(findings=(finding("input_straggler", 2),))
    assert news(other, told)[0] == [
        "input_straggler: It is input_straggler. Do: Mend it.",
        "resolved: input_straggler",
    ]
    assert news(Report(), told)[0] == ["resolved: input_straggler"]


def test_calm_findings_are_not_said() -> None:
    healthy = Report(findings=(Finding(kind="healthy", severity="info", summary="All is well.", action=""),))
    assert news(healthy, set()) == ([], set())


def test_what_a_run_records_is_looked_at_while_it_goes_on(tmp_path: Path) -> None:
    storage = open_storage(tmp_path / "run")
    said: list[str] = []
    told = threading.Event()

    def tell(line: str) -> None:
        said.append(line)
        told.set()

    with Live(storage, "run", tell, every=0.02):
        run_directory.record(storage, synthetic.run(1, synthetic.bound(phases.INPUT, 0.030)))
        assert told.wait(20)
    assert said[0].startswith("[run] input_bound: ")
    assert [line.split()[1] for line in said[1:]] in ([], ["speed:"])


def test_the_speed_is_said_once_enough_steps_are_recorded() -> None:
    report = Report(steps=200, throughput=Throughput(steps_per_second=12.5, mfu=0.41))
    trained = (TimeShare(cause="training", seconds=60.0, share=1.0),)
    assert efficiency(report) == "speed: 12.5 steps/s, MFU 41 %"
    timed = msgspec.structs.replace(report, time=trained)
    assert efficiency(timed) == "speed: 12.5 steps/s, MFU 41 %; goodput: 100 % of 60 s in training"
    assert efficiency(msgspec.structs.replace(timed, steps=3)) == ""


# --------------------------------------------------------------------------- looks that fail or take long


class Turns:
    """In the place of a Live's event: lets it look ``count`` times at once, and keeps how long it would have waited."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.waits: list[float] = []

    def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        return len(self.waits) > self.count

    def set(self) -> None:
        """Its end is the last turn."""


def look(
    monkeypatch: pytest.MonkeyPatch,
    reports: list[Callable[[], Report]],
    tell: Callable[[str], None],
    took: float = 0.0,
) -> list[float]:
    """Have a Live look once at each of ``reports``, which take ``took`` seconds each; its waits."""
    coming = iter(reports)
    clock = [0.0]

    def report_of(*_: object) -> Report:
        clock[0] += took
        return next(coming)()

    monkeypatch.setattr(recorded, "report_of", report_of)
    monkeypatch.setattr(live, "monotonic", lambda: clock[0])
    watcher = Live(open_storage("/nowhere"), "run", tell, every=10.0)
    turns = Turns(len(reports))
    monkeypatch.setattr(watcher, "_over", turns)
    with watcher:
        pass
    return turns.waits


def broken() -> Report:
    raise ValueError("a table of another shape")


def late() -> Report:
    return Report(findings=(finding("input_straggler", 1),))


def test_a_look_that_fails_is_reported_once_and_the_next_one_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    look(monkeypatch, [broken, broken, late, broken, late, Report], said.append)
    assert len(said) == 3
    assert said[0].startswith(
        "[run] The run's telemetry could not be analysed: ValueError: a table of another shape."
    )
    assert said[1].startswith("[run] input_straggler: ")
    assert said[2] == "[run] resolved: input_straggler"


def test_a_viewer_that_cannot_be_notified_does_not_end_the_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def tell(line: str) -> None:
        tried.append(line)
        raise RuntimeError("the terminal is gone")

    waits = look(monkeypatch, [late, Report, late], tell)
    assert len(waits) == 4
    assert [line.split()[1] for line in tried] == ["input_straggler:", "The", "resolved:", "input_straggler:"]


def test_a_run_that_has_nothing_yet_is_waited_for_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing() -> Report:
        raise StorageError("Nothing was recorded.")

    said: list[str] = []
    look(monkeypatch, [nothing, late], said.append)
    assert [line.split()[1] for line in said] == ["input_straggler:"]


def test_looks_become_rarer_as_they_cost_more(monkeypatch: pytest.MonkeyPatch) -> None:
    assert look(monkeypatch, [late, broken], print, took=0.1) == [10, 10, 10]
    assert look(monkeypatch, [late, broken], print, took=3.0) == [10, 60, 60]


@given(st.floats(0, 1e4), st.floats(0, 1e4))
def test_looking_takes_at_most_a_twentieth_of_the_time(every: float, took: float) -> None:
    wait = until_next(every, took)
    assert wait >= every
    assert wait >= 20 * took
    assert wait in (every, 20 * took)
