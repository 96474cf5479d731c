"""A rank's part of a dataset of Ray's: the feed in Ray, the shard without it, and the socket between them."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.data.fed import FakeIterator, Opened, numbers
from tests.ray_nodes import RayNodes

from powertrain.data.ray import protocol
from powertrain.data.ray.cutting import cut_rows
from powertrain.data.ray.shard import StreamedShard
from powertrain.data.rows.rows import Rows
from powertrain.engine.ray.feed import Feed, end, iterators_of
from powertrain.errors import DataError


def ids(batches: Any) -> list[list[int]]:
    return [batch["id"].tolist() for batch in batches]


# --------------------------------------------------------------------------- batches


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_batches_have_the_size_asked_for_whatever_blocks_there_are(opened: Opened, prefetch: int) -> None:
    shard = opened(FakeIterator(*numbers(3, 0, 1, 7)))
    assert ids(shard.iter_batches(batch_size=4, prefetch_batches=prefetch)) == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10],
    ]
    assert ids(shard.iter_batches(batch_size=4, prefetch_batches=prefetch, drop_last=True)) == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]


def test_tensors_are_made_as_for_any_other_dataset(opened: Opened) -> None:
    import torch

    table = pa.table({"x": pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float32())), "text": ["a", "b"]})
    (batch,) = opened(FakeIterator(table)).iter_torch_batches(batch_size=2, dtypes={"x": torch.float64})
    assert torch.equal(batch["x"], torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64))
    assert batch["text"] == ["a", "b"]


def test_rows_are_dicts(opened: Opened) -> None:
    shard = opened(FakeIterator(*numbers(2, 1)))
    assert list(shard.iter_rows()) == [{"id": 0}, {"id": 1}, {"id": 2}]


def test_a_large_table_travels_in_pieces(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_FRAME_BYTES", 1000)
    assert ids(opened(FakeIterator(*numbers(5000))).iter_batches(batch_size=5000)) == [list(range(5000))]


def test_tensors_of_ray_keep_their_shape(opened: Opened) -> None:
    fields = {b"ARROW:extension:name": b"ray.data.arrow_tensor_v2", b"ARROW:extension:metadata": b"[2, 2]"}
    field = pa.field("x", pa.large_list(pa.int32()), metadata=fields)
    table = pa.table([pa.array([[1, 2, 3, 4]] * 3, field.type)], schema=pa.schema([field]))
    (batch,) = opened(FakeIterator(table)).iter_batches(batch_size=3)
    assert batch["x"].shape == (3, 2, 2)


def rows_of(count: int, first: int = 0) -> Rows:
    return Rows({"id": np.arange(first, first + count)}, np.arange(first, first + count))


@given(
    sizes=st.lists(st.integers(1, 20), max_size=8),
    size=st.integers(1, 15),
    keeps_rest=st.booleans(),
    window=st.integers(0, 12),
    seed=st.none() | st.integers(0, 9),
)
def test_rows_are_cut_into_full_batches_and_none_is_lost_or_doubled(
    sizes: list[int], size: int, keeps_rest: bool, window: int, seed: int | None
) -> None:
    firsts = np.cumsum([0, *sizes])
    pieces = [rows_of(count, int(first)) for count, first in zip(sizes, firsts, strict=False)]
    random = None if seed is None else np.random.default_rng(seed)
    batches = [
        batch.columns["id"]
        for batch in cut_rows(pieces, size, keeps_rest=keeps_rest, window=window, random=random)
    ]
    total = sum(sizes)
    rest = [total % size] if keeps_rest and total % size else []
    assert [len(batch) for batch in batches] == [size] * (total // size) + rest
    found = np.concatenate([*batches, np.array([], int)]).tolist()
    assert len(set(found)) == len(found)
    if seed is None:
        assert found == list(range(len(found)))
    elif keeps_rest:
        assert sorted(found) == list(range(total))


def test_a_local_shuffle_draws_each_batch_from_a_window(opened: Opened) -> None:
    shard = opened(FakeIterator(*numbers(*[50] * 20)))
    options: dict[str, Any] = {"batch_size": 10, "local_shuffle_buffer_size": 100, "local_shuffle_seed": 7}
    first, second = ids(shard.iter_batches(**options)), ids(shard.iter_batches(**options))
    assert sorted(itertools.chain(*first)) == list(range(1000))
    assert first != second, "each epoch is drawn anew"
    assert max(first[0]) - min(first[0]) > 10, "a batch is not one stretch"
    assert max(first[0]) < 250, "and not from everywhere"
    again = opened(FakeIterator(*numbers(*[50] * 20)))
    assert ids(again.iter_batches(**options)) == first


@pytest.mark.parametrize(
    ("options", "pieces"),
    [
        ({"batch_size": None}, ["batch_size=None", "rows of one rank"]),
        ({"batch_size": 0}, ["batch_size=0", "at least 1"]),
        ({"global_batch_size": 7}, ["global_batch_size=7", "2 ranks", "snapshot=True"]),
        ({"tail": "carry"}, ["tail='carry'", "snapshot=True"]),
        ({"tail": "partial", "drop_last": True}, ["contradict"]),
        ({"seed": 3}, ["Ray decides the order", "random_shuffle"]),
        ({"local_shuffle_seed": 3}, ["Ray decides the order", "local_shuffle_buffer_size"]),
        ({"local_shuffle_buffer_size": 0}, ["local_shuffle_buffer_size=0"]),
        ({"prefetch_batches": -1}, ["prefetch_batches=-1"]),
        ({"batch_format": "torch"}, ["batch_format='torch'"]),
    ],
)
def test_what_a_stream_cannot_do_is_refused(options: dict[str, Any], pieces: list[str]) -> None:
    with pytest.raises(DataError) as refused:
        StreamedShard("train", "/nowhere", world_size=2).iter_batches(**options)
    for piece in pieces:
        assert piece in str(refused.value)


def test_a_global_batch_is_shared_evenly(opened: Opened) -> None:
    shard = opened(FakeIterator(*numbers(8)), world_size=2)
    assert ids(shard.iter_batches(global_batch_size=8)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


# --------------------------------------------------------------------------- epochs


def test_each_iteration_is_one_execution_and_one_epoch(opened: Opened) -> None:
    iterator = FakeIterator(*numbers(4))
    shard = opened(iterator)
    batches = shard.iter_batches(batch_size=2)
    seen = [(epoch, shard.epoch, ids(batches)) for epoch in shard.epochs(3)]
    assert seen == [(epoch, epoch, [[0, 1], [2, 3]]) for epoch in range(3)]
    assert iterator.epochs == iterator.closed == 3


def test_after_a_restart_the_epoch_begins_again(opened: Opened) -> None:
    shard = opened(FakeIterator(*numbers(4)))
    batches = shard.iter_batches(batch_size=2)
    assert len(ids(batches)) == 2
    second = iter(batches)
    next(second)
    kept = shard.kept()
    again = opened(FakeIterator(*numbers(4)), resume=lambda: kept)
    assert again.epoch == 1
    assert [(epoch, ids(again.iter_batches(batch_size=4))) for epoch in again.epochs(2)] == [
        (1, [[0, 1, 2, 3]])
    ]


def test_a_position_is_refused_with_the_way_to_get_one() -> None:
    shard = StreamedShard("train", "/nowhere")
    for call in (shard.state_dict, lambda: shard.load_state_dict({"epoch": 1})):
        with pytest.raises(DataError, match=r"DataConfig\(snapshot=True\)"):
            call()
    with pytest.raises(DataError, match="only known when it was read to its end"):
        shard.count()


def test_each_batch_is_reported_before_it_is_handed_out(opened: Opened) -> None:
    told: list[float | None] = []
    assert len(ids(opened(FakeIterator(*numbers(4)), began=told.append).iter_batches(batch_size=2))) == 2
    whole = opened(FakeIterator(*numbers(4)), began=told.append, is_split=False)
    assert len(ids(whole.iter_batches(batch_size=4))) == 1
    assert told == [1.0, 1.0, None]


def test_leaving_an_epoch_ends_rays_part_of_it_and_the_next_can_begin(opened: Opened) -> None:
    iterator = FakeIterator(*[pa.table({"x": pa.array(np.zeros(2**20))})] * 50)
    shard = opened(iterator)
    for _ in shard.iter_batches(batch_size=10):
        break
    shard.close()
    assert iterator.over.wait(10)
    assert iterator.fetched < 50, "an execution of one's own is not read to its end"
    assert next(iter(shard.iter_batches(batch_size=10)))["x"].shape == (10,)


def test_a_part_of_a_shared_epoch_is_drained_so_that_the_others_can_go_on(opened: Opened) -> None:
    iterator = FakeIterator(*[pa.table({"x": pa.array(np.zeros(2**20))})] * 20, parts=2)
    shard = opened(iterator)
    next(iter(shard.iter_batches(batch_size=10)))
    shard.close()
    assert iterator.over.wait(10)
    assert (iterator.fetched, iterator.told) == (20, 1)


def test_a_second_loop_ends_the_first(opened: Opened) -> None:
    shard = opened(FakeIterator(*numbers(100)))
    batches = shard.iter_batches(batch_size=2)
    first = iter(batches)
    next(first)
    assert len(ids(batches)) == 50
    with pytest.raises(DataError, match="Another iteration over the dataset 'train'"):
        next(first)


def test_memory_is_bounded_because_the_feed_waits_for_the_rank(opened: Opened) -> None:
    iterator = FakeIterator(*[pa.table({"x": pa.array(np.zeros(2**20))})] * 50)
    epoch = iter(opened(iterator).iter_batches(batch_size=2**20))
    ahead = []
    for count in range(1, 41):
        next(epoch)
        ahead.append(iterator.fetched - count)
    # One whole batch of 8 MiB waits, another is being put together, a third is in the socket and the feed's hands.
    assert max(ahead) <= 4
    epoch.close()


def test_columns_are_known_before_and_during_an_epoch(opened: Opened) -> None:
    shard = opened(FakeIterator(*numbers(4)))
    assert shard.schema() == pa.schema([("id", pa.int64())])
    assert len(ids(shard.iter_batches(batch_size=4))) == 1
    other = opened(FakeIterator(*numbers(4)))
    epoch = iter(other.iter_batches(batch_size=2, prefetch_batches=0))
    with pytest.raises(DataError, match="waits for its first rows"):
        other.schema()
    next(epoch)
    assert other.schema().names == ["id"]


# --------------------------------------------------------------------------- what goes wrong


def test_an_error_in_ray_reaches_the_rank_with_its_message(opened: Opened) -> None:
    shard = opened(FakeIterator(*numbers(4), ValueError("row 4 is odd")))
    epoch = iter(shard.iter_batches(batch_size=2))
    with pytest.raises(DataError, match=r"The Ray dataset 'train' cannot be read.*ValueError: row 4 is odd"):
        list(epoch)
    with pytest.raises(DataError, match="row 4 is odd"):
        next(epoch)
    with pytest.raises(DataError, match="row 4 is odd"):
        list(shard.iter_batches(batch_size=2))


def test_an_error_of_the_users_that_looks_like_one_of_the_socket_is_reported_too(opened: Opened) -> None:
    with pytest.raises(DataError, match="ConnectionResetError: from the database"):
        list(opened(FakeIterator(ConnectionResetError("from the database"))).iter_batches())
    with pytest.raises(DataError, match="no such table"):
        opened(FakeIterator(OSError("no such table"))).schema()


class Pickled(pa.ExtensionType):
    def __init__(self) -> None:
        super().__init__(pa.binary(), "ray.data.arrow_pickled_object")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: pa.DataType, serialized: bytes) -> Pickled:
        return cls()


def test_python_objects_of_ray_are_refused_by_name(opened: Opened) -> None:
    column = pa.ExtensionArray.from_storage(Pickled(), pa.array([b"x"]))
    with pytest.raises(DataError, match="column 'thing' of a Ray dataset holds Python objects"):
        list(opened(FakeIterator(pa.table({"thing": column}))).iter_batches())


def test_a_feed_that_is_gone_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "feed.sock")
    feed = Feed(FakeIterator(*[pa.table({"x": pa.array(np.zeros(2**20))})] * 50), path)
    epoch = iter(StreamedShard("train", path).iter_batches(batch_size=2**20))
    next(epoch)
    feed.close()
    with pytest.raises(DataError, match="has ended in mid-epoch"):
        list(epoch)
    monkeypatch.setattr(protocol, "_CONNECT_TIMEOUT_S", 0.0)
    with pytest.raises(DataError, match="no process listens at"):
        iter(StreamedShard("train", path).iter_batches())


def test_a_path_that_is_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="more than 107 bytes"):
        Feed(FakeIterator(), str(tmp_path / ("x" * 120)))


# --------------------------------------------------------------------------- with a real Ray

_RANK = """
import json, sys
sys.modules["ray"] = None  # importing it would fail
from powertrain.data.ray.shard import StreamedShard
shard = StreamedShard("train", sys.argv[1], world_size=2)
seen = []
for epoch in shard.epochs(2):
    for batch in shard.iter_batches(batch_size=4):
        assert batch["image"].shape[1:] == (2, 3), batch["image"].shape
        seen.append(batch["id"].tolist())
