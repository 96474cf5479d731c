"""What each Arrow type becomes: seen where it lies, as numpy, as Python values, as tensors."""

from __future__ import annotations

import datetime
import decimal
import uuid
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from powertrain.data.rows.arrow_types import Named, plain, view
from powertrain.data.rows.to_arrow import arrow_of
from powertrain.data.rows.to_python import numpy_of, values_of
from powertrain.data.rows.to_tensors import tensor_of
from powertrain.errors import DataError

_UTC = datetime.timezone.utc


def _tensor(column: Any, **options: Any) -> Any:
    return tensor_of(column, Named("x", np.arange(len(column)) + 100), **options)


def _fixed_shape_tensor(values: Any, shape: tuple[int, ...], permutation: list[int] | None = None) -> Any:
    flat = np.asarray(values)
    size = int(np.prod(shape))
    storage = pa.FixedSizeListArray.from_arrays(pa.array(flat.reshape(-1)), size)
    kind = pa.fixed_shape_tensor(storage.type.value_type, shape, permutation=permutation)
    return pa.ExtensionArray.from_storage(kind, storage)


# --------------------------------------------------------------------------- views


@pytest.mark.parametrize(
    ("array", "dtype"),
    [
        (pa.array([1, 2, 3], pa.uint16()), "uint16"),
        (pa.array([1, 2, 3], pa.float16()), "float16"),
        (pa.array([1, 2, 3], pa.timestamp("us")), "datetime64[us]"),
        (pa.array([1, 2, 3], pa.duration("ms")), "timedelta64[ms]"),
    ],
)
def test_numbers_and_times_are_seen_where_they_lie(array: Any, dtype: str) -> None:
    for shown in (array, array.slice(1)):
        seen = view(shown)
        assert isinstance(seen, np.ndarray)
        assert seen.dtype == dtype
        assert not seen.flags.writeable
        assert seen.ctypes.data == shown.buffers()[1].address + shown.offset * seen.itemsize
        assert seen.astype(np.int64).tolist() == [1, 2, 3][len(array) - len(shown) :]


@pytest.mark.parametrize(
    ("array", "shape"),
    [
        (pa.array([[1, 2], [3, 4], [5, 6]]), (2, 2)),
        (pa.array([[1, 2], [3, 4], [5, 6]], pa.large_list(pa.int64())), (2, 2)),
        (pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int64(), 2)), (2, 2)),
        (pa.array([[[1], [2]], [[3], [4]], [[5], [6]]]), (2, 2, 1)),
        (pa.array([[[1], [2]], [[3], [4]], [[5], [6]]], pa.list_(pa.list_(pa.int64(), 1))), (2, 2, 1)),
        (pa.array([[], [], []], pa.list_(pa.int64())), (2, 0)),
        (_fixed_shape_tensor(np.arange(1, 7), (2, 1)), (2, 2, 1)),
    ],
)
def test_lists_of_one_length_are_stacked_without_a_copy(array: Any, shape: tuple[int, ...]) -> None:
    seen = view(array.slice(1))
    assert isinstance(seen, np.ndarray)
    assert seen.shape == shape
    assert seen.reshape(-1).tolist() == [3, 4, 5, 6][: seen.size]
    assert not seen.flags.writeable


def test_a_tensor_type_that_permutes_its_dimensions_is_seen_as_arrow_sees_it() -> None:
    array = _fixed_shape_tensor(np.arange(12), (2, 3), permutation=[1, 0])
    seen = view(array)
    assert isinstance(seen, np.ndarray)
    assert seen.tolist() == array.to_numpy_ndarray().tolist()
    assert _tensor(array).tolist() == seen.tolist()


def test_bools_are_unpacked_also_from_the_middle_of_a_byte() -> None:
    values = [True, False, False, True, True, False, True, False, True, True, True]
    assert view(pa.array(values).slice(3)).tolist() == values[3:]
    assert view(pa.array([values, values])).tolist() == [values, values]
    bool8 = pa.ExtensionArray.from_storage(pa.bool8(), pa.array([0, 2], pa.int8()))
    assert view(bool8).tolist() == [False, True]


