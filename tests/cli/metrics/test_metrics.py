"""``powertrain metrics``: the table, curves, CSV and JSON of a run that failed once and went on."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from tests.recorded_run import EVENTFUL, points, write
from typer.testing import CliRunner

from powertrain.cli.main import app
from powertrain.run.metrics.points import MAX_COLUMNS


def measured(row: int, rank: int) -> dict[str, Any]:
    loss = math.nan if row == 3 else 10.0 - row + rank
    found: dict[str, Any] = {
        "loss": loss,
        "nested": {"lr": 0.5},
        "note": 'a "b",\n\x1b[2J' if row == 1 else "é",
    }
    return found | ({"late": row} if row > 4 else {})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    records = points(range(1, 7), measured, ranks=(0, 1))
    records += points(range(5, 9), measured, attempt=1, ranks=(0, 1))
    write(tmp_path / "run", records, facts=EVENTFUL)
    return tmp_path / "run"


def invoke(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["metrics", *map(str, arguments)])


def test_the_table_has_a_line_for_each_metric_with_numbers(run: Path) -> None:
    lines = invoke(run).output.splitlines()
    assert lines[0].split() == ["metric", "rank", "points", "last", "lowest", "highest", "curve"]
    loss = next(line for line in lines if line.startswith("loss")).split(maxsplit=6)
    assert loss[:6] == ["loss", "0", "8", "2", "2", "9"]
    assert " " in loss[6].strip()  # the gap of NaN
    assert [line.split()[0] for line in lines[1:]] == ["loss", "nested/lr", "late"]


def test_a_plot_of_one_metric_of_two_ranks(run: Path) -> None:
    shown = invoke(run, "--plot", "--metric", "loss", "--rank", "0-1").output
    assert "loss, rank 0: 2 at row 8\n" in shown
    assert "loss, rank 1: 3 at row 8\n" in shown
    assert "lr" not in shown
    assert "┤" in shown


def test_csv_has_every_point_of_the_lineage_once(run: Path) -> None:
    lines = list(csv.DictReader(io.StringIO(invoke(run, "--csv").output)))
    assert [(line["training_iteration"], line["rank"]) for line in lines] == [
        (str(row), str(rank)) for row in range(1, 9) for rank in (0, 1)
    ]
    assert {line["attempt"] for line in lines if int(line["training_iteration"]) > 4} == {"1"}
    assert (lines[0]["loss"], lines[4]["loss"]) == ("9.0", "nan")
    assert (lines[0]["late"], lines[-1]["late"], lines[0]["nested/lr"]) == ("", "8", "0.5")
    assert lines[0]["note"] == 'a "b",\\n\\x1b[2J'


def test_csv_of_some_metrics_and_ranks(run: Path) -> None:
    output = invoke(run, "--csv", "-m", "loss", "-r", "1").output
    assert output.splitlines()[:2] == [
        "training_iteration,rank,attempt,timestamp,loss",
        "1,1,0,1700000010.0,10.0",
    ]
    assert len(output.splitlines()) == 9


def test_json_has_the_curves(run: Path) -> None:
    found = json.loads(invoke(run, "--json", "-m", "loss").output)
    (loss,) = found["metrics"]
    assert (found["run"], loss["name"], loss["points"], loss["rows"]) == ("run", "loss", 8, [*range(1, 9)])
    assert (loss["lowest"], loss["highest"], loss["last"][:3]) == (2.0, 9.0, [9.0, 8.0, None])


def test_an_unknown_metric_is_an_error_that_names_similar_ones(run: Path) -> None:
    done = invoke(run, "-m", "los")
    assert (done.exit_code, str(done.exception)) == (
        1,
        "The run 'run' has no metric 'los' with numbers. It has: loss.",
    )


def test_two_forms_at_once_are_a_usage_error(run: Path) -> None:
    assert invoke(run, "--csv", "--json").exit_code == 2


def test_a_run_without_metrics_says_so(tmp_path: Path) -> None:
    write(tmp_path / "empty")
    assert invoke(tmp_path / "empty").output == "The run 'empty' has reported no numbers yet.\n"
    assert invoke(tmp_path / "empty", "--csv").output == "training_iteration,rank,attempt,timestamp\n"


def test_csv_of_a_metric_beyond_the_columns_has_the_column_of_further_ones(tmp_path: Path) -> None:
    many = {f"m{index:04}": float(index) for index in range(MAX_COLUMNS + 5)}
    write(tmp_path / "many", points([1], lambda row, rank: many))
    last = f"m{MAX_COLUMNS + 4:04}"
    (line,) = csv.DictReader(io.StringIO(invoke(tmp_path / "many", "--csv", "-m", last).output))
    assert str(float(MAX_COLUMNS + 4)) in line["more metrics"]
    assert "m0000" not in line
