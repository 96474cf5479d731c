"""Gathering rows from many blocks: the same as picking them one by one, into memory of the batch's own."""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.examples import scaled

from powertrain.data.rows.formats import row_dicts, to_arrow
from powertrain.data.rows.gather import BlockView, concat_rows, gather, take_rows
from powertrain.data.rows.rows import Rows
from powertrain.data.sources.base import PYTHON_FLOATS
from powertrain.errors import DataError

_INTS = st.integers(-100, 100)
_LISTS = st.lists(_INTS, max_size=4)
_TIMES = st.datetimes(datetime.datetime(1980, 1, 1), datetime.datetime(2030, 1, 1))


def _or_null(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | values


#: Types of a column, and values for it.
_COLUMNS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "int8": (pa.int8(), _INTS),
    "int64": (pa.int64(), _INTS),
    "nullable": (pa.int64(), _or_null(_INTS)),
    "float32": (pa.float32(), st.floats(width=32, allow_nan=False)),
    "float16": (pa.float16(), st.floats(width=16, allow_nan=False)),
    "bool": (pa.bool_(), st.booleans()),
    "nullable bool": (pa.bool_(), _or_null(st.booleans())),
    "bools": (pa.list_(pa.bool_()), st.lists(st.booleans(), min_size=2, max_size=2)),
    "text": (pa.string(), _or_null(st.text(max_size=5))),
    "large text": (pa.large_string(), st.text(max_size=5)),
    "text view": (pa.string_view(), st.text(max_size=20)),
    "binary": (pa.binary(), st.binary(max_size=4)),
    "fixed binary": (pa.binary(2), st.binary(min_size=2, max_size=2)),
    "ragged": (pa.list_(pa.int32()), _LISTS),
    "large ragged": (pa.large_list(pa.float64()), st.lists(st.floats(allow_nan=False), max_size=3)),
    "nullable lists": (pa.list_(pa.int32()), _or_null(st.lists(_or_null(_INTS), max_size=3))),
    "uniform": (pa.list_(pa.int16()), st.lists(_INTS, min_size=3, max_size=3)),
    "fixed": (pa.list_(pa.int32(), 2), st.lists(_INTS, min_size=2, max_size=2)),
    "nested": (pa.list_(pa.list_(pa.int32())), st.lists(_LISTS, max_size=3)),
    "list view": (pa.list_view(pa.int32()), _LISTS),
    "words": (pa.list_(pa.string()), st.lists(st.text(max_size=3), max_size=3)),
    "struct": (
        pa.struct([pa.field("a", pa.int32()), pa.field("b", pa.list_(pa.string()))]),
        _or_null(
            st.fixed_dictionaries({"a": _or_null(_INTS), "b": st.lists(st.text(max_size=2), max_size=2)})
        ),
    ),
    "structs": (
        pa.list_(pa.struct([pa.field("a", pa.int32())])),
        st.lists(st.fixed_dictionaries({"a": _INTS}), max_size=2),
    ),
    "map": (pa.map_(pa.string(), pa.int32()), st.lists(st.tuples(st.text(max_size=2), _INTS), max_size=2)),
    "codes": (pa.dictionary(pa.int8(), pa.string()), _or_null(st.sampled_from(["a", "b", "c"]))),
    "number codes": (pa.dictionary(pa.int8(), pa.int64()), st.sampled_from([7, 8, 9])),
    "decimal": (pa.decimal128(9, 2), st.decimals(-99, 99, places=2).map(decimal.Decimal)),
    "date": (pa.date32(), _or_null(st.dates())),
    "time": (pa.time64("us"), st.times()),
    "stamp": (pa.timestamp("us"), _TIMES),
    "zoned": (
        pa.timestamp("us", "UTC"),
        _or_null(_TIMES.map(lambda t: t.replace(tzinfo=datetime.timezone.utc))),
    ),
    "null": (pa.null(), st.none()),
}


@st.composite
def _blocks(draw: st.DrawFn) -> list[list[pa.RecordBatch]]:
    """Blocks of up to three batches of up to five rows, some of them slices of longer ones."""
    names = draw(st.lists(st.sampled_from(sorted(_COLUMNS)), min_size=1, max_size=3, unique=True))

    def batch() -> pa.RecordBatch:
        rows, before = draw(st.integers(0, 5)), draw(st.integers(0, 2))
        arrays = []
        for name in names:
            kind, values = _COLUMNS[name]
            drawn = draw(st.lists(values, min_size=rows + before + 1, max_size=rows + before + 1))
            arrays.append(pa.array(drawn, type=kind).slice(before, rows))
        return pa.record_batch(arrays, names=names)

    return [[batch() for _ in range(draw(st.integers(1, 3)))] for _ in range(draw(st.integers(1, 4)))]


