"""Rows on their way from the blocks to the user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Union

import numpy as np

from powertrain.data.plan.order import Ints

if TYPE_CHECKING:
    import pyarrow as pa

#: A numpy array whose first dimension is the rows (values of one type and shape), or an Arrow array otherwise: text,
#: lists of different lengths, structs, decimals, and columns with nulls. An object array holds results of a user's
#: function for which Arrow has no type.
Column = Union["np.ndarray[Any, Any]", "pa.Array[Any]"]


@dataclass(frozen=True)
class Rows:
    """Named columns of equal length."""

    columns: Mapping[str, Column]
    #: The number of each row in the stored data, over all blocks: it names the row in errors, and is the key of its
    #: random numbers. A row made by a flat_map has the number of its original row.
    numbers: Ints
    #: Columns of float64 whose values were Python floats: see ``sources.base.PYTHON_FLOATS``.
    python_floats: frozenset[str] = field(default=frozenset())
    #: Columns whose rows are lists. A row of any other column of several dimensions, or of Arrow lists, is an array.
    lists: frozenset[str] = field(default=frozenset())

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        return sum(int(column.nbytes) for column in self.columns.values())

    def with_columns(self, columns: Mapping[str, Column]) -> Rows:
        """Return the same rows with other columns."""
        return replace(
            self,
            columns=columns,
            python_floats=self.python_floats.intersection(columns),
            lists=self.lists.intersection(columns),
        )

    def between(self, low: int, high: int) -> Rows:
        """Return rows ``low`` to before ``high``, as a copy."""
        columns = {
            name: column[low:high].copy() if isinstance(column, np.ndarray) else column.slice(low, high - low)
            for name, column in self.columns.items()
        }
        return replace(self, columns=columns, numbers=self.numbers[low:high])
