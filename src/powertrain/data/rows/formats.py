"""Rows in user-facing formats: numpy, pandas, Arrow, dicts of Python values, tensors; and back.

The conversion of each type of column is the table at the head of :mod:`powertrain.data.rows`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from powertrain.data.arguments import keyword_arguments, shown
from powertrain.data.plan.order import Ints
from powertrain.data.rows.arrow_types import (
    ArrowArray,
    Named,
    NumpyArray,
    is_list,
    object_array,
    rows_are_lists,
    view,
)
from powertrain.data.rows.nesting import check_nesting
from powertrain.data.rows.pixels_of import as_numpy
from powertrain.data.rows.rows import Column, Rows
from powertrain.data.rows.to_arrow import arrow_of
from powertrain.data.rows.to_python import numpy_of, row_values, values_of
from powertrain.data.rows.to_tensors import tensor_of
from powertrain.data.sources.base import ARRAYS
from powertrain.errors import DataError

if TYPE_CHECKING:
    import pandas as pd
    import torch


def to_numpy(rows: Rows) -> dict[str, NumpyArray]:
    """Return one writable array per column."""
    return {name: numpy_of(column) for name, column in rows.columns.items()}


def to_arrow(rows: Rows) -> pa.Table:
    """Return an Arrow table: lists, and rows of one dimension, as lists; rows of more as tensors. Columns of arrays are
    marked, so that they are arrays again afterwards. Raises DataError for Python objects."""
    fields, arrays = [], []
    for name, column in rows.columns.items():
        array = arrow_of(column, name, as_lists=name in rows.lists)
        had_arrays = is_list(array.type) and name not in rows.lists
        fields.append(pa.field(name, array.type, metadata=dict([ARRAYS]) if had_arrays else None))
        arrays.append(array)
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


def to_pandas(rows: Rows) -> pd.DataFrame:
    """Return a DataFrame; lists and tensors are arrays, one per cell."""
    import pandas as pd

    columns = {name: _pandas_values(column) for name, column in rows.columns.items()}
    return pd.DataFrame(columns, index=pd.RangeIndex(len(rows)))


def _pandas_values(column: Column) -> Any:
    if isinstance(column, np.ndarray):
        return numpy_of(column) if column.ndim == 1 else object_array(values_of(column))
    if isinstance(column.type, pa.BaseExtensionType):
        return object_array(values_of(column))
    if pa.types.is_time(column.type):
        return numpy_of(column)  # Python's time of day, which pandas would hold, has no nanoseconds
    return column.to_pandas()


def row_dicts(rows: Rows) -> list[dict[str, Any]]:
    """Return one dict per row: scalars, text, lists and dicts of Python, tensors as arrays, None for null."""
    names = list(rows.columns)
    if not names:
        return [{} for _ in range(len(rows))]
    return [
        dict(zip(names, values, strict=True))
        for values in zip(
            *(row_values(rows.columns[name], name in rows.lists) for name in names), strict=True
        )
    ]


def to_torch(
    rows: Rows, dtypes: torch.dtype | Mapping[str, torch.dtype] | None = None
) -> dict[str, torch.Tensor | list[Any] | dict[str, Any]]:
    """Return a writable tensor per column, which owns its memory; text and bytes as lists, structs as dicts.

    ``dtypes`` is one type for all tensors, or a type by column. Raises DataError for values that cannot be in a tensor,
    naming the column and the row.
    """
    dtypes = checked_dtypes(dtypes)
    by_name = dtypes if isinstance(dtypes, Mapping) else dict.fromkeys(rows.columns, dtypes)
    unknown = [name for name in by_name if name not in rows.columns]
    if unknown:
        raise DataError(
            f"dtypes names the column {unknown[0]!r}, and there are {_listed(rows.columns)}. Name one of these."
        )
    tensors = {
        name: tensor_of(
            column,
            Named(name, rows.numbers),
            dtype=by_name.get(name),
            python_floats=name in rows.python_floats,
        )
        for name, column in rows.columns.items()
    }
    for name in by_name if isinstance(dtypes, Mapping) else ():
        if isinstance(tensors[name], list):
            raise DataError(
                f"dtypes asks for column {name!r} as {by_name[name]}, and it holds text or bytes, which become a "
                "list. Convert it to numbers in map() or map_batches() first, or leave it out of dtypes."
            )
    return tensors


def checked_dtypes(dtypes: Any) -> torch.dtype | dict[str, torch.dtype] | None:
    """Return ``dtypes`` as torch types, from names or from numpy types of the same name. Raises DataError."""
    if isinstance(dtypes, Mapping):
        by_name = keyword_arguments("dtypes", dtypes)
        return {name: _torch_dtype(given, f"dtypes[{name!r}]") for name, given in by_name.items()}
    return None if dtypes is None else _torch_dtype(dtypes, "dtypes")


def _torch_dtype(given: Any, argument: str) -> torch.dtype:
    import torch

    if isinstance(given, torch.dtype):
        return given
    name: Any = given.removeprefix("torch.") if isinstance(given, str) else None
    if name is None and (
        isinstance(given, np.dtype) or (isinstance(given, type) and issubclass(given, np.generic))
    ):
        name = np.dtype(given).name
    found = getattr(torch, name, None) if name else None
    if not isinstance(found, torch.dtype):
        raise DataError(
            f"{argument}={shown(given)} is not a tensor dtype. Give a dtype such as torch.float32, or its name."
        )
    return found


def from_numpy(batch: Mapping[str, Any], numbers: Ints) -> Rows:
    """Return rows of a dict of columns: arrays, tensors, Arrow arrays, Series, or lists of one value per row."""
    return _checked({name: _column(values, name) for name, values in batch.items()}, numbers)


def from_pandas(frame: pd.DataFrame, numbers: Ints) -> Rows:
    """Return rows of a DataFrame without its index. None, NA and, in columns of objects, NaN are nulls."""
    names = list(map(str, frame.columns))
    _refuse_twice(names, "A DataFrame")
    return _checked({name: _from_series(frame.iloc[:, at]) for at, name in enumerate(names)}, numbers)


def from_arrow(table: pa.Table | pa.RecordBatch, numbers: Ints) -> Rows:
    """Return rows of a table; numpy views of its columns where possible."""
    _refuse_twice(table.schema.names, "An Arrow table")
    made = {
        field.name: _Made(_from_arrow(table.column(at)), lists=rows_are_lists(field))
        for at, field in enumerate(table.schema)
    }
    return _checked(made, numbers)


def _refuse_twice(names: Sequence[str], what: str) -> None:
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise DataError(
            f"{what} has several columns named {twice[0]!r}, and a row can have only one. Rename or drop the others."
        )


def from_row_dicts(dicts: Sequence[Mapping[str, Any]], numbers: Ints) -> Rows:
    """Return rows of one dict per row. A key that is missing in some of them is null there."""
    names = dict.fromkeys(name for row in dicts for name in row)
    return from_numpy({name: [row.get(name) for row in dicts] for name in names}, numbers)


class _Made(NamedTuple):
    """A column made from a user's values, and their kind."""

    column: Column
    #: Python floats.
    python_floats: bool = False
    #: Lists of Python, or of Arrow.
    lists: bool = False


