"""The CSV file has the run's rows, each once, after kills, restarts and new metrics."""

from __future__ import annotations

import os
from pathlib import Path

import pandas as pd
import pytest
from tests.trackers.recorded import RecordedRun, loss, send_all

from powertrain.errors import ConfigError
from powertrain.trackers import CSV, sending


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out" / "metrics.csv"


def test_rows_are_lines_and_metrics_that_appear_later_get_columns(run: RecordedRun, path: Path) -> None:
    run.report([1, 2])
    assert send_all(run, CSV(path)) is None
    run.report([3], loss=0.5, eval={"acc": 0.75}, training_iteration=7, words='a "b"\nc', many=[1, 2])
    assert send_all(run, CSV(path)) is None
    frame = pd.read_csv(path)
    assert frame["training_iteration"].tolist() == [1, 2, 3]
    assert frame["loss"].tolist() == [loss(0, 1), loss(0, 2), 0.5]
    assert frame["eval/acc"].tolist()[2] == 0.75
    assert frame["reported/training_iteration"].tolist()[2] == 7
    assert frame["words"].tolist()[2] == 'a "b"\nc'
    assert frame["many"].tolist()[2] == "[1, 2]"


def test_half_a_line_of_a_killed_process_is_written_again(run: RecordedRun, path: Path) -> None:
    run.report([1, 2, 3])
    assert send_all(run, CSV(path)) is None
    os.truncate(path, path.stat().st_size - 4)
    run.report([4])
    assert send_all(run, CSV(path)) is None
    assert pd.read_csv(path)["training_iteration"].tolist() == [1, 2, 3, 4]


def test_a_file_that_was_removed_is_written_anew(run: RecordedRun, path: Path) -> None:
    run.report([1, 2, 3])
    assert send_all(run, CSV(path)) is None
    path.unlink()
    run.report([4])
    assert send_all(run, CSV(path)) is None
    assert pd.read_csv(path)["training_iteration"].tolist() == [1, 2, 3, 4]


def test_rows_that_are_trained_again_are_replaced(run: RecordedRun, path: Path) -> None:
    run.report(range(1, 6))
    assert send_all(run, CSV(path)) is None
    run.fail(0)
    run.begin(1, first_row=4)
    run.report(range(4, 7), attempt=1)
    assert send_all(run, CSV(path)) is None
    frame = pd.read_csv(path)
    assert frame["training_iteration"].tolist() == [1, 2, 3, 4, 5, 6]
    assert frame["loss"].tolist()[3:] == [loss(1, row) for row in (4, 5, 6)]


def test_a_file_that_is_not_ours_is_left_alone(
    run: RecordedRun, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "REFUSED_TIMEOUT_S", 0.0)
    path.parent.mkdir()
    path.write_text("a,b\n1,2\n")
    run.report([1])
    unsent = send_all(run, CSV(path))
    assert unsent is not None
    assert "is not one that this tracker has written" in unsent.reason
    assert path.read_text() == "a,b\n1,2\n"


def test_without_a_directory_of_this_machine_a_path_is_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"object store.*CSV\(path=\.\.\.\)"):
        CSV().settled("")
    assert os.fspath(CSV().settled("/runs/digits").path or "") == "/runs/digits/metrics.csv"