@pytest.mark.parametrize(
    "array",
    [
        pa.array([1, None]),
        pa.array(["a"]),
        pa.array([b"a"]),
        pa.array([[1], [2, 3]]),
        pa.array([[1], None]),
        pa.array([[1, None], [2, 3]]),
        pa.array([[[1], [2, 3]]]),
        pa.array([{"a": 1}]),
        pa.array([1, 2], pa.decimal128(5, 2)),
        pa.array([1], pa.date32()),
        pa.array([1], pa.timestamp("us", "Europe/Berlin")),
        pa.array([[1]], pa.list_view(pa.int32())),
        pa.nulls(2),
    ],
)
def test_everything_else_stays_an_arrow_array(array: Any) -> None:
    assert view(array) is array


class _ShapedType(pa.ExtensionType):
    """As other libraries have them: flat lists, or lists of lists, and an attribute for the shape of a row."""

    def __init__(self, shape: tuple[int, ...], storage: Any) -> None:
        self.shape = shape
        super().__init__(storage, "tests.shaped")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""


def test_tensor_types_of_other_libraries_are_stacked() -> None:
    flat = pa.array([[1, 2, 3, 4, 5, 6]], pa.large_list(pa.int64()))
    nested = pa.array([[[1, 2, 3], [4, 5, 6]]])
    for storage in (flat, nested):
        array = pa.ExtensionArray.from_storage(_ShapedType((2, 3), storage.type), storage)
        assert view(array).tolist() == [[[1, 2, 3], [4, 5, 6]]]
        assert _tensor(array).tolist() == [[[1, 2, 3], [4, 5, 6]]]


def test_a_tensor_type_of_hugging_face_is_stacked() -> None:
    from datasets import Array2D, Features

    kind = Features({"x": Array2D((2, 3), "int32")}).arrow_schema.field("x").type
    theirs = pa.ExtensionArray.from_storage(kind, pa.array([[[1, 2, 3], [4, 5, 6]]], kind.storage_type))
    assert view(theirs).tolist() == [[[1, 2, 3], [4, 5, 6]]]


def test_plain_types_are_what_encoded_ones_hold() -> None:
    words = pa.array(["a", "b", "a"])
    lists = pa.ListArray.from_arrays(pa.array([0, 1, 3], pa.int32()), words.dictionary_encode())
    structs = pa.StructArray.from_arrays([words.dictionary_encode()], ["w"])
    cases: list[tuple[Any, Any]] = [
        (words.dictionary_encode(), pa.string()),
        (pc.call_function("run_end_encode", [words]), pa.string()),
        (words.cast(pa.string_view()), pa.string()),
        (lists, pa.list_(pa.string())),
        (structs, pa.struct([pa.field("w", pa.string())])),
        (pa.array([[1]], pa.list_view(pa.int32())), pa.list_(pa.int32())),
        (pa.array([[1], None, [2, 3]], pa.large_list_view(pa.int32())).slice(1), pa.large_list(pa.int32())),
        (pa.array([["a", None], None], pa.list_(pa.string_view(), 2)), pa.list_(pa.string(), 2)),
        (
            pa.array([{"v": [1]}, None], pa.struct([pa.field("v", pa.list_view(pa.int8()))])),
            pa.struct([pa.field("v", pa.list_(pa.int8()))]),
        ),
    ]
    for array, kind in cases:
        plain(array).validate(full=True)
        assert plain(array).type == kind
        assert plain(array).to_pylist() == array.to_pylist()


# --------------------------------------------------------------------------- to Arrow and back


