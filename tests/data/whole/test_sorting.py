"""Sorted rows: in the order of pandas, with nulls last, equal rows in theirs, and columns that DuckDB does not hold."""

from __future__ import annotations

import itertools
import math
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.examples import scaled

from powertrain import data
from powertrain.data.whole import inputs
from powertrain.errors import DataError

NUMBERS = st.one_of(st.none(), st.integers(-3, 3))
FLOATS = st.one_of(st.none(), st.just(math.nan), st.floats(-2, 2, width=16))


def rank(value: Any) -> int:
    return 2 if value is None else 1 if isinstance(value, float) and math.isnan(value) else 0


@settings(deadline=None, max_examples=scaled(20))
@given(
    rows=st.lists(st.tuples(NUMBERS, FLOATS), min_size=1, max_size=40),
    down=st.tuples(st.booleans(), st.booleans()),
)
def test_rows_are_in_the_order_of_their_keys_and_equal_ones_in_theirs(
    rows: list[tuple[int | None, float | None]], down: tuple[bool, bool]
) -> None:
    table = pa.table(
        {
            "a": pa.array([a for a, _ in rows], pa.int64()),
            "b": pa.array([b for _, b in rows], pa.float64()),
            "row": range(len(rows)),
        }
    )
    found = data.from_arrow(table).sort(["a", "b"], descending=list(down)).take_all()

    def key(number: int) -> list[Any]:
        values = zip(rows[number], down, strict=True)
        return [
            (rank(value), 0 if rank(value) else -value if first_is_greatest else value)  # type: ignore[operator]
            for value, first_is_greatest in values
        ]

    assert [row["row"] for row in found] == sorted(range(len(rows)), key=key)


def test_all_types_come_back_as_they_were() -> None:
    table = pa.table(
        {
            "key": [2, None, 1],
            "text": ["b", None, "a"],
            "large": pa.array(["b", None, "a"], pa.large_string()),
            "bytes": [b"b", None, b"a"],
            "day": [date(2020, 1, 2), None, date(2020, 1, 1)],
            "time": pa.array([datetime(2020, 1, 2), None, datetime(2020, 1, 1)], pa.timestamp("ns")),
            "zone": pa.array(
                [datetime(2020, 1, 2), None, datetime(2020, 1, 1)], pa.timestamp("ns", "Asia/Tokyo")
            ),
            "amount": [Decimal("2.50"), None, Decimal("1.25")],
            "yes": [True, None, False],
            "small": pa.array([2, None, 1], pa.int8()),
            "half": pa.array(np.array([2, 0, 1], np.float16)),
            "list": [[1, 2], None, []],
            "struct": [{"x": 1}, None, {"x": 2}],
        }
    )
    found = data.from_arrow(table).sort("key")
    expected = table.take([2, 0, 1])
    assert found.schema().types == data.from_arrow(table).schema().types
    taken = found.take_batch(3, batch_format="pyarrow")
    for name in table.column_names:
        assert taken.column(name).to_pylist() == expected.column(name).to_pylist(), name


def test_tensors_are_gathered_by_the_numbers_of_their_rows(tmp_path: Path) -> None:
    pixels = np.arange(7 * 4).reshape(7, 2, 2)
    keys = np.array([3, 1, 2, 3, 1, 2, 0])
    dataset = data.from_numpy({"pixels": pixels, "key": keys}).repartition(3)
    found = dataset.sort("key", descending=True).take_batch(7)
    order = np.argsort(-keys, kind="stable")
    assert (found["pixels"] == pixels[order]).all()


def test_large_rows_are_gathered_a_few_at_a_time() -> None:
    images = data.from_numpy({"image": np.zeros((60, 2**20), np.uint8), "key": np.arange(60)[::-1].copy()})
    found = images.sort("key")
    assert [block.rows for block in found.plan.inspected().blocks] == [31, 29], "of 32 MiB at most"
    gathered: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        take = inputs.Input.take

        def counted(self: inputs.Input, rows: Any, columns: Any) -> Any:
            gathered.append(len(rows))
            return take(self, rows, columns)

        patch.setattr(inputs.Input, "take", counted)
        assert images.sort("key").take(1)[0]["key"] == 0
    assert sum(gathered) == 60
    assert max(gathered) <= 32


