"""Operations on all rows at once: sort, group, aggregate, join."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from powertrain.data.arguments import column_names, flag, one_of, shown, texts, values_of, whole
from powertrain.data.methods.iterators import IteratorMethods
from powertrain.data.options.noting import note_without_effect
from powertrain.errors import DataError

if TYPE_CHECKING:
    from powertrain.data.aggregate.functions import AggregateFn
    from powertrain.data.methods.summary import DatasetSummary
    from powertrain.data.whole.grouped import GroupedData

_D = TypeVar("_D", bound="WholeDataMethods")
#: Most blocks that rows are brought together in.
_MOST_PARTS = 100_000


class WholeDataMethods(IteratorMethods):
    """The methods of :class:`powertrain.data.Dataset` that need all rows at once. DuckDB computes them."""

    __slots__ = ()

    def sort(
        self: _D,
        key: str | Sequence[str],
        descending: bool | Sequence[bool] = False,
        boundaries: Sequence[Any] | None = None,
    ) -> _D:
        """Return the rows sorted by columns; null and NaN are the last ones, and equal rows keep their order.

        It is computed when it is first needed, within the memory of ``DataContext`` and spilling to disk, and kept in
        files like the rows of :meth:`materialize`. Needs ``pip install 'powertrain[duckdb]'``.

        Args:
            key: The name of a column, or several.
            descending: Sort from the greatest value; for several columns also one for each.
            boundaries: Values of the first column at which blocks end.

        Returns:
            The new dataset.

        Raises:
            DataError: An argument has a wrong value; and when it is computed, a column does not exist.

        Example::

            dataset.sort(["user", "time"], descending=[False, True])
        """
        from powertrain.data.whole.ordering import SortRows
        from powertrain.data.whole.query import plan_of

        keys = column_names("sort", key)
        if isinstance(descending, (list, tuple)):
            directions = tuple(flag("descending", each) for each in descending)
        else:
            directions = (flag("descending", descending),) * len(keys)
        if len(directions) != len(keys):
            raise DataError(
                f"sort(): descending={shown(descending)} has {len(directions)} values for {len(keys)} columns. Give "
                "one for each, or one for all."
            )
        limits = values_of("boundaries", boundaries, "Give values in ascending order.") if boundaries else []
        return self._of_plan(plan_of(SortRows(keys, directions, tuple(limits)), self.plan))

    def groupby(
        self: _D, key: str | Sequence[str] | None, num_partitions: int | None = None
    ) -> GroupedData[_D]:
        """Return the rows in groups of equal values, to aggregate them or to call a function with each.

        Args:
            key: The name of a column, or several; None for one group of all rows.
            num_partitions: Accepted for compatibility, without effect.

        Returns:
            The groups; nothing is computed yet.

        Raises:
            DataError: ``key`` is not the name of columns.

        Example::

            dataset.groupby("label").count().show()
        """
        from powertrain.data.whole.grouped import GroupedData

        note_without_effect("groupby", {"num_partitions": num_partitions} if num_partitions else {})
        return GroupedData(self, () if key is None else column_names("groupby", key))

    def aggregate(self, *aggs: AggregateFn) -> dict[str, Any]:
        """Return the results of aggregations of all rows, computed in one pass, by their names.

        Args:
            *aggs: Aggregations of :mod:`powertrain.data.aggregate`.

        Returns:
            A dict such as ``{"mean(x)": 0.5}``.

        Raises:
            DataError: An argument is not an aggregation, or a column does not exist or has another type.

        Example::

            dataset.aggregate(Mean("price"), Quantile("price", q=0.9))
        """
        from powertrain.data.whole.grouped import checked_aggregations
        from powertrain.data.whole.grouping import aggregate_all
        from powertrain.data.whole.inputs import Input

        return aggregate_all(checked_aggregations(aggs), Input(self.plan))

    def summary(
        self, columns: Sequence[str] | None = None, override_dtype_agg_mapping: Any = None
    ) -> DatasetSummary:
        """Return statistics of the columns.

        Columns of numbers have count, mean, least and greatest value, standard deviation, and the percentages of
        missing values and of zeros; others the count and the percentage of missing values, and those that can be
        ordered the least and greatest value. With the extra ``duckdb``, which a second pass is made by, numbers have
        their median too, and texts their ten most frequent values.

        Args:
            columns: The names of columns; None for all.
            override_dtype_agg_mapping: Functions by :class:`~powertrain.data.datatype.DataType` that return the
                aggregations of a column with that type, in place of the statistics above. Needs ``duckdb``.

        Returns:
            The statistics; ``to_pandas()`` shows them as a table.

        Raises:
            DataError: There is no such column, or no DuckDB for given aggregations.

        Example::

            print(dataset.summary())
        """
        from powertrain.data.methods.summary import (
            DatasetSummary,
            add_results,
            chosen_aggregations,
            distributions,
            statistics_of,
        )

        names = self.columns() if columns is None else list(column_names("summary", columns))
        schema = self.schema()
        chosen = chosen_aggregations(schema, names, override_dtype_agg_mapping)
        found = self._aggregates([name for name in names if name not in chosen])
        statistics = {name: {} if name in chosen else statistics_of(found[name]) for name in names}
        more = {**chosen, **distributions(schema, list(found))}
        aggregations = [one for each in more.values() for one in each]
        if aggregations:
            add_results(statistics, more, self.aggregate(*aggregations))
        return DatasetSummary(schema, statistics)

    def join(
        self: _D,
        ds: Any,
        join_type: str,
        num_partitions: int | None = None,
        on: str | Sequence[str] = ("id",),
        right_on: str | Sequence[str] | None = None,
        left_suffix: str | None = None,
        right_suffix: str | None = None,
        *,
        partition_size_hint: int | None = None,
        aggregator_ray_remote_args: Any = None,
        validate_schemas: bool = False,
    ) -> _D:
        """Return the rows of this and another dataset that have equal keys, put together; null equals nothing.

        Rows are in the order of this dataset, then of the other. It is computed when it is first needed, like
        :meth:`sort`.

        Args:
            ds: The other dataset, the right one.
            join_type: "inner", "left_outer", "right_outer" or "full_outer"; or the rows of one dataset that have a
                counterpart, "left_semi" or "right_semi", or none, "left_anti" or "right_anti".
            num_partitions: Accepted for compatibility, without effect.
            on: The columns to compare.
            right_on: Their names in the other dataset; None for the same.
            left_suffix: Is added to names of this dataset's columns that both have.
            right_suffix: Is added to names of the other's.
            partition_size_hint: Accepted for compatibility, without effect.
            aggregator_ray_remote_args: Likewise.
            validate_schemas: Likewise: columns are always checked.

        Returns:
            The new dataset.

        Raises:
            DataError: An argument has a wrong value; and when it is computed, columns do not exist, have different
                types, or have equal names without a suffix.

        Example::

            people.join(cities, "left_outer", on="city", right_on="name")
        """
        from powertrain.data.whole.joining import JOIN_TYPES, JoinRows
        from powertrain.data.whole.query import plan_of

        if not isinstance(ds, WholeDataMethods):
            raise DataError(f"join() takes a dataset, and got a {type(ds).__name__}. Give a Dataset.")
        ignored = {
            "num_partitions": num_partitions,
            "partition_size_hint": partition_size_hint,
            "aggregator_ray_remote_args": aggregator_ray_remote_args,
        }
        note_without_effect("join", {name: value for name, value in ignored.items() if value is not None})
        flag("validate_schemas", validate_schemas)
        kind = one_of("join_type", join_type, JOIN_TYPES)
        left_on = column_names("join", on)
        others = left_on if right_on is None else column_names("join", right_on)
        if len(left_on) != len(others):
            raise DataError(
                f"join(): on={shown(on)} and right_on={shown(right_on)} have different numbers of columns. Give as "
                "many for both."
            )
        [left, right] = [
            _suffix(name, text)
            for name, text in (("left_suffix", left_suffix), ("right_suffix", right_suffix))
        ]
        return self._of_plan(plan_of(JoinRows(kind, left_on, others, left, right), self.plan, ds.plan))

    def _by_keys(self: _D, num_blocks: Any, keys: Any, sort: bool) -> _D:
        """Return the rows in blocks, those with equal keys in the same one: see :meth:`Dataset.repartition`."""
        from powertrain.data.whole.ordering import PartitionRows
        from powertrain.data.whole.query import plan_of

        if num_blocks is None:
            raise DataError("repartition(keys=...) needs the number of blocks. Give num_blocks=...")
        count = whole("num_blocks", num_blocks, 1, _MOST_PARTS)
        query = PartitionRows(column_names("repartition", keys), count, sort)
        return self._of_plan(plan_of(query, self.plan))


def _suffix(name: str, value: Any) -> str | None:
    found = texts(name, value, "Give text that is added to names.")
    if found is not None and len(found) != 1:
        raise DataError(f"{name}={shown(value)} must be one text that is added to names.")
    return None if found is None else found[0]
