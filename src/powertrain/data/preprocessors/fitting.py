"""Statistics of a dataset's columns, each in one pass."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from powertrain.data.output.aggregates import ColumnAggregate, check_numbers
from powertrain.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

    from powertrain.data.dataset import Dataset


def statistics(what: str, dataset: Dataset, columns: Sequence[str]) -> dict[str, ColumnAggregate]:
    """Return count, mean, spread and extremes of columns of numbers; nulls and NaN are left out."""
    found = dataset._aggregates(columns)
    for each in found.values():
        check_numbers(what, each)
    return found


def value_counts(dataset: Dataset, columns: Sequence[str], *, of_lists: bool) -> dict[str, Counter[Any]]:
    """Return how often each value of columns occurs, null under None; of lists their values where ``of_lists``."""
    found: dict[str, Counter[Any]] = {name: Counter() for name in columns}
    for table in _tables(dataset, columns):
        for name, counter in found.items():
            counter.update(_counted(table.column(name), of_lists))
    return found


def token_counts(
    dataset: Dataset, columns: Sequence[str], tokenize: Callable[[str], Iterable[str]]
) -> dict[str, Counter[str]]:
    """Return how often each token occurs in the texts of columns, in the order of their first occurrence."""
    found: dict[str, Counter[str]] = {name: Counter() for name in columns}
    for table in _tables(dataset, columns):
        for name, counter in found.items():
            for text in table.column(name).to_pylist():
                if text is not None:
                    counter.update(tokenize(text))
    return found


def _tables(dataset: Dataset, columns: Sequence[str]) -> Iterator[pa.Table]:
    with closing(dataset._column_tables(columns)) as tables:
        yield from tables


def _counted(column: Any, of_lists: bool) -> Counter[Any]:
    import pyarrow as pa
    import pyarrow.compute as pc

    from powertrain.data.output.tables import as_lists
    from powertrain.data.rows.arrow_types import is_list

    found: Counter[Any] = Counter()
    for chunk in column.chunks:
        values = as_lists(chunk) if isinstance(chunk.type, pa.FixedShapeTensorType) else chunk
        if is_list(values.type):
            if not of_lists:
                found.update(None if each is None else tuple(each) for each in values.to_pylist())
                continue
            values = values.flatten()
        for each in pc.value_counts(values):
            value = each["values"].as_py()
            if isinstance(value, float) and math.isnan(value):
                value = None
            found[value] += each["counts"].as_py()
    return found


def numbered_values(name: str, counts: Counter[Any], most: int | None = None) -> dict[Any, int]:
    """Return the different values of a column, sorted, each with its place; of ``most`` the most frequent ones."""
    if None in counts:
        raise DataError(
            f"The column {name!r} has nulls, which cannot be encoded. Fill them first, for example with SimpleImputer."
        )
    try:
        values = sorted(counts)
        if most is not None:  # of equally frequent ones the least
            values = sorted(sorted(values, key=lambda value: -counts[value])[:most])
    except TypeError as error:
        raise DataError(
            f"The values of the column {name!r} cannot be sorted ({error}). Give them one type first."
        ) from error
    return {value: place for place, value in enumerate(values)}