def test_results_of_functions_are_sorted_by_them() -> None:
    dataset = (
        data.range(1000)
        .map(lambda row: {"id": row["id"], "rest": row["id"] % 7})
        .filter(lambda row: row["rest"])
    )
    found = dataset.random_shuffle(seed=1).sort("rest").to_pandas()
    expected = pd.DataFrame({"id": range(1000)}).assign(rest=lambda rows: rows["id"] % 7)
    expected = expected[expected["rest"] > 0].sort_values("rest", kind="stable")
    assert found["id"].tolist() == expected["id"].tolist(), "equal rows are in the order of the data"


def test_files_are_sorted_within_the_memory_that_the_context_gives(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    rows = 400_000
    frame = pd.DataFrame(
        {"key": generator.permutation(rows), "text": [f"text number {i}" for i in range(rows)]}
    )
    data.from_pandas(frame).write_parquet(str(tmp_path / "rows"))
    context = data.DataContext.get_current()
    limits = context.execution_options.resource_limits
    before = limits.object_store_memory
    limits.object_store_memory = 64 * 2**20
    try:
        found = data.read_parquet(str(tmp_path / "rows")).sort("key").to_pandas()
    finally:
        limits.object_store_memory = before
    assert found["key"].tolist() == list(range(rows))
    assert found["text"].tolist() == frame.sort_values("key")["text"].tolist()


def test_boundaries_end_blocks() -> None:
    dataset = data.from_items([{"x": value} for value in [5, 3, None, 9, 1, 7]])
    found = dataset.sort("x", boundaries=[3, 8])
    blocks = [block.rows for block in found.plan.inspected().blocks]
    assert [row["x"] for row in found.take_all()] == [1, 3, 5, 7, 9, None]
    assert blocks == [1, 3, 2]
    text = data.from_items([{"x": value} for value in "it's"]).sort("x", boundaries=["s", "'"])
    assert [row["x"] for row in text.take_all()] == ["'", "i", "s", "t"]


def test_wrong_arguments_are_errors_that_name_them() -> None:
    dataset = data.from_items([{"x": 1, "list": [1]}])
    with pytest.raises(DataError, match="There is no column 'y' in sort"):
        dataset.sort("y").count()
    with pytest.raises(DataError, match=r"the column 'list' has the type list.*cannot be ordered"):
        dataset.sort("list").count()
    with pytest.raises(DataError, match="has 1 values for 2 columns"):
        dataset.sort(["x", "list"], descending=[True])
    with pytest.raises(
        DataError, match="boundaries has 'a', which is not a value of a column of the type int64"
    ):
        dataset.sort("x", boundaries=["a"]).count()
    with pytest.raises(DataError, match="Give at least one name of a column"):
        dataset.sort(3)  # type: ignore[arg-type]


def test_rows_with_equal_keys_come_into_one_block() -> None:
    dataset = data.from_items([{"k": number % 5 or None, "id": number} for number in range(60)])
    found = dataset.repartition(3, keys=["k"], sort=True)
    blocks = list(found.iter_batches(batch_size=None, batch_format="pandas"))
    ids = [number for block in blocks for number in block["id"]]
    assert sorted(ids) == list(range(60))
    counts = [block.rows for block in found.plan.inspected().blocks]
    assert len(counts) <= 3
    ends = np.cumsum([0, *counts])
    rows = found.take_all()
    parts = [rows[start:end] for start, end in itertools.pairwise(ends)]
    homes: dict[Any, int] = {}
    for number, part in enumerate(parts):
        for row in part:
            assert homes.setdefault(row["k"], number) == number
        keys = [(row["k"] is None, row["k"] or 0, row["id"]) for row in part]
        assert keys == sorted(keys)
    with pytest.raises(DataError, match="needs the number of blocks"):
        dataset.repartition(keys=["k"])
    with pytest.raises(DataError, match="sorts by keys"):
        dataset.repartition(3, sort=True)
    with pytest.raises(DataError, match="takes num_blocks"):
        dataset.repartition(3, keys=["k"], shuffle=True)


def test_rows_without_any_are_sorted_too() -> None:
    empty = data.from_arrow(pa.table({"x": pa.array([], pa.int64())})).sort("x")
    assert empty.count() == 0
    assert empty.schema().names == ["x"]
