"""A thousand ranks: a report, a beat or an arrival costs the same as with two, and a hang is a few passes over them.

Work is counted and not timed: how often what is known of a rank is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powertrain.engine.base import Slot
from powertrain.run.health import hangs, waits
from powertrain.run.health.hang_report import explain
from powertrain.run.health.pace import Pace
from powertrain.run.health.waits import RankState
from powertrain.run.health.watchdog import NOTICE_DELAY_S, HangNotice, Suspect, Watchdog
from powertrain.run.workers.attempt import Attempt, Member
from powertrain.run.workers.placement import arrange
from powertrain.run.workers.rows import WINDOW_REPORTS, RowTable
from powertrain.wire.from_worker import Arrived, Beat
from powertrain.wire.values import Frame, Point, Where

RANKS = 1000
LINE = Frame(file="/home/me/train.py", line=41, function="train")
IN_ALL_REDUCE = Where(frame=LINE, inside="collective", call="all_reduce")
IN_OWN_CODE = Where(frame=LINE)


class Ledger(list[int]):
    """A list of one number for each rank that counts how often it is read from end to end."""

    passes = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return super().__iter__()


def beat(steps: int, where: Where = IN_OWN_CODE, collectives: int = -1) -> Beat:
    return Beat(
        reports=steps,
        steps=steps,
        batches=steps,
        idle=0.0,
        phase="training",
        collectives=collectives,
        where=where,
    )


def point(row: int) -> Point:
    return Point(row=row, at=0.0, metrics={"loss": 1.0})


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str], list[int]]:
    """How often a method or function is called, as a list that grows."""

    def count(kind: Any, name: str) -> list[int]:
        calls: list[int] = []
        method = getattr(kind, name)
        is_property = isinstance(method, property)

        def call(*arguments: Any, **options: Any) -> Any:
            calls.append(1)
            return method.fget(*arguments) if is_property else method(*arguments, **options)

        monkeypatch.setattr(kind, name, property(call) if is_property else call)
        return calls

    return count


# --------------------------------------------------------------------------- rows


def test_a_report_looks_at_no_other_rank_and_each_row_closes_once() -> None:
    table = RowTable(RANKS, first_row=1)
    table._last = ledger = Ledger(table._last)
    closed = []
    for row in (1, 2, 3):
        for rank in range(RANKS):
            closed += table.add(rank, point(row))
            assert table.waits_for_first_reports == (row == 1 and rank < RANKS - 1)
            assert (table.newest, table.closed) == (row, row if rank == RANKS - 1 else row - 1)
    assert [(row.number, len(row.metrics)) for row in closed] == [(1, RANKS), (2, RANKS), (3, RANKS)]
    assert ledger.passes == 0


def test_ends_close_rows_without_a_look_at_all_ranks_for_each() -> None:
    table = RowTable(RANKS, first_row=1)
    table._last = ledger = Ledger(table._last)
    for row in (1, 2):
        table.add(0, point(row))
    closed = [row for rank in range(1, RANKS) for row in table.end(rank)]
    assert [row.number for row in closed] == [1, 2]
    assert ledger.passes == 0


def test_rows_that_wait_for_one_of_many_ranks_are_bounded_by_reports_and_not_by_rows() -> None:
    table = RowTable(RANKS, first_row=1)
    window = WINDOW_REPORTS // RANKS
    shown = []
    for row in range(1, window + 3):
        for rank in range(1, RANKS):
            shown += table.add(rank, point(row))
    assert [(row.number, row.complete) for row in shown] == [(1, False), (2, False)]
    assert len(table._metrics) == window


# --------------------------------------------------------------------------- collectives and exits


def attempt_of(ranks: int) -> Attempt:
    slots = [Slot(f"slot-{number}", f"node-{number // 8}", "127.0.0.1") for number in range(ranks)]
    attempt = Attempt(0, arrange(slots), 1)
    attempt.members = [Member(place, b"", attempt) for place in attempt.placements]
    return attempt


def test_a_barrier_opens_with_the_last_arrival_and_members_are_found_by_slot() -> None:
    attempt = attempt_of(RANKS)
    for rank in range(RANKS):
        assert attempt.pop_finished_collectives() == []
        attempt.arrive(rank, Arrived(sync=1, kind="barrier"))
    ((opened, members),) = attempt.pop_finished_collectives()
    assert (opened.error, len(members)) == ("", RANKS)
    assert [attempt.by_slot(f"slot-{rank}") for rank in range(RANKS)] == attempt.members
    assert attempt.by_slot("another's") is None


def test_different_calls_of_many_ranks_are_reported_in_a_few_words() -> None:
    attempt = attempt_of(RANKS)
    for rank in range(RANKS):
        attempt.arrive(rank, Arrived(sync=1, kind="barrier" if rank % 2 else "broadcast_from_rank_zero"))
    ((opened, _),) = attempt.pop_finished_collectives()
    assert "rank 1 called barrier()" in opened.error
    assert "rank 0 called broadcast_from_rank_zero()" in opened.error
    assert len(opened.error) < 1000


def test_all_have_greeted_or_exited_only_when_the_last_has() -> None:
    attempt = attempt_of(5)
    for rank in (3, 1, 0, 4, 2):
        assert not attempt.all_greeted()
        assert not attempt.all_exited()
        attempt.members[rank].greeted = attempt.members[rank].exited = True
    assert attempt.all_greeted()
    assert attempt.all_exited()


# --------------------------------------------------------------------------- the watchdog


def test_beats_reports_and_ends_look_at_one_rank_each(counted: Callable[[Any, str], list[int]]) -> None:
    dog = Watchdog(RANKS, 0.0, timeout=None)
    states, usual = counted(Watchdog, "_state"), counted(Pace, "usual")
    for second in range(1, 4):
        for rank in range(RANKS):
            dog.on_beat(rank, beat(second), float(second))
            dog.on_report(rank, float(second))
    assert dog.poll(3.1) is None
    assert not states  # a look at a run that moves invents no state
    assert len(usual) == RANKS
    for rank in range(RANKS):
        dog.on_rank_ended(rank, 3.2)
        assert dog.due() > 3.2  # and the end of one is no reason to look at all
    assert dog.poll(4.5) is None
    assert dog.due() == float("inf")


def test_one_of_a_thousand_that_hangs_is_found_in_a_few_looks_at_each(
    counted: Callable[[Any, str], list[int]],
) -> None:
    dog, culprit = Watchdog(RANKS, 0.0, timeout=None), RANKS // 2
    for second in range(1, 4):
        for rank in range(RANKS):
            dog.on_beat(rank, beat(second, collectives=second), float(second))
    for second in range(4, 4 + int(NOTICE_DELAY_S) + 1):
        for rank in range(RANKS):
            where, count = (IN_OWN_CODE, 3) if rank == culprit else (IN_ALL_REDUCE, 4)
            stuck = beat(3, where, count)
            dog.on_beat(rank, Beat(**{**_fields(stuck), "idle": second - 3.0}), float(second))
    awaited, inside = counted(waits, "_awaited"), counted(RankState, "inside")
    found: list[Suspect | HangNotice] = []
    now = 3.0 + NOTICE_DELAY_S
    while not any(isinstance(one, HangNotice) for one in found):
        now = max(now + 0.1, dog.due())
        if (decision := dog.poll(now)) is not None:
            assert isinstance(decision, (Suspect, HangNotice))
            found.append(decision)
    notice = found[-1]
    assert isinstance(notice, HangNotice)
    assert (notice.ranks, len(notice.waiting)) == ((culprit,), RANKS - 1)
    assert f"rank {culprit}" in explain(notice.states, {}, notice.seconds).message.lower()
    assert RANKS <= len(awaited) <= 20 * RANKS
    assert len(inside) <= 100 * RANKS


def _fields(message: Beat) -> dict[str, Any]:
    return {name: getattr(message, name) for name in message.__struct_fields__}


def test_all_ranks_that_wait_for_the_same_share_one_set_of_missing_ranks() -> None:
    states = [
        RankState(
            rank,
            beat(3, IN_ALL_REDUCE if rank else IN_OWN_CODE, 4 if rank else 3),
            idle=9.0,
            unheard=0.5,
            still=True,
            collectives=4 if rank else 3,
        )
        for rank in range(RANKS)
    ]
    found = waits.waits_for(states)
    assert found[0] == frozenset()
    assert {id(found[rank]) for rank in range(1, RANKS)} == {id(found[1])}
    assert found[1] == frozenset({0})


def test_a_rank_whose_connection_ended_counts_as_silent_until_its_next_message() -> None:
    dog = Watchdog(2, 0.0, timeout=None)
    for rank in (0, 1):
        dog.on_beat(rank, beat(1), 1.0)
    dog.on_disconnect(1)
    assert [dog._state(known, 1.1).silent for known in dog._ranks] == [False, True]
    dog.on_beat(1, beat(2), 1.2)
    assert [dog._state(known, 1.3).silent for known in dog._ranks] == [False, False]


# --------------------------------------------------------------------------- whose stacks are asked for


@given(st.sets(st.integers(0, 5000), max_size=3000), st.sets(st.integers(0, 5000), max_size=200))
def test_all_of_a_few_ranks_are_asked_and_of_many_the_suspects_and_some_that_wait(
    running: set[int], suspects: set[int]
) -> None:
    asked = hangs.ranks_to_ask(sorted(running), suspects)
    assert len(asked) == len(set(asked)) == min(len(running), hangs.ASKED_AT_MOST)
    assert set(asked) <= running
    blamed = suspects & running
    if len(running) > hangs.ASKED_AT_MOST:
        room = hangs.ASKED_AT_MOST - hangs._KEPT_FOR_WAITING
        assert len(blamed & set(asked)) >= min(len(blamed), room)
        assert set(asked) - blamed or len(running - blamed) == 0
