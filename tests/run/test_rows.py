"""Rows: whatever the order in which ranks report, end and go missing, each row closes once, in order, whole."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from powertrain.run.workers.rows import Row, RowTable
from powertrain.wire.values import CheckpointPart, Point


def point(row: int, rank: int, part: bool = False) -> Point:
    share = CheckpointPart(checkpoint=f"c{row}", files=[]) if part else None
    return Point(row=row, at=0.0, metrics={"row": row, "rank": rank}, part=share)


def numbers(rows: list[Row]) -> list[int]:
    return [row.number for row in rows]


# --------------------------------------------------------------------------- single cases


def test_a_row_closes_when_the_last_rank_reports_it() -> None:
    table = RowTable(2, first_row=1)
    assert table.add(0, point(1, 0)) == []
    (row,) = table.add(1, point(1, 1))
    assert row == Row(1, [{"row": 1, "rank": 0}, {"row": 1, "rank": 1}])
    assert (table.closed, table.newest) == (1, 1)


def test_rows_of_an_attempt_begin_after_the_restored_one() -> None:
    table = RowTable(2, first_row=8)
    assert (table.closed, table.last_row(0)) == (7, 0)
    table.add(0, point(8, 0))
    assert numbers(table.add(1, point(8, 1))) == [8]
    assert table.last_row(1) == 8


def test_the_end_of_a_rank_closes_the_rows_that_waited_for_it() -> None:
    table = RowTable(2, first_row=1)
    for number in (1, 2, 3):
        table.add(0, point(number, 0))
    closed = table.end(1)
    assert numbers(closed) == [1, 2, 3]
    assert closed[0].metrics == [{"row": 1, "rank": 0}, None]


def test_behind_and_never_reported_name_the_ranks_that_are_waited_for() -> None:
    table = RowTable(4, first_row=1)
    assert (table.behind(), table.never_reported()) == ([], [0, 1, 2, 3])
    table.add(0, point(1, 0))
    table.add(1, point(1, 1))
    table.end(3)
    assert (table.behind(), table.never_reported()) == ([2], [2])
    table.add(2, point(1, 2))
    table.add(0, point(2, 0))
    assert (table.behind(), table.never_reported()) == ([1, 2], [])


def test_an_absent_rank_that_reports_after_all_gets_its_rows_and_shares_out() -> None:
    table = RowTable(2, first_row=1)
    table.add(1, point(1, 1))
    table.add(1, point(2, 1))
    assert numbers(table.declare_absent([0])) == [1, 2]
    (late,) = table.add(0, point(1, 0, part=True))
    assert (late.number, late.metrics, list(late.parts), late.complete) == (1, [], [0], True)
    assert numbers(table.add(0, point(2, 0))) == [2]
    table.add(1, point(3, 1))
    assert table.behind() == [0]


def test_a_row_shown_early_for_memorys_sake_comes_again_when_it_is_complete() -> None:
    table = RowTable(2, first_row=1, window=2)
    table.add(0, point(1, 0, part=True))
    table.add(0, point(2, 0))
    (early,) = table.add(0, point(3, 0))
    assert (early.number, early.metrics, early.parts, early.complete) == (
        1,
        [{"row": 1, "rank": 0}, None],
        {},
        False,
    )
    (complete,) = table.add(1, point(1, 1, part=True))
    assert (complete.number, complete.metrics, sorted(complete.parts), complete.complete) == (
        1,
        [],
        [0, 1],
        True,
    )


# --------------------------------------------------------------------------- any order


@dataclass
class History:
    """What one rank will do: how many rows it reports, which with a share, and whether it ends or stays."""

    rows: int
    parts: frozenset[int]
    ends: bool


@dataclass
class Outcome:
    shown: list[int] = field(default_factory=list)
    complete: list[int] = field(default_factory=list)
    parts: dict[tuple[int, int], int] = field(default_factory=dict)
    metrics: set[tuple[int, int]] = field(default_factory=set)

    def take(self, rows: list[Row], world_size: int) -> None:
        for row in rows:
            if row.metrics:
                assert len(row.metrics) == world_size
                self.shown.append(row.number)
            if row.complete:
                self.complete.append(row.number)
            else:
                assert not row.parts, "shares must wait for the complete row"
            for rank, metrics in enumerate(row.metrics):
                if metrics is not None:
                    assert metrics == {"row": row.number, "rank": rank}
                    self.metrics.add((row.number, rank))
            for rank in row.parts:
                key = (row.number, rank)
                self.parts[key] = self.parts.get(key, 0) + 1


histories = st.lists(
    st.builds(History, st.integers(0, 12), st.frozensets(st.integers(1, 12), max_size=4), st.booleans()),
    min_size=1,
    max_size=4,
)


@given(histories, st.integers(1, 20), st.integers(1, 5), st.booleans(), st.data())
def test_every_row_closes_once_in_order_and_no_share_is_lost(
    ranks: list[History], first: int, window: int, may_be_absent: bool, data: st.DataObject
) -> None:
    table, out, done = RowTable(len(ranks), first, window), Outcome(), [0] * len(ranks)
    moves = [rank for rank, history in enumerate(ranks) for _ in range(history.rows + history.ends)]
    absent: set[int] = set()
    late: set[tuple[int, int]] = set()
    for rank in data.draw(st.permutations(moves)):
        if may_be_absent and data.draw(st.integers(0, 9)) == 0:
            missing = table.never_reported()
            absent.update(missing)
            out.take(table.declare_absent(missing), len(ranks))
        if done[rank] < ranks[rank].rows:
            done[rank] += 1
            row = first - 1 + done[rank]
            if row <= table.closed:
                late.add((row, rank))
            out.take(table.add(rank, point(row, rank, done[rank] in ranks[rank].parts)), len(ranks))
        else:
            out.take(table.end(rank), len(ranks))
        assert len(table._metrics) <= window
        assert not [number for number in table._parts if number <= table.closed]
    for rank in range(len(ranks)):
        out.take(table.end(rank), len(ranks))

    last = first - 1 + max(history.rows for history in ranks)
    assert out.shown == list(range(first, last + 1)), "each row is shown once, in order"
    assert table.closed == last
    in_order = list(dict.fromkeys(out.complete))
    assert in_order == list(range(first, last + 1)), "rows become complete in order"
    expected_parts = {
        (first - 1 + made, rank): 1
        for rank, history in enumerate(ranks)
        for made in history.parts
        if made <= history.rows
    }
    assert out.parts == expected_parts
    if not absent:
        assert out.complete == in_order, "without absences each row is complete exactly once"
        assert not late


@given(st.integers(1, 4), st.integers(1, 30), st.data())
def test_without_a_tight_window_every_metric_is_in_its_row(size: int, rows: int, data: st.DataObject) -> None:
    table, out, done = RowTable(size, 1), Outcome(), [0] * size
    for rank in data.draw(st.permutations([rank for rank in range(size) for _ in range(rows)])):
        done[rank] += 1
        out.take(table.add(rank, point(done[rank], rank)), size)
    assert out.metrics == {(row, rank) for row in range(1, rows + 1) for rank in range(size)}
    assert out.complete == list(range(1, rows + 1))