@given(
    st.sampled_from(["int8", "uint64", "float32", "float16", "bool", "M8[us]", "m8[ns]", "M8[D]"]),
    st.lists(st.integers(0, 3), min_size=1, max_size=4),
)
def test_any_array_comes_back_from_arrow_as_it_went(dtype: str, shape: list[int]) -> None:
    values = np.arange(int(np.prod(shape))).astype(dtype).reshape(shape)
    array = arrow_of(values)
    assert len(array) == shape[0]
    back = numpy_of(array)
    if 0 not in shape:
        assert back.dtype == values.dtype
        assert back.tolist() == values.tolist()


def test_rows_of_one_dimension_are_lists_in_arrow_and_of_more_tensors() -> None:
    assert arrow_of(np.zeros((2, 3), np.int32)).type == pa.list_(pa.int32())
    assert arrow_of(np.zeros((2, 3, 4), np.uint8)).type == pa.fixed_shape_tensor(pa.uint8(), (3, 4))


def test_times_in_units_arrow_does_not_have_are_counted_in_seconds() -> None:
    assert arrow_of(np.array([2], "M8[h]")).to_pylist() == [datetime.datetime(1970, 1, 1, 2)]
    assert arrow_of(np.array([1], "m8[D]")).to_pylist() == [datetime.timedelta(days=1)]


def test_objects_without_an_arrow_type_are_refused_by_name() -> None:
    with pytest.raises(DataError, match="Column 'thing' cannot be an Arrow column"):
        arrow_of(np.array([object()], object), "thing")
    different = np.empty(2, object)
    different[:] = [np.zeros((1, 2)), np.ones((2, 1))]
    assert arrow_of(different).to_pylist() == [[[0.0, 0.0]], [[1.0], [1.0]]]


# --------------------------------------------------------------------------- to numpy and Python values


def _object(values: list[Any]) -> Any:
    array = np.empty(len(values), object)
    array[:] = values
    return array


_DAY = datetime.date(2020, 1, 2)
_MOMENT = datetime.datetime(2020, 1, 2, 3, 4, 5)


@pytest.mark.parametrize(
    ("array", "numpy", "values"),
    [
        (pa.array(["a", None]), _object(["a", None]), ["a", None]),
        (pa.array(["a", "b"], pa.large_string()), _object(["a", "b"]), ["a", "b"]),
        (pa.array(["a", "b"], pa.string_view()), _object(["a", "b"]), ["a", "b"]),
        (pa.array(["a", "b"]).dictionary_encode(), _object(["a", "b"]), ["a", "b"]),
        (pa.array([b"a", b"b"]), _object([b"a", b"b"]), [b"a", b"b"]),
        (pa.array([1, None]), _object([1, None]), [1, None]),
        (pa.array([True, None]), _object([True, None]), [True, None]),
        (pa.array([1.5, None]), np.array([1.5, np.nan]), [1.5, None]),
        (pa.array([1.5, None], pa.float16()), np.array([1.5, np.nan], np.float16), [1.5, None]),
        (pa.nulls(2), _object([None, None]), [None, None]),
        (pa.array([_DAY, None]), np.array([_DAY, None], "M8[D]"), [_DAY, None]),
        (pa.array([_DAY], pa.date64()), np.array([_DAY], "M8[D]"), [_DAY]),
        (pa.array([_MOMENT, None]), np.array([_MOMENT, None], "M8[us]"), [_MOMENT, None]),
        (
            pa.array([1, None], pa.duration("s")),
            np.array([1, "NaT"], "m8[s]"),
            [datetime.timedelta(0, 1), None],
        ),
        (
            pa.array([61, None], pa.time32("s")),
            np.array([61, "NaT"], "m8[s]"),
            [datetime.time(0, 1, 1), None],
        ),
        (pa.array([61_000], pa.time64("ns")), np.array([61_000], "m8[ns]"), [datetime.time(0, 0, 0, 61)]),
        (pa.array([decimal.Decimal("1.50")]), _object([decimal.Decimal("1.50")]), [decimal.Decimal("1.50")]),
        (pa.array([{"a": 1}, None]), _object([{"a": 1}, None]), [{"a": 1}, None]),
        (pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int32())), _object([[("k", 1)]]), [[("k", 1)]]),
    ],
)
def test_columns_as_numpy_and_as_python_values(array: Any, numpy: Any, values: list[Any]) -> None:
    made = numpy_of(array)
    assert made.dtype == numpy.dtype
    np.testing.assert_array_equal(made, numpy)
    assert made.flags.writeable
    assert values_of(array) == values
    assert [type(value) for value in values_of(array)] == [type(value) for value in values]