def _checked(made: Mapping[str, _Made], numbers: Ints) -> Rows:
    lengths = {name: len(each.column) for name, each in made.items()}
    if any(length != len(numbers) for length in lengths.values()):
        said = ", ".join(f"{name!r} has {length}" for name, length in lengths.items())
        raise DataError(
            f"The columns of a batch of {len(numbers)} rows have other lengths: {said}. Every column needs one value "
            "per row."
        )
    return Rows(
        {name: each.column for name, each in made.items()},
        numbers,
        python_floats=frozenset(name for name, each in made.items() if each.python_floats),
        lists=frozenset(name for name, each in made.items() if each.lists),
    )


def _from_arrow(values: ArrowArray) -> Column:
    if isinstance(values, pa.ChunkedArray):
        values = values.chunk(0) if values.num_chunks == 1 else pa.concat_arrays(_one_dictionary(values))
    return view(values)


def _one_dictionary(values: ArrowArray) -> list[ArrowArray]:
    """Return the chunks, decoded where each could have a dictionary of its own; an empty one where there is none."""
    if values.num_chunks == 0:
        return [pa.array([], type=values.type)]
    chunks = values.chunks
    return [chunk.dictionary_decode() for chunk in chunks] if pa.types.is_dictionary(values.type) else chunks