def _rows_of(batches: Sequence[pa.RecordBatch]) -> list[dict[str, Any]]:
    return [row for batch in batches for row in batch.to_pylist()]


def _python(value: Any) -> Any:
    """The same with lists for arrays."""
    if isinstance(value, np.ndarray):
        return [_python(item) for item in value.tolist()]
    if isinstance(value, dict):
        return {key: _python(item) for key, item in value.items()}
    return [_python(item) for item in value] if isinstance(value, list) else value


def _assert_own_memory(rows: Rows) -> None:
    for column in rows.columns.values():
        if isinstance(column, np.ndarray):
            assert column.flags.writeable


#: The first Arrow array of a process imports pandas, which Hypothesis would take for a slow strategy.
_SLOW_START = [HealthCheck.too_slow]


@settings(max_examples=scaled(120), suppress_health_check=_SLOW_START)
@given(st.data(), _blocks(), st.booleans())
def test_gathers_what_picking_row_by_row_gives(
    data: st.DataObject, blocks: list[list[pa.RecordBatch]], grouped: bool
) -> None:
    places = [(at, row) for at, block in enumerate(blocks) for row in range(sum(b.num_rows for b in block))]
    wanted = data.draw(st.lists(st.sampled_from(places), max_size=30) if places else st.just([]))
    if grouped:
        wanted.sort(key=lambda place: place[0])
    which, offsets = (
        np.array([at for at, _ in wanted], np.int64),
        np.array([row for _, row in wanted], np.int64),
    )
    numbers = np.arange(len(wanted)) * 3

    rows = gather([BlockView(block) for block in blocks], which, offsets, numbers)

    naive = [_rows_of(blocks[at])[row] for at, row in wanted]
    assert _python(row_dicts(rows)) == naive
    assert rows.numbers.tolist() == numbers.tolist()
    assert list(rows.columns) == blocks[0][0].schema.names
    _assert_own_memory(rows)


@settings(suppress_health_check=_SLOW_START)
@given(st.data(), _blocks())
def test_taking_and_joining_rows_keeps_each_row(
    data: st.DataObject, blocks: list[list[pa.RecordBatch]]
) -> None:
    views = [BlockView(block) for block in blocks]
    parts = []
    for at, view in enumerate(views):
        offsets = np.arange(view.rows)
        parts.append(gather(views, np.full(view.rows, at), offsets, offsets + 100 * at))
    joined = concat_rows(parts)
    naive = [row for block in blocks for row in _rows_of(block)]
    assert _python(row_dicts(joined)) == naive

    indices = data.draw(st.lists(st.integers(0, len(naive) - 1), max_size=10) if naive else st.just([]))
    taken = take_rows(joined, np.array(indices, np.int64))
    assert _python(row_dicts(taken)) == [naive[index] for index in indices]
    assert taken.numbers.tolist() == joined.numbers[indices].tolist()


def _one(array: Any, name: str = "x") -> BlockView:
    return BlockView([pa.record_batch([array], names=[name])])


def _of_columns(columns: dict[str, Any]) -> BlockView:
    return BlockView([pa.record_batch(columns)])


def _all_rows(*views: BlockView) -> Rows:
    which = np.repeat(np.arange(len(views)), [view.rows for view in views])
    offsets = np.concatenate([np.arange(view.rows) for view in views])
    return gather(views, which, offsets, offsets)


def test_numbers_come_as_numpy_and_lists_of_one_length_stacked() -> None:
    kinds: dict[str, Any] = {
        "int": pa.array([1, 2], pa.int32()),
        "half": pa.array([1, 2], pa.float16()),
        "bool": pa.array([True, False]),
        "stamp": pa.array([1, 2], pa.timestamp("ns")),
        "list": pa.array([[1, 2, 3], [4, 5, 6]], pa.list_(pa.int32())),
        "nested": pa.array([[[1, 2]], [[3, 4]]], pa.list_(pa.list_(pa.int64(), 2))),
        "codes": pa.array([5, 6], pa.int64()).dictionary_encode(),
    }
    rows = _all_rows(*[BlockView([pa.record_batch(kinds)])] * 2)
    columns: Mapping[str, Any] = rows.columns
    found = {name: (column.dtype.str, column.shape) for name, column in columns.items()}
    assert found == {
        "int": ("<i4", (4,)),
        "half": ("<f2", (4,)),
        "bool": ("|b1", (4,)),
        "stamp": ("<M8[ns]", (4,)),
        "list": ("<i4", (4, 3)),
        "nested": ("<i8", (4, 1, 2)),
        "codes": ("<i8", (4,)),
    }


