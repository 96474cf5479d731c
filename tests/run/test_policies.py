"""The pure decisions: after a failure, after a loss, which failure is the cause, how many workers, when to stop."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powertrain.run.events import WorkerFailure
from powertrain.run.health.failure_policy import after_failure, after_loss, cause_is_known, order_by_cause
from powertrain.run.scaling.policy import Elastic, sizes_to_try
from powertrain.run.stopping import reason_to_stop


@pytest.mark.parametrize(
    ("before", "allowed", "fail_fast", "action", "words"),
    [
        (0, 0, False, "give_up", "max_failures=0"),
        (0, 1, False, "retry", "failure 1 of the 1"),
        (1, 1, False, "give_up", "failure 2 is more than max_failures=1"),
        (99, -1, False, "retry", "no limit"),
        (0, 5, True, "give_up", "fail_fast"),
    ],
)
def test_a_failure_is_retried_within_the_budget(
    before: int, allowed: int, fail_fast: bool, action: str, words: str
) -> None:
    decision = after_failure(before, allowed, fail_fast)
    assert (decision.action, decision.retry) == (action, action == "retry")
    assert words in decision.reason


@given(st.integers(0, 50), st.integers(0, 50))
def test_exactly_as_many_retries_as_max_failures_allows(before: int, allowed: int) -> None:
    assert after_failure(before, allowed, fail_fast=False).retry is (before < allowed)


def test_the_third_loss_without_a_commit_ends_the_run() -> None:
    assert [after_loss(before).action for before in range(4)] == ["retry", "retry", "give_up", "give_up"]
    assert "3 losses" in after_loss(2).reason


def failure(rank: int, after: float, secondary: bool = False) -> WorkerFailure:
    return WorkerFailure(rank=rank, kind="raised", summary="", after=after, secondary=secondary)


def test_the_cause_comes_before_its_echoes_then_the_earlier_then_the_lower_rank() -> None:
    echo, early, late, tie = failure(0, 1.0, True), failure(3, 2.0), failure(1, 3.0), failure(2, 2.0)
    assert order_by_cause([echo, late, early, tie]) == [tie, early, late, echo]


def test_the_cause_is_unknown_while_all_is_echo() -> None:
    assert not cause_is_known([])
    assert not cause_is_known([failure(0, 1.0, True)])
    assert cause_is_known([failure(0, 1.0, True), failure(1, 1.1)])


def test_sizes_are_tried_from_the_most_to_the_fewest() -> None:
    assert list(sizes_to_try(2, 4)) == [4, 3, 2]
    assert list(sizes_to_try(3, 3)) == [3]


@pytest.mark.parametrize(
    ("wish", "size", "room", "words"),
    [
        (1, 2, 2, "It goes on with 1 worker instead of 2 after its next checkpoint."),
        (2, 1, 2, "It goes on with 2 workers instead of 1 after its next checkpoint."),
        (1, 1, 2, "It has 1 worker, and keeps it."),
        (2, 2, 2, "It has 2 workers, and keeps them."),
        (4, 1, 1, "It has 1 worker, and there is room for 1 now; it grows to 4 as room comes."),
        (1, 0, 4, "It has not started yet, and starts with at most 1 worker."),
    ],
)
def test_the_outcome_of_a_resize_request_is_reported_in_numbers_that_agree(
    wish: int, size: int, room: int, words: str
) -> None:
    elastic = Elastic(1, 4)
    elastic.set_capacity(room, 0.0)
    elastic.set_limit(wish, "asked for", 0.0)
    assert elastic.prospect(wish, size) == words


@pytest.mark.parametrize(
    ("criterion", "metrics", "reason"),
    [
        (None, {"x": 1}, ""),
        ({"accuracy": 0.9}, {"accuracy": 0.89}, ""),
        ({"accuracy": 0.9}, {"accuracy": 0.9}, "accuracy=0.9 has reached 0.9"),
        ({"training_iteration": 7}, {}, "training_iteration=7 has reached 7"),
        ({"training_iteration": 8}, {}, ""),
        ({"time_total_s": 100}, {}, "time_total_s=120 has reached 100"),
        ({"val/loss": 1}, {"val": {"loss": 2}}, "val/loss=2 has reached 1"),
        ({"val/loss": 1}, {"val/loss": 3}, "val/loss=3 has reached 1"),
        ({"val/loss": 1}, {"val": 2}, ""),
        ({"missing": 0}, {"x": 1}, ""),
        ({"text": 0}, {"text": "1"}, ""),
        ({"nan": 0}, {"nan": float("nan")}, ""),
        ({"a": 5, "b": 1}, {"a": 1, "b": 1}, "b=1 has reached 1"),
        (lambda name, result: result["x"] > 1, {"x": 1}, ""),
        (lambda name, result: name == "run" and result["x"] > 1, {"x": 2}, "the stop function asked for it"),
    ],
)
def test_a_run_stops_when_its_criterion_is_met(criterion: Any, metrics: dict[str, Any], reason: str) -> None:
    assert reason_to_stop(criterion, "run", 7, metrics, 120.0) == reason


def test_what_the_user_reported_counts_more_than_what_we_add() -> None:
    assert reason_to_stop({"training_iteration": 50}, "run", 7, {"training_iteration": 50}, 0.0)