def test_times_with_a_zone_are_utc_in_numpy_and_keep_it_in_python() -> None:
    moment = _MOMENT.replace(tzinfo=_UTC)
    array = pa.array([moment], pa.timestamp("us", "Europe/Berlin"))
    assert numpy_of(array).tolist() == [_MOMENT]
    assert values_of(array) == [moment]


def test_lists_are_arrays_whatever_their_neighbours_are() -> None:
    rows = [[1, 2], [3], None, [], [4, None]]
    made = values_of(pa.array(rows).slice(1))
    assert [None if row is None else row.tolist() for row in made] == rows[1:]
    assert [None if row is None else row.dtype.str for row in made] == ["<i8", None, "<i8", "|O"]
    nested = values_of(pa.array([[[1, 2], [3, 4]], [[5], [6, 7]], [[8, 9]]]))
    assert [row.shape for row in nested] == [(2, 2), (2,), (1, 2)]
    assert nested[1][1].tolist() == [6, 7]
    words = numpy_of(pa.array([["a"], ["b", "c"]]))
    assert [row.tolist() for row in words] == [["a"], ["b", "c"]]


def test_nulls_within_lists_of_one_length_are_nan() -> None:
    made = numpy_of(pa.array([[1.5, None], [2.5, 3.5]]))
    np.testing.assert_array_equal(made, [[1.5, np.nan], [2.5, 3.5]])


def test_structs_hold_arrays_for_lists_and_lists_of_structs_hold_dicts() -> None:
    made = values_of(pa.array([{"a": [1, 2], "b": "x"}, {"a": [3], "b": None}]).slice(1))
    assert made[0]["a"].tolist() == [3]
    assert made[0]["b"] is None
    assert values_of(pa.array([[{"a": 1}], []]))[0].tolist() == [{"a": 1}]
    assert values_of(pa.array([{}, {}], pa.struct([]))) == [{}, {}]


def test_nanoseconds_are_not_lost_in_python_values() -> None:
    import pandas as pd

    assert values_of(np.array([1], "M8[ns]")) == [pd.Timestamp(1)]
    assert values_of(np.array(["2020-01-02"], "M8[D]")) == [_DAY]


def test_an_extension_without_a_shape_is_its_storage() -> None:
    number = uuid.UUID(int=7)
    array = pa.array([number.bytes], pa.binary(16))
    assert numpy_of(pa.ExtensionArray.from_storage(pa.uuid(), array)).tolist() == [number.bytes]


# --------------------------------------------------------------------------- to tensors


