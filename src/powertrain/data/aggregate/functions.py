"""Aggregations that call functions of the user."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from powertrain.data.arguments import column_name, flag, shown
from powertrain.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

AccumulatorType = TypeVar("AccumulatorType")
AggOutputType = TypeVar("AggOutputType")


def checked_name(name: Any) -> str:
    """Return the name of the column of results."""
    if not isinstance(name, str) or not name:
        raise DataError(f"name={shown(name)} must be the name of the column of results. Give it as str.")
    return column_name("an aggregation", name)


class AggregateFn:
    """An aggregation of rows by functions: an accumulator is made, given the rows, and turned into a result.

    Args:
        init: Makes an accumulator; it is given the key of the group, None without groups.
        merge: Makes one accumulator of two.
        name: The name of the column of results.
        accumulate_row: Returns the accumulator with one more row, a dict.
        accumulate_block: Returns the accumulator with some more rows, a ``pyarrow.Table``; in place of
            ``accumulate_row``.
        finalize: Turns the accumulator into the result; None where it is the result.

    Raises:
        DataError: An argument has a wrong value.

    Example::

        longest = AggregateFn(
            init=lambda key: 0,
            accumulate_row=lambda found, row: max(found, len(row["text"])),
            merge=max,
            name="longest",
        )
        dataset.groupby("label").aggregate(longest)
    """

    def __init__(
        self,
        init: Callable[[Any], Any],
        merge: Callable[[Any, Any], Any],
        name: str,
        accumulate_row: Callable[[Any, dict[str, Any]], Any] | None = None,
        accumulate_block: Callable[[Any, Any], Any] | None = None,
        finalize: Callable[[Any], Any] | None = None,
    ) -> None:
        if (accumulate_row is None) == (accumulate_block is None):
            raise DataError("AggregateFn takes one of accumulate_row and accumulate_block. Give one.")
        for argument, fn in (("init", init), ("merge", merge), ("finalize", finalize)):
            if not callable(fn) and not (fn is None and argument == "finalize"):
                raise DataError(f"AggregateFn({argument}={shown(fn)}) must be a function.")
        self.name = checked_name(name)
        self.init, self.merge = init, merge
        self.accumulate_block: Callable[[Any, Any], Any] = accumulate_block or _ByRows(accumulate_row)
        self.finalize: Callable[[Any], Any] = finalize or _unchanged

    def get_target_column(self) -> str | None:
        """Return the column that is aggregated; None for whole rows."""
        return None

    def start(self, key: Any) -> Any:
        """Return the accumulator of no rows.

        Args:
            key: The key of the group; None without groups.
        """
        return self.init(key)

    def add(self, accumulator: Any, table: pa.Table) -> Any:
        """Return the accumulator with more rows.

        Args:
            accumulator: That of the rows before.
            table: The rows.
        """
        return self.accumulate_block(accumulator, table)

    def finish(self, accumulator: Any) -> Any:
        """Return the result of all rows.

        Args:
            accumulator: That of all rows.
        """
        return self.finalize(accumulator)


class _ByRows:
    """Accumulates the rows of a table one by one."""

    def __init__(self, accumulate_row: Any) -> None:
        self._accumulate_row = accumulate_row

    def __call__(self, accumulator: Any, table: pa.Table) -> Any:
        for row in table.to_pylist():
            accumulator = self._accumulate_row(accumulator, row)
        return accumulator


def _unchanged(accumulator: Any) -> Any:
    return accumulator


class AggregateFnV2(AggregateFn, Generic[AccumulatorType, AggOutputType]):
    """An aggregation as a class to derive from: of blocks of rows, whose results are combined.

    Args:
        name: The name of the column of results.
        zero_factory: Makes the accumulator of no rows.
        on: The column that is aggregated; None for whole rows.
        ignore_nulls: Leave out results of blocks that are null; otherwise one makes the whole result null.

    Raises:
        DataError: An argument has a wrong value.
    """

    def __init__(
        self, name: str, zero_factory: Callable[[], Any], *, on: str | None, ignore_nulls: bool
    ) -> None:
        self._target_col_name = on
        self._ignore_nulls = flag("ignore_nulls", ignore_nulls)
        self._zero_factory = zero_factory
        self.name = checked_name(name)

    def start(self, key: Any) -> Any:
        """Return the accumulator of no rows.

        Args:
            key: The key of the group, without effect.
        """
        return None if self._ignore_nulls else self._zero_factory()

    def add(self, accumulator: Any, table: pa.Table) -> Any:
        """Return the accumulator with more rows.

        Args:
            accumulator: That of the rows before.
            table: The rows.
        """
        new = self.aggregate_block(table)
        if accumulator is None or new is None:
            return (accumulator if new is None else new) if self._ignore_nulls else None
        return self.combine(accumulator, new)

    def finish(self, accumulator: Any) -> Any:
        """Return the result of all rows; null stays null.

        Args:
            accumulator: That of all rows.
        """
        return None if accumulator is None else self.finalize(accumulator)

    def get_target_column(self) -> str | None:
        """Return the column that is aggregated; None for whole rows."""
        return self._target_col_name

    def get_agg_name(self) -> str:
        """Return the name of the aggregation, such as "sum" of "sum(x)"."""
        return self.name.partition("(")[0] or self.name

    @abstractmethod
    def aggregate_block(self, block: Any) -> Any:
        """Return the accumulator of some rows.

        Args:
            block: The rows, a ``pyarrow.Table``.
        """

    @abstractmethod
    def combine(self, current_accumulator: Any, new: Any) -> Any:
        """Return one accumulator of two.

        Args:
            current_accumulator: One of them.
            new: The other.
        """

    def finalize(self, accumulator: Any) -> Any:
        """Return the result of an accumulator.

        Args:
            accumulator: That of all rows.
        """
        return accumulator
