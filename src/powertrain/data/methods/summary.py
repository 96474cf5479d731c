"""Summaries of datasets: the statistics of each column, and which of them a column has."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from powertrain.errors import DataError

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from powertrain.data.aggregate.functions import AggregateFn
    from powertrain.data.output.aggregates import ColumnAggregate

#: The most frequent values of a text column.
_MOST_FREQUENT = 10


class DatasetSummary:
    """Statistics of the columns of a dataset, returned by :meth:`Dataset.summary`."""

    def __init__(self, schema: pa.Schema, statistics: dict[str, dict[str, Any]]) -> None:
        self.dataset_schema, self._statistics = schema, statistics
        self.columns = list(statistics)

    def to_pandas(self) -> pd.DataFrame:
        """Return a DataFrame with a row for each statistic and a column for each column of the dataset."""
        import pandas as pd

        names = list(dict.fromkeys(name for found in self._statistics.values() for name in found))
        columns: dict[str, Any] = {"statistic": names}
        for column, found in self._statistics.items():
            columns[column] = [found.get(name) for name in names]
        return pd.DataFrame(columns)

    def get_column_stats(self, column: str) -> pd.DataFrame:
        """Return the statistics of one column, as a DataFrame.

        Args:
            column: The name of the column.

        Raises:
            DataError: There is no such column.
        """
        import pandas as pd

        from powertrain.data.sources.plain import checked_columns

        checked_columns([column], self.columns, "the summary")
        found = self._statistics[column]
        return pd.DataFrame(
            {"statistic": list(found), "value": pd.Series(list(found.values()), dtype=object)}
        )

    def __repr__(self) -> str:
        return self.to_pandas().to_string()


def statistics_of(found: ColumnAggregate) -> dict[str, Any]:
    """Return the statistics of a column by name."""
    rows = found.count + found.nulls
    result: dict[str, Any] = {"count": rows, "missing_pct": 100 * found.nulls / rows if rows else None}
    if found.total is not None:
        result.update(mean=found.mean, std=found.std(0), zero_pct=100 * found.zeros / rows)
    if found.least is not None:
        result.update(min=found.least, max=found.most)
    return result


def chosen_aggregations(
    schema: pa.Schema, names: Sequence[str], given: Mapping[Any, Callable[[str], Any]] | None
) -> dict[str, list[AggregateFn]]:
    """Return the aggregations that the user has chosen for the types of columns, by column.

    Raises:
        DataError: ``given`` has another form.
    """
    from powertrain.data.datatype import DataType

    example = "Give functions by type, such as {DataType.int64(): lambda column: [Sum(column)]}."
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise DataError(f"summary(override_dtype_agg_mapping={given!r:.80}) is not a dict. {example}")
    for kind, function in given.items():
        if not isinstance(kind, DataType) or not callable(function):
            raise DataError(
                f"summary(override_dtype_agg_mapping=...) has the entry {kind!r}: {function!r:.80}. {example}"
            )
    kinds = {name: DataType.from_arrow(schema.field(name).type) for name in names}
    return {name: list(given[kind](name)) for name, kind in kinds.items() if kind in given}


def distributions(schema: pa.Schema, names: Sequence[str]) -> dict[str, list[AggregateFn]]:
    """Return the aggregations for medians of numbers and frequent values of texts; none without DuckDB."""
    import pyarrow as pa

    if importlib.util.find_spec("duckdb") is None:
        return {}
    from powertrain.data.aggregate import ApproximateQuantile, ApproximateTopK

    found: dict[str, list[AggregateFn]] = {}
    for name in names:
        kind = schema.field(name).type
        if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
            found[name] = [ApproximateQuantile(name, [0.5])]
        elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
            found[name] = [ApproximateTopK(name, _MOST_FREQUENT)]
    return found


def add_results(
    statistics: Mapping[str, dict[str, Any]],
    aggregations: Mapping[str, Sequence[AggregateFn]],
    results: Mapping[str, Any],
) -> None:
    """Add the results of aggregations to the statistics of their columns: "mean(x)" as "mean", lists by their items."""
    for column, each in aggregations.items():
        for one in each:
            name = one.name.removesuffix(f"({column})")
            value = results[one.name]
            if isinstance(value, list):
                statistics[column].update({f"{name}[{place}]": item for place, item in enumerate(value)})
            else:
                statistics[column][name] = value
