"""``DataType``: Ray Data's names of Arrow types."""

from __future__ import annotations

from typing import Any

from powertrain.data.expressions.arrow import arrow_type
from powertrain.errors import DataError

_NAMES = (
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
    "string", "large_string", "binary", "large_binary", "bool", "date32", "date64", "null",
)  # fmt: skip


class _Names(type):
    def __getattr__(cls, name: str) -> Any:
        if name in _NAMES:
            return lambda: DataType(_named(name))
        if name.startswith("_"):
            raise AttributeError(name)
        raise DataError(
            f"DataType.{name} of Ray Data has no counterpart here. Give an Arrow type: DataType.from_arrow(...)."
        )


def _named(name: str) -> Any:
    import pyarrow as pa

    return getattr(pa, {"bool": "bool_"}.get(name, name))()


class DataType(metaclass=_Names):
    """An Arrow type under its name in Ray Data: ``DataType.int64()``, ``DataType.string()``.

    Example::

        @udf(return_dtype=DataType.float64())
        def halves(values): ...
    """

    def __init__(self, arrow: Any) -> None:
        self.arrow = arrow_type(arrow)

    def __repr__(self) -> str:
        return f"DataType({self.arrow})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DataType) and bool(self.arrow == other.arrow)

    def __hash__(self) -> int:
        return hash(str(self.arrow))

    @classmethod
    def from_arrow(cls, arrow_type: Any) -> DataType:
        """Return the name of an Arrow type.

        Args:
            arrow_type: A ``pyarrow.DataType``.
        """
        return cls(arrow_type)

    @classmethod
    def from_numpy(cls, numpy_dtype: Any) -> DataType:
        """Return the name of a numpy type.

        Args:
            numpy_dtype: A numpy dtype, or its name.
        """
        return cls(numpy_dtype)

    @classmethod
    def list(cls, value_type: DataType) -> DataType:
        """Return the type of lists.

        Args:
            value_type: The type of their values.
        """
        import pyarrow as pa

        return cls(pa.list_(value_type.arrow))

    def to_arrow_dtype(self) -> Any:
        """Return the Arrow type."""
        return self.arrow
