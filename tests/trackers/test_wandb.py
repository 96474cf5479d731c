"""W&B's offline files have each point once, over several processes of one run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.trackers.recorded import RecordedRun, loss

from powertrain.trackers import cursor
from powertrain.trackers.wandb import _records, newest_step

pytest.importorskip("wandb")

#: W&B starts a process and threads of its own, so it is used in a process that ends.
_PROGRAM = """
import sys
from powertrain.storage import open_storage
from powertrain.trackers import RunEnding, TrackedRun, WandB
from powertrain.trackers.sending import Sender
place, board, state = sys.argv[1:]
run = TrackedRun(name="run", path=place, key="", params={"lr": 0.1}, tags={"team": "a"}, directory=place)
tracker = WandB(project="digits", mode="offline", directory=board).settled(place)
sender = Sender(tracker, open_storage(place), run, print)
sender.end(RunEnding(state) if state else None, 300.0)
print("unsent:", sender.follow())
"""


def send(run: RecordedRun, board: Path, state: str = "") -> None:
    place = run.storage.uri
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, place, str(board), state],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert "unsent: None" in done.stdout, done.stdout + done.stderr


def records(board: Path) -> list[Any]:
    """All records of all offline files, in the order in which the files were begun."""
    from wandb.proto import wandb_internal_pb2

    found = []
    for path in sorted(board.glob("wandb/offline-run-*/run-*.wandb")):
        for data in _records(path.read_bytes()):
            record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
            record.ParseFromString(data)
            found.append(record)
    return found


def history(board: Path) -> list[tuple[int, float]]:
    points = []
    for record in records(board):
        if record.WhichOneof("record_type") == "history":
            values = {
                "/".join([item.key] if item.key else item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            points.append((record.history.step.num or values["_step"], values["loss"]))
    return points


@pytest.mark.timeout(900)
def test_offline_files_have_each_point_once_in_one_run(run: RecordedRun, tmp_path: Path) -> None:
    board = tmp_path / "board"
    run.report(range(1, 6))
    send(run, board)
    kept = cursor.read(run.storage, "wandb")
    assert kept is not None
    assert newest_step(board / "wandb", kept.key) == 5
    # As after a kill: the file has points that the cursor does not know of.
    cursor.write(run.storage, "wandb", kept.moved_to(kept.position._replace(row=2)))
    run.report(range(6, 9))
    run.end()
    send(run, board, "finished")
    assert history(board) == [(row, loss(0, row)) for row in range(1, 9)]
    ids = {record.run.run_id for record in records(board) if record.WhichOneof("record_type") == "run"}
    assert ids == {kept.key}


def test_a_directory_without_files_says_nothing_of_steps(tmp_path: Path) -> None:
    assert newest_step(tmp_path / "wandb", "0123456789abcdef") is None
