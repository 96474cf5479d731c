"""Aggregates of columns: sums, extremes, means, different values, a summary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from powertrain.data.arguments import column_names, flag, whole
from powertrain.data.methods.writing_formats import FormatWritingMethods

if TYPE_CHECKING:
    from powertrain.data.output.aggregates import ColumnAggregate


class StatisticsMethods(FormatWritingMethods):
    """The methods of :class:`powertrain.data.Dataset` that aggregate columns."""

    __slots__ = ()

    def unique(self, column: str, ignore_nulls: bool = False) -> list[Any]:
        """Return the different values of a column, in the order of their first rows. Reads that column.

        Args:
            column: The name of the column.
            ignore_nulls: Leave out null.

        Returns:
            The values. They are in memory together.

        Raises:
            DataError: There is no such column, or its values cannot be compared.

        Example::

            classes = sorted(dataset.unique("label"))
        """
        from powertrain.data.output.aggregates import unique_values

        ignored = flag("ignore_nulls", ignore_nulls)
        [name] = column_names("unique", column)[:1]
        with closing(self._column_tables([name])) as tables:
            return unique_values(tables, name, ignored)

    def sum(self, on: str | Sequence[str] | None = None, ignore_nulls: bool = True) -> Any:
        """Return the sum of a column, or of several.

        Args:
            on: The name of a column, or several; None for all.
            ignore_nulls: Leave out nulls and NaN; otherwise the result is None where there are any.

        Returns:
            A number; for several columns a dict such as ``{"sum(x)": 3}``. None without values.

        Raises:
            DataError: There is no such column, or it has no numbers.

        Example::

            total = dataset.sum("price")
        """
        return self._aggregated("sum", on, ignore_nulls, lambda found: found.total)

    def min(self, on: str | Sequence[str] | None = None, ignore_nulls: bool = True) -> Any:
        """Return the least value of a column, or of several.

        Args:
            on: As for :meth:`sum`.
            ignore_nulls: As for :meth:`sum`.

        Returns:
            As for :meth:`sum`.

        Raises:
            DataError: There is no such column.

        Example::

            first = dataset.min("time")
        """
        return self._aggregated("min", on, ignore_nulls, lambda found: found.least, numbers=False)

    def max(self, on: str | Sequence[str] | None = None, ignore_nulls: bool = True) -> Any:
        """Return the greatest value of a column, or of several.

        Args:
            on: As for :meth:`sum`.
            ignore_nulls: As for :meth:`sum`.

        Returns:
            As for :meth:`sum`.

        Raises:
            DataError: There is no such column.

        Example::

            last = dataset.max("time")
        """
        return self._aggregated("max", on, ignore_nulls, lambda found: found.most, numbers=False)

    def mean(self, on: str | Sequence[str] | None = None, ignore_nulls: bool = True) -> Any:
        """Return the mean of a column, or of several.

        Args:
            on: As for :meth:`sum`.
            ignore_nulls: As for :meth:`sum`.

        Returns:
            As for :meth:`sum`.

        Raises:
            DataError: There is no such column, or it has no numbers.

        Example::

            average = dataset.mean("price")
        """
        return self._aggregated("mean", on, ignore_nulls, lambda found: found.mean if found.count else None)

    def std(self, on: str | Sequence[str] | None = None, ddof: int = 1, ignore_nulls: bool = True) -> Any:
        """Return the standard deviation of a column, or of several.

        Args:
            on: As for :meth:`sum`.
            ddof: The variance divides by the number of values less this.
            ignore_nulls: As for :meth:`sum`.

        Returns:
            As for :meth:`sum`.

        Raises:
            DataError: There is no such column, or it has no numbers.

        Example::

            spread = dataset.std("price")
        """
        freedom = whole("ddof", ddof, 0)
        return self._aggregated("std", on, ignore_nulls, lambda found: found.std(freedom))

    def _aggregated(
        self,
        method: str,
        on: Any,
        ignore_nulls: bool,
        result: Callable[[ColumnAggregate], Any],
        numbers: bool = True,
    ) -> Any:
        from powertrain.data.output.aggregates import check_numbers

        ignored = flag("ignore_nulls", ignore_nulls)
        names = self.columns() if on is None else list(column_names(method, on))
        found = self._aggregates(names)
        if numbers:
            for each in found.values():
                check_numbers(method, each)
        results = {name: None if each.nulls and not ignored else result(each) for name, each in found.items()}
        if len(names) == 1:
            return results[names[0]]
        return {f"{method}({name})": value for name, value in results.items()}

    def _aggregates(self, names: Sequence[str]) -> dict[str, ColumnAggregate]:
        from powertrain.data.output.aggregates import aggregate_columns

        with closing(self._column_tables(names)) as tables:
            return aggregate_columns(tables, names)

    def _column_tables(self, names: Sequence[str]) -> Any:
        """Return the rows as tables with these columns only, which are the only ones read where that is possible."""
        from powertrain.data.consuming import PlanReader
        from powertrain.data.operations.columns import SelectColumns
        from powertrain.data.plan.changing import project
        from powertrain.data.sources.filtered import ProjectedSource

        chosen = tuple(names)
        plan = project(self.plan, lambda source: ProjectedSource(source, chosen), SelectColumns(chosen))
        return PlanReader(plan).tables(None)
