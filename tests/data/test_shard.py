"""A rank's shard: exactly once over any restarts, equal steps, positions, epochs."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.data.small_source import NumberedBlocks, numbered
from tests.support.examples import scaled

from powertrain.data.plan.plan import Plan
from powertrain.data.plan.prepared import Prepared
from powertrain.data.shard import DataShard
from powertrain.errors import DataChangedError, DataError

MEMORY = 64 * 2**20


def prepared(plan: Plan, *, split: bool = True, lanes: int = 64) -> Prepared:
    inspected = plan.inspected()
    return Prepared("train", inspected, plan.seed or 0, split, inspected.fingerprint, lanes)


@contextmanager
def shards(
    plan: Plan,
    world: int,
    tmp_path: Path,
    state: Any = None,
    *,
    split: bool = True,
    lanes: int = 64,
    **options: Any,
) -> Iterator[list[DataShard]]:
    """The shards of all ranks of a run that begins at ``state``."""
    ready = prepared(plan, split=split, lanes=lanes)
    made = [
        DataShard(
            ready,
            rank=rank,
            world_size=world,
            cache_directory=str(tmp_path / "cache"),
            disk_bytes=MEMORY,
            memory_bytes=MEMORY,
            resume=lambda: state,
            **options,
        )
        for rank in range(world)
    ]
    try:
        yield made
    finally:
        for shard in made:
            shard.close()


def ids(batch: Any) -> list[int]:
    return batch["id"].tolist()


@pytest.mark.smoke
@settings(deadline=None, max_examples=scaled(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    blocks=st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(sum),
    lanes=st.integers(1, 70),
    shuffled=st.booleans(),
    tail=st.sampled_from(["partial", "carry"]),
    data=st.data(),
)
def test_committed_rows_of_each_epoch_are_each_row_once_over_any_restarts(
    tmp_path: Path, blocks: list[int], lanes: int, shuffled: bool, tail: Any, data: st.DataObject
) -> None:
    total, epochs = sum(blocks), 2
    sequence: list[int] = []  # every committed row, in order
    state: Any = None
    rounds = 0
    while (state or {"epoch": 0})["epoch"] < epochs:
        rounds += 1
        world = data.draw(st.integers(1, 5))
        batch = data.draw(st.integers(1, 40))
        prefetch = data.draw(st.sampled_from([0, 2]))
        steps = data.draw(st.integers(1, 5)) if rounds < 12 else 10**6
        with shards(numbered(blocks, shuffled=shuffled), world, tmp_path, state, lanes=lanes) as ranks:
            options = {"global_batch_size": batch, "tail": tail, "prefetch_batches": prefetch}
            steps_made = list(itertools.islice(in_step(ranks, **options), steps + 1))
            committed = steps_made[:steps]  # what came after the commit is redone by the next session
            sequence += [row for rows, _ in committed for row in rows]
            state = committed[-1][1] if len(steps_made) > steps else ranks[0].state_dict()
    assert len(sequence) == state["epoch"] * total + state["position"]
    for epoch in range(len(sequence) // total):
        assert sorted(sequence[epoch * total : (epoch + 1) * total]) == list(range(total))


def in_step(ranks: list[DataShard], **options: Any) -> Iterator[tuple[list[int], Any]]:
    """(rows of all ranks, state) of one step after the other of one epoch. Checks what holds for every step."""
    weights: list[Any] = []
    for rank in ranks:
        rank._reader.hooks.began = weights.append
    iterators = [iter(rank.iter_batches(**options)) for rank in ranks]
    while True:
        weights.clear()
        got = [next(iterator, None) for iterator in iterators]
        assert len({batch is None for batch in got}) == 1  # all ranks make equally many steps
        states = [rank.state_dict() for rank in ranks]
        assert all(state == states[0] for state in states)
        if got[0] is None:
            return
        assert sum(weights) == pytest.approx(len(ranks))
        parts = [ids(batch) if weight else [] for batch, weight in zip(got, weights, strict=True)]
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        yield [row for part in parts for row in part], states[0]


@given(st.integers(1, 300), st.integers(1, 9), st.integers(1, 50))
@settings(deadline=None, max_examples=scaled(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_a_step_has_does_not_depend_on_ranks_threads_or_prefetch(
    tmp_path: Path, rows: int, world: int, batch: int
) -> None:
    def steps(ranks_count: int, prefetch: int) -> list[list[int]]:
        with shards(numbered([rows // 3, rows - rows // 3]), ranks_count, tmp_path, lanes=8) as ranks:
            options = {"global_batch_size": batch, "prefetch_batches": prefetch}
            return [sorted(rows) for rows, _ in in_step(ranks, **options)]

    alone = steps(1, 0)
    assert steps(world, 3) == alone
    assert [len(step) for step in alone] == [batch] * (rows // batch) + [rows % batch] * bool(rows % batch)


def test_resuming_decodes_each_block_of_its_first_step_once_and_no_other(tmp_path: Path) -> None:
    blocks = [50] * 20
    with shards(numbered(blocks), 1, tmp_path, lanes=4) as [shard]:
        iterator = iter(shard.iter_batches(batch_size=32))
        for _ in range(9):
            next(iterator)
        state = shard.state_dict()
        del iterator
    plan = numbered(blocks)
    source = plan.parts[0].source
    assert isinstance(source, NumberedBlocks)
    with shards(plan, 1, tmp_path / "elsewhere", state, lanes=4) as [shard]:
        first = ids(next(iter(shard.iter_batches(batch_size=32, prefetch_batches=0))))
    needed = {row // 50 for row in first}
    assert source.reads == Counter(dict.fromkeys(needed, 1))


@pytest.mark.parametrize("blocks", [[0, 0, 3, 0], [1], [100_000], [2] * 50, [0, 1, 0]])
@pytest.mark.parametrize("world", [1, 3, 7])
def test_odd_shapes_of_data_give_every_row_once(tmp_path: Path, blocks: list[int], world: int) -> None:
    """Empty blocks, fewer rows than ranks, fewer rows than a batch, more ranks than lanes, one giant block."""
    with shards(numbered(blocks), world, tmp_path, lanes=2) as ranks:
        seen: Counter[int] = Counter()
        for rank in ranks:
            weights: list[Any] = []
            rank._reader.hooks.began = weights.append
            for batch in rank.iter_batches(batch_size=4096):
                if weights[-1]:
                    seen.update(ids(batch))
                else:
                    assert len(ids(batch)) == 1
        assert seen == Counter(range(sum(blocks)))


def test_the_state_is_small_plain_and_the_same_on_every_rank(tmp_path: Path) -> None:
    with shards(numbered([1000] * 400, seed=2**53 - 1), 3, tmp_path) as ranks:
        iterators = [iter(rank.iter_batches(batch_size=64)) for rank in ranks]
        for iterator in iterators:
            next(iterator)
        states = [json.dumps(rank.state_dict()) for rank in ranks]
        assert len(set(states)) == 1
        assert len(states[0]) <= 400
        assert json.loads(states[0])["position"] == 192


def test_the_position_is_that_of_the_last_batch_handed_out(tmp_path: Path) -> None:
    with shards(numbered([100]), 1, tmp_path) as [shard]:
        iterator = iter(shard.iter_batches(batch_size=10, prefetch_batches=5))
        assert shard.state_dict()["position"] == 0
        next(iterator)
        next(iterator)
        assert shard.state_dict()["position"] == 20


# --------------------------------------------------------------------------- epochs


def test_each_iteration_is_a_new_epoch_in_a_new_order(tmp_path: Path) -> None:
    with shards(numbered([64]), 1, tmp_path) as [shard]:
        loader = shard.iter_batches(batch_size=64)
        orders = []
        for epoch in range(3):
            assert shard.epoch == epoch
            [batch] = loader
            orders.append(tuple(ids(batch)))
            assert shard.epoch == epoch + 1
        assert len(set(orders)) == 3
        assert all(sorted(order) == list(range(64)) for order in orders)


def test_without_shuffling_every_epoch_is_in_the_order_of_the_files(tmp_path: Path) -> None:
    with shards(numbered([10, 20], shuffled=False), 1, tmp_path) as [shard]:
        for _ in range(2):
            assert [r for b in shard.iter_batches(batch_size=7) for r in ids(b)] == list(range(30))


def test_a_live_iteration_is_resumed_and_a_finished_one_is_followed_by_the_next_epoch(tmp_path: Path) -> None:
    plan = numbered([40])
    with shards(plan, 1, tmp_path) as [shard]:
        loader = shard.iter_batches(batch_size=10)
        iterator = iter(loader)
        first = ids(next(iterator))
        in_the_middle = loader.state_dict()
        rest = [row for batch in iterator for row in ids(batch)]
        at_the_end = loader.state_dict()
    assert (in_the_middle["epoch"], in_the_middle["position"]) == (0, 10)
    assert (at_the_end["epoch"], at_the_end["position"]) == (1, 0)
    with shards(plan, 1, tmp_path, in_the_middle) as [shard]:
        assert shard.epoch == 0
        again = [row for batch in shard.iter_batches(batch_size=10) for row in ids(batch)]
        assert again == rest
        assert sorted(first + again) == list(range(40))
        assert shard.epoch == 1


def test_a_position_at_the_last_batch_leaves_an_empty_rest(tmp_path: Path) -> None:
    """A loop that reports with its last batch goes on, after a restart, where it would have: behind that batch."""
    plan = numbered([20])
    with shards(plan, 1, tmp_path) as [shard]:
        iterator = iter(shard.iter_batches(batch_size=10))
        next(iterator)
        next(iterator)
        state = shard.state_dict()
        assert (state["epoch"], state["position"]) == (0, 20)
        del iterator
    with shards(plan, 1, tmp_path, state) as [shard]:
        assert list(shard.iter_batches(batch_size=10)) == []
        assert shard.epoch == 1


def test_epochs_counts_from_where_the_shard_stands(tmp_path: Path) -> None:
    plan = numbered([30])
    with shards(plan, 1, tmp_path) as [shard]:
        seen = []
        for epoch in shard.epochs(3):
            for _ in shard.iter_batches(batch_size=10):
                if epoch == 1:
                    state = shard.state_dict()
                    break
            seen.append(epoch)
        assert seen == [0, 1, 2]
    with shards(plan, 1, tmp_path, state) as [shard]:
        assert [(epoch, sum(1 for _ in shard.iter_batches(batch_size=10))) for epoch in shard.epochs(3)] == [
            (1, 2),
            (2, 3),
        ]


def test_epochs_goes_on_where_a_loop_reads_nothing(tmp_path: Path) -> None:
    with shards(numbered([30]), 1, tmp_path) as [shard]:
        assert list(shard.epochs(3)) == [0, 1, 2]


def test_a_second_iteration_gives_the_first_one_up(tmp_path: Path) -> None:
    with shards(numbered([30]), 1, tmp_path) as [shard]:
        loader = shard.iter_batches(batch_size=10)
        first = iter(loader)
        next(first)
        next(first)
        second = iter(loader)
        with pytest.raises(DataError, match="Another iteration over the dataset 'train' was begun"):
            next(first)
        assert shard.epoch == 1
        assert len(list(second)) == 3


# --------------------------------------------------------------------------- tails, batches, splits


def test_a_dropped_tail_is_left_out_on_every_rank(tmp_path: Path) -> None:
    with shards(numbered([25]), 2, tmp_path) as ranks:
        loaders = [rank.iter_batches(batch_size=5, drop_last=True) for rank in ranks]
        assert [len(loader) for loader in loaders] == [2, 2]
        assert [[len(ids(b)) for b in loader] for loader in loaders] == [[5, 5], [5, 5]]


def test_a_carried_tail_comes_with_the_next_epoch(tmp_path: Path) -> None:
    with shards(numbered([25]), 1, tmp_path) as [shard]:
        loader = shard.iter_batches(batch_size=10, tail="carry")
        epochs = [[ids(batch) for batch in loader] for _ in range(4)]
    assert [[len(batch) for batch in epoch] for epoch in epochs] == [[10] * 2, [10] * 3, [10] * 2, [10] * 3]
    assert sorted(epochs[0][0] + epochs[0][1] + epochs[1][0][:5]) == list(range(25))
    assert Counter(row for epoch in epochs for batch in epoch for row in batch) == Counter(
        dict.fromkeys(range(25), 4)
    )


def test_rows_that_are_carried_into_smaller_steps_are_those_of_their_own_epoch(tmp_path: Path) -> None:
    with shards(numbered([25] * 4), 1, tmp_path) as [shard]:
        first = [row for batch in shard.iter_batches(batch_size=60, tail="carry") for row in ids(batch)]
        state = shard.state_dict()
    assert (state["epoch"], state["position"]) == (1, -40)
    with shards(numbered([25] * 4), 1, tmp_path, state) as [shard]:
        second = [row for batch in shard.iter_batches(batch_size=20, tail="carry") for row in ids(batch)]
    assert sorted(first + second[:40]) == list(range(100))
    assert sorted(second[40:]) == list(range(100))


def test_rows_one_by_one_keep_the_position_of_each(tmp_path: Path) -> None:
    plan = numbered([30])
    with shards(plan, 2, tmp_path) as ranks:
        iterators = [rank.iter_rows() for rank in ranks]
        seen = [next(iterator)["id"] for _ in range(5) for iterator in iterators]
        state = ranks[0].state_dict()
    assert state["position"] == 10
    with shards(plan, 3, tmp_path, state) as ranks:
        seen += [row["id"] for rank in ranks for row in rank.iter_rows()]
    assert sorted(seen) == list(range(30))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_is_not_the_end_of_an_epoch(tmp_path: Path, prefetch: int) -> None:
    plan = numbered([40])
    with shards(plan, 1, tmp_path) as [shard]:
        iterator = iter(shard.iter_batches(batch_size=10, prefetch_batches=prefetch))
        next(iterator)
        iterator._pipeline._shared.work = _broken
        if iterator._pipeline._alone is not None:
            iterator._pipeline._alone = (iterator._pipeline._alone[0], _broken)
        for _ in range(2):
            with pytest.raises(OSError, match="no longer"):
                for _ in iterator:
                    pass
        assert shard.epoch == 0


def _broken(work: Any) -> Any:
    raise OSError("the disk is no longer there")


def test_a_global_batch_stays_the_same_at_any_world_size(tmp_path: Path) -> None:
    for world in (1, 2, 3, 4):
        with shards(numbered([96]), world, tmp_path) as ranks:
            sizes = [[len(ids(b)) for b in r.iter_batches(global_batch_size=32)] for r in ranks]
            assert [sum(step) for step in zip(*sizes, strict=True)] == [32, 32, 32]


def test_data_that_is_not_split_comes_whole_to_every_rank(tmp_path: Path) -> None:
    with shards(numbered([20]), 3, tmp_path, split=False) as ranks:
        for rank in ranks:
            assert sorted(r for b in rank.iter_batches(batch_size=6) for r in ids(b)) == list(range(20))


def test_weights_make_an_uneven_step_exact(tmp_path: Path) -> None:
    with shards(numbered([10]), 3, tmp_path) as ranks:
        weights: list[list[Any]] = [[], [], []]
        for rank, mine in zip(ranks, weights, strict=True):
            rank._reader.hooks.began = mine.append
            list(rank.iter_batches(global_batch_size=10))
        assert [mine[0] for mine in weights] == pytest.approx([0.9, 0.9, 1.2])


def test_a_window_shuffles_within_itself(tmp_path: Path) -> None:
    with shards(numbered([40], shuffled=False), 1, tmp_path) as [shard]:
        rows = [r for b in shard.iter_batches(batch_size=40, local_shuffle_buffer_size=10) for r in ids(b)]
    assert rows != list(range(40))
    assert [sorted(rows[at : at + 10]) for at in range(0, 40, 10)] == [
        list(range(at, at + 10)) for at in range(0, 40, 10)
    ]


def test_an_epoch_under_way_goes_on_in_the_order_it_was_begun_in(tmp_path: Path) -> None:
    with shards(numbered([40], shuffled=False), 1, tmp_path) as [shard]:
        iterator = iter(shard.iter_batches(batch_size=8, local_shuffle_buffer_size=16))
        first = ids(next(iterator))
        state = shard.state_dict()
        del iterator
    with shards(numbered([40]), 1, tmp_path, state) as [shard]:
        rest = [row for batch in shard.iter_batches(batch_size=8) for row in ids(batch)]
    assert sorted(first + rest) == list(range(40))


# --------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": None}, "batch_size=None"),
        ({"global_batch_size": -1}, "global_batch_size=-1"),
        ({"tail": "wrap"}, "tail='wrap'"),
        ({"tail": "carry", "drop_last": True}, "contradict"),
        ({"prefetch_batches": -1}, "prefetch_batches=-1"),
        ({"batch_format": "tensorflow"}, "batch_format='tensorflow'"),
        ({"local_shuffle_buffer_size": 0}, "local_shuffle_buffer_size=0"),
        ({"seed": -3}, "seed=-3"),
    ],
)
def test_bad_arguments_are_named(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with shards(numbered([10]), 2, tmp_path) as [shard, _], pytest.raises(DataError, match=words):
        shard.iter_batches(**options)


def test_a_position_of_other_data_is_refused_and_says_how_to_go_on(tmp_path: Path) -> None:
    with shards(numbered([10]), 1, tmp_path) as [shard]:
        iterator = iter(shard.iter_batches(batch_size=2))
        next(iterator)
        state = shard.state_dict()
        del iterator
    with (
        shards(numbered([11]), 1, tmp_path, state) as [shard],
        pytest.raises(DataChangedError, match="had 10 rows then and has 11 now"),
    ):
        iter(shard.iter_batches(batch_size=2))
    with shards(numbered([11]), 1, tmp_path, state, on_change="restart_epoch") as [shard]:
        assert len([r for b in shard.iter_batches(batch_size=2) for r in ids(b)]) == 11


@pytest.mark.parametrize("state", [{}, {"epoch": 1}, {"v": 9}, [1, 2]])
def test_a_state_that_is_none_is_refused(tmp_path: Path, state: Any) -> None:
    with shards(numbered([10]), 1, tmp_path) as [shard], pytest.raises(DataError, match="state_dict"):
        shard.load_state_dict(state)


def test_another_seed_in_mid_epoch_is_refused(tmp_path: Path) -> None:
    with shards(numbered([10]), 1, tmp_path) as [shard]:
        iterator = iter(shard.iter_batches(batch_size=2))
        next(iterator)
        state = shard.state_dict()
        del iterator
        shard.load_state_dict(state)
        with pytest.raises(DataError, match="rows would be lost"):
            iter(shard.iter_batches(batch_size=2, seed=77))


ENDS_IN_MID_EPOCH = """
from powertrain.data import range as numbers
iterator = iter(numbers(1000).random_shuffle(seed=1).iter_batches(batch_size=10))
next(iterator)
"""


def test_a_program_may_end_with_an_iteration_under_way() -> None:
    ended = subprocess.run([sys.executable, "-c", ENDS_IN_MID_EPOCH], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
