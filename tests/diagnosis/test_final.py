"""The end of a run: what was found is kept, copied where asked for, and found again."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.diagnosis import run_directory, synthetic

from powertrain.diagnosis import final, summary
from powertrain.storage import open_storage
from powertrain.trace import phases


@pytest.fixture
def bound(tmp_path: Path) -> Path:
    steps = synthetic.run(1, synthetic.bound(phases.INPUT, 0.030))
    run_directory.record(open_storage(tmp_path / "run"), steps)
    return tmp_path / "run"


def test_the_report_is_kept_in_the_runs_directory(bound: Path) -> None:
    report = final.conclude(open_storage(bound), "bound")
    assert report is not None
    assert report.findings[0].kind == "input_bound"
    assert final.is_telling(report)
    kept = summary.from_json((bound / "final_summary.json").read_bytes())
    assert kept == report
    assert final.report_of(open_storage(bound), "any") == report


def test_without_a_summary_it_is_made_again(bound: Path) -> None:
    report = final.report_of(open_storage(bound), "bound")
    assert report is not None
    assert report.findings[0].kind == "input_bound"
    assert not (bound / "final_summary.json").exists()


def test_a_run_that_recorded_nothing_has_none(tmp_path: Path) -> None:
    storage = open_storage(tmp_path / "empty")
    assert final.conclude(storage, "empty") is None
    assert final.report_of(storage, "empty") is None


def test_a_copy_goes_where_it_was_asked_for(bound: Path, tmp_path: Path) -> None:
    report = final.conclude(open_storage(bound), "bound")
    assert report is not None
    first = final.copy_to(str(tmp_path / "logs"), "", report)
    second = final.copy_to(str(tmp_path / "logs"), "session", report)
    assert first == str(tmp_path / "logs" / "bound" / "final_summary.json")
    assert Path(second).parent.name == "session"
    assert [p.name for p in Path(second).parent.iterdir()] == ["final_summary.json"]
    assert summary.from_json(Path(second).read_bytes()) == report


def test_a_few_steps_are_not_worth_a_card(tmp_path: Path) -> None:
    storage = open_storage(tmp_path / "run")
    run_directory.record(storage, synthetic.run(1, steps=5))
    report = final.conclude(storage, "short")
    assert report is not None
    assert not final.is_telling(report)