def test_a_column_that_is_stacked_in_one_block_and_ragged_in_another_comes_ragged() -> None:
    three = _one(pa.array([[1, 2, 3], [4, 5, 6]]))
    assert isinstance(_all_rows(three, three).columns["x"], np.ndarray)
    for other in ([[1, 2], [3, 4]], [[1], [2, 3, 4]], [[1, 2, 3], None]):
        column = _all_rows(three, _one(pa.array(other))).columns["x"]
        assert isinstance(column, pa.Array)
        assert column.to_pylist() == [[1, 2, 3], [4, 5, 6], *other]


def test_nested_lists_of_one_shape_in_one_block_are_joined_with_others() -> None:
    stacked, other = [[[1, 2], [3, 4]]], [[[5], [6, 7]], []]
    rows = _all_rows(_one(pa.array(stacked)), _one(pa.array(other)), _one(pa.array(stacked)))
    column: Any = rows.columns["x"]
    assert column.to_pylist() == [*stacked, *other, *stacked]


def test_tensors_of_different_shapes_are_joined_as_one_array_per_row() -> None:
    rows = concat_rows([Rows({"x": np.full(shape, 7)}, np.arange(1)) for shape in ((1, 2, 3), (1, 3, 2))])
    assert [row.shape for row in rows.columns["x"]] == [(2, 3), (3, 2)]


def test_a_column_with_nulls_in_one_block_only_keeps_them() -> None:
    column = _all_rows(_one(pa.array([1, 2])), _one(pa.array([None, 3]))).columns["x"]
    assert isinstance(column, pa.Array)
    assert column.to_pylist() == [1, 2, None, 3]


def test_numbers_of_different_types_become_one_type_and_text_among_them_is_refused() -> None:
    column = _all_rows(_one(pa.array([1, 2], pa.int32())), _one(pa.array([0.5]))).columns["x"]
    assert isinstance(column, np.ndarray)
    assert column.tolist() == [1.0, 2.0, 0.5]
    with pytest.raises(
        DataError, match=r"Column 'x' has values of types that cannot be made one: int64, string"
    ):
        _all_rows(_one(pa.array([1])), _one(pa.array(["a"])))


def test_bools_do_not_become_numbers_when_joined_with_numbers() -> None:
    with pytest.raises(DataError, match="bool, int64"):
        _all_rows(_one(pa.array([True])), _one(pa.array([1])))


def test_blocks_with_different_columns_are_refused() -> None:
    with pytest.raises(DataError, match="different columns: x in one place, y in another"):
        _all_rows(_one(pa.array([1]), "x"), _one(pa.array([1]), "y"))


def test_blocks_may_have_their_columns_in_another_order() -> None:
    one = _of_columns({"a": pa.array([1]), "b": pa.array(["x"])})
    other = _of_columns({"b": pa.array(["y"]), "a": pa.array([2])})
    assert to_arrow(_all_rows(one, other)).to_pylist() == [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]


def test_only_the_columns_that_were_asked_for_are_there() -> None:
    batch = pa.record_batch({"a": pa.array([1]), "b": pa.array([2])})
    assert BlockView([batch], ["b"]).names == ("b",)
    with pytest.raises(DataError, match="There is no column 'c' in a block of the data, which has a, b"):
        BlockView([batch], ["c"])