@pytest.mark.parametrize(
    ("column", "dtype", "values"),
    [
        (pa.array([1, 2], pa.int8()), torch.int8, [1, 2]),
        (pa.array([1, 2], pa.uint8()), torch.uint8, [1, 2]),
        (pa.array([1, 2**16 - 1], pa.uint16()), torch.int32, [1, 2**16 - 1]),
        (pa.array([1, 2**32 - 1], pa.uint32()), torch.int64, [1, 2**32 - 1]),
        (pa.array([1, 2**63 - 1], pa.uint64()), torch.int64, [1, 2**63 - 1]),
        (pa.array([1, 2], pa.float16()), torch.float16, [1, 2]),
        (pa.array([1.5], pa.float64()), torch.float64, [1.5]),
        (pa.array([True, False]), torch.bool, [True, False]),
        (pa.array([3, 4, 3]).dictionary_encode(), torch.int64, [3, 4, 3]),
        (pa.array([[1, 2], [3, 4]], pa.list_(pa.int32())), torch.int32, [[1, 2], [3, 4]]),
        (pa.array([[[1], [2]]]), torch.int64, [[[1], [2]]]),
        (pa.array([decimal.Decimal("1.25")]), torch.float64, [1.25]),
        (pa.array([[decimal.Decimal("1.25")]]), torch.float64, [[1.25]]),
        (pa.array([1, 2], pa.timestamp("ms")), torch.int64, [10**6, 2 * 10**6]),
        (pa.array([1], pa.timestamp("s", "Asia/Tokyo")), torch.int64, [10**9]),
        (pa.array([[1]], pa.list_(pa.timestamp("us"))), torch.int64, [[1000]]),
        (pa.array([3], pa.duration("us")), torch.int64, [3000]),
        (pa.array([2], pa.time32("s")), torch.int64, [2 * 10**9]),
        (pa.array([7], pa.date32()), torch.int64, [7]),
        (pa.array([7 * 86_400_000], pa.date64()), torch.int64, [7]),
        (np.array([1], "M8[h]"), torch.int64, [3600 * 10**9]),
        (np.array([[1.5]], np.float32), torch.float32, [[1.5]]),
        (pa.array([], pa.list_(pa.int32())), torch.int32, []),
    ],
)
def test_columns_as_tensors(column: Any, dtype: torch.dtype, values: list[Any]) -> None:
    made = _tensor(column)
    assert made.dtype == dtype
    assert made.tolist() == values


def test_text_and_bytes_are_lists() -> None:
    assert _tensor(pa.array(["a", "b"])) == ["a", "b"]
    assert _tensor(pa.array([b"a"])) == [b"a"]
    assert _tensor(pa.array([["a"], []], pa.list_(pa.string()))) == [["a"], []]
    assert _tensor(pa.array(["a"]).dictionary_encode()) == ["a"]
    assert _tensor(np.array(["a", "b"], object)) == ["a", "b"]


def test_structs_are_dicts_of_tensors() -> None:
    array = pa.array(
        [{"a": 1, "b": {"c": [1.5, 2.5], "d": "x"}}, {"a": 2, "b": {"c": [3.5, 4.5], "d": "y"}}]
    ).slice(1)
    made = _tensor(array)
    assert made["a"].tolist() == [2]
    assert made["b"]["c"].tolist() == [[3.5, 4.5]]
    assert made["b"]["d"] == ["y"]


def test_a_dtype_is_that_of_every_tensor_and_python_floats_get_torchs_default() -> None:
    array = pa.array([{"a": 1.5, "b": 1}])
    assert {tensor.dtype for tensor in _tensor(array, dtype=torch.bfloat16).values()} == {torch.bfloat16}
    made = _tensor(array, python_floats=True)
    assert (made["a"].dtype, made["b"].dtype) == (torch.float32, torch.int64)
    assert _tensor(pa.array([7], pa.uint16()), dtype=torch.uint16).dtype == torch.uint16
    assert _tensor(np.array([1.5], np.float16), python_floats=True).dtype == torch.float16


def test_tensors_own_their_memory() -> None:
    array = pa.array([1, 2])
    _tensor(array).add_(1)
    assert array.to_pylist() == [1, 2]
    ours = np.array([1, 2])
    _tensor(ours).add_(1)  # a batch's own memory is handed on, not copied
    assert ours.tolist() == [2, 3]
    backwards = np.arange(3)[::-1]
    assert _tensor(backwards).tolist() == [2, 1, 0]


