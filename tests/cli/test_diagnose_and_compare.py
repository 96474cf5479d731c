"""``powertrain diagnose``, ``compare`` and ``trace export``, on directories as runs leave them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tests.diagnosis import synthetic
from tests.diagnosis.run_directory import record
from typer.testing import CliRunner, Result

from powertrain.cli.main import app
from powertrain.diagnosis.report import from_json
from powertrain.errors import StorageError
from powertrain.storage import Storage, open_storage
from powertrain.terminal.text import data_size
from powertrain.trace.recording import phases


@pytest.fixture
def place() -> Storage:
    """The storage path that commands look at when none is given."""
    return open_storage(os.environ["POWERTRAIN_STORAGE"])


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


def test_diagnose_prints_the_card(place: Storage) -> None:
    record(place.child("slow"), synthetic.run(0, synthetic.late(1, phases.INPUT, 0.03)))
    result = invoke("diagnose", "slow")
    assert result.exit_code == 0
    assert result.output.startswith("diagnosis of slow: 1 finding (200 steps, 2 ranks")
    assert "input_straggler: Rank 1" in result.output


def test_diagnose_prints_the_summary_as_json(place: Storage) -> None:
    record(place.child("fine"), synthetic.run(0))
    report = from_json(invoke("diagnose", "fine", "--json").output.encode())
    assert (report.name, report.findings[0].kind) == ("fine", "healthy")


def test_diagnose_takes_the_attempt_and_the_path_it_is_given(place: Storage, tmp_path: Path) -> None:
    there = tmp_path / "elsewhere" / "two"
    for attempt, count in ((0, 100), (1, 60)):
        record(open_storage(str(there)), synthetic.run(attempt, steps=count), attempt=attempt)
    assert "(60 steps" in invoke("diagnose", str(there)).output
    assert "(100 steps" in invoke("diagnose", str(there), "--attempt", "0").output


def test_a_run_without_a_trace_is_reported_in_one_sentence(place: Storage) -> None:
    place.put("untraced/journal/0001-000001.jsonl", b"")
    with pytest.raises(StorageError, match="has no recorded steps"):
        invoke("diagnose", "untraced")


@pytest.mark.parametrize(
    ("seconds", "steps", "code", "said"),
    [
        (0.0, 200, 0, "b is the same as a"),
        (0.02, 200, 3, "worse than a"),
        (0.0, 10, 4, "b cannot be compared with a"),
    ],
)
def test_compare_reports_to_ci_by_its_exit_code(
    place: Storage, seconds: float, steps: int, code: int, said: str
) -> None:
    record(place.child("a"), synthetic.run(0))
    record(place.child("b"), synthetic.run(1, synthetic.bound(phases.FORWARD, seconds), steps=steps))
    result = invoke("compare", "a", "b")
    assert result.exit_code == code
    assert said in result.output
    as_json = json.loads(invoke("compare", "a", "b", "--json").output)
    assert as_json["verdict"] == {0: "same", 3: "worse", 4: "unknown"}[code]


def test_trace_export_writes_a_chrome_trace(
    place: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(place.child("run"), synthetic.run(0, steps=30))
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        result = invoke("trace", "export", "run")
    assert result.exit_code == 0
    assert "of 30 steps" in result.output
    events = json.loads((tmp_path / "run.trace.json").read_text())["traceEvents"]
    assert sum(event["name"] == "step 29" for event in events) == 2


def test_trace_export_takes_the_newest_steps_alone(place: Storage, tmp_path: Path) -> None:
    record(place.child("run"), synthetic.run(0, steps=30))
    file = tmp_path / "part.json"
    result = invoke("trace", "export", "run", "--last", "5", "--output", str(file))
    assert "of 5 steps" in result.output
    events = json.loads(file.read_text())["traceEvents"]
    assert {event["args"]["step"] for event in events if event.get("tid") == 1 and event["ph"] == "X"} == {
        *range(25, 30)
    }
    assert min(event["ts"] for event in events if event["ph"] == "X") == 0


def test_trace_export_of_more_steps_than_there_are_takes_all(place: Storage, tmp_path: Path) -> None:
    record(place.child("run"), synthetic.run(0, steps=30))
    result = invoke("trace", "export", "run", "--last", "500", "--output", str(tmp_path / "all.json"))
    assert "of 30 steps" in result.output
    assert CliRunner().invoke(app, ["trace", "export", "run", "--last", "0"]).exit_code == 2


def test_a_large_trace_is_refused_with_its_size_and_how_to_take_a_part(
    place: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(place.child("run"), synthetic.run(0, steps=30))
    out = ("--output", str(tmp_path / "file.json"))
    assert "--last" not in invoke("trace", "export", "run", *out).output
    size = (tmp_path / "file.json").stat().st_size
    monkeypatch.setattr("powertrain.cli.trace._LARGE", size // 2)
    told = invoke("trace", "export", "run", *out).output.splitlines()[1]
    assert told.startswith(f"It takes {data_size(size)}, ")
    assert "`--last 10` writes only the newest 10 steps" in told


def test_trace_export_says_where_it_cannot_write(place: Storage, tmp_path: Path) -> None:
    record(place.child("run"), synthetic.run(0, steps=30))
    with pytest.raises(StorageError, match="cannot be written"):
        invoke("trace", "export", "run", "--output", str(tmp_path / "missing" / "file"))