print(json.dumps(seen))
"""


@pytest.fixture
def slots(ray_cluster: RayNodes, tmp_path: Path) -> Iterator[Callable[[Any], list[str]]]:
    """Splits a Ray dataset in two; gives the sockets where actors in Ray serve the parts."""
    import ray

    class Slot:
        def open(self, iterator: Any, path: str) -> None:
            self.feed = Feed(iterator, path)

        def close(self) -> None:
            self.feed.close()

    actor = ray.remote(num_cpus=0)(Slot)
    actors: list[Any] = []
    made: list[Any] = []

    def serve(dataset: Any) -> list[str]:
        paths = [str(tmp_path / f"{rank}.sock") for rank in range(2)]
        actors.extend(actor.remote() for _ in paths)
        made.extend(iterators_of(dataset, [ray_cluster.nodes[0]] * 2))
        opening = zip(actors, made, paths, strict=True)
        ray.get([each.open.remote(iterator, path) for each, iterator, path in opening])
        return paths

    yield serve
    end(made)
    ray.get([each.close.remote() for each in actors])
    for each in actors:
        ray.kill(each)


def in_two_ranks(paths: list[str], work: Callable[[int, StreamedShard], Any]) -> list[Any]:
    shards = [StreamedShard("train", path, world_size=2) for path in paths]
    with ThreadPoolExecutor(2) as ranks:
        return list(ranks.map(work, range(2), shards))


def test_ranks_without_ray_get_equal_parts_of_every_epoch(slots: Callable[[Any], list[str]]) -> None:
    import ray.data

    dataset = ray.data.range(41, override_num_blocks=5).map(
        lambda row: {"id": row["id"], "image": np.full((2, 3), row["id"], np.uint8)}
    )
    paths = slots(dataset)
    ranks = [
        subprocess.Popen([sys.executable, "-c", _RANK, path], stdout=subprocess.PIPE, text=True)
        for path in paths
    ]
    said = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    found = [json.loads(text) for text in said]
    assert [[len(batch) for batch in one] for one in found] == [[4] * 10] * 2, "20 rows each, twice"
    for epoch in (slice(0, 5), slice(5, 10)):
        rows = [row for one in found for batch in one[epoch] for row in batch]
        assert len(set(rows)) == 40, "none twice, at most one left out"


def test_a_rank_that_leaves_early_holds_nothing_up(slots: Callable[[Any], list[str]]) -> None:
    """More rows than Ray's memory holds: were those of the rank that left kept, the other would wait for ever."""
    import ray.data

    wide = ray.data.range(36, override_num_blocks=36).map_batches(
        lambda batch: {"id": batch["id"], "x": np.zeros((len(batch["id"]), 6_000_000), np.uint8)}
    )
    paths = slots(wide)

    def work(rank: int, shard: StreamedShard) -> list[int]:
        counts: list[int] = []
        for _ in range(2):
            count = 0
            for batch in shard.iter_batches(batch_size=2):
                count += len(batch["id"])
                if rank == 0 and not counts:
                    break
            counts.append(count)
        return counts

    assert in_two_ranks(paths, work) == [[2, 18], [18, 18]]


