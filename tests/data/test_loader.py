"""What is done to rows does not depend on who reads them; every rank stays in step whatever is left out."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import powertrain.data
from powertrain.data import Dataset
from powertrain.data.plan.prepared import Prepared
from powertrain.data.shard import DataShard
from powertrain.errors import DataError


@pytest.fixture
def rows(tmp_path: Path) -> Dataset:
    """200 numbered rows in row groups of 30."""
    place = tmp_path / "rows"
    place.mkdir()
    pq.write_table(pa.table({"id": pa.array(np.arange(200))}), place / "part.parquet", row_group_size=30)
    return powertrain.data.read_parquet(str(place))


@contextmanager
def ranks_of(dataset: Dataset, world: int, tmp_path: Path, warn: Any = lambda message: None) -> Any:
    inspected = dataset.plan.inspected()
    prepared = Prepared("train", inspected, dataset.plan.seed or 0, True, inspected.fingerprint)
    shards = [
        DataShard(
            prepared,
            rank=rank,
            world_size=world,
            local_world_size=world,
            cache_directory=str(tmp_path / "cache"),
            disk_bytes=2**26,
            memory_bytes=2**26,
            warn=warn,
        )
        for rank in range(world)
    ]
    try:
        yield shards
    finally:
        for shard in shards:
            shard.close()


def read(dataset: Dataset, world: int, tmp_path: Path, column: str = "id", batch: int = 24) -> dict[int, Any]:
    """What came for each row, over all ranks of one epoch."""
    found: dict[int, Any] = {}
    with ranks_of(dataset, world, tmp_path) as shards:
        for shard in shards:
            for part in shard.iter_batches(global_batch_size=batch):
                if shard.weight:
                    found.update(zip(part["id"].tolist(), part[column].tolist(), strict=True))
    return found


def centred(batch: dict[str, Any]) -> dict[str, Any]:
    """Depends on which rows are together."""
    return {"id": batch["id"], "value": batch["id"] - batch["id"].mean()}


def noisy(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"id": row["id"], "value": float(rng.random())}


@pytest.mark.parametrize("shuffled", [True, False])
def test_batches_of_a_function_are_the_same_at_any_world_size(
    rows: Dataset, tmp_path: Path, shuffled: bool
) -> None:
    dataset = rows.map_batches(centred, batch_size=16)
    dataset = dataset.random_shuffle(seed=3) if shuffled else dataset
    alone = read(dataset, 1, tmp_path, "value")
    assert len(alone) == 200
    for world in (2, 3, 5):
        assert read(dataset, world, tmp_path, "value", batch=17 * world) == alone


def test_random_numbers_of_a_row_are_the_same_at_any_world_size_and_others_in_another_epoch(
    rows: Dataset, tmp_path: Path
) -> None:
    dataset = rows.map(noisy).random_shuffle(seed=3)
    alone = read(dataset, 1, tmp_path, "value")
    assert read(dataset, 3, tmp_path, "value") == alone
    with ranks_of(dataset, 1, tmp_path) as [shard]:
        loader = shard.iter_batches(batch_size=200)
        first, second = [
            dict(zip(b["id"].tolist(), b["value"].tolist(), strict=True)) for _ in range(2) for b in loader
        ]
    assert first == alone
    assert all(first[row] != second[row] for row in first)


def test_parts_of_a_union_are_mixed_and_each_has_its_own_operations(rows: Dataset, tmp_path: Path) -> None:
    other = powertrain.data.from_items([{"id": n} for n in range(200, 260)])
    both = rows.map(lambda row: {"id": row["id"]}).union(other).random_shuffle(seed=0)
    for world in (1, 3):
        assert sorted(read(both, world, tmp_path)) == list(range(260))


def keep_tens(row: dict[str, Any]) -> bool:
    return row["id"] % 10 == 0


def test_a_filter_leaves_holes_but_no_rank_behind(rows: Dataset, tmp_path: Path) -> None:
    said: list[str] = []
    dataset = rows.filter(keep_tens).random_shuffle(seed=1)
    with ranks_of(dataset, 4, tmp_path, said.append) as shards:
        steps, seen = set(), Counter[Any]()
        for shard in shards:
            made = 0
            for batch in shard.iter_batches(global_batch_size=8):
                made += 1
                assert len(batch["id"]) >= 1
                if shard.weight:
                    seen.update(batch["id"].tolist())
            steps.add(made)
    assert steps == {25}
    assert seen == Counter(range(0, 200, 10))
    assert sum("leaves rows out" in message for message in said) == 4  # once for each rank


def test_a_filter_that_keeps_nothing_is_one_error_on_every_rank(rows: Dataset, tmp_path: Path) -> None:
    dataset = rows.filter(lambda row: False)
    with ranks_of(dataset, 2, tmp_path) as shards:
        for shard in shards:
            with pytest.raises(DataError, match="left no row of the 200"):
                next(iter(shard.iter_batches(batch_size=8)))
    assert dataset.count() == 0
    assert dataset.take(3) == []


def test_rows_that_become_several_stay_with_their_step(rows: Dataset, tmp_path: Path) -> None:
    twice = rows.flat_map(lambda row: [row, row]).random_shuffle(seed=2)
    with ranks_of(twice, 2, tmp_path) as shards:
        seen: Counter[int] = Counter()
        for shard in shards:
            sizes = []
            for batch in shard.iter_batches(global_batch_size=20):
                sizes.append(len(batch["id"]))
                seen.update(batch["id"].tolist())
            assert sizes == [20] * 10
    assert seen == Counter(dict.fromkeys(range(200), 2))


def test_encoded_images_are_decoded_where_their_column_or_the_reader_says_so(tmp_path: Path) -> None:
    for number in range(5):
        Image.fromarray(np.full((6, 4, 3), number, np.uint8)).save(tmp_path / f"{number}.png")
    marked = powertrain.data.read_images(str(tmp_path))
    [batch] = marked.iter_torch_batches(batch_size=5)
    assert batch["image"].shape == (5, 6, 4, 3)
    assert batch["image"][:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4]

    encoded = io.BytesIO()
    Image.fromarray(np.full((6, 4, 3), 7, np.uint8)).save(encoded, "png")
    told = powertrain.data.from_items([{"picture": encoded.getvalue()}] * 3).decode_images(
        "picture", size=(2, 2), mode="L"
    )
    [batch] = told.iter_torch_batches(batch_size=3)
    assert batch["picture"].shape == (3, 2, 2)
    assert batch["picture"].unique().tolist() == [7]


def test_a_single_reader_gets_full_batches_whatever_was_left_out() -> None:
    few = powertrain.data.range(100).filter(lambda row: row["id"] % 3 == 0)
    sizes = [len(batch["id"]) for batch in few.iter_batches(batch_size=10)]
    assert sizes == [10, 10, 10, 4]
    assert [len(batch["id"]) for batch in few.iter_torch_batches(batch_size=10, drop_last=True)] == [10] * 3
    assert list(powertrain.data.range(9).filter(lambda row: False).iter_batches(batch_size=2)) == []
    assert "34 rows" in few.stats() or few.take_all()


def test_a_single_rank_makes_no_step_without_rows(rows: Dataset, tmp_path: Path) -> None:
    with ranks_of(rows.filter(lambda row: row["id"] >= 190), 1, tmp_path) as [shard]:
        assert [batch["id"].tolist() for batch in shard.iter_batches(batch_size=10)] == [
            list(range(190, 200))
        ]


@pytest.mark.parametrize("window", [None, 16])
def test_functions_of_a_unions_parts_get_rows_of_their_own_part(window: int | None) -> None:
    def only(low: int, high: int) -> Any:
        def check(batch: dict[str, Any]) -> dict[str, Any]:
            assert ((batch["id"] >= low) & (batch["id"] < high)).all()
            return {"id": batch["id"]}

        return check

    first = powertrain.data.range(50).map_batches(only(0, 50), batch_size=16)
    other = powertrain.data.from_items([{"id": n} for n in range(50, 90)]).map_batches(
        only(50, 90), batch_size=8
    )
    both = first.union(other)
    both = both if window else both.random_shuffle(seed=0)
    seen = [
        n for b in both.iter_batches(batch_size=7, local_shuffle_buffer_size=window) for n in b["id"].tolist()
    ]
    assert sorted(seen) == list(range(90))


def meeting(batch: dict[str, Any], directory: str) -> dict[str, Any]:
    """Comes to an end only when another process is here at the same time."""
    mine = Path(directory, str(os.getpid()))
    mine.touch()
    deadline = time.monotonic() + 30
    while len(list(Path(directory).iterdir())) < 2:
        if time.monotonic() > deadline:
            raise TimeoutError("nobody else came")
        time.sleep(0.01)
    return batch


@pytest.mark.parametrize("shuffled", [True, False])
def test_batches_of_a_function_are_worked_on_by_all_its_processes_at_once(
    rows: Dataset, tmp_path: Path, shuffled: bool
) -> None:
    meet = tmp_path / "meet"
    meet.mkdir()
    dataset = rows.map_batches(meeting, batch_size=20, concurrency=2, fn_kwargs={"directory": str(meet)})
    dataset = dataset.random_shuffle(seed=0) if shuffled else dataset
    assert dataset.count() == 200


def test_the_first_batch_does_not_load_pandas(rows: Dataset, tmp_path: Path) -> None:
    """It would take a third of a second on every rank; Arrow loads it for conversions that seem harmless."""
    table = pa.table({"id": [1, 2], "tokens": [[1, 2], [3, 4]], "ragged": [[1], [2, 3]], "text": ["a", "b"]})
    pq.write_table(table, tmp_path / "few.parquet")
    program = f"""
