"""Arrow's types by name, its functions that are written as operators, and the comparison of their arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
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
#: Functions that raise where integers overflow, as the operators above do.
CHECKED = {name: f"{name}_checked" for name in ("add", "subtract", "multiply")}
#: Functions of text whose results are text.
_OF_TEXT = ("utf8_", "binary_join", "binary_repeat", "replace_", "strftime")


def is_text_function(function: str) -> bool:
    """Return True for a function of Arrow's that returns text."""
    counts = ("utf8_length", "utf8_is_", "utf8_split")
    return function.startswith(_OF_TEXT) and not function.startswith(counts)


def floor_divided(left: Any, right: Any) -> tuple[Any, Any]:
    """Return quotient and remainder as Python does, of whole numbers as whole numbers; null where the divisor is 0.

    In functions that Arrow has for whole numbers and floats alike; :func:`floor_division` is the same for filters.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    call: Any = pc.call_function
    scalar: Any = pa.scalar  # its stub knows fixed types only
    zero = scalar(0)
    divisor = call("if_else", [call("equal", [right, zero]), scalar(None), right])
    quotient = call("round", [call("divide", [left, divisor])], pc.RoundOptions(**ROUND_DOWN))
    rest = call("subtract", [left, call("multiply", [quotient, divisor])])
    has_other_sign = call("xor", [call("less", [rest, zero]), call("less", [divisor, zero])])
    is_below = call("and", [call("not_equal", [rest, zero]), has_other_sign])
    floor = call("if_else", [is_below, call("subtract", [quotient, scalar(1, quotient.type)]), quotient])
    return floor, call("if_else", [is_below, call("add", [rest, divisor]), rest])


def floor_division(function: str, left: Any, right: Any) -> Any:
    """Return the expression of a quotient ("floor_divide") or remainder ("modulo") of two in functions of Arrow's."""
    if any(isinstance(getattr(each, "value", None), float) for each in (left, right)):
        left, right = left.cast("float64"), right.cast("float64")  # Arrow would take a constant for a float32
    divisor = (right == 0)._called("if_else", None, right)
    quotient = left._called("divide", divisor)._called("round", options=("RoundOptions", ROUND_DOWN))
    rest = left - quotient * divisor
    is_below = (rest != 0) & (rest < 0)._called("xor", divisor < 0)
    if function == "floor_divide":
        return is_below._called("if_else", quotient - 1, quotient)
    return is_below._called("if_else", rest + divisor, rest)


def are_same(one: Any, other: Any) -> bool:
    """Return whether two expressions, or two values in them, are the same tree."""
    if type(one) is not type(other):
        return False
    if dataclasses.is_dataclass(one):
        names = [field.name for field in dataclasses.fields(one)]
        return all(are_same(getattr(one, name), getattr(other, name)) for name in names)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(are_same(one[key], other[key]) for key in one)
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(are_same, one, other))
    try:
        return bool(one.equals(other) if hasattr(one, "equals") else one == other)
    except ODD:  # arrays have no truth value
        return one is other


#: Options that round down. Unlike ``floor``, ``round`` leaves whole numbers as they are.
ROUND_DOWN: dict[str, Any] = {"ndigits": 0, "round_mode": "down"}
UNSAFE_CASTS = (
    "allow_int_overflow", "allow_time_truncate", "allow_time_overflow", "allow_decimal_truncate",
    "allow_float_truncate", "allow_invalid_utf8",
)  # fmt: skip