def test_a_failing_map_in_ray_fails_every_rank_with_rays_message(slots: Callable[[Any], list[str]]) -> None:
    import ray.data

    def fails(row: dict[str, Any]) -> dict[str, Any]:
        raise ValueError("the row is broken")

    def work(rank: int, shard: StreamedShard) -> str:
        with pytest.raises(DataError) as failed:
            list(shard.iter_batches())
        return str(failed.value)

    for message in in_two_ranks(slots(ray.data.range(4).map(fails)), work):
        first, rest = message.split("\n", 1)
        assert re.fullmatch(
            r"The Ray dataset 'train' cannot be read. Ray says: ValueError: the row is broken "
            r"\(test_streamed.py:\d+ in fails\)",
            first,
        )
        assert 'raise ValueError("the row is broken")' in rest
        assert "\x1b" not in message


def test_a_rank_that_waits_for_others_which_never_come_is_woken_at_the_end_of_the_attempt(
    ray_cluster: RayNodes, tmp_path: Path
) -> None:
    import ray.data

    iterators = iterators_of(ray.data.range(4), [ray_cluster.nodes[0]] * 2)
    feed = Feed(iterators[0], str(tmp_path / "feed.sock"))
    epoch = iter(StreamedShard("train", str(tmp_path / "feed.sock"), world_size=2).iter_batches())
    end(iterators)
    with pytest.raises(DataError, match="Ray says: ActorDiedError"):
        next(epoch)
    feed.close()
    assert not feed._thread.is_alive()


