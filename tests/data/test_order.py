"""The order of an epoch: every row once, the same at any world size, pinned by golden values."""

from __future__ import annotations

import hashlib
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.support.examples import scaled

from powertrain.data.plan.order import EpochOrder, after_epoch, part_of, permutation, share, steps_left

BLOCKS = st.lists(st.integers(0, 40), min_size=1, max_size=25).filter(sum)
SHUFFLES = st.one_of(st.sampled_from(["none", "rows", "blocks"]), st.integers(1, 50))
LANES = st.integers(1, 80)


def rows_of(order: EpochOrder, blocks: list[int], slots: NDArray[Any]) -> list[int]:
    """Numbers of the rows over all blocks."""
    firsts = np.concatenate([[0], np.cumsum(blocks)])
    located = order.locate(slots)
    assert (located.offsets >= 0).all()
    assert (located.offsets < np.asarray(blocks)[located.blocks]).all()
    return (firsts[located.blocks] + located.offsets).tolist()


@given(BLOCKS, SHUFFLES, LANES, st.integers(0, 9), st.integers(0, 3))
def test_every_slot_holds_another_row_and_every_row_has_a_slot(
    blocks: list[int], shuffle: Any, lanes: int, seed: int, epoch: int
) -> None:
    order = EpochOrder(blocks, seed=seed, epoch=epoch, shuffle=shuffle, lanes=lanes)
    rows = rows_of(order, blocks, np.arange(order.rows))
    assert sorted(rows) == list(range(sum(blocks)))
    if shuffle == "none":
        assert rows == sorted(rows)


@settings(deadline=None, max_examples=scaled(200))
@given(BLOCKS, SHUFFLES, LANES, st.data())
def test_an_epoch_over_any_sequence_of_world_sizes_and_batch_sizes_gives_each_row_once(
    blocks: list[int], shuffle: Any, lanes: int, data: st.DataObject
) -> None:
    """Each session is a restart: a fresh order, another number of ranks, another batch size; some steps are redone."""
    seen: list[int] = []
    position, total = 0, sum(blocks)
    reference = rows_of(
        EpochOrder(blocks, seed=5, epoch=2, shuffle=shuffle, lanes=lanes), blocks, np.arange(total)
    )
    while position < total:
        world = data.draw(st.integers(1, 13))
        batch = data.draw(st.integers(1, 60))
        order = EpochOrder(blocks, seed=5, epoch=2, shuffle=shuffle, lanes=lanes)
        committed, uncommitted = data.draw(st.integers(1, 6)), data.draw(st.integers(0, 3))
        for step in range(committed + uncommitted):
            start = position + step * batch if step >= committed else position
            slots = order.step(start, start + batch)
            parts = [share(slots, rank, world) for rank in range(world)]
            sizes = [len(part) for part in parts]
            assert max(sizes) - min(sizes) <= 1
            rows = [row for part in parts for row in rows_of(order, blocks, part)]
            assert sorted(rows) == sorted(reference[start : start + batch])  # whatever the world size
            if step < committed:
                seen += rows
                position = min(position + batch, total)
    assert sorted(seen) == list(range(total))


@given(BLOCKS, SHUFFLES, LANES, st.integers(1, 30))
def test_chunks_part_the_epoch_and_stay_within_a_block(
    blocks: list[int], shuffle: Any, lanes: int, size: int
) -> None:
    order = EpochOrder(blocks, seed=1, epoch=0, shuffle=shuffle, lanes=lanes)
    seen: dict[int, tuple[int, ...]] = {}
    for slot in range(order.rows):
        members = order.chunk(slot, size)
        assert slot in members
        assert len(members) <= size
        if shuffle in ("none", "blocks"):
            assert len(set(order.locate(members).blocks.tolist())) == 1
        for member in members.tolist():
            assert seen.setdefault(member, tuple(members)) == tuple(members)
    assert set(seen) == set(range(order.rows))


