"""Tables of one schema: what fits is made to fit, and what does not is named."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from powertrain.data.output.tables import (
    as_type,
    conformed,
    first_rows,
    pieces_by_bytes,
    pieces_by_rows,
    widened,
)
from powertrain.errors import DataError


def column(array: pa.Array[Any]) -> Any:
    return pa.chunked_array([array])


# -- types


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        (pa.int64(), pa.float64(), pa.float64()),
        (pa.null(), pa.string(), pa.string()),
        (pa.int8(), pa.int32(), pa.int32()),
        (pa.list_(pa.int64(), 3), pa.list_(pa.int64()), pa.list_(pa.int64())),
        (pa.list_(pa.int64()), pa.list_(pa.float32()), pa.list_(pa.float64())),
        (pa.fixed_shape_tensor(pa.uint8(), (2, 3)), pa.fixed_shape_tensor(pa.uint8(), (3, 3)), None),
        (pa.fixed_shape_tensor(pa.uint8(), (2, 3)), pa.list_(pa.list_(pa.uint8())), None),
    ],
)
def test_two_types_are_widened_to_one_that_fits_both(one: Any, other: Any, both: Any) -> None:
    expected = pa.list_(pa.list_(pa.uint8())) if both is None else both
    for left, right in ((one, other), (other, one)):
        assert widened(pa.schema([("c", left)]), pa.schema([("c", right)])).field("c").type == expected


def test_types_that_have_nothing_in_common_are_refused_by_column() -> None:
    with pytest.raises(DataError, match="'c' has the type int64 in some rows and string in others"):
        widened(pa.schema([("c", pa.int64())]), pa.schema([("c", pa.string())]))


def test_marks_of_a_column_stay_where_both_have_them() -> None:
    marked = pa.schema([pa.field("c", pa.float64(), metadata={"mark": "1"})])
    plain = pa.schema([("c", pa.float64())])
    assert widened(marked, marked).field("c").metadata == {b"mark": b"1"}
    assert widened(marked, plain).field("c").metadata is None
    assert widened(pa.schema([("c", pa.null())]), marked).field("c").metadata == {b"mark": b"1"}


@given(st.integers(0, 4), st.lists(st.integers(0, 3), min_size=2, max_size=3))
def test_tensors_become_nested_lists_and_back(rows: int, shape: list[int]) -> None:
    values = np.arange(rows * int(np.prod(shape))).reshape(rows, *shape)
    kind: Any = pa.fixed_shape_tensor(pa.int64(), shape)
    flat: Any = pa.array(values.reshape(-1))
    storage: Any = pa.FixedSizeListArray.from_arrays(flat, type=kind.storage_type) if values.size else None
    if storage is None:
        storage = (
            pa.array([[]] * rows, kind.storage_type)
            if not np.prod(shape)
            else pa.array([], kind.storage_type)
        )
    array = column(pa.ExtensionArray.from_storage(kind, storage))
    nested: Any = pa.int64()
    for _ in shape:
        nested = pa.list_(nested)
    lists = as_type(array, nested)
    assert lists.to_pylist() == values.tolist()
    if values.size:
        assert as_type(lists, kind).to_pylist() == array.to_pylist()


def test_lists_of_another_shape_are_no_tensors() -> None:
    ragged = column(pa.array([[[1, 2], [3]]]))
    with pytest.raises(pa.ArrowInvalid):
        as_type(ragged, pa.fixed_shape_tensor(pa.int64(), (2, 2)))


def test_a_table_with_other_columns_is_refused() -> None:
    with pytest.raises(DataError, match=r"\['a'\] and others \['b'\]"):
        conformed(pa.table({"b": [1]}), pa.schema([("a", pa.int64())]), "")


def test_values_that_do_not_fit_are_refused_with_advice() -> None:
    with pytest.raises(DataError, match=r"'a' has the type int64.*double.*Do this\."):
        conformed(pa.table({"a": [0.5]}), pa.schema([("a", pa.int64())]), "Do this.")


# -- pieces


@st.composite
def some_tables(draw: st.DrawFn) -> list[pa.Table]:
    counts = draw(st.lists(st.integers(1, 7), max_size=6))
    ends = np.cumsum([0, *counts])
    return [pa.table({"id": pa.array(np.arange(low, high))}) for low, high in itertools.pairwise(ends)]


def ids(tables: Any) -> list[int]:
    return [number for table in tables for number in table.column("id").to_pylist()]


@given(some_tables(), st.integers(1, 100), st.integers(0, 5), st.none() | st.integers(5, 9))
def test_pieces_by_bytes_keep_rows_in_order_and_within_bounds(
    tables: list[pa.Table], nbytes: int, fewest: int, most: int | None
) -> None:
    pieces = list(pieces_by_bytes(tables, nbytes, fewest=fewest, most=most))
    assert ids(pieces) == ids(tables)
    assert all(piece.num_rows for piece in pieces)
    assert all(piece.num_rows >= fewest for piece in pieces[:-1])
    assert most is None or all(piece.num_rows <= most for piece in pieces)


@given(some_tables(), st.data())
def test_pieces_by_rows_have_exactly_the_sizes(tables: list[pa.Table], data: st.DataObject) -> None:
    rows = len(ids(tables))
    cuts = sorted(data.draw(st.lists(st.integers(0, rows), max_size=4)))
    sizes = np.diff([0, *cuts, rows]).tolist()
    if not tables:
        return
    pieces = list(pieces_by_rows(tables, sizes))
    assert [piece.num_rows for piece in pieces] == sizes
    assert ids(pieces) == ids(tables)


@given(some_tables(), st.integers(0, 50))
def test_the_first_rows_are_a_slice(tables: list[pa.Table], count: int) -> None:
    assert ids(first_rows(tables, count)) == ids(tables)[:count]