def test_of_a_dataset_that_is_not_split_every_rank_gets_all_rows(
    ray_cluster: RayNodes, tmp_path: Path
) -> None:
    import ray.data

    iterators = iterators_of(ray.data.range(6), [ray_cluster.nodes[0]] * 2, split=False)
    for number, iterator in enumerate(iterators):
        feed = Feed(iterator, str(tmp_path / f"{number}.sock"))
        shard = StreamedShard("eval", str(tmp_path / f"{number}.sock"), world_size=2, is_split=False)
        assert sorted(row["id"] for row in shard.iter_rows()) == list(range(6))
        feed.close()
    end(iterators)


@pytest.mark.usefixtures("ray_cluster")
def test_an_actor_that_holds_a_slot_is_not_warned_of_by_ray(tmp_path: Path) -> None:
    """Its feeds wait for Ray on threads of their own, which hold no event loop up."""
    import ray.data

    from powertrain.engine.ray.actors import SlotActor

    class Holder(SlotActor):
        async def warned(self) -> bool:
            return bool(ray._private.worker.blocking_get_inside_async_warned)

    actor: Any = ray.remote(num_cpus=0)(Holder).remote()
    path = str(tmp_path / "feed.sock")
    ray.get(actor.feed.remote({path: ray.data.range(6).iterator()}))
    assert len(list(StreamedShard("train", path).iter_rows())) == 6
    assert not ray.get(actor.warned.remote())
    ray.kill(actor)
