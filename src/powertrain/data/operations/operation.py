"""The protocol of an operation on rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from powertrain.data.operations.calls import Setting
from powertrain.data.plan.order import Ints
from powertrain.data.rows.rows import Rows


@dataclass(frozen=True)
class Applied:
    """Rows after an operation."""

    rows: Rows
    #: Number of output rows of each input row, in order; None for one each.
    counts: Ints | None = None


@dataclass(frozen=True)
class RowPiece:
    """Rows that an operation gets at once."""

    rows: Rows
    #: Index of each among the rows made from the same stored row; None where each is the only one.
    copies: Ints | None = None

    def copy(self, index: int) -> int:
        return 0 if self.copies is None else int(self.copies[index])


#: An operation begun in a process. Raises FunctionFailed, or DataError where no user function is involved.
Apply = Callable[[RowPiece, Setting], Applied]


class Operation(ABC):
    """One transformation of every row of a dataset. A value: frozen, pickled by cloudpickle."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name for messages: "map(tokenize)"."""

    @property
    def keeps_count(self) -> bool:
        """True when every row is known beforehand to yield exactly one."""
        return True

    @property
    def batch_size(self) -> int | None:
        """Number of neighbouring rows that it must get together; None where each row is independent."""
        return None

    @property
    def keeps_row_numbers(self) -> bool:
        """True when rows hold values, the same in every epoch, that follow from their numbers in the dataset."""
        return False

    @property
    def functions(self) -> Sequence[Callable[..., Any]]:
        """Functions and classes of the user that it calls, which other processes may be unable to import."""
        return ()

    @property
    def concurrency(self) -> int:
        """Number of processes of a node that run it; 0 for the prefetching threads."""
        return 0

    def stored(self, columns: Mapping[str, str]) -> Mapping[str, str]:
        """Return the columns that hold exactly the stored values afterwards, by their names in the source.

        ``columns`` are those columns before the operation. Returns none where nothing is known.
        """
        return {}

    @abstractmethod
    def begin(self) -> Apply:
        """Prepare it in this process. The returned function may be called by several threads at once."""
