"""The protocol of an operation on rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from powertrain.data.operations.calls import Setting
from powertrain.data.plan.order import Ints
from powertrain.data.rows.rows import Rows


@dataclass(frozen=True)
class Applied:
    """Rows after something was done to them."""

    rows: Rows
    #: How many rows each row that went in has become, in order; None for one each.
    counts: Ints | None = None


@dataclass(frozen=True)
class RowPiece:
    """Rows that an operation is given at once."""

    rows: Rows
    #: Which of the rows made from the same stored row each is; None where each is the only one.
    copies: Ints | None = None

    def copy(self, index: int) -> int:
        return 0 if self.copies is None else int(self.copies[index])


#: What an operation has become in a process. Raises FunctionFailed, or DataError where no function is to blame.
Apply = Callable[[RowPiece, Setting], Applied]


class Operation(ABC):
    """One thing done to every row of a dataset. A value: frozen, pickled by cloudpickle."""

    @property
    @abstractmethod
    def name(self) -> str:
        """For messages: "map(tokenize)"."""

    @property
    def keeps_count(self) -> bool:
        """True when it is known beforehand that every row gives exactly one."""
        return True

    @property
    def batch_size(self) -> int | None:
        """How many neighbours it must be given together; None where each row stands for itself."""
        return None

    @property
    def concurrency(self) -> int:
        """How many processes of a node do it; 0 where the threads that prefetch do."""
        return 0

    def stored(self, columns: Mapping[str, str]) -> Mapping[str, str]:
        """Which columns hold after it exactly what the source has stored for the row, by the name that each has there.

        ``columns`` says the same of the columns before it. Where nothing is known, none.
        """
        return {}

    @abstractmethod
    def begin(self) -> Apply:
        """Make it ready in this process. What is returned may be called by several threads at once."""