@given(st.integers(0, 3000), st.integers(0, 300), st.integers(1, 70))
def test_parts_are_even_and_cover_everything(count: int, extra: int, world: int) -> None:
    edges = [part_of(count, rank, world) for rank in range(world)]
    assert edges[0][0] == 0
    assert edges[-1][1] == count
    assert all(a[1] == b[0] for a, b in itertools.pairwise(edges))
    assert {high - low for low, high in edges} <= {count // world, count // world + 1}


@given(st.integers(1, 200), st.integers(1, 300), st.integers(1, 9))
def test_with_carry_every_step_is_full_and_no_row_is_left_but_at_the_very_end(
    rows: int, batch: int, epochs: int
) -> None:
    position, given_out = 0, 0
    for _ in range(epochs):
        steps = steps_left(rows, position, batch, "carry")
        given_out += steps * batch
        position = after_epoch(rows, position + steps * batch, batch, "carry")
        assert -batch < position <= 0
    assert given_out - position == rows * epochs


@pytest.mark.parametrize(("tail", "steps"), [("partial", 4), ("drop", 3), ("carry", 3)])
def test_the_tail_decides_how_many_steps_there_are(tail: Any, steps: int) -> None:
    assert steps_left(10, 0, 3, tail) == steps


@given(st.integers(0, 2000), st.integers(0, 5))
def test_a_permutation_has_every_number_once(size: int, key: int) -> None:
    assert sorted(permutation(size, key).tolist()) == list(range(size))


def test_equal_random_words_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    class Constant:
        def __init__(self, key: Any) -> None:
            pass

        def random_raw(self, size: int) -> Any:
            return np.full(size, 7, np.uint64)

    monkeypatch.setattr(np.random, "Philox", Constant)
    assert permutation(1000, 0).tolist() == list(range(1000))


def test_each_epoch_and_each_seed_has_an_order_of_its_own() -> None:
    def order(seed: int, epoch: int) -> tuple[int, ...]:
        made = EpochOrder([50, 50], seed=seed, epoch=epoch, shuffle="blocks", lanes=4)
        return tuple(rows_of(made, [50, 50], np.arange(100)))

    assert len({order(seed, epoch) for seed in range(4) for epoch in range(4)}) == 16


def test_a_batch_has_rows_from_as_many_places_as_there_are_lanes() -> None:
    order = EpochOrder([1000] * 500, seed=0, epoch=0, shuffle="blocks")
    assert len(set(order.locate(order.step(0, 512)).blocks.tolist())) >= 60


def test_rows_of_one_block_are_mixed_from_its_whole_length() -> None:
    """A file of one row group, sorted by label: the first batch must not be its beginning, epoch after epoch."""
    order = EpochOrder([6400], seed=0, epoch=0, shuffle="blocks")
    first = order.locate(order.step(0, 32)).offsets
    assert first.min() < 1600
    assert first.max() > 4800


def test_a_giant_block_is_shuffled_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("powertrain.data.plan.order.MOST_SHUFFLED", 10)
    order = EpochOrder([35, 0, 7], seed=0, epoch=0, shuffle="blocks", lanes=3)
    assert sorted(rows_of(order, [35, 0, 7], np.arange(42))) == list(range(42))
    assert max(len(kept) for kept in order._permutations.values()) == 10


def test_a_rank_reads_about_its_share_of_the_blocks() -> None:
    blocks, world = [1000] * 100, 4
    order = EpochOrder(blocks, seed=0, epoch=0, shuffle="blocks")
    read = 0
    for rank in range(world):
        slots = np.concatenate(
            [share(order.step(at, at + 512), rank, world) for at in range(0, order.rows, 512)]
        )
        read += len(set(order.locate(slots).blocks.tolist()))
    assert read <= 1.1 * len(blocks) + order.lanes


def test_finding_a_place_in_a_huge_dataset_needs_no_more_than_its_blocks() -> None:
    """10 ** 9 rows: were all of them touched, this would take minutes and gigabytes."""
    order = EpochOrder([10_000] * 100_000, seed=0, epoch=1, shuffle="blocks")
    located = order.locate(np.array([0, 10**9 - 1, 123_456_789]))
    assert len(located.blocks) == 3


# Golden values: the order is a promise across platforms, versions of numpy and of Powertrain. A checkpoint written with
# one version must be resumed by another at the same rows; if one of these changes, every saved position is void.

GOLDEN = {
    "blocks": [7, 18, 17, 3, 9, 19, 12, 2, 8, 20, 16, 1, 10, 14, 4, 6, 11, 13, 5, 0, 15],
    "rows": [11, 10, 12, 6, 0, 20, 8, 5, 17, 2, 18, 1, 3, 13, 4, 14, 19, 15, 16, 9, 7],
    6: [0, 5, 2, 1, 3, 4, 7, 9, 6, 10, 8, 11, 15, 17, 13, 12, 14, 16, 20, 19, 18],
}


def test_the_golden_permutation() -> None:
    assert permutation(10, "golden").tolist() == [9, 6, 2, 5, 1, 8, 4, 0, 7, 3]


@pytest.mark.parametrize("shuffle", GOLDEN)
def test_the_golden_orders(shuffle: Any) -> None:
    blocks = [7, 0, 5, 9]
    order = EpochOrder(blocks, seed=3, epoch=1, shuffle=shuffle, lanes=4)
    assert rows_of(order, blocks, np.arange(21)) == GOLDEN[shuffle]


def test_the_golden_order_of_a_larger_dataset() -> None:
    order = EpochOrder([1000] * 200 + [17, 0, 4096], seed=2**53 - 1, epoch=12, shuffle="blocks")
    located = order.locate(np.arange(order.rows))
    digest = hashlib.sha256(np.stack([located.blocks, located.offsets]).astype("<i8").tobytes()).hexdigest()
    assert digest == "0327bdce7fcb6b1d686a039f675b3efbbb9ba0932224d85bc38f4de45a298272"


def test_random_words_are_those_of_philox_with_every_implementation() -> None:
    key = (0x0123456789ABCDEF, 0xFEDCBA9876543210)
    words = np.random.Philox(key=np.array(key, np.uint64)).random_raw(8).tolist()
    assert words == [word for counter in (1, 2) for word in philox(counter, key)]


def philox(counter: int, key: tuple[int, int]) -> list[int]:
    """Philox 4x64 with ten rounds, from its definition."""
    mask = 2**64 - 1
    c, k = [counter, 0, 0, 0], list(key)
    for _ in range(10):
        a, b = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
        c = [(b >> 64) ^ c[1] ^ k[0], b & mask, (a >> 64) ^ c[3] ^ k[1], a & mask]
        k = [(k[0] + 0x9E3779B97F4A7C15) & mask, (k[1] + 0xBB67AE8584CAA73B) & mask]
    return c