def _from_series(series: pd.Series[Any]) -> _Made:
    if isinstance(series.dtype, np.dtype) and series.dtype != object:
        return _Made(_from_array(series.to_numpy(), str(series.name)).column)
    if series.dtype == object:
        check_nesting(series.tolist(), f"column {shown(series.name)}")
        try:
            array: ArrowArray = pa.Array.from_pandas(series)
            return _Made(view(array), lists=_are_lists(series.tolist(), array.type))
        except (pa.ArrowException, OverflowError):
            # Arrays of several dimensions, or objects.
            return _of_values(series.tolist())._replace(python_floats=False)
    return _Made(_from_arrow(pa.Array.from_pandas(series)))


def _column(values: Any, name: str) -> _Made:
    values = as_numpy(values)
    if isinstance(values, np.ndarray):
        return _from_array(values, name)
    if isinstance(values, (pa.Array, pa.ChunkedArray)):
        return _Made(_from_arrow(values), lists=is_list(values.type))
    if isinstance(values, (list, tuple)):
        return _of_values(list(values))
    if type(values).__module__.startswith("pandas") and hasattr(values, "array"):
        return _from_series(values)
    raise DataError(
        f"Column {name!r} is {shown(values)} of type {type(values).__name__}. A column is an array, a tensor or a "
        "list with one value per row."
    )


def _from_array(values: NumpyArray, name: str) -> _Made:
    if values.ndim == 0:
        raise DataError(
            f"Column {name!r} is the single value {shown(values)}. A column has one value per row: repeat it for "
            "each row."
        )
    if values.dtype.kind in "biufcMm":
        return _Made(values)
    return _of_values(list(values) if values.ndim > 1 else values.tolist())


def _of_values(values: list[Any]) -> _Made:
    """Return a column of one value per row, each of Python, numpy, torch or Pillow."""
    values = [as_numpy(value) for value in values]
    kinds = set(map(type, values))
    if kinds and kinds <= {int, float} and float in kinds:
        return _Made(np.array(values, np.float64), python_floats=True)
    if kinds == {bool}:
        return _Made(np.array(values, np.bool_))
    if kinds == {int} and min(values) >= -(2**63) and max(values) < 2**63:
        return _Made(np.array(values, np.int64))
    if kinds == {np.ndarray}:
        return _Made(_of_arrays(values))
    if kinds and all(issubclass(kind, (np.number, np.bool_, np.datetime64)) for kind in kinds):
        return _Made(np.array(values))
    check_nesting(values, "a column that a function returned")
    try:
        array: ArrowArray = pa.array(values, type=_nanosecond_type(values))
    except (pa.ArrowException, OverflowError):
        return _Made(object_array(values))
    floats = holds_double(array.type) and any(_leads_to_float(value) for value in values)
    return _Made(view(array), python_floats=floats, lists=_are_lists(values, array.type))


def _are_lists(values: list[Any], kind: pa.DataType) -> bool:
    """Return whether values that make a column of this type are list-like, and not arrays."""
    return is_list(kind) and not any(isinstance(value, np.ndarray) for value in values)


def _nanosecond_type(values: list[Any]) -> pa.DataType | None:
    """Return the type of pandas times, which have nanoseconds: Arrow would truncate them. None for other values."""
    example = next((value for value in values if value is not None), None)
    if not type(example).__module__.startswith("pandas"):
        return None
    import pandas as pd

    if isinstance(example, pd.Timestamp):
        return pa.timestamp("ns", None if example.tz is None else str(example.tz))
    return pa.duration("ns") if isinstance(example, pd.Timedelta) else None


def _of_arrays(arrays: list[NumpyArray]) -> Column:
    numbers = all(array.dtype.kind in "biufcMm" for array in arrays)
    if numbers and all(array.shape == arrays[0].shape for array in arrays):
        return np.stack(arrays)
    if all(array.ndim == 1 for array in arrays):
        try:
            return view(pa.array(arrays))
        except (pa.ArrowException, OverflowError):
            pass  # types that Arrow does not know, or does not mix
    return object_array(arrays)


def holds_double(kind: pa.DataType) -> bool:
    """Return whether values of this type are float64, or contain such."""
    return pa.types.is_float64(kind) or any(
        holds_double(kind.field(index).type) for index in range(kind.num_fields)
    )


def _leads_to_float(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_leads_to_float(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return any(_leads_to_float(item) for item in value)
    return type(value) is float


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, names)) or "none"
