"""Which values of a row are Python's lists and which are arrays, wherever the row has been."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from powertrain import data
from powertrain.data.operations.columns import RenameColumns
from powertrain.data.operations.runner import Runner
from powertrain.data.rows import formats
from powertrain.data.rows.gather import BlockView, concat_rows, gather, take_rows
from powertrain.data.rows.rows import Rows

_LISTS = {
    "uniform": pa.array([[1, 2], [3, 4]]),
    "ragged": pa.array([[1], [2, 3]]),
    "fixed": pa.array([[1, 2], [3, 4]], pa.list_(pa.int32(), 2)),
    "deep": pa.array([[[1, 2]], [[3, 4]]]),
    "words": pa.array([["a"], ["b", "c"]]),
    "holes": pa.array([[1, None], None]),
    "times": pa.array([[datetime.datetime(2020, 1, 2)]] * 2),
    "dicts": pa.array([[{"x": 1}], []]),
    "bools": pa.array([[True], [False]]),
    "view": pa.array([[1], [2, 3]], pa.list_view(pa.int32())),
    "struct": pa.array([{"a": [1, 2]}, {"a": [3]}]),
}


def gathered(**columns: Any) -> Rows:
    view = BlockView([pa.record_batch(columns)])
    places = np.arange(view.rows)
    return gather([view], np.zeros(view.rows, np.int64), places, places)


@pytest.mark.parametrize("name", sorted(_LISTS))
def test_lists_of_arrow_are_lists_in_rows(name: str) -> None:
    """Of Python's own types all the way down: numpy's would not be equal to lists."""
    rows = gathered(x=_LISTS[name])
    assert [row["x"] for row in formats.row_dicts(rows)] == _LISTS[name].to_pylist()
    table = pa.table({"x": _LISTS[name]})
    from_table = formats.from_arrow(table, np.arange(2))
    assert [row["x"] for row in formats.row_dicts(from_table)] == _LISTS[name].to_pylist()


def test_a_function_may_append_to_a_list(tmp_path: Path) -> None:
    pq.write_table(pa.table({"t": [[1, 2], [3, 4, 5]]}), tmp_path / "lists.parquet")
    longer = data.read_parquet(str(tmp_path)).map(lambda row: {"t": row["t"] + [9]})
    assert longer.map(lambda row: {"t": row["t"] + [0]}).take() == [
        {"t": [1, 2, 9, 0]},
        {"t": [3, 4, 5, 9, 0]},
    ]
    assert data.from_items([{"t": ["a"]}]).map(lambda row: {"t": row["t"] * 2}).take() == [{"t": ["a", "a"]}]


@pytest.mark.parametrize(
    "arrays",
    [
        [np.ones(2), np.zeros(2)],
        [np.ones((2, 2)), np.zeros((2, 2))],
        [np.ones(2), np.zeros(3)],
        [np.ones((2, 2)), np.zeros((3, 1))],
        [torch.ones(2), torch.zeros(2)],
    ],
)
def test_arrays_and_tensors_stay_arrays_through_all_forms(arrays: list[Any], tmp_path: Path) -> None:
    expected = [np.asarray(array).tolist() for array in arrays]
    items = data.from_items([{"x": array} for array in arrays])
    made = data.range(2).map(lambda row: {"x": arrays[row["id"]]})
    made.write_parquet(str(tmp_path))
    for found in (
        items,
        made,
        items.materialize(),
        made.materialize(),
        made.map(lambda row: row),
        made.map_batches(lambda batch: batch, batch_format="pyarrow"),
        made.map_batches(lambda batch: batch, batch_format="pandas"),
        data.read_parquet(str(tmp_path)),
    ):
        values = [row["x"] for row in found.take()]
        assert all(isinstance(value, np.ndarray) for value in values), found
        assert [value.tolist() for value in values] == expected


def test_arrays_of_numpy_and_pandas_are_arrays_and_their_lists_lists() -> None:
    times = np.array([["2020-01-01"], ["2021-01-01"]], "M8[s]")
    [first, _] = data.from_numpy({"times": times, "numbers": np.ones((2, 3))}).take()
    assert isinstance(first["times"], np.ndarray)
    assert isinstance(first["numbers"], np.ndarray)
    frame = pd.DataFrame({"list": [[1, 2]], "array": [np.array([1, 2])]})
    [row] = data.from_pandas(frame).take()
    assert row["list"] == [1, 2]
    assert isinstance(row["array"], np.ndarray)
    [again] = formats.row_dicts(formats.from_pandas(frame, np.arange(1)))
    assert again["list"] == [1, 2]
    assert isinstance(again["array"], np.ndarray)


def test_the_batches_of_numpy_have_arrays_whatever_rows_have() -> None:
    batch = formats.to_numpy(gathered(x=pa.array([[1, 2], [3, 4]])))["x"]
    assert (batch.shape, batch.dtype) == ((2, 2), np.int64)


def test_lists_are_lists_of_arrow_at_any_depth_and_arrays_tensors() -> None:
    lists = gathered(x=pa.array([[[[1]]], [[[2]]]]))
    assert lists.lists == {"x"}
    assert formats.to_arrow(lists).schema.field("x").type == pa.list_(pa.list_(pa.list_(pa.int64())))
    arrays = formats.from_numpy({"x": np.ones((2, 1, 1, 1))}, np.arange(2))
    assert isinstance(formats.to_arrow(arrays).schema.field("x").type, pa.FixedShapeTensorType)


def test_what_is_done_to_rows_keeps_which_columns_are_lists() -> None:
    rows = gathered(x=pa.array([[1, 2], [3, 4]]), y=pa.array([1, 2]))
    runner = Runner([RenameColumns({"x": "z"})], seed=0, name_row=str)
    assert runner.run(rows, 0).rows.lists == {"z"}
    assert rows.between(0, 1).lists == {"x"}
    assert take_rows(rows, np.array([1])).lists == {"x"}
    assert rows.with_columns({"y": rows.columns["y"]}).lists == frozenset()
    ragged = gathered(x=pa.array([[1]]), y=pa.array([1]))
    empty = gathered(x=pa.nulls(1), y=pa.array([1]))
    assert concat_rows([rows, ragged, empty]).lists == {"x"}
    assert (
        concat_rows([rows, formats.from_numpy({"x": np.ones((1, 2)), "y": [1]}, np.arange(1))]).lists == set()
    )


def test_a_list_of_float64_is_still_one_after_a_map_and_new_python_floats_are_not() -> None:
    table = pa.table({"uniform": [[0.5], [1.5]], "ragged": [[0.5], []], "struct": [{"a": 0.5}, {"a": 1.5}]})
    mapped = data.from_arrow(table).map(lambda row: {**row, "new": [0.5]}).limit(1)
    [batch] = mapped.iter_torch_batches(batch_size=2)
    assert batch["uniform"].dtype == batch["ragged"].dtype == batch["struct"]["a"].dtype == torch.float64
    assert batch["new"].dtype == torch.get_default_dtype()


def test_python_floats_inside_of_dicts_have_the_default_dtype() -> None:
    [batch] = data.from_items(
        [{"a": {"x": 1.5, "y": [2.5]}, "b": {"x": np.float64(1.5)}}]
    ).iter_torch_batches()
    assert batch["a"]["x"].dtype == batch["a"]["y"].dtype == torch.get_default_dtype()
    assert batch["b"]["x"].dtype == torch.float64


def test_nanoseconds_of_times_survive_a_map() -> None:
    table = pa.table(
        {
            "stamp": pa.array([1, None], pa.timestamp("ns")),
            "zoned": pa.array([1001, 2], pa.timestamp("ns", "Europe/Berlin")),
            "span": pa.array([1, 1001], pa.duration("ns")),
        }
    )
    mapped = data.from_arrow(table).map(lambda row: row)
    assert mapped.schema() == table.schema
    [one, other] = mapped.take()
    assert (one["stamp"].value, one["zoned"].value, other["span"].value) == (1, 1001, 1001)
    assert other["stamp"] is None


def test_images_of_pillow_are_arrays_when_a_function_returns_them() -> None:
    from PIL import Image

    def drawn(row: dict[str, Any]) -> dict[str, Any]:
        return {"x": Image.new("P" if row["id"] else "RGB", (3, 2))}

    assert data.range(2).map(drawn).take_batch()["x"].shape == (2, 2, 3, 3)
    assert data.from_items([drawn({"id": 1})]).take()[0]["x"].shape == (2, 3, 3)
