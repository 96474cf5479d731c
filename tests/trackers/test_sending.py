"""Each point arrives once and in order, whatever happens to the tracker, the sender and the run."""

from __future__ import annotations

import pytest
from tests.trackers.recorded import Board, BoardTracker, Killed, RecordedRun, facts_of, loss, send_all

from powertrain.trackers import RunEnding, cursor, sending
from powertrain.trackers.sending import Sender


@pytest.fixture
def board() -> Board:
    return Board()


def points(*parts: tuple[int, range]) -> list[tuple[int, float]]:
    return [(row, loss(attempt, row)) for attempt, rows in parts for row in rows]


def test_a_tracker_of_a_user_gets_every_point_once_and_then_the_end(run: RecordedRun, board: Board) -> None:
    tracker = BoardTracker(board)
    run.report(range(1, 6))
    assert send_all(run, tracker) is None
    run.report(range(6, 11))
    run.end()
    assert send_all(run, tracker, "finished") is None
    assert board.only() == points((0, range(1, 11)))
    assert [ending.state for ending in board.endings] == ["finished"]
    first, second = board.opened
    assert (first.id, first.last_step, second.id, second.last_step) == ("", 0, f"board-{first.key}", 5)
    assert first.params == {"lr": 0.1, "net/depth": 3}


def test_a_run_that_was_finished_and_has_no_new_points_is_not_opened_again(
    run: RecordedRun, board: Board
) -> None:
    run.report([1])
    run.end()
    for _ in range(2):
        assert send_all(run, BoardTracker(board), "finished") is None
    assert len(board.opened) == len(board.endings) == 1


def test_the_end_of_a_run_without_points_is_recorded(run: RecordedRun, board: Board) -> None:
    run.end()
    assert send_all(run, BoardTracker(board), "failed") is None
    assert board.endings == [RunEnding("failed")]


def test_more_points_than_a_page_holds_are_sent_in_order(
    run: RecordedRun, board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "PAGE_POINTS", 7)
    run.report(range(1, 101))
    assert send_all(run, BoardTracker(board)) is None
    assert board.only() == points((0, range(1, 101)))


def test_points_of_a_run_that_ends_while_others_are_being_sent_arrive(run: RecordedRun, board: Board) -> None:
    run.report(range(1, 6))

    class EndsMeanwhile(BoardTracker):
        def open(self, run):  # type: ignore[no-untyped-def]
            session = super().open(run)
            log = session.log

            def log_while_the_run_ends(sent):  # type: ignore[no-untyped-def]
                log(sent)
                if sent[-1].step == 5:
                    recorded.report(range(6, 9))
                    recorded.end()
                    sender.end(RunEnding("finished"), 60.0)

            session.log = log_while_the_run_ends  # type: ignore[method-assign]
            return session

    recorded, sender = run, Sender(EndsMeanwhile(board), run.storage, facts_of(run), print)
    assert sender.follow() is None
    assert board.only() == points((0, range(1, 9)))
    assert [ending.state for ending in board.endings] == ["finished"]


@pytest.mark.parametrize("taken", [0, 3, 5])
def test_after_a_kill_between_sending_and_recording_no_point_is_doubled_or_missing(
    run: RecordedRun, board: Board, taken: int
) -> None:
    run.report(range(1, 6))
    board.kills_after = taken
    with pytest.raises(Killed):
        send_all(run, BoardTracker(board))
    board.kills_after = -1
    run.report(range(6, 9))
    assert send_all(run, BoardTracker(board)) is None
    assert board.only() == points((0, range(1, 9)))
    assert len(board.runs) == 1


def test_after_a_kill_while_the_run_is_made_there_is_one_run(run: RecordedRun, board: Board) -> None:
    run.report([1])

    class LostAnswer(BoardTracker):
        def open(self, run):  # type: ignore[no-untyped-def]
            super().open(run)
            raise Killed

    with pytest.raises(Killed):
        send_all(run, LostAnswer(board))
    assert send_all(run, BoardTracker(board)) is None
    assert len(board.runs) == 1
    assert board.opened[0].key == board.opened[1].key


def test_rows_that_are_trained_again_replace_those_of_a_tracker_that_can_take_points_back(
    run: RecordedRun, board: Board
) -> None:
    tracker = BoardTracker(board, rewinds=True)
    run.report(range(1, 11))
    assert send_all(run, tracker) is None
    run.fail(0)
    run.begin(1, first_row=6)
    run.report(range(6, 9), attempt=1)
    assert send_all(run, tracker) is None
    assert board.only() == points((0, range(1, 6)), (1, range(6, 9)))


def test_a_tracker_that_cannot_take_points_back_keeps_them_and_gets_the_rows_after_them(
    run: RecordedRun, board: Board
) -> None:
    tracker = BoardTracker(board)
    run.report(range(1, 11))
    assert send_all(run, tracker) is None
    run.fail(0)
    run.begin(1, first_row=6)
    run.report(range(6, 14), attempt=1)
    assert send_all(run, tracker) is None
    assert board.only() == points((0, range(1, 11)), (1, range(11, 14)))


