"""Conversion of a user function's result to rows, with errors that name the function."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from powertrain.data.arguments import shown
from powertrain.data.operations.calls import Call, FunctionFailed
from powertrain.data.plan.order import Ints
from powertrain.data.rows.rows import Column, Rows
from powertrain.errors import DataError


def drawn(call: Call, returned: Iterable[Any], numbers: Ints) -> Iterator[Any]:
    """Yield the items of a generator; it is user code, and may raise."""
    try:
        yield from returned
    except FunctionFailed:
        raise
    except (Exception, SystemExit) as error:
        raise call.failed(error, numbers) from error


def check_row(call: Call, returned: Any, before: Sequence[Mapping[str, Any]], row: Ints) -> None:
    """Raise unless it is a dict with the keys of those that came before it."""
    if not isinstance(returned, Mapping):
        hint = ": does every way through it end in a return?" if returned is None else ""
        raise call.returned(f"it returned {kind_of(returned)}, and must return a dict of columns{hint}", row)
    if before and returned.keys() != before[0].keys():
        missing, more = before[0].keys() - returned.keys(), returned.keys() - before[0].keys()
        said = [f"without {quoted(missing)}"] if missing else []
        said += [f"with {quoted(more)}"] if more else []
        raise call.returned(
            f"it returned a dict {' and '.join(said)}, unlike for the rows before, which have {quoted(before[0])}. "
            "All rows need the same columns; None stands for a missing value",
            row,
        )
    if not before:
        _check_names(call, returned, row)


def _check_names(call: Call, returned: Mapping[Any, Any], numbers: Ints) -> None:
    wrong = [name for name in returned if not isinstance(name, str)]
    if wrong:
        raise call.returned(f"it returned {wrong[0]!r} as the name of a column, and names are text", numbers)


def rows_of_dicts(call: Call, made: list[Mapping[str, Any]], numbers: Ints, before: Rows) -> Rows:
    from powertrain.data.rows.formats import from_row_dicts

    if not made:
        return no_rows()
    rows = _understood(call, lambda: from_row_dicts(made, numbers), numbers)
    # A float64 column is handed out as Python floats. A column returned under its name is still float64.
    typed = {
        name
        for name, column in before.columns.items()
        if name not in before.python_floats and _is_float64(column)
    }
    return replace(rows, python_floats=rows.python_floats - typed)


def _is_float64(column: Column) -> bool:
    from powertrain.data.rows.formats import holds_double

    return column.dtype == np.float64 if isinstance(column, np.ndarray) else holds_double(column.type)


def _understood(call: Call, convert: Callable[[], Rows], numbers: Ints) -> Rows:
    """Return the result as columns; an error is attributed to the function."""
    try:
        return convert()
    except DataError as error:
        raise call.returned(f"what it returned cannot be used: {error}", numbers) from error
    except Exception as error:
        problem = f"what it returned makes no columns: {type(error).__name__}: {error}"
        raise call.returned(problem, numbers) from error


def length_of_batch(call: Call, batch: Any, numbers: Ints) -> int:
    """Return the number of rows of a returned batch; raises unless it is a batch."""
    if _is_table(batch):
        return len(batch)
    if not isinstance(batch, Mapping):
        hint = ": does every way through it end in a return?" if batch is None else ""
        raise call.returned(
            f"it returned {kind_of(batch)}, and must return a dict of arrays, a pandas DataFrame or a pyarrow "
            f"Table{hint}",
            numbers,
        )
    _check_names(call, batch, numbers)
    if not batch:
        raise call.returned(
            "it returned a dict without columns, of which nobody can say how many rows it has. To leave rows out, "
            "return columns without values",
            numbers,
        )
    lengths: dict[str, int] = {}
    for name, values in batch.items():
        try:
            lengths[name] = len(values)
        except TypeError:
            raise call.returned(
                f"it returned {kind_of(values)} for column {name!r}, and each column needs one value per row",
                numbers,
            ) from None
    if len(set(lengths.values())) > 1:
        said = ", ".join(f"{name!r} has {length}" for name, length in lengths.items())
        raise call.returned(f"it returned columns of different lengths: {said}", numbers)
    return next(iter(lengths.values()))


def from_batch(call: Call, batch: Any, made_numbers: Ints, numbers: Ints) -> Rows:
    from powertrain.data.rows import formats

    if isinstance(batch, Mapping):
        convert: Callable[[Any, Ints], Rows] = formats.from_numpy
    else:
        convert = formats.from_pandas if type(batch).__module__.startswith("pandas") else formats.from_arrow
    return _understood(call, lambda: convert(batch, made_numbers), numbers)


def _is_table(batch: Any) -> bool:
    """Return True for tables of pandas and Arrow, without importing either."""
    kinds = {"pandas": ("DataFrame",), "pyarrow": ("Table", "RecordBatch")}
    return any(
        isinstance(batch, getattr(sys.modules[module], name))
        for module, names in kinds.items()
        if module in sys.modules
        for name in names
    )


def kind_of(value: Any) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"


def quoted(names: Iterable[str]) -> str:
    return ", ".join(map(shown, names)) or "nothing"


def no_rows() -> Rows:
    """Return no rows, whose columns are unknown."""
    return Rows({}, np.empty(0, np.int64))
