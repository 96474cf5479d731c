"""Findings of a run that goes on are said when they come up, and when they go."""

from __future__ import annotations

import threading
from pathlib import Path

from tests.diagnosis import run_directory, synthetic

from powertrain.diagnosis.finding import Finding
from powertrain.diagnosis.live import Live, news
from powertrain.diagnosis.summary import Report
from powertrain.storage import open_storage
from powertrain.trace import phases


def finding(kind: str, *ranks: int) -> Finding:
    return Finding(kind=kind, severity="warning", summary=f"It is {kind}.", action="Mend it.", ranks=ranks)


def test_a_finding_is_said_once_and_its_end_too() -> None:
    late = Report(findings=(finding("input_straggler", 1),), steps=100, step_seconds=0.01)
    lines, told = news(late, set())
    assert lines == ["input_straggler: It is input_straggler. Do: Mend it. (100 steps, 10.0 ms each)"]
    assert news(late, told)[0] == []
    other = Report(findings=(finding("input_straggler", 2),))
    assert news(other, told)[0] == [
        "input_straggler: It is input_straggler. Do: Mend it.",
        "no longer: input_straggler",
    ]
    assert news(Report(), told)[0] == ["no longer: input_straggler"]


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
    assert len(said) == 1
