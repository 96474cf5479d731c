"""Limits, splits and repartitions as arithmetic on blocks."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from powertrain.data.plan import cutting
from powertrain.data.plan.plan import Block

counts = st.lists(st.integers(0, 9), max_size=6)


def blocks_of(rows: list[int]) -> tuple[Block, ...]:
    return tuple(Block(number % 2, number, 3, count) for number, count in enumerate(rows))


def rows_of(blocks: tuple[Block, ...]) -> list[tuple[int, int, int]]:
    """Each row as (part, block of the source, its number there)."""
    return [(b.part, b.index, row) for b in blocks for row in range(b.start, b.start + b.rows)]


@given(counts, st.integers(0, 40), st.integers(0, 40))
def test_between_gives_the_same_rows_as_a_slice(rows: list[int], start: int, stop: int) -> None:
    blocks = blocks_of(rows)
    found = cutting.between(blocks, start, stop)
    assert rows_of(found) == rows_of(blocks)[start:stop]
    assert all(block.rows for block in found)


@given(counts, st.lists(st.integers(0, 60), max_size=5).map(sorted))
def test_pieces_have_every_row_once_and_one_piece_more_than_cuts(rows: list[int], cuts: list[int]) -> None:
    blocks = blocks_of(rows)
    pieces = cutting.pieces(blocks, cuts)
    assert len(pieces) == len(cuts) + 1
    assert [row for piece in pieces for row in rows_of(piece)] == rows_of(blocks)


@given(st.integers(0, 1000), st.integers(1, 50))
def test_even_cuts_make_pieces_that_differ_by_at_most_one(rows: int, count: int) -> None:
    sizes = list(cutting.sizes(rows, cutting.even_cuts(rows, count)))
    assert sum(sizes) == rows
    assert len(sizes) == count
    assert max(sizes) - min(sizes) <= 1


def test_proportions_mean_the_decimal_number_that_was_written() -> None:
    # 0.7 * 10 rounds down to 7 and 0.1 + 0.2 is 0.3, which floats do not know.
    assert cutting.proportional_cuts(10, [0.1, 0.2, 0.4]) == [1, 3, 7]
    assert cutting.decimal(0.1) == Fraction(1, 10)


@given(st.integers(2, 10_000), st.floats(0.0001, 0.9999))
def test_a_fraction_leaves_rows_on_both_sides_and_rounds_in_favour_of_the_test(
    rows: int, size: float
) -> None:
    test = cutting.rows_of_test(rows, size)
    assert 1 <= test <= rows - 1
    assert abs(test - size * rows) <= 1


def test_the_size_of_a_test_is_what_ray_data_makes_of_it() -> None:
    assert cutting.rows_of_test(8, 0.25) == 2
    assert cutting.rows_of_test(10, 0.9) == 9
    assert cutting.rows_of_test(100, 7) == 7


@given(st.lists(st.integers(0, 100), min_size=1, max_size=8), st.data())
def test_shares_add_up_and_none_is_more_than_there_is(heaps: list[int], data: st.DataObject) -> None:
    wanted = data.draw(st.integers(0, sum(heaps)))
    taken = cutting.shares(heaps, wanted)
    assert sum(taken) == wanted
    assert all(0 <= take <= heap for take, heap in zip(taken, heaps, strict=True))


@given(counts, st.integers(1, 10))
def test_a_repartition_keeps_rows_and_their_order_or_says_that_it_cannot(rows: list[int], count: int) -> None:
    blocks = blocks_of(rows)
    cuts = cutting.even_cuts(sum(rows), count)
    found = cutting.repartitioned(blocks, cuts)
    if found is None:
        assert any(len(piece) > 1 for piece in cutting.pieces(blocks, cuts))
    else:
        assert rows_of(found) == rows_of(blocks)
        assert len(found) == min(count, sum(rows))


def test_blocks_of_each_part_keep_their_order() -> None:
    blocks = blocks_of([1, 2, 3, 4])
    assert cutting.by_part(blocks) == {0: [blocks[0], blocks[2]], 1: [blocks[1], blocks[3]]}