@pytest.mark.parametrize(
    ("array", "name", "row"),
    [
        (pa.array([1, None]), "x", 101),
        (pa.array(["a", None]), "x", 101),
        (pa.array([[1, 2], None], pa.list_(pa.int32(), 2)), "x", 101),
        (pa.array([{"a": 1}, None]), "x", 101),
        (pa.nulls(1), "x", 100),
        (np.array(["2020-01-01", "NaT"], "M8[s]"), "x", 101),
        (np.array([b"a", None], object), "x", 101),
    ],
)
def test_nulls_are_refused_naming_column_and_row(array: Any, name: str, row: int) -> None:
    with pytest.raises(DataError, match=f"Column '{name}' is null in row {row}, .*fill_null"):
        _tensor(array)


@pytest.mark.parametrize(
    ("array", "problem", "advice"),
    [
        (
            pa.array([{"a": 1}, {"a": None}]),
            "Column 'x.a' is null in row 101",
            "filter(expr=pyarrow.compute.field('x', 'a').is_valid())",
        ),
        (
            pa.array([[1], [2], [None]]),
            "Column 'x' has a null in the list of row 102",
            "lambda row: None not in row['x']",
        ),
        (
            pa.array([{"a": [1]}, {"a": [None]}]),
            "Column 'x.a' has a null in the list of row 101",
            "lambda row: None not in row['x']['a']",
        ),
        (
            pa.array([[[1]], [], [[2], [None]]]).slice(1),
            "Column 'x' has a null in the list of row 101",
            "leave such rows out by a function given to filter();",
        ),
    ],
)
def test_of_nulls_inside_of_structs_and_lists_it_is_said_what_helps_there(
    array: Any, problem: str, advice: str
) -> None:
    with pytest.raises(DataError) as raised:
        _tensor(array)
    assert str(raised.value).startswith(problem)
    assert advice in str(raised.value)


def test_lists_of_different_lengths_are_refused_naming_two_rows_and_the_way_out() -> None:
    with pytest.raises(DataError, match=r"Column 'x' .* 2 in row 100, 3 in row 102") as caught:
        _tensor(pa.array([[1, 2], [3, 4], [5, 6, 7]]))
    assert "collate_fn=powertrain.data.collate_fn.pad(" in str(caught.value)
    assert "collate_fn=powertrain.data.collate_fn.ragged()" in str(caught.value)
    with pytest.raises(DataError, match=r"1 in row 100, 2 in row 101"):
        _tensor(pa.array([[[1], [2]], [[3], [4, 5]]]))
    images = _object([np.zeros((2, 3)), np.zeros((3, 2))])
    with pytest.raises(DataError, match=r"\(2, 3\) in row 100, \(3, 2\) in row 101"):
        _tensor(images)


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int32())), "map<string, int32"),
        (pa.array([[{"a": 1}]]), "list<item: struct<a: int64>>"),
        (_object([object()]), "Python objects"),
        (np.array([2**63], np.uint64), "9223372036854775808 in row 100"),
        (np.array(["2900-01-01"], "M8[s]"), "too far from 1970"),
        (np.zeros(1, "V4"), "numpy type"),
    ],
)
def test_what_no_tensor_can_hold_is_refused_with_the_reason(array: Any, said: str) -> None:
    with pytest.raises(DataError, match="Column 'x'") as caught:
        _tensor(array)
    assert said in str(caught.value)


def test_objects_that_are_arrays_or_tensors_of_one_shape_are_stacked() -> None:
    assert _tensor(_object([torch.ones(2), torch.zeros(2)])).tolist() == [[1, 1], [0, 0]]


def test_of_images_of_different_sizes_it_is_said_what_makes_them_one() -> None:
    images = np.empty(2, object)
    images[:] = [np.zeros((2, 3, 3), np.uint8), np.zeros((4, 1, 3), np.uint8)]
    with pytest.raises(DataError) as raised:
        _tensor(images)
    assert "(2, 3, 3) in row 100, (4, 1, 3) in row 101" in str(raised.value)
    assert "size=(height, width) and mode='RGB' in read_images() or decode_images()" in str(raised.value)
