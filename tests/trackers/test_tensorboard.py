"""TensorBoard's own reader finds each point once in the event files, after kills and restarts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.trackers.recorded import RecordedRun, approx, loss, send_all

from powertrain.errors import ConfigError
from powertrain.trackers import TensorBoard

pytest.importorskip("tensorboard")


@pytest.fixture
def board(tmp_path: Path) -> Path:
    return tmp_path / "board"


def scalars(board: Path, tag: str = "loss") -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(board), size_guidance={"scalars": 0}).Reload()
    return [(event.step, event.value) for event in found.Scalars(tag)]


def texts(board: Path, tag: str) -> str:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(board)).Reload()
    return "".join(value.decode() for event in found.Tensors(tag) for value in event.tensor_proto.string_val)


def test_numbers_are_scalars_and_parameters_and_the_end_are_text(run: RecordedRun, board: Path) -> None:
    run.report(range(1, 6))
    run.report([6], loss=0.5, eval={"acc": 0.75}, words="no number")
    run.end()
    assert send_all(run, TensorBoard(board), "finished") is None
    assert approx(scalars(board), [*((row, loss(0, row)) for row in range(1, 6)), (6, 0.5)])
    assert scalars(board, "eval/acc") == [(6, 0.75)]
    assert "| net/depth | 3 |" in texts(board, "train_loop_config")
    assert "| state | finished |" in texts(board, "run")


def test_points_of_a_killed_process_are_found_once(run: RecordedRun, board: Path) -> None:
    run.report(range(1, 6))
    assert send_all(run, TensorBoard(board)) is None
    # As after a kill: points are in the file that the cursor does not know of, the last of them by half.
    run.storage.put("trackers/tensorboard.json", _moved_back(run, to=2))
    (file,) = board.iterdir()
    os.truncate(file, file.stat().st_size - 3)
    run.report(range(6, 9))
    assert send_all(run, TensorBoard(board)) is None
    assert approx(scalars(board), [(row, loss(0, row)) for row in range(1, 9)])


def _moved_back(run: RecordedRun, to: int) -> bytes:
    data = run.storage.get("trackers/tensorboard.json")
    return data.replace(b'"row": 5', b'"row": %d' % to)


def test_rows_that_are_trained_again_are_found_once_with_their_new_values(
    run: RecordedRun, board: Path
) -> None:
    run.report(range(1, 11))
    assert send_all(run, TensorBoard(board)) is None
    for attempt in (1, 2):
        run.fail(attempt - 1)
        run.begin(attempt, first_row=6)
        run.report(range(6, 9 + attempt), attempt=attempt)
        assert send_all(run, TensorBoard(board)) is None
    assert approx(scalars(board), [(row, loss(0 if row < 6 else 2, row)) for row in range(1, 11)])


def test_files_that_were_removed_are_written_anew(run: RecordedRun, board: Path) -> None:
    run.report(range(1, 4))
    assert send_all(run, TensorBoard(board)) is None
    for file in board.iterdir():
        file.unlink()
    run.report([4])
    assert send_all(run, TensorBoard(board)) is None
    assert [step for step, _ in scalars(board)] == [1, 2, 3, 4]


def test_names_of_event_files_sort_in_the_order_in_which_they_were_made(
    run: RecordedRun, board: Path
) -> None:
    names: list[str] = []
    for row in range(1, 6):
        run.report([row])
        assert send_all(run, TensorBoard(board)) is None
        names += sorted({path.name for path in board.iterdir()} - set(names))
    assert names == sorted(names)
    assert len(names) == 5


def test_without_a_directory_of_this_machine_one_is_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"object store.*TensorBoard\(directory=\.\.\.\)"):
        TensorBoard().settled("")
