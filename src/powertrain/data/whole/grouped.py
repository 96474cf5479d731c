"""``GroupedData``: the rows of a dataset in groups, on their way to an aggregation or a function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from powertrain.data.aggregate.functions import AggregateFn
from powertrain.data.aggregate.standard import Count, Max, Mean, Min, Std, Sum
from powertrain.data.arguments import column_names, flag, shown
from powertrain.data.dataset_arguments import checked_batch_format, function
from powertrain.data.methods.columns import ColumnMethods
from powertrain.data.options.scheduling import take_ray_arguments
from powertrain.data.whole.query import plan_of
from powertrain.errors import DataError

if TYPE_CHECKING:
    from powertrain.data.expressions.expr import Expr

_D = TypeVar("_D", bound="ColumnMethods")


class GroupedData(Generic[_D]):
    """Rows with equal values in some columns, returned by :meth:`Dataset.groupby`.

    Every method returns a dataset, which is computed when it is first needed. Groups are in the order of their keys;
    null is a key of its own, the last one.

    Example::

        dataset.groupby("label").mean("score").show()
    """

    def __init__(self, dataset: _D, keys: Sequence[str]) -> None:
        self._dataset, self._keys = dataset, tuple(keys)

    def __repr__(self) -> str:
        return f"GroupedData(dataset={self._dataset!r}, key={list(self._keys)!r})"

    def aggregate(self, *aggs: AggregateFn) -> _D:
        """Return one row for each group, with its keys and the results of aggregations.

        Args:
            *aggs: Aggregations of :mod:`powertrain.data.aggregate`.

        Returns:
            The new dataset.

        Raises:
            DataError: An argument is not an aggregation; and when it is computed, a column does not exist or has
                another type.

        Example::

            dataset.groupby("label").aggregate(Mean("score"), Quantile("score", q=0.9))
        """
        from powertrain.data.whole.grouping import AggregateGroups

        return self._dataset._of_plan(
            plan_of(AggregateGroups(self._keys, checked_aggregations(aggs)), self._dataset.plan)
        )

    def map_groups(
        self,
        fn: Callable[..., Any],
        *,
        zero_copy_batch: bool = True,
        compute: Any = None,
        batch_format: str | None = "default",
        fn_args: Iterable[Any] | None = None,
        fn_kwargs: Mapping[str, Any] | None = None,
        fn_constructor_args: Iterable[Any] | None = None,
        fn_constructor_kwargs: Mapping[str, Any] | None = None,
        concurrency: int | tuple[int, ...] | None = None,
        **ray_remote_args: Any,
    ) -> _D:
        """Call ``fn`` with all rows of each group, and return a dataset of the rows that it returns.

        Each group is in memory by itself. The results are computed once, and kept like those of ``materialize()``.

        Args:
            fn: A function or class that is given a batch and returns one of any number of rows, or yields several.
            zero_copy_batch: Accepted for compatibility: a function may always write to its batch.
            compute: As for :meth:`Dataset.map`.
            batch_format: ``"numpy"`` (the default), ``"pandas"`` or ``"pyarrow"``.
            fn_args: As for :meth:`Dataset.map`, like the arguments below.
            fn_kwargs: Likewise.
            fn_constructor_args: Likewise.
            fn_constructor_kwargs: Likewise.
            concurrency: Likewise.
            **ray_remote_args: Likewise.

        Returns:
            The new dataset, with the groups in the order of their keys.

        Raises:
            DataError: An argument has a wrong value; and when it is computed, a column does not exist or ``fn`` fails.

        Example::

            dataset.groupby("user").map_groups(lambda rows: {"first": rows["time"].min(keepdims=True)})
        """
        from powertrain.data.whole.grouping import MapGroupRows, MapGroups

        take_ray_arguments("map_groups", ray_remote_args)
        flag("zero_copy_batch", zero_copy_batch)
        given = function(
            "map_groups",
            fn,
            fn_args,
            fn_kwargs,
            fn_constructor_args,
            fn_constructor_kwargs,
            concurrency,
            compute,
        )
        operation = MapGroupRows(**given, batch_format=checked_batch_format(batch_format), keys=self._keys)
        return self._dataset._of_plan(plan_of(MapGroups(self._keys, operation), self._dataset.plan))

    def with_column(self, column_name: str, expr: Expr, **ray_remote_args: Any) -> _D:
        """Return all rows, sorted by their keys, with one more column.

        Args:
            column_name: The name of the column.
            expr: An expression of other columns: see :meth:`Dataset.with_column`.
            **ray_remote_args: As for :meth:`Dataset.map`.
        """
        from powertrain.data.whole.ordering import SortRows

        plan = self._dataset.plan
        if self._keys:
            plan = plan_of(SortRows(self._keys, (False,) * len(self._keys)), plan)
        return self._dataset._of_plan(plan).with_column(column_name, expr, **ray_remote_args)

    # -- one aggregation

    def count(self) -> _D:
        """Return the number of rows of each group, as "count()"."""
        return self.aggregate(Count())

    def sum(self, on: str | Sequence[str] | None = None, ignore_nulls: bool = True) -> _D:
        """Return the sum of columns in each group, as "sum(x)".

        Args:
            on: The name of a column, or several; None for all but the keys.
            ignore_nulls: Leave out nulls and NaN; otherwise the result of a group with any is null.
        """
        return self.aggregate(*(Sum(name, ignore_nulls) for name in self._columns("sum", on)))

    def min(self, on: str | Sequence[str] | None = None, ignore_nulls: bool = True) -> _D:
        """Return the least value of columns in each group, as "min(x)".

        Args:
            on: As for :meth:`sum`.
            ignore_nulls: As for :meth:`sum`.
        """
        return self.aggregate(*(Min(name, ignore_nulls) for name in self._columns("min", on)))

    def max(self, on: str | Sequence[str] | None = None, ignore_nulls: bool = True) -> _D:
        """Return the greatest value of columns in each group, as "max(x)".

        Args:
            on: As for :meth:`sum`.
            ignore_nulls: As for :meth:`sum`.
        """
        return self.aggregate(*(Max(name, ignore_nulls) for name in self._columns("max", on)))

    def mean(self, on: str | Sequence[str] | None = None, ignore_nulls: bool = True) -> _D:
        """Return the mean of columns in each group, as "mean(x)".

        Args:
            on: As for :meth:`sum`.
            ignore_nulls: As for :meth:`sum`.
        """
        return self.aggregate(*(Mean(name, ignore_nulls) for name in self._columns("mean", on)))

    def std(self, on: str | Sequence[str] | None = None, ddof: int = 1, ignore_nulls: bool = True) -> _D:
        """Return the standard deviation of columns in each group, as "std(x)".

        Args:
            on: As for :meth:`sum`.
            ddof: The variance divides by the number of values less this.
            ignore_nulls: As for :meth:`sum`.
        """
        return self.aggregate(*(Std(name, ddof, ignore_nulls) for name in self._columns("std", on)))

    def _columns(self, method: str, on: Any) -> tuple[str, ...]:
        if on is not None:
            return column_names(method, on)
        found = tuple(name for name in self._dataset.columns() if name not in self._keys)
        if not found:
            raise DataError(
                f"{method}() has no column to aggregate beside the keys {list(self._keys)}. Use count()."
            )
        return found


def checked_aggregations(aggs: Sequence[Any]) -> tuple[AggregateFn, ...]:
    """Return aggregations; raise :class:`DataError` for anything else."""
    if not aggs:
        raise DataError("aggregate() was given no aggregation. Give at least one, such as Mean('x').")
    for each in aggs:
        if not isinstance(each, AggregateFn):
            raise DataError(
                f"aggregate() takes aggregations, and got {shown(each)}. Give objects of powertrain.data.aggregate, "
                "such as Mean('x')."
            )
    return tuple(aggs)
