"""Which reported checkpoints count as lost."""

from __future__ import annotations

from powertrain.run import events as ev
from powertrain.run.checkpoints.unsaved import UnsavedCheckpoint, error_text, summarize
from powertrain.run.lifecycle import RunState, apply


def replayed(*facts: ev.Event) -> RunState:
    started = ev.RunStarted(time=1.0, name="run", lease=1, host="here", pid=1, version="1", engine="local")
    state = RunState()
    for fact in (started, *facts):
        state = apply(state, fact)
    return state


def attempt(number: int, first_row: int) -> list[ev.Event]:
    begin = [
        ev.RunStarted(time=1.0, name="run", lease=number + 1, host="h", pid=1, version="1", engine="local")
    ]
    started = ev.AttemptStarted(time=1.0, attempt=number, world_size=1, first_row=first_row)
    return [*(begin if number else []), started, ev.TrainingStarted(time=1.0, attempt=number)]


def lost(number: int, row: int) -> ev.CheckpointFailed:
    return ev.CheckpointFailed(
        time=1.0, attempt=number, row=row, checkpoint=f"c{row}", reason=f"row {row} is lost", place="/disk"
    )


def saved(number: int, row: int) -> ev.Committed:
    return ev.Committed(time=1.0, attempt=number, row=row, checkpoint=f"c{row}")


def test_the_last_report_decides_whether_the_last_checkpoint_is_lost() -> None:
    assert replayed(*attempt(0, 1), saved(0, 1), lost(0, 2)).lost_last == UnsavedCheckpoint(
        row=2, name="c2", reason="row 2 is lost", place="/disk", attempt=0
    )
    earlier = replayed(*attempt(0, 1), lost(0, 1), saved(0, 2))
    assert earlier.lost_last is None
    assert [one.row for one in earlier.unsaved] == [1]


def test_a_commit_that_is_recorded_after_the_loss_of_a_newer_one_does_not_hide_it() -> None:
    state = replayed(*attempt(0, 1), lost(0, 2), saved(0, 1))
    assert state.lost_last is not None
    assert state.lost_last.row == 2


def test_rows_that_are_trained_again_are_lost_no_more() -> None:
    state = replayed(*attempt(0, 1), lost(0, 1), saved(0, 2), lost(0, 3), *attempt(1, 3))
    assert [one.row for one in state.unsaved] == [1]
    assert state.lost_last is None


def test_a_row_that_is_saved_without_a_late_rank_is_listed_and_not_the_lost_last() -> None:
    state = replayed(*attempt(0, 1), saved(0, 1), lost(0, 1))
    assert [one.row for one in state.unsaved] == [1]
    assert state.lost_last is None


def test_the_summary_counts_and_gives_the_newest_reason() -> None:
    assert summarize(()) == ""
    one = UnsavedCheckpoint(row=3, name="c3", reason="no room")
    assert summarize([one]) == "1 checkpoint was NOT saved (row 3): no room"
    many = [UnsavedCheckpoint(row=row, name="", reason="no room") for row in range(1, 9)]
    assert summarize(many) == "8 checkpoints were NOT saved (rows 1, 2, 3, 4, 5 to 8): no room"
    other = UnsavedCheckpoint(row=9, name="", reason="gone")
    assert summarize([*many, other]).endswith("): row 9: gone")


def test_the_error_names_the_place_once_and_the_newest_saved_row() -> None:
    lost = UnsavedCheckpoint(row=3, name="c3", reason="no answer", place="s3://bucket/run")
    text = error_text([lost], newest_saved=2)
    assert "(row 3) was not saved: no answer. Place: s3://bucket/run." in text
    assert "The newest saved checkpoint is of row 2." in text
    assert "earlier" not in text
    two = error_text([UnsavedCheckpoint(row=1, name="c1", reason="x"), lost], newest_saved=0)
    assert "1 earlier one was lost, too" in two
    assert "no saved checkpoint" in two
