"""Rows as numpy, pandas, Arrow, dicts and tensors, and back."""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from powertrain.data.collate_fn import (
    ArrowBatchCollateFn,
    NumpyBatchCollateFn,
    PandasBatchCollateFn,
)
from powertrain.data.rows import collate, formats
from powertrain.data.rows.gather import BlockView, gather
from powertrain.data.rows.rows import Rows
from powertrain.errors import DataError

_UTC = datetime.timezone.utc


def _numbers(count: int) -> Any:
    return np.arange(count, dtype=np.int64) + 10


def _of(**columns: Any) -> Rows:
    return formats.from_numpy(columns, _numbers(len(next(iter(columns.values())))))


def _plain(value: Any) -> Any:
    """Arrays as lists, so that rows can be compared."""
    if isinstance(value, np.ndarray):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value.item() if isinstance(value, np.generic) else value


_SCALARS = {
    "int": st.integers(-(2**63), 2**63 - 1),
    "float": st.floats(allow_nan=False),
    "bool": st.booleans(),
    "text": st.text(max_size=5),
    "bytes": st.binary(max_size=5),
    "date": st.dates(),
    "time": st.times(),
    "stamp": st.datetimes(),
    "decimal": st.decimals(-1000, 1000, places=3),
}
_VALUES: dict[str, st.SearchStrategy[Any]] = {
    **_SCALARS,
    "maybe int": st.none() | st.integers(-100, 100),
    "maybe text": st.none() | st.text(max_size=3),
    "list": st.lists(st.integers(-100, 100), max_size=3),
    "nested": st.lists(st.lists(st.integers(-9, 9), max_size=2), max_size=2),
    "struct": st.fixed_dictionaries({"a": st.integers(0, 9), "b": st.none() | st.text(max_size=2)}),
}


@given(st.data(), st.lists(st.sampled_from(sorted(_VALUES)), unique=True, max_size=4), st.integers(1, 6))
def test_dicts_become_rows_and_the_same_dicts_again(
    data: st.DataObject, names: list[str], count: int
) -> None:
    dicts = [{name: data.draw(_VALUES[name]) for name in names} for _ in range(count)]
    rows = formats.from_row_dicts(dicts, _numbers(count))
    assert [_plain(row) for row in formats.row_dicts(rows)] == dicts
    assert rows.numbers.tolist() == _numbers(count).tolist()
    through_arrow = formats.from_arrow(formats.to_arrow(rows), rows.numbers) if names else rows
    assert [_plain(row) for row in formats.row_dicts(through_arrow)] == dicts
    through_numpy = formats.from_numpy(formats.to_numpy(rows), rows.numbers)
    if not {"time", "stamp", "date"} & set(names):  # numpy has one type for all times
        assert [_plain(row) for row in formats.row_dicts(through_numpy)] == dicts


@given(
    st.lists(
        st.fixed_dictionaries(
            {"a": st.integers(0, 9), "b": st.floats(allow_nan=False), "c": st.text(max_size=3)}
        ),
        min_size=1,
        max_size=5,
    )
)
def test_rows_come_back_from_pandas_as_they_went(dicts: list[dict[str, Any]]) -> None:
    rows = formats.from_row_dicts(dicts, _numbers(len(dicts)))
    frame = formats.to_pandas(rows)
    assert list(frame.columns) == list(dicts[0])
    assert formats.row_dicts(formats.from_pandas(frame, rows.numbers)) == dicts


@given(st.lists(st.integers(0, 4), min_size=1, max_size=20), st.sampled_from(["<i4", "<f4", "|b1", "<f2"]))
def test_tensors_are_the_batchs_own_and_never_the_memory_map(offsets: list[int], dtype: str) -> None:
    values = np.arange(10).astype(dtype)
    batch = pa.record_batch({"flat": pa.array(values[:5]), "list": pa.array(list(values.reshape(5, 2)))})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    mapped = pa.ipc.open_file(sink.getvalue()).get_batch(0)
    which = np.zeros(len(offsets), np.int64)
    rows = gather([BlockView([mapped])], which, np.array(offsets), np.array(offsets))
    made = formats.to_torch(rows)
    for name, whole in (("flat", values[:5]), ("list", values.reshape(5, 2))):
        tensor = made[name]
        assert isinstance(tensor, torch.Tensor)
        np.testing.assert_array_equal(tensor.numpy(), whole[offsets])
        column = rows.columns[name]
        assert isinstance(column, np.ndarray)
        assert tensor.data_ptr() == column.ctypes.data, "a batch's memory is copied once more"
        tensor.zero_()
    assert mapped.equals(batch)


