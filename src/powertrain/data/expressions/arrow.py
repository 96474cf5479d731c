"""Arrow's types by name, and its functions that are written as operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from powertrain.data.arguments import ODD, refused


def arrow_type(given: Any) -> Any:
    """Return an Arrow type from a type, its name, a ``DataType``, a numpy or Python type. Raises :class:`DataError`."""
    import numpy as np
    import pyarrow as pa

    found = getattr(given, "arrow", given)
    if isinstance(found, pa.DataType):
        return found
    try:
        if isinstance(found, str):
            by_name: Any = pa.type_for_alias  # its stub knows constants only
            return by_name(found)
        python = {
            int: pa.int64(),
            float: pa.float64(),
            str: pa.string(),
            bool: pa.bool_(),
            bytes: pa.binary(),
        }
        return (
            python[found]
            if isinstance(found, type) and found in python
            else pa.from_numpy_dtype(np.dtype(found))
        )
    except ODD as error:
        raise refused("There is no Arrow type for", given, error) from error


#: Arrow writes these as operators, so that conditions read alike wherever they come from.
OPERATORS: dict[str, Callable[..., Any]] = {
    "add": lambda left, right: left + right,
    "subtract": lambda left, right: left - right,
    "multiply": lambda left, right: left * right,
    "divide": lambda left, right: left / right,
    "equal": lambda left, right: left == right,
    "not_equal": lambda left, right: left != right,
    "less": lambda left, right: left < right,
    "less_equal": lambda left, right: left <= right,
    "greater": lambda left, right: left > right,
    "greater_equal": lambda left, right: left >= right,
    "and_kleene": lambda left, right: left & right,
    "or_kleene": lambda left, right: left | right,
    "invert": lambda value: ~value,
    "is_null": lambda value: value.is_null(),
    "is_valid": lambda value: value.is_valid(),
}
UNSAFE_CASTS = (
    "allow_int_overflow", "allow_time_truncate", "allow_time_overflow", "allow_decimal_truncate",
    "allow_float_truncate", "allow_invalid_utf8",
)  # fmt: skip
