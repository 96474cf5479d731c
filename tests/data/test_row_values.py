"""Values that belong to a row stay with it: over splits, batch sizes and ranks, and next to other such values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.data.test_shard import shards

from powertrain import data
from powertrain.data import Dataset
from powertrain.data.expressions import col, monotonically_increasing_id, random, udf, uuid
from powertrain.errors import DataError


def files(directory: Path) -> Dataset:
    pq.write_table(pa.table({"id": range(40)}), directory / "x.parquet", row_group_size=5)
    return data.read_parquet(str(directory))


# --------------------------------------------------------------------------- numbers of rows

AFTERWARDS: dict[str, Callable[[Dataset], list[Dataset]]] = {
    "split": lambda whole: whole.split(3),
    "train_test_split": lambda whole: list(whole.train_test_split(0.3)),
    "a shuffled train_test_split": lambda whole: list(whole.train_test_split(0.3, shuffle=True, seed=1)),
    "random_sample": lambda whole: [whole.random_sample(0.5, seed=2)],
    "randomize_block_order": lambda whole: [whole.randomize_block_order(seed=1)],
    "limit": lambda whole: [whole.limit(13)],
    "a shuffled limit": lambda whole: [whole.random_shuffle(seed=3).limit(13)],
    "repartition": lambda whole: [whole.repartition(4)],
}


@pytest.mark.parametrize("step", AFTERWARDS)
def test_a_row_keeps_its_number(tmp_path: Path, step: str) -> None:
    numbered = files(tmp_path).with_column("number", monotonically_increasing_id())
    found = [row for each in AFTERWARDS[step](numbered) for row in each.take_all()]
    assert found
    assert all(row["number"] == row["id"] for row in found)


def test_blocks_of_numbered_rows_change_places(tmp_path: Path) -> None:
    numbered = files(tmp_path).with_column("number", monotonically_increasing_id())
    assert [row["id"] for row in numbered.randomize_block_order(seed=1).take_all()] != list(range(40))


def test_random_numbers_of_a_fixed_seed_are_the_same_in_every_reading(tmp_path: Path) -> None:
    drawn = files(tmp_path).with_column("r", random(seed=7, reseed_after_execution=False))
    first = [row["r"] for row in drawn.take_all()]
    assert [row["r"] for row in drawn.take_all()] == first
    assert [row["r"] for part in drawn.split(2) for row in part.take_all()] == first
    assert [batch["r"].tolist() for _ in range(2) for batch in drawn.iter_batches(batch_size=40)] == [
        first
    ] * 2
    again = [row["r"] for row in files(tmp_path).with_column("r", random(seed=7)).take_all()]
    assert again != first
    with pytest.raises(DataError, match="reseed_after_execution"):
        random(seed=7, reseed_after_execution="no")  # type: ignore[arg-type]


# --------------------------------------------------------------------------- several in one operation


def test_several_random_columns_of_one_call_differ() -> None:
    @udf()
    def drawn(values: Any, rng: np.random.Generator) -> Any:
        return rng.random(len(values))

    made = {
        "r": random(),
        "s": random(),
        "u": uuid(),
        "v": uuid(),
        "f": drawn(col("id")),
        "g": drawn(col("id")),
    }
    rows = data.range(20).with_columns(made).take_all()
    for one, other in (("r", "s"), ("u", "v"), ("f", "g")):
        assert all(row[one] != row[other] for row in rows)


def test_one_expression_used_twice_is_one_number() -> None:
    drawn = random()
    rows = data.range(20).with_columns({"r": drawn, "double": drawn * 2}).take_all()
    assert all(row["double"] == 2 * row["r"] for row in rows)


# --------------------------------------------------------------------------- functions of arrays


@pytest.mark.parametrize("shuffled", [False, True])
def test_functions_of_arrays_get_the_same_rows_at_any_batch_size_and_number_of_ranks(
    tmp_path: Path, shuffled: bool
) -> None:
    @udf()
    def centred(values: Any) -> Any:
        values = values.to_numpy()
        return values - values.mean()

    whole = files(tmp_path).with_column("c", centred(col("id"))).filter(centred(col("id")) > -100.0)
    if shuffled:
        whole = whole.random_shuffle(seed=1)
    found = []
    for size, world in ((40, 1), (7, 1), (4, 2)):
        values: dict[int, float] = {}
        with shards(whole.plan, world, tmp_path / f"{size}") as ranks:
            for rank in ranks:
                for batch in rank.iter_batches(batch_size=size):
                    values.update(zip(batch["id"].tolist(), batch["c"].tolist(), strict=True))
        found.append(values)
    assert len(found[0]) == 40
    assert found[0] == found[1] == found[2]


def test_functions_of_lists_need_no_neighbours() -> None:
    from powertrain.data.operations.computing import ComputeColumns

    assert ComputeColumns((("x", col("tokens").list.get(0)),)).batch_size is None


# --------------------------------------------------------------------------- types


@pytest.mark.parametrize(
    ("expression", "kind"),
    [
        (col("a").list.get(0), pa.int32()),
        (col("a").list.slice(0, 1), pa.list_(pa.int32())),
        (col("a").list.sort(), pa.list_(pa.int32())),
        (col("nested").list.flatten(), pa.list_(pa.int8())),
        (col("fixed").arr.to_list(), pa.list_(pa.float32())),
        (col("m").map.keys(), pa.list_(pa.string())),
        (col("m").map.values(), pa.list_(pa.int16())),
    ],
)
def test_types_follow_from_the_column_and_not_from_the_values_of_a_piece(expression: Any, kind: Any) -> None:
    """A piece may hold nothing but nulls and empty lists."""
    table = pa.table(
        {
            "a": pa.array([[], None], pa.list_(pa.int32())),
            "nested": pa.array([[[]], None], pa.list_(pa.list_(pa.int8()))),
            "fixed": pa.array([None, None], pa.list_(pa.float32(), 2)),
            "m": pa.array([[], None], pa.map_(pa.string(), pa.int16())),
        }
    )
    values = table.column(expression.columns()[0]).chunk(0)
    assert expression.fn(values).type == kind


# --------------------------------------------------------------------------- torch's loaders


def test_several_workers_of_a_torch_loader_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.data import DataLoader
    from torch.utils.data._utils import worker

    iterator = data.from_items([{"x": float(n), "y": n} for n in range(8)]).iterator()
    dataset = iterator.to_torch(label_column="y", batch_size=4)
    assert sum(len(labels) for _, labels in DataLoader(dataset, batch_size=None)) == 8
    iterator.close()
    # As torch sets it in a worker process.
    monkeypatch.setattr(worker, "_worker_info", SimpleNamespace(id=0, num_workers=2))
    with pytest.raises(DataError, match="num_workers=2, and each of them would read every row"):
        iter(dataset)
