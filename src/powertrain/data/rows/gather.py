"""Rows from many blocks into one batch: the hot path of a loader.

Rows of a block are viewed in place, mostly in a memory-mapped file. One copy is made of each requested value, into
memory that belongs to the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from powertrain.data.plan.order import Ints
from powertrain.data.rows.arrow_types import (
    LONGEST_LIST_COLUMN,
    ArrowArray,
    ArrowType,
    NumpyArray,
    arrow_ints,
    is_marked,
    is_text,
    leaf_type,
    list_offsets,
    object_array,
    plain,
    rows_are_lists,
    view,
    writable,
)
from powertrain.data.rows.rows import Column, Rows
from powertrain.data.rows.to_arrow import arrow_of, nested_lists
from powertrain.data.rows.to_python import values_of
from powertrain.data.sources.base import PYTHON_FLOATS
from powertrain.errors import DataError

#: The type and the shape of a row of a numpy column: pieces of one form are copied into one array.
_Form = tuple[Any, ...]


@dataclass(frozen=True)
class _Lists:
    """A list column of numbers, without nulls, of different lengths: Arrow is ten times slower than numpy to take rows
    of it."""

    array: ArrowArray
    offsets: NumpyArray
    values: NumpyArray

    @staticmethod
    def of(array: ArrowArray) -> _Lists | None:
        if not (pa.types.is_list(array.type) or pa.types.is_large_list(array.type)) or array.null_count:
            return None
        values = view(array.values) if len(array) else None
        if not isinstance(values, np.ndarray) or values.ndim > 1 or values.dtype == bool:
            return None
        return _Lists(array, list_offsets(array), values)


@dataclass(frozen=True)
class _Piece:
    """The columns of one record batch, and the form of each (None for those that are not numpy's)."""

    #: Each a numpy array, :class:`_Lists` or an Arrow array.
    columns: Mapping[str, Any]
    forms: Mapping[str, _Form | None]
    python_floats: frozenset[str]
    lists: frozenset[str]

    @staticmethod
    def of(batch: pa.RecordBatch, names: Sequence[str]) -> _Piece:
        columns = {name: _where_it_lies(batch.column(name)) for name in names}
        fields = [batch.schema.field(name) for name in names]
        return _Piece(
            columns,
            {name: _form(column) for name, column in columns.items()},
            python_floats=frozenset(field.name for field in fields if is_marked(field, PYTHON_FLOATS)),
            lists=frozenset(field.name for field in fields if rows_are_lists(field)),
        )


def _where_it_lies(array: ArrowArray) -> Any:
    """Return a view without a copy, or :class:`_Lists`, or the array. Bools, which would have to be unpacked, are
    converted when requested."""
    if pa.types.is_boolean(leaf_type(array.type)) or pa.types.is_dictionary(array.type):
        return array
    seen = view(array)
    if isinstance(seen, np.ndarray):
        return seen
    return _Lists.of(array) or (array if _can_take(array.type) else plain(array))


def _can_take(kind: ArrowType) -> bool:
    """Return whether Arrow has a ``take`` for this type; it lacks it for some of its newer ones."""
    return not any(word in str(kind) for word in ("view", "run_end"))


def _form(column: Any) -> _Form | None:
    return (column.dtype, column.shape[1:]) if isinstance(column, np.ndarray) else None


class BlockView:
    """One decoded block, readable at any of its rows."""

    def __init__(self, batches: Sequence[pa.RecordBatch], columns: Sequence[str] | None = None) -> None:
        """View ``columns`` (all where None) of the batches that make up a block, in order, without a copy."""
        schema = batches[0].schema if batches else pa.schema([])
        self.names: tuple[str, ...] = tuple(schema.names if columns is None else columns)
        missing = [name for name in self.names if name not in schema.names]
        if missing and batches:
            raise DataError(
                f"There is no column {missing[0]!r} in a block of the data, which has {', '.join(schema.names)}. "
                "Name columns that every file has."
            )
        self.pieces = tuple(_Piece.of(batch, self.names) for batch in batches)
        #: The first row of each batch, and the number of all rows.
        self.starts: Ints = np.cumsum([0, *(batch.num_rows for batch in batches)], dtype=np.int64)
        self.rows = int(self.starts[-1])


# --------------------------------------------------------------------------- gathering


@dataclass(frozen=True)
class _Runs:
    """Runs of rows from several pieces."""

    pieces: list[_Piece]
    #: The number of each row within its piece, over all runs.
    rows: Ints
    #: Run k is ``rows[bounds[k]:bounds[k + 1]]``, of ``pieces[k]``.
    bounds: list[int]
    #: Where rows were grouped by piece: the place of each in the result. None: they are in place.
    places: Ints | None


def gather(
    views: Sequence[BlockView], which: Ints, offsets: Ints, numbers: Ints, *, python_text: bool = False
) -> Rows:
    """Return rows: row i of the result is row ``offsets[i]`` of ``views[which[i]]``, with the number ``numbers[i]``.

    Numpy columns of the result own their memory and are writable. Fastest where rows of one view follow each other. A
    column that is stacked in one view and ragged, or of another length, in another is returned as an Arrow array.
    ``python_text`` gives text as an object array of strings, for callers that need strings. Raises DataError where
    views have different columns, or incompatible types of a column.
    """
    if len(which) == 0:
        return _no_rows(views, numbers)
    _refuse_outside(views, which, offsets)
    runs = _runs(views, which, offsets)
    forms = runs.pieces[0].forms
    if not all(piece.forms == forms for piece in runs.pieces):
        _refuse_other_columns(runs.pieces)
        forms = dict.fromkeys(forms)  # checked column by column
    columns = {
        name: _column(
            [piece.columns[name] for piece in runs.pieces], runs, form is not None, name, python_text
        )
        for name, form in forms.items()
    }
    floats = frozenset.intersection(*(piece.python_floats for piece in runs.pieces))
    return Rows(columns, numbers, floats, _lists_in_all(runs.pieces))


def _lists_in_all(parts: Sequence[_Piece] | Sequence[Rows]) -> frozenset[str]:
    """Return the columns that are lists in every part; a column of nulls in one part follows the others."""
    first = parts[0].lists
    if all(part.lists == first for part in parts):
        return first
    some = frozenset().union(*(part.lists for part in parts))
    return frozenset(
        name for name in some if all(name in part.lists or _is_null(part.columns[name]) for part in parts)
    )


def _is_null(column: Any) -> bool:
    return isinstance(column, pa.Array) and pa.types.is_null(column.type)


def _column(parts: Sequence[Any], runs: _Runs, of_one_form: bool, name: str, python_text: bool) -> Column:
    """Return one column, in the fastest way for its parts; ``of_one_form`` where they are known to have one."""
    if of_one_form or _have_one_form(parts):
        return _copied(parts, runs)
    if all(isinstance(part, _Lists) and part.array.type == parts[0].array.type for part in parts):
        return _lists(parts, runs)
    if python_text and all(isinstance(part, pa.Array) and is_text(part.type) for part in parts):
        return _strings(parts, runs)
    return _taken([part.array if isinstance(part, _Lists) else part for part in parts], runs, name)


def _strings(parts: Sequence[ArrowArray], runs: _Runs) -> NumpyArray:
    """Return the text of parts as Python strings: through one Arrow array for all it would be copied twice more."""
    made = np.empty(len(runs.rows), object)
    rows = arrow_ints(runs.rows)
    for part, (first, stop) in zip(parts, pairwise(runs.bounds), strict=True):
        made[first:stop] = _take_arrow(part, rows.slice(first, stop - first)).to_pylist()
    if runs.places is None:
        return made
    placed = np.empty_like(made)
    placed[runs.places] = made
    return placed


def _no_rows(views: Sequence[BlockView], numbers: Ints) -> Rows:
    """Return no rows, with the columns of the first view that has a batch."""
    shown = next((view for view in views if view.pieces), None)
    if shown is None:
        return Rows({}, numbers)
    nothing = np.zeros(0, np.int64)
    columns = {
        name: take(column.array if isinstance(column, _Lists) else column, nothing)
        for name, column in shown.pieces[0].columns.items()
    }
    return Rows(columns, numbers, shown.pieces[0].python_floats, shown.pieces[0].lists)


def _refuse_outside(views: Sequence[BlockView], which: Ints, offsets: Ints) -> None:
    """Check the offsets: the copying below does not, and would give the nearest row."""
    sizes = np.array([view.rows for view in views])
    if int(which.min()) < 0 or bool(((offsets < 0) | (offsets >= sizes[which])).any()):
        raise IndexError("a requested row is not in its block")


def _refuse_other_columns(pieces: Sequence[_Piece]) -> None:
    first = pieces[0].columns
    for piece in pieces:
        if piece.columns.keys() != first.keys():
            raise DataError(
                f"Rows of one dataset have different columns: {', '.join(first)} in one place, "
                f"{', '.join(piece.columns)} in another. Choose the columns they share with select_columns()."
            )


def _runs(views: Sequence[BlockView], which: Ints, offsets: Ints) -> _Runs:
    pieces = [piece for view in views for piece in view.pieces]
    piece_of, rows = _pieces_of(views, which, offsets)
    edges = np.flatnonzero(piece_of[1:] != piece_of[:-1]) + 1
    places = None
    if len(edges) + 1 > 2 * np.count_nonzero(np.bincount(piece_of)):
        places = np.argsort(piece_of, kind="stable")
        piece_of, rows = piece_of[places], rows[places]
        edges = np.flatnonzero(piece_of[1:] != piece_of[:-1]) + 1
    bounds = [0, *edges.tolist(), len(rows)]
    return _Runs([pieces[index] for index in piece_of[bounds[:-1]].tolist()], rows, bounds, places)


def _pieces_of(views: Sequence[BlockView], which: Ints, offsets: Ints) -> tuple[Ints, Ints]:
    """Return the number of each row's piece, over the pieces of all views, and the number of the row within it."""
    if all(len(view.pieces) == 1 for view in views):
        return which, offsets
    first_rows = np.cumsum([0, *(view.rows for view in views)])
    starts = np.concatenate(
        [view.starts[:-1] + first for view, first in zip(views, first_rows[:-1], strict=True)]
    )
    rows = first_rows[which] + offsets
    # Of pieces that begin at the same row all but the last are empty.
    piece_of = np.searchsorted(starts, rows, side="right") - 1
    return piece_of, rows - starts[piece_of]


def _have_one_form(parts: Sequence[Any]) -> bool:
    form = _form(parts[0])
    return form is not None and all(_form(part) == form for part in parts)


def _copied(parts: Sequence[NumpyArray], runs: _Runs) -> NumpyArray:
    """Copy the rows of parts of one form directly into their place."""
    made = np.empty((len(runs.rows), *parts[0].shape[1:]), parts[0].dtype)
    rows, bounds = runs.rows, runs.bounds
    start = 0
    for part, stop in zip(parts, bounds[1:], strict=True):
        # "clip" lets numpy write into the result without a buffer between; all rows are known to exist.
        part.take(rows[start:stop], axis=0, out=made[start:stop], mode="clip")
        start = stop
    if runs.places is None:
        return made
    placed = np.empty_like(made)
    placed[runs.places] = made
    return placed


def _lists(parts: Sequence[_Lists], runs: _Runs) -> pa.Array[Any]:
    """Return the lists of parts of one type, one after the other."""
    lists: list[NumpyArray] = []
    for part, (first, stop) in zip(parts, pairwise(runs.bounds), strict=True):
        rows, values = runs.rows[first:stop], part.values
        begins, ends = part.offsets.take(rows).tolist(), part.offsets.take(rows + 1).tolist()
        lists += [values[begin:end] for begin, end in zip(begins, ends, strict=True)]
    if runs.places is not None:
        lists = [lists[index] for index in np.argsort(runs.places).tolist()]
    kind = parts[0].array.type
    offsets = np.cumsum([0, *map(len, lists)], dtype=np.int64)
    values = pa.array(np.concatenate(lists), type=kind.value_type)
    starts = arrow_ints(offsets)
    if pa.types.is_large_list(kind) or int(offsets[-1]) > LONGEST_LIST_COLUMN:
        return pa.LargeListArray.from_arrays(starts, values)
    return pa.ListArray.from_arrays(starts.cast(pa.int32()), values, type=kind)


def _taken(parts: Sequence[Column], runs: _Runs, name: str) -> Column:
    """Return the rows of parts of which at least one is an Arrow array, or which differ in form."""
    rows = arrow_ints(runs.rows)
    cut = [rows.slice(start, stop - start) for start, stop in pairwise(runs.bounds)]
    taken = [
        part.take(rows.to_numpy(), axis=0) if isinstance(part, np.ndarray) else _take_arrow(part, rows)
        for part, rows in zip(parts, cut, strict=True)
    ]
    column = concat(taken, name)
    if not isinstance(column, np.ndarray) and any(_unpacks(part) for part in parts):
        seen = view(column)
        column = writable(seen) if isinstance(seen, np.ndarray) else seen
    return column if runs.places is None else take(column, np.argsort(runs.places))


def _unpacks(part: Column) -> bool:
    """Return whether a column stayed an Arrow array only to avoid unpacking rows that are not requested."""
    return not isinstance(part, np.ndarray) and (
        pa.types.is_dictionary(part.type) or pa.types.is_boolean(leaf_type(part.type))
    )


def _take_arrow(array: ArrowArray, rows: ArrowArray) -> pa.Array[Any]:
    taken: ArrowArray = array.take(rows)
    # Each block has a dictionary of its own; a few decoded rows are cheaper than one dictionary for all.
    plainer: pa.Array[Any] = taken.dictionary_decode() if pa.types.is_dictionary(taken.type) else taken
    return plainer


# --------------------------------------------------------------------------- rows that are in hand


def take(column: Column, indices: Ints) -> Column:
    """Return the rows ``indices`` of a column, in that order, as a copy."""
    if isinstance(column, np.ndarray):
        taken: NumpyArray = column.take(indices, axis=0)
        return taken
    return _take_arrow(column if _can_take(column.type) else plain(column), arrow_ints(indices))


def concat(parts: Sequence[Column], name: str = "") -> Column:
    """Return columns one after the other; parts of different form become one: see :func:`gather`. Requires at least
    one part."""
    if len(parts) == 1:
        return parts[0]
    filled = [part for part in parts if len(part)] or [parts[0]]
    if len(filled) == 1:
        return filled[0]
    arrays = [part for part in filled if isinstance(part, np.ndarray)]
    if any(part.dtype == object for part in arrays):
        return object_array([value for part in filled for value in values_of(part)])
    if len(arrays) == len(filled) and _can_join(arrays):
        joined: NumpyArray = np.concatenate(arrays)
        return joined
    if len(arrays) == len(filled) and all(array.ndim > 2 for array in arrays):
        return object_array(
            [row for array in arrays for row in array]
        )  # for example images of different sizes
    return _joined(filled, name)


def _can_join(arrays: Sequence[NumpyArray]) -> bool:
    """Return whether numpy joins them without changing values: it would turn bools into numbers, and integers into
    dates."""
    first = arrays[0]
    if any(array.shape[1:] != first.shape[1:] for array in arrays):
        return False
    kinds = {array.dtype.kind for array in arrays}
    return len(kinds) == 1 or kinds <= set("iuf")


def _joined(parts: Sequence[Column], name: str) -> pa.Array[Any]:
    arrays = [arrow_of(part, name) for part in parts]
    if all(array.type.equals(arrays[0].type) for array in arrays):
        return pa.concat_arrays(arrays)
    arrays = [
        nested_lists(part) if isinstance(part, np.ndarray) and part.ndim > 2 else plain(array)
        for part, array in zip(parts, arrays, strict=True)
    ]
    try:
        tables = [pa.table({"": array}) for array in arrays]
        return pa.concat_tables(tables, promote_options="permissive").column(0).combine_chunks()
    except (pa.ArrowTypeError, pa.ArrowInvalid) as problem:
        kinds = sorted({str(array.type) for array in arrays})
        raise DataError(
            f"Column {name!r} has values of types that cannot be made one: {', '.join(kinds)}. Convert it to one "
            "type in map_batches(), or leave it out with drop_columns()."
        ) from problem


def take_rows(rows: Rows, indices: Ints) -> Rows:
    """Return the rows ``indices``, in that order, as a copy."""
    columns = {name: take(column, indices) for name, column in rows.columns.items()}
    return replace(rows, columns=columns, numbers=rows.numbers[indices])


def concat_rows(parts: Sequence[Rows]) -> Rows:
    """Return all rows one after the other. Requires at least one part; parts without rows need not have columns."""
    filled = [part for part in parts if len(part)] or [parts[0]]
    if len(filled) == 1:
        return filled[0]
    names = list(filled[0].columns)
    for part in filled:
        if part.columns.keys() != filled[0].columns.keys():
            raise DataError(
                f"Rows of one dataset have different columns: {', '.join(names)} in one place, "
                f"{', '.join(part.columns)} in another. A function must return the same columns for every row."
            )
    columns = {name: concat([part.columns[name] for part in filled], name) for name in names}
    numbers = np.concatenate([part.numbers for part in filled])
    floats = frozenset.intersection(*(part.python_floats for part in filled))
    return Rows(columns, numbers, floats, _lists_in_all(filled))
