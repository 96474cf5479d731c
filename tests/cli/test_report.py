"""``powertrain report``: where the file goes, of which runs, and what it says when it cannot be made."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tests.recorded_run import at, points, write
from tests.ui import sample_runs
from typer.testing import CliRunner

from powertrain.cli.main import app, main
from powertrain.cli.pages.report import target_of
from powertrain.run import events as ev
from powertrain.storage import open_storage


def write_run(root: Path, name: str = "digits") -> Path:
    write(
        root / name,
        points(range(1, 4), lambda row, rank: {"loss": 1.0 / row}),
        end=ev.Ended(time=at(9), state="finished", reason=""),
    )
    return root / name


def test_the_file_has_the_name_of_the_run_and_is_written_where_it_was_asked_for(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        told = CliRunner().invoke(app, ["report", str(run)])
    assert (told.exit_code, told.output.split()[0]) == (0, "digits-report.html")
    assert (tmp_path / "digits-report.html").read_bytes().startswith(b"<!doctype html>")
    into = CliRunner().invoke(app, ["report", str(run), "-o", str(run)])
    assert into.output.startswith(str(run / "digits-report.html"))
    file = tmp_path / "mine.html"
    file.write_text("an earlier one")
    found = CliRunner().invoke(app, ["report", str(run), "--output", str(file), "--json"])
    assert json.loads(found.output) == {"name": "digits", "path": str(file), "bytes": file.stat().st_size}
    assert sorted(os.listdir(tmp_path)) == ["digits-report.html", "mine.html", "runs"], (
        "and no temporary file"
    )


def test_the_file_is_as_readable_as_others_that_the_user_makes(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    (tmp_path / "other").touch()
    CliRunner().invoke(app, ["report", str(run), "-o", str(tmp_path / "made.html")])
    assert (tmp_path / "made.html").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_sweep_has_a_report_too(tmp_path: Path) -> None:
    sample_runs.write_search(open_storage(tmp_path / "search"), 1.7e9, trials=6)
    told = CliRunner().invoke(app, ["report", str(tmp_path / "search"), "-o", str(tmp_path / "made.html")])
    assert told.exit_code == 0, told.output
    replies = (tmp_path / "made.html").read_text().partition('id="replies">')[2].partition("</script>")[0]
    sweep = json.loads(replies)["sweep"]
    assert (sweep["name"], len(sweep["trials"]), sweep["can_control"]) == ("search", 6, False)


def test_a_directory_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path)
    target = tmp_path / "nowhere" / "made.html"
    monkeypatch.setattr("sys.argv", ["powertrain", "report", str(run), "-o", str(target)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert "nowhere' of the report does not exist. Make it first." in capsys.readouterr().err


def test_a_run_that_has_written_nothing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run" / "journal").mkdir(parents=True)
    (tmp_path / "run" / "journal" / "0001-000001.jsonl").touch()
    monkeypatch.setattr("sys.argv", ["powertrain", "report", str(tmp_path / "run"), "-o", str(tmp_path)])
    with pytest.raises(SystemExit):
        main()
    assert "has no journal yet" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["run"]


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("digits", "digits-report.html"),
        ("a/b\\c\0d", "a_b_c_d-report.html"),
        ("é" * 300, "é" * 100 + "-report.html"),
        ("no text \udcff", "no text ?-report.html"),
    ],
    ids=["plain", "separators", "long", "bytes"],
)
def test_any_name_of_a_run_is_the_name_of_a_file(name: str, file: str) -> None:
    assert target_of(None, name) == Path(file)