def test_rows_that_were_abandoned_before_they_were_sent_are_not_sent(run: RecordedRun, board: Board) -> None:
    run.report(range(1, 11))
    run.fail(0)
    run.begin(1, first_row=6)
    run.report(range(6, 9), attempt=1)
    assert send_all(run, BoardTracker(board)) is None
    assert board.only() == points((0, range(1, 6)), (1, range(6, 9)))


def test_rows_behind_which_an_attempt_went_back_without_reporting_are_taken_back_at_the_end(
    run: RecordedRun, board: Board
) -> None:
    tracker = BoardTracker(board, rewinds=True)
    run.report(range(1, 11))
    assert send_all(run, tracker) is None
    run.fail(0)
    run.begin(1, first_row=6)
    run.end()
    assert send_all(run, tracker, "finished") is None
    assert board.only() == points((0, range(1, 6)))


def test_a_second_start_of_a_run_continues_the_tracker_s_run(run: RecordedRun, board: Board) -> None:
    tracker = BoardTracker(board, rewinds=True)
    run.report(range(1, 8))
    run.end("stopped")
    assert send_all(run, tracker, "stopped") is None
    path = run.storage.local_path("x")
    assert path is not None
    again = RecordedRun(path.parent, lease=2)
    again.begin(1, first_row=5)
    again.report(range(5, 11), attempt=1)
    again.end()
    assert send_all(again, tracker, "finished") is None
    assert board.only() == points((0, range(1, 5)), (1, range(5, 11)))
    assert [ending.state for ending in board.endings] == ["stopped", "finished"]


def test_points_that_a_tracker_has_lost_are_sent_again_as_the_lineage_has_them(
    run: RecordedRun, board: Board
) -> None:
    run.report(range(1, 11))
    run.fail(0)
    run.begin(1, first_row=6)
    run.report(range(6, 13), attempt=1)
    assert send_all(run, BoardTracker(board)) is None
    del board.only()[3:]
    run.report([13], attempt=1)
    assert send_all(run, BoardTracker(board)) is None
    assert board.only() == points((0, range(1, 6)), (1, range(6, 14)))


def test_a_tracker_that_is_down_is_said_once_and_catches_up(
    run: RecordedRun, board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "RETRY_DELAY_S", 0.0)
    said: list[str] = []
    tries = 0

    class UpAtLast(BoardTracker):
        def open(self, run):  # type: ignore[no-untyped-def]
            nonlocal tries
            tries += 1
            board.is_down = tries < 4
            if tries == 4:
                sender.end(RunEnding("finished"), 60.0)
            return super().open(run)

    run.report(range(1, 6))
    sender = Sender(UpAtLast(board), run.storage, facts_of(run), said.append)
    assert sender.follow() is None
    assert board.only() == points((0, range(1, 6)))
    down, up = said
    assert "'board' refuses points: ConnectionError: the board is down" in down
    assert "Training is not affected" in down
    assert "'board' takes points again" in up


def test_a_tracker_that_stays_down_is_named_with_the_number_of_its_points_and_the_command(
    run: RecordedRun, board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "REFUSED_TIMEOUT_S", 0.0)
    run.report(range(1, 4))
    assert send_all(run, BoardTracker(board)) is None
    run.report(range(4, 6))
    board.is_down = True
    unsent = send_all(run, BoardTracker(board), "finished")
    assert unsent is not None
    sentence = unsent.sentence("powertrain track digits")
    assert "The tracker 'board' has not got 2 points: ConnectionError: the board is down." in sentence
    assert sentence.endswith("Send it later: powertrain track digits")
    board.is_down = False
    assert send_all(run, BoardTracker(board), "finished") is None
    assert board.only() == points((0, range(1, 6)))


def test_each_tracker_of_a_run_has_a_cursor_and_a_key_of_its_own(run: RecordedRun, board: Board) -> None:
    run.report(range(1, 4))
    for name in ("left", "right"):
        assert send_all(run, BoardTracker(board, name=name)) is None
    left, right = cursor.read(run.storage, "left"), cursor.read(run.storage, "right")
    assert left is not None
    assert right is not None
    assert left.key != right.key
    assert (left.row, right.row) == (3, 3)


def test_a_damaged_cursor_is_named_with_what_to_do(
    run: RecordedRun, board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "REFUSED_TIMEOUT_S", 0.0)
    run.storage.put("trackers/board.json", b'{"key": "no key"}')
    run.report([1])
    unsent = send_all(run, BoardTracker(board))
    assert unsent is not None
    assert "trackers/board.json" in unsent.reason
    assert "remove it" in unsent.reason