def test_the_result_does_not_touch_the_memory_map(tmp_path: Path) -> None:
    batch = pa.record_batch({"x": pa.array([[1, 2], [3, 4]]), "y": pa.array([1.5, 2.5])})
    path = str(tmp_path / "block.arrow")
    with pa.OSFile(path, "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    with pa.memory_map(path) as mapped:
        view = BlockView([pa.ipc.open_file(mapped).get_batch(0)])
        rows = _all_rows(view)
        for name, column in rows.columns.items():
            assert isinstance(column, np.ndarray)
            held = view.pieces[0].columns[name]
            assert not np.shares_memory(column, held)
            assert not held.flags.writeable
            column += 1  # would end the process if it were the file's memory
        again = _all_rows(view)
        assert again.columns["x"].tolist() == [[1, 2], [3, 4]]
        del view, rows, again, held, column


def test_a_row_outside_its_block_is_an_error_and_not_the_nearest_row() -> None:
    view = _one(pa.array([1, 2]))
    for which, offset in ((0, 2), (0, -1), (-1, 0), (1, 0)):
        with pytest.raises(IndexError):
            gather([view], np.array([which]), np.array([offset]), np.array([0]))


def test_no_rows_have_the_columns_of_the_block() -> None:
    none = np.zeros(0, np.int64)
    view = BlockView([pa.record_batch({"a": pa.array([[1, 2]], pa.list_(pa.int32())), "b": pa.array(["x"])})])
    rows = gather([view], none, none, none)
    columns: Mapping[str, Any] = rows.columns
    assert columns["a"].shape == (0, 2)
    assert columns["b"].type == pa.string()
    assert len(gather([], none, none, none)) == 0
    assert len(gather([BlockView([])], none, none, none)) == 0


def test_empty_blocks_among_others_do_no_harm() -> None:
    empty = BlockView([])
    no_rows = _one(pa.array([], pa.list_(pa.int64())))
    full = _one(pa.array([[1, 2], [3, 4]]))
    which, offsets = np.array([2, 2, 3]), np.array([1, 0, 1])
    rows = gather([empty, no_rows, full, full], which, offsets, offsets)
    assert rows.columns["x"].tolist() == [[3, 4], [1, 2], [3, 4]]


def test_a_batch_without_columns_still_has_its_rows() -> None:
    batch = pa.record_batch({"x": pa.array([1, 2, 3])})
    rows = gather([BlockView([batch], [])], np.zeros(2, np.int64), np.array([2, 0]), np.array([12, 10]))
    assert len(rows) == 2
    assert rows.columns == {}


def test_the_mark_of_python_floats_is_kept_where_all_blocks_have_it() -> None:
    marked = pa.field("x", pa.float64(), metadata=dict([PYTHON_FLOATS]))
    ours = BlockView([pa.record_batch([pa.array([0.5])], schema=pa.schema([marked]))])
    assert _all_rows(ours, ours).python_floats == {"x"}
    assert _all_rows(ours, _one(pa.array([0.5]))).python_floats == frozenset()


def test_rows_that_are_joined_must_have_the_same_columns() -> None:
    number = np.array([0])
    with pytest.raises(DataError, match="different columns: a in one place, b in another"):
        concat_rows([Rows({"a": np.array([1])}, number), Rows({"b": np.array([1])}, number)])
    assert list(concat_rows([Rows({}, number[:0]), Rows({"b": np.array([1])}, number)]).columns) == ["b"]


def test_objects_that_arrow_has_no_type_for_are_joined_as_objects() -> None:
    thing = object()
    objects = np.array([thing, None], object)
    rows = concat_rows([Rows({"a": objects}, np.arange(2)), Rows({"a": np.array([1])}, np.arange(1))])
    assert rows.columns["a"].tolist() == [thing, None, 1]


def test_columns_in_another_order_are_distinguished_although_their_forms_look_alike() -> None:
    one = _of_columns({"a": pa.array(["x"]), "b": pa.array([1])})
    other = _of_columns({"b": pa.array([None], pa.int64()), "a": pa.array(["y"])})
    assert to_arrow(_all_rows(one, other)).to_pylist() == [{"a": "x", "b": 1}, {"a": "y", "b": None}]


@given(
    st.lists(st.lists(st.none() | st.text(max_size=5), min_size=1, max_size=6), min_size=1, max_size=4),
    st.data(),
)
def test_text_as_python_strings_is_what_arrow_would_give(
    blocks: list[list[str | None]], data: st.DataObject
) -> None:
    kinds = st.sampled_from([pa.string(), pa.large_string()])
    arrays = [pa.array(["before", *texts], data.draw(kinds))[1:] for texts in blocks]
    views = [BlockView([pa.record_batch({"text": array})]) for array in arrays]
    picks = data.draw(st.lists(st.integers(0, len(blocks) - 1), min_size=1, max_size=20))
    rows = [data.draw(st.integers(0, len(blocks[block]) - 1)) for block in picks]
    found = gather(views, np.array(picks), np.array(rows), np.arange(len(picks)), python_text=True)
    expected = [blocks[block][row] for block, row in zip(picks, rows, strict=True)]
    assert found.columns["text"].tolist() == expected
