"""The aggregations of Ray Data: each one as SQL, or as a class of functions where SQL has none."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from powertrain.data.aggregate.functions import AggregateFn, checked_name
from powertrain.data.arguments import flag, number, shown, values_of, whole
from powertrain.errors import DataError

_pt = pa.types


class SqlAggregate(AggregateFn):
    """An aggregation of a column that DuckDB computes.

    NaN counts as null, as Ray Data documents it. With ``ignore_nulls=False`` one null makes the result null.
    """

    #: The word before the parenthesis of its name.
    verb = ""
    #: True where values are added, so that they must be numbers.
    of_numbers = False

    def __init__(
        self, on: str | None = None, ignore_nulls: bool = True, alias_name: str | None = None
    ) -> None:
        if on is not None and not isinstance(on, str):
            raise DataError(f"{type(self).__name__}(on={shown(on)}) must be the name of a column.")
        self._target_col_name = on
        self._ignore_nulls = flag("ignore_nulls", ignore_nulls)
        self.name = checked_name(alias_name or f"{self.verb}({on})")

    def get_target_column(self) -> str | None:
        """Return the column that is aggregated; None for whole rows."""
        return self._target_col_name

    def get_agg_name(self) -> str:
        """Return the name of the aggregation, such as "sum" of "sum(x)"."""
        return self.name.partition("(")[0] or self.name

    def check(self, schema: pa.Schema) -> None:
        """Raise :class:`DataError` where it cannot be computed of these columns."""
        on = self._target_col_name
        if on is None:
            raise DataError(f"{type(self).__name__}() needs the name of a column. Give on=...")
        kind = schema.field(on).type
        numbers = (
            _pt.is_integer(kind) or _pt.is_floating(kind) or _pt.is_decimal(kind) or _pt.is_boolean(kind)
        )
        if self.of_numbers and not numbers:
            raise DataError(
                f"{self.name} cannot be computed: the column {on!r} has the type {kind}. Name one of numbers."
            )

    def sql(self, column: str, kind: Any) -> str:
        """Return the SQL of the result, given that of the column and its type (None for whole rows)."""
        value = known(column, kind)
        result = self.of_values(value, kind)
        if self._ignore_nulls:
            return result
        return f"CASE WHEN count({value}) < count(*) THEN NULL ELSE {result} END"

    @abstractmethod
    def of_values(self, value: str, kind: Any) -> str:
        """Return the SQL of the result of values of which NULL is left out."""


def known(column: str, kind: Any) -> str:
    """Return the SQL of a column in which NaN is null; of booleans as numbers."""
    if kind is not None and _pt.is_floating(kind):
        return f"nullif({column}, 'nan'::{'FLOAT' if _pt.is_float32(kind) else 'DOUBLE'})"
    return column


def _as_number(value: str, kind: Any) -> str:
    return f"({value})::INTEGER" if _pt.is_boolean(kind) else value


class Count(SqlAggregate):
    """The number of rows, or with ``ignore_nulls=True`` of the values of a column that are not null.

    Args:
        on: The column; None for rows.
        ignore_nulls: Leave out nulls.
        alias_name: The name of the result in place of "count(x)".
    """

    verb = "count"

    def __init__(
        self, on: str | None = None, ignore_nulls: bool = False, alias_name: str | None = None
    ) -> None:
        super().__init__(on, ignore_nulls, alias_name or f"count({on or ''})")

    def check(self, schema: pa.Schema) -> None:
        """Accept any column, and none."""

    def sql(self, column: str, kind: Any) -> str:
        """Return the SQL of the number."""
        return f"count({known(column, kind)})" if self._ignore_nulls and kind is not None else "count(*)"

    def of_values(self, value: str, kind: Any) -> str:
        """Return the SQL of the number of values."""
        return f"count({value})"


class Sum(SqlAggregate):
    """The sum of a column.

    Args:
        on: The column.
        ignore_nulls: Leave out nulls; otherwise the result is null where there are any.
        alias_name: The name of the result in place of "sum(x)".
    """

    verb, of_numbers = "sum", True

    def of_values(self, value: str, kind: Any) -> str:
        """Return the SQL of the sum; of whole numbers with 64 bits."""
        if _pt.is_floating(kind):
            return f"sum(({value})::DOUBLE)"
        if _pt.is_decimal(kind):
            return f"sum({value})"
        return f"sum({_as_number(value, kind)})::{'UBIGINT' if _pt.is_uint64(kind) else 'BIGINT'}"


class _Extreme(SqlAggregate):
    """A least or greatest value. Ray Data starts it from ``zero_factory``, which has no effect here."""

    def __init__(
        self,
        on: str | None = None,
        ignore_nulls: bool = True,
        alias_name: str | None = None,
        zero_factory: Any = None,
    ) -> None:
        super().__init__(on, ignore_nulls, alias_name)


class Min(_Extreme):
    """The least value of a column.

    Args:
        on: The column.
        ignore_nulls: As for :class:`Sum`.
        zero_factory: Accepted for compatibility, without effect.
        alias_name: The name of the result in place of "min(x)".
    """

    verb = "min"

    def of_values(self, value: str, kind: Any) -> str:
        """Return the SQL of the least value."""
        return f"min({value})"


class Max(_Extreme):
    """The greatest value of a column.

    Args:
        on: The column.
        ignore_nulls: As for :class:`Sum`.
        zero_factory: Accepted for compatibility, without effect.
        alias_name: The name of the result in place of "max(x)".
    """

    verb = "max"

    def of_values(self, value: str, kind: Any) -> str:
        """Return the SQL of the greatest value."""
        return f"max({value})"


class Mean(SqlAggregate):
    """The mean of a column.

    Args:
        on: The column.
        ignore_nulls: As for :class:`Sum`.
        alias_name: The name of the result in place of "mean(x)".
    """

    verb, of_numbers = "mean", True

    def of_values(self, value: str, kind: Any) -> str:
        """Return the SQL of the mean."""
        return f"avg({_as_number(value, kind)})::DOUBLE"


class Std(SqlAggregate):
    """The standard deviation of a column.

    Args:
        on: The column.
        ddof: The variance divides by the number of values less this.
        ignore_nulls: As for :class:`Sum`.
        alias_name: The name of the result in place of "std(x)".
    """

    verb, of_numbers = "std", True

    def __init__(
        self, on: str | None = None, ddof: int = 1, ignore_nulls: bool = True, alias_name: str | None = None
    ) -> None:
        super().__init__(on, ignore_nulls, alias_name)
        self._ddof = whole("ddof", ddof, 0)

    def of_values(self, value: str, kind: Any) -> str:
        """Return the SQL of the deviation; null for too few values."""
        doubles = f"({_as_number(value, kind)})::DOUBLE"
        return (
            f"CASE WHEN count({value}) > {self._ddof} "
            f"THEN sqrt(var_pop({doubles}) * count({value}) / (count({value}) - {self._ddof})) END"
        )


class AbsMax(_Extreme):
    """The greatest absolute value of a column.

    Args:
        on: The column.
        ignore_nulls: As for :class:`Sum`.
        zero_factory: Accepted for compatibility, without effect.
        alias_name: The name of the result in place of "abs_max(x)".
    """

    verb, of_numbers = "abs_max", True

    def of_values(self, value: str, kind: Any) -> str:
        """Return the SQL of the greatest absolute value."""
        return f"max(abs({_as_number(value, kind)}))"


class Quantile(SqlAggregate):
    """A quantile of a column, interpolated between neighbours.

    Args:
        on: The column.
        q: The share of values below it, from 0 to 1.
        ignore_nulls: As for :class:`Sum`.
        alias_name: The name of the result in place of "quantile(x)".
    """

    verb, of_numbers = "quantile", True

    def __init__(
        self,
        on: str | None = None,
        q: float = 0.5,
        ignore_nulls: bool = True,
        alias_name: str | None = None,
    ) -> None:
        super().__init__(on, ignore_nulls, alias_name)
        self._q = _share("q", q)

    def of_values(self, value: str, kind: Any) -> str:
        """Return the SQL of the quantile."""
        return f"quantile_cont(({_as_number(value, kind)})::DOUBLE, {self._q!r})"


def _share(name: str, value: Any) -> float:
    what = "must be a number from 0 to 1."
    share = float(number(name, value, what))
    if not 0 <= share <= 1:
        raise DataError(f"{name}={shown(value)} {what}")
    return share


class Unique(SqlAggregate):
    """The different values of a column, as a sorted list; null is the last.

    Args:
        on: The column.
        ignore_nulls: Leave out null.
        alias_name: The name of the result in place of "unique(x)".
        encode_lists: Of a column of lists, the different values in them.
    """

    verb = "unique"

    def __init__(
        self,
        on: str | None = None,
        ignore_nulls: bool = False,
        alias_name: str | None = None,
        encode_lists: bool | None = None,
    ) -> None:
        super().__init__(on, ignore_nulls, alias_name)
        self._encode_lists = flag("encode_lists", encode_lists or False)

    def sql(self, column: str, kind: Any) -> str:
        """Return the SQL of the list."""
        value = known(column, kind)
        found = f"list(DISTINCT {value})"
        if self._ignore_nulls:
            found += f" FILTER (WHERE {value} IS NOT NULL)"
        if self._encode_lists and (_pt.is_list(kind) or _pt.is_large_list(kind)):
            found = f"list_distinct(flatten(list({column})))"  # which leaves out null
        return f"coalesce(list_sort({found}, 'ASC', 'NULLS LAST'), [])"

    def of_values(self, value: str, kind: Any) -> str:
        """Return the SQL of the list."""
        return self.sql(value, kind)


class CountDistinct(SqlAggregate):
    """The number of different values of a column.

    Args:
        on: The column.
        ignore_nulls: Do not count null.
        alias_name: The name of the result in place of "count_distinct(x)".
    """

    verb = "count_distinct"

    def __init__(self, on: str, ignore_nulls: bool = True, alias_name: str | None = None) -> None:
        super().__init__(on, ignore_nulls, alias_name)

    def sql(self, column: str, kind: Any) -> str:
        """Return the SQL of the number."""
        value = known(column, kind)
        more = "" if self._ignore_nulls else f" + (count({value}) < count(*))::BIGINT"
        return f"count(DISTINCT {value}){more}"

    def of_values(self, value: str, kind: Any) -> str:
        """Return the SQL of the number."""
        return self.sql(value, kind)


class AsList(SqlAggregate):
    """All values of a column as a list, in the order of the rows.

    Args:
        on: The column.
        alias_name: The name of the result in place of "list(x)".
        ignore_nulls: Leave out nulls.
    """

    verb = "list"

    def __init__(self, on: str, alias_name: str | None = None, ignore_nulls: bool = False) -> None:
        super().__init__(on, ignore_nulls, alias_name)

    def sql(self, column: str, kind: Any) -> str:
        """Return the SQL of the list."""
        from powertrain.data.whole.database import ROW

        kept = f" FILTER (WHERE {known(column, kind)} IS NOT NULL)" if self._ignore_nulls else ""
        return f"coalesce(list({column} ORDER BY {ROW}){kept}, [])"

    def of_values(self, value: str, kind: Any) -> str:
        """Return the SQL of the list."""
        return self.sql(value, kind)


class MissingValuePercentage(SqlAggregate):
    """The percentage of nulls and NaN in a column.

    Args:
        on: The column.
        alias_name: The name of the result in place of "missing_pct(x)".
    """

    verb = "missing_pct"

    def __init__(self, on: str, alias_name: str | None = None) -> None:
        super().__init__(on, True, alias_name)

    def of_values(self, value: str, kind: Any) -> str:
        """Return the SQL of the percentage."""
        return f"100.0::DOUBLE * (count(*) - count({value})) / nullif(count(*), 0)"


class ZeroPercentage(SqlAggregate):
    """The percentage of zeros in a column.

    Args:
        on: The column.
        ignore_nulls: Of the values that are not null, in place of all rows.
        alias_name: The name of the result in place of "zero_pct(x)".
    """

    verb, of_numbers = "zero_pct", True

    def __init__(self, on: str, ignore_nulls: bool = True, alias_name: str | None = None) -> None:
        super().__init__(on, ignore_nulls, alias_name)

    def sql(self, column: str, kind: Any) -> str:
        """Return the SQL of the percentage."""
        value = _as_number(known(column, kind), kind)
        counted = f"count({value})" if self._ignore_nulls else "count(*)"
        return f"100.0::DOUBLE * count(*) FILTER (WHERE {value} = 0) / nullif({counted}, 0)"

    def of_values(self, value: str, kind: Any) -> str:
        """Return the SQL of the percentage."""
        return self.sql(value, kind)


class ApproximateQuantile(SqlAggregate):
    """Quantiles of a column, as a list of values of it. They are exact here.

    Args:
        on: The column.
        quantiles: Shares of values, each from 0 to 1.
        quantile_precision: Accepted for compatibility, without effect.
        alias_name: The name of the result in place of "approx_quantile(x)".
    """

    verb, of_numbers = "approx_quantile", True

    def __init__(
        self,
        on: str,
        quantiles: Sequence[float],
        quantile_precision: int = 800,
        alias_name: str | None = None,
    ) -> None:
        super().__init__(on, True, alias_name)
        given = values_of("quantiles", quantiles, "Give numbers from 0 to 1.")
        self._quantiles = [_share("a value of quantiles", each) for each in given]

    def of_values(self, value: str, kind: Any) -> str:
        """Return the SQL of the quantiles."""
        return f"quantile_disc(({_as_number(value, kind)})::DOUBLE, {self._quantiles!r})"
