"""Aggregations that count values: in functions, because their results have no type in SQL."""

from __future__ import annotations

import math
from typing import Any

import pyarrow as pa

from powertrain.data.aggregate.functions import AggregateFnV2
from powertrain.data.arguments import flag, whole
from powertrain.errors import DataError

_pt = pa.types


class ValueCounter(AggregateFnV2[dict[Any, int], dict[str, list[Any]]]):
    """The different values of a column and how often each occurs: ``{"values": [...], "counts": [...]}``.

    Args:
        on: The column.
        alias_name: The name of the result in place of "value_counter(x)".
    """

    def __init__(self, on: str, alias_name: str | None = None) -> None:
        super().__init__(alias_name or f"value_counter({on})", dict, on=on, ignore_nulls=True)

    def aggregate_block(self, block: Any) -> dict[Any, int]:
        """Return the number of each value.

        Args:
            block: The rows.
        """
        return _counted(block, str(self.get_target_column()), flatten=False)

    def combine(self, current_accumulator: dict[Any, int], new: dict[Any, int]) -> dict[Any, int]:
        """Return the sums of the numbers.

        Args:
            current_accumulator: One of them.
            new: The other.
        """
        return _added(current_accumulator, new)

    def finalize(self, accumulator: dict[Any, int]) -> dict[str, list[Any]]:
        """Return the values, the most frequent first, and their numbers.

        Args:
            accumulator: The number of each value.
        """
        ordered = _by_frequency(accumulator)
        return {"values": [value for value, _ in ordered], "counts": [count for _, count in ordered]}


class ApproximateTopK(AggregateFnV2[dict[Any, int], list[dict[str, Any]]]):
    """The most frequent values of a column, with their numbers. They are exact here.

    Args:
        on: The column.
        k: How many.
        log_capacity: Accepted for compatibility, without effect.
        alias_name: The name of the result in place of "approx_topk(x)".
        encode_lists: Of a column of lists, the most frequent values in them.
    """

    def __init__(
        self,
        on: str,
        k: int,
        log_capacity: int = 15,
        alias_name: str | None = None,
        encode_lists: bool = False,
    ) -> None:
        super().__init__(alias_name or f"approx_topk({on})", dict, on=on, ignore_nulls=True)
        self.k = whole("k", k, 1)
        self._encode_lists = flag("encode_lists", encode_lists)

    def aggregate_block(self, block: Any) -> dict[Any, int]:
        """Return the number of each value.

        Args:
            block: The rows.
        """
        return _counted(block, str(self.get_target_column()), flatten=self._encode_lists)

    def combine(self, current_accumulator: dict[Any, int], new: dict[Any, int]) -> dict[Any, int]:
        """Return the sums of the numbers.

        Args:
            current_accumulator: One of them.
            new: The other.
        """
        return _added(current_accumulator, new)

    def finalize(self, accumulator: dict[Any, int]) -> list[dict[str, Any]]:
        """Return the most frequent values and their numbers.

        Args:
            accumulator: The number of each value.
        """
        name = str(self.get_target_column())
        return [{name: value, "count": count} for value, count in _by_frequency(accumulator)[: self.k]]


def _counted(block: pa.Table, column: str, *, flatten: bool) -> dict[Any, int]:
    import pyarrow.compute as pc

    found: dict[Any, int] = {}
    for chunk in block.column(column).chunks:
        values: Any = chunk
        if flatten and (_pt.is_list(values.type) or _pt.is_large_list(values.type)):
            values = values.flatten()
        if _pt.is_nested(values.type):
            raise DataError(
                f"The values of the column {column!r} have the type {values.type} and cannot be counted. Name a "
                "column of numbers, text or times, or give encode_lists=True."
            )
        for each in pc.value_counts(values):
            value = each["values"].as_py()
            if value is not None and not (isinstance(value, float) and math.isnan(value)):
                found[value] = found.get(value, 0) + each["counts"].as_py()
    return found


def _added(one: dict[Any, int], other: dict[Any, int]) -> dict[Any, int]:
    for value, count in other.items():
        one[value] = one.get(value, 0) + count
    return one


def _by_frequency(found: dict[Any, int]) -> list[tuple[Any, int]]:
    """Return values and numbers, the most frequent first, equally frequent ones in their order."""
    return sorted(found.items(), key=lambda each: (-each[1], each[0]))
