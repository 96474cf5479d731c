from __future__ import annotations

from powertrain.run import events as ev
from powertrain.run.record.milestones import milestones


def attempt(number: int, world_size: int, first_row: int) -> ev.AttemptStarted:
    return ev.AttemptStarted(time=float(number), attempt=number, world_size=world_size, first_row=first_row)


def failed(*failures: ev.WorkerFailure) -> ev.Failed:
    return ev.Failed(time=0.5, attempt=0, failures=failures, decision="retry", reason="")


def test_a_run_that_went_through_has_none() -> None:
    assert milestones([attempt(0, 2, 1), ev.Ended(time=9.0, state="finished", reason="")]) == []


def test_a_failure_lies_at_its_last_row_and_names_the_rank_that_failed_first() -> None:
    raised = ev.WorkerFailure(rank=1, kind="raised", summary="", error_type="ValueError", row=7)
    killed = ev.WorkerFailure(rank=0, kind="signal", summary="rank 0 was killed\nby somebody", row=9)
    found = milestones([attempt(0, 2, 1), failed(raised, killed), attempt(1, 2, 5)])
    assert [tuple(one) for one in found] == [
        ("failure", 9, 0.5, "rank 1 raised ValueError"),
        ("restart", 5, 1.0, "again from row 5"),
    ]
    assert milestones([failed(killed)])[0].words == "rank 0 was killed"


def test_an_attempt_of_another_size_is_a_resize() -> None:
    found = milestones([attempt(0, 2, 1), attempt(1, 4, 5), attempt(2, 1, 6)])
    assert [(one.kind, one.row, one.words) for one in found] == [
        ("resize", 5, "4 workers instead of 2"),
        ("resize", 6, "1 worker instead of 4"),
    ]


def test_a_failure_before_any_worker_is_none() -> None:
    assert milestones([failed()]) == []
