"""The end of a run: what was found is kept, copied where asked for, and found again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.diagnosis import run_directory, synthetic

from powertrain.diagnosis import final, summary
from powertrain.diagnosis.summary import Report
from powertrain.storage import open_storage
from powertrain.trace.recording import phases


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


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b'{"schema_version": 1, "name": "\xff\xff"}',
        b'{"schema_version": 1, "findings": 7}',
        b'{"schema_version": 1, "findings": [{"kind": ' + b"[" * 50_000,
        b'{"schema_version": 99, "findings": "other"}',
    ],
)
def test_a_summary_that_cannot_be_read_is_made_again_and_that_is_noted(bound: Path, content: bytes) -> None:
    before = final.conclude(open_storage(bound), "bound")
    (bound / "final_summary.json").write_bytes(content)
    again = final.report_of(open_storage(bound), "bound")
    assert before is not None
    assert again is not None
    assert again.findings == before.findings
    assert again.notes[:-1] == before.notes
    assert again.notes[-1].startswith("final_summary.json could not be read")
    assert (bound / "final_summary.json").read_bytes() == content


def test_a_summary_that_cannot_be_read_is_no_error_where_nothing_else_is_there(tmp_path: Path) -> None:
    (tmp_path / "final_summary.json").write_bytes(b"{")
    assert final.report_of(open_storage(tmp_path), "run") is None


@pytest.mark.parametrize("session", ["../elsewhere", "..", ".", "{tmp}/root", "a/b", "a\\..\\b", "a\0b"])
def test_a_copy_stays_below_the_directory_it_was_asked_for(tmp_path: Path, session: str) -> None:
    logs = tmp_path / "logs"
    written = Path(final.copy_to(str(logs), session.replace("{tmp}", str(tmp_path)), Report()))
    assert written.resolve().parent.parent == logs.resolve()
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]


def test_sessions_of_usual_names_keep_them(tmp_path: Path) -> None:
    for session in ("run-1", "2026.01.02 night", ".hidden", "läuft"):
        assert Path(final.copy_to(str(tmp_path), session, Report())).parent.name == session


@given(st.text())
@example("..")
@example("/")
def test_any_text_makes_one_component(text: str) -> None:
    name = final._one_component(text)
    assert os.path.basename(os.path.normpath(os.path.join("logs", name))) == name
    assert os.path.dirname(os.path.normpath(os.path.join("logs", name))) == "logs"


def test_a_few_steps_are_not_worth_a_card(tmp_path: Path) -> None:
    storage = open_storage(tmp_path / "run")
    run_directory.record(storage, synthetic.run(1, steps=5))
    report = final.conclude(storage, "short")
    assert report is not None
    assert not final.is_telling(report)