import sys, powertrain.data
from powertrain.data.collate_fn import ragged
rows = powertrain.data.read_parquet({str(tmp_path / "few.parquet")!r}).random_shuffle(seed=0)
print(len(next(iter(rows.drop_columns("ragged").iter_torch_batches(batch_size=2)))["id"]), "pandas" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "False"]


def test_a_shard_that_is_dropped_takes_its_threads_and_files_with_it(rows: Dataset) -> None:
    import gc
    import threading

    loader = rows.random_shuffle(seed=0).iter_torch_batches(batch_size=8)
    iterator = iter(loader)
    next(iterator)
    directory = loader.source.seat["cache_directory"]
    assert Path(directory).exists()
    mine = [t for t in threading.enumerate() if t.name.startswith("powertrain-d")]
    assert mine
    del iterator, loader
    gc.collect()
    for thread in mine:
        thread.join(timeout=10)
        assert not thread.is_alive()
    assert not Path(directory).exists()


def test_without_a_cache_on_disk_blocks_leave_memory_within_its_budget(tmp_path: Path) -> None:
    table = pa.table({"id": pa.array(np.arange(40)), "wide": [np.zeros(2**15)] * 40})  # 256 KiB a row
    pq.write_table(table, tmp_path / "wide.parquet", row_group_size=2)
    dataset = powertrain.data.read_parquet(str(tmp_path / "wide.parquet")).random_shuffle(seed=0)
    inspected = dataset.plan.inspected()
    prepared = Prepared("train", inspected, 0, True, inspected.fingerprint)
    shard = DataShard(prepared, cache_directory=str(tmp_path / "none"), disk_bytes=0, memory_bytes=2**21)
    seen = []
    for batch in shard.iter_batches(batch_size=4):
        seen += batch["id"].tolist()
        loader = shard._reader.open.loader
        assert loader is not None
        assert len(loader._reader._views.keys()) <= 8, (
            "about as many blocks of 512 KiB as 2 MiB have room for"
        )
    assert sorted(seen) == list(range(40))
    shard.close()