def test_rows_seen_in_a_file_are_copied_before_they_are_handed_out(tmp_path: Path) -> None:
    path = str(tmp_path / "rows.arrow")
    table = pa.table({"x": [1, 2], "y": [[1.5], [2.5]]})
    with pa.OSFile(path, "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    with pa.memory_map(path) as mapped:
        rows = formats.from_arrow(pa.ipc.open_file(mapped).read_all(), _numbers(2))
        for tensor in formats.to_torch(rows).values():
            tensor.add_(1)  # type: ignore[union-attr]
        for array in formats.to_numpy(rows).values():
            array += 1
        assert formats.to_arrow(rows).to_pydict() == table.to_pydict()
        del rows


# --------------------------------------------------------------------------- what people hand in


def test_a_batch_may_have_arrays_tensors_lists_series_and_arrow_arrays() -> None:
    rows = _of(
        array=np.array([1, 2], np.int16),
        tensor=torch.tensor([[1.5], [2.5]]),
        list=["a", "b"],
        series=pd.Series([1, 2], dtype="Int8"),
        arrow=pa.chunked_array([[1], [2]]),
        words=np.array(["x", "y"]),
    )
    shown = {
        name: (column.dtype.name if isinstance(column, np.ndarray) else str(column.type))
        for name, column in rows.columns.items()
    }
    assert shown == {
        "array": "int16",
        "tensor": "float32",
        "list": "string",
        "series": "int8",
        "arrow": "int64",
        "words": "string",
    }


def test_rows_may_have_tensors_arrays_and_scalars_of_numpy_as_values() -> None:
    dicts = [
        {"t": torch.ones(2), "s": torch.tensor(3), "a": np.zeros((2, 2), np.uint8), "n": np.float32(0.5)},
        {"t": torch.zeros(2), "s": torch.tensor(4), "a": np.ones((2, 2), np.uint8), "n": np.float32(1.5)},
    ]
    rows = formats.from_row_dicts(dicts, _numbers(2))
    made = formats.to_torch(rows)
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in made.items()} == {  # type: ignore[union-attr]
        "t": (torch.float32, (2, 2)),
        "s": (torch.int64, (2,)),
        "a": (torch.uint8, (2, 2, 2)),
        "n": (torch.float32, (2,)),
    }
    assert rows.python_floats == frozenset()


def test_pythons_floats_get_torchs_default_dtype_and_typed_ones_keep_theirs() -> None:
    rows = formats.from_row_dicts(
        [
            {"x": 0.5, "mixed": 1, "list": [1.0, 2.0], "typed": np.float64(1), "struct": {"a": 1.5}, "n": 1},
            {
                "x": 1.5,
                "mixed": 0.5,
                "list": [3.0, 4.0],
                "typed": np.float64(2),
                "struct": {"a": 2.5},
                "n": 2,
            },
        ],
        _numbers(2),
    )
    assert rows.python_floats == {"x", "mixed", "list", "struct"}
    made: Any = formats.to_torch(rows)
    dtypes = {name: tensor.dtype for name, tensor in made.items() if name != "struct"}
    assert dtypes == {
        "x": torch.float32,
        "mixed": torch.float32,
        "list": torch.float32,
        "typed": torch.float64,
        "n": torch.int64,
    }
    assert made["struct"]["a"].dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert formats.to_torch(rows)["x"].dtype == torch.float64  # type: ignore[union-attr]
    finally:
        torch.set_default_dtype(torch.float32)


def test_arrays_of_different_lengths_are_lists_and_of_different_shapes_objects() -> None:
    rows = _of(x=[np.arange(2), np.arange(3)], y=[np.zeros((1, 2)), np.zeros((2, 1))])
    columns: Mapping[str, Any] = rows.columns
    assert columns["x"].type == pa.list_(pa.int64())
    assert columns["y"].dtype == object
    assert [row["y"].shape for row in formats.row_dicts(rows)] == [(1, 2), (2, 1)]


def test_objects_arrow_has_no_type_for_are_kept() -> None:
    thing = object()
    rows = _of(x=[thing, 1])
    assert formats.row_dicts(rows) == [{"x": thing}, {"x": 1}]
    assert _of(x=[2**70, 1]).columns["x"].tolist() == [2**70, 1]


def test_a_key_that_some_rows_do_not_have_is_null_there() -> None:
    rows = formats.from_row_dicts([{"a": 1}, {"b": 2}], _numbers(2))
    assert formats.row_dicts(rows) == [{"a": 1, "b": None}, {"a": None, "b": 2}]


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ({"x": np.zeros(2), "y": [1]}, "'x' has 2, 'y' has 1"),
        ({"x": 5}, "Column 'x' is 5 of type int"),
        ({"x": np.array(5)}, "Column 'x' is the single value"),
        ({"x": "ab"}, "Column 'x' is 'ab' of type str"),
    ],
)
def test_batches_of_the_wrong_form_are_refused(batch: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        formats.from_numpy(batch, _numbers(2))


def test_tables_with_no_rows_no_columns_or_many_chunks_are_rows_too() -> None:
    empty = formats.from_arrow(pa.table({"x": pa.array([], pa.list_(pa.int8()))}), _numbers(0))
    assert formats.to_numpy(empty)["x"].shape[0] == 0
    assert formats.to_torch(empty)["x"].dtype == torch.int8  # type: ignore[union-attr]
    assert formats.row_dicts(empty) == []
    bare = Rows({}, _numbers(2))
    assert formats.row_dicts(bare) == [{}, {}]
    assert len(formats.to_pandas(bare)) == 2
    assert formats.to_torch(bare) == {}
    chunked: Any = pa.chunked_array(
        [pa.array(["a"]).dictionary_encode(), pa.array(["b"]).dictionary_encode()]
    )
    rows = formats.from_arrow(pa.table({"x": chunked}), _numbers(2))
    assert formats.to_numpy(rows)["x"].tolist() == ["a", "b"]


# --------------------------------------------------------------------------- pandas


def test_a_frame_has_arrays_for_lists_and_keeps_zones_and_nulls() -> None:
    moment = datetime.datetime(2020, 1, 2, tzinfo=_UTC)
    table = pa.table(
        {
            "zoned": pa.array([moment, None], pa.timestamp("us", "UTC")),
            "list": [[1, 2], [3, 4]],
            "ragged": [[1], [2, 3]],
            "text": ["a", None],
            "price": [decimal.Decimal("1.5"), None],
            "time": pa.array([1, 2], pa.time64("ns")),
        }
    )
    frame = formats.to_pandas(formats.from_arrow(table, _numbers(2)))
    assert frame["zoned"][0] == pd.Timestamp(moment)
    assert frame["list"][1].tolist() == [3, 4]
    assert frame["ragged"][1].tolist() == [2, 3]
    assert frame["text"].isna().tolist() == [False, True]
    assert frame["price"][0] == decimal.Decimal("1.5")
    assert frame["time"][1] == pd.Timedelta(2, "ns")
    back = formats.from_pandas(frame.drop(columns="time"), _numbers(2))
    assert formats.row_dicts(back)[0]["zoned"] == moment
    assert formats.row_dicts(back)[1]["text"] is None


def test_a_frame_of_any_dtype_becomes_rows() -> None:
    images = [np.zeros((2, 2)), np.ones((2, 2))]
    frame = pd.DataFrame(
        {"c": pd.Categorical(["a", "b"]), "i": pd.array([1, None], "Int64"), "image": images, 7: [1, 2]}
    )
    frame.index = [5, 3]
    rows = formats.from_pandas(frame, _numbers(2))
    assert list(rows.columns) == ["c", "i", "image", "7"]
    image: Any = rows.columns["image"]
    assert image.shape == (2, 2, 2)
    first, second = formats.row_dicts(rows)
    assert (first["c"], first["i"], second["i"]) == ("a", 1, None)


# --------------------------------------------------------------------------- tensors, collate functions


def test_dtypes_are_one_for_all_tensors_or_by_column() -> None:
    rows = _of(x=np.array([1, 2]), y=np.array([1.5, 2.5]), text=["a", "b"])
    made: Any = formats.to_torch(rows, torch.float16)
    assert (made["x"].dtype, made["y"].dtype, made["text"]) == (torch.float16, torch.float16, ["a", "b"])
    made = formats.to_torch(rows, {"x": torch.bfloat16})
    assert (made["x"].dtype, made["y"].dtype) == (torch.bfloat16, torch.float64)
    with pytest.raises(DataError, match="dtypes names the column 'z', and there are 'x', 'y', 'text'"):
        formats.to_torch(rows, {"z": torch.int8})
    with pytest.raises(DataError, match=r"column 'text' as torch\.int8, and it holds text"):
        formats.to_torch(rows, {"text": torch.int8})


def test_errors_name_the_row_by_its_number_in_the_data() -> None:
    with pytest.raises(DataError, match="Column 'x' is null in row 11"):
        formats.to_torch(_of(x=[1, None]))


def test_a_collate_fn_gets_the_batches_that_its_class_requires() -> None:
    class OfArrow(ArrowBatchCollateFn):
        def __call__(self, batch: pa.Table) -> Any:
            return type(batch), batch["x"].to_pylist()

    class OfNumpy(NumpyBatchCollateFn):
        def __call__(self, batch: dict[str, Any]) -> Any:
            return type(batch["x"]), batch["x"].tolist()

    class OfPandas(PandasBatchCollateFn):
        def __call__(self, batch: pd.DataFrame) -> Any:
            return type(batch), batch["x"].tolist()

    rows = _of(x=[1, 2])
    assert collate.collate(rows, OfArrow()) == (pa.Table, [1, 2])
    assert collate.collate(rows, OfNumpy()) == (np.ndarray, [1, 2])
    assert collate.collate(rows, OfPandas()) == (pd.DataFrame, [1, 2])
    assert collate.collate(rows, lambda batch: (type(batch["x"]), batch["x"].tolist())) == (
        np.ndarray,
        [1, 2],
    )


@pytest.mark.parametrize(
    "given", [torch.float16, "float16", "torch.float16", np.float16, np.dtype("float16")]
)
def test_types_of_tensors_may_be_named_and_be_those_of_numpy(given: Any) -> None:
    rows = _of(x=np.array([1, 2]))
    assert formats.to_torch(rows, given)["x"].dtype == torch.float16  # type: ignore[union-attr]
    assert formats.to_torch(rows, {"x": given})["x"].dtype == torch.float16  # type: ignore[union-attr]


@pytest.mark.parametrize("given", [5, "nn", str, np.str_, float])
def test_what_is_no_type_of_tensors_is_refused(given: Any) -> None:
    with pytest.raises(DataError, match=r"dtypes\['x'\]=.* is not a tensor dtype"):
        formats.to_torch(_of(x=[1]), {"x": given})


def test_two_columns_of_one_name_are_refused() -> None:
    frame = pd.concat([pd.DataFrame({"a": [1]}), pd.DataFrame({"a": [2]})], axis=1)
    with pytest.raises(DataError, match="A DataFrame has several columns named 'a'"):
        formats.from_pandas(frame, _numbers(1))
    with pytest.raises(DataError, match="An Arrow table has several columns named 'a'"):
        formats.from_arrow(pa.Table.from_arrays([pa.array([1])] * 2, names=["a", "a"]), _numbers(1))
