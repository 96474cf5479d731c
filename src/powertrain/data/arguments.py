"""Checks of arguments: each returns the intended value, or raises a one-sentence error.

Numbers may be Python's, numpy's, or tensors of one value. Exceptions that an argument raises while it is shown,
compared or iterated over never escape as such.
"""

from __future__ import annotations

import itertools
import math
import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from powertrain.errors import DataError

#: Seeds are stored as JSON and MessagePack, which have 64 bits.
LARGEST_SEED = 2**64 - 1
#: A longer iterable is not a list of names or numbers that was meant by a person.
_MOST_VALUES = 1_000_000
#: Exceptions that an object may raise when it lacks an operation.
ODD = (Exception, SystemExit)
_LONGEST = 80
#: Limit of Linux; keys in object stores are shorter.
_LONGEST_PATH = 4096


def shown(value: Any) -> str:
    """Return the value for a message: short, and safe against a failing ``__repr__``."""
    try:
        return shortened(repr(value))
    except ODD:
        return f"<an object of type {type(value).__name__} that cannot be shown>"


def shortened(text: str, longest: int = _LONGEST) -> str:
    """Return text for a message, truncated where it is long."""
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def whole(name: str, value: Any, least: int, most: int | None = None) -> int:
    """Return a whole number from ``least`` to ``most``; raise :class:`DataError` for anything else."""
    number = _as_index(value)
    if number is None or number < least:
        raise DataError(f"{name}={shown(value)} must be a whole number of at least {least}.")
    if most is not None and number > most:
        raise DataError(f"{name}={shown(value)} is too large. Give a whole number of at most {most}.")
    return number


def optional_whole(name: str, value: Any, least: int, most: int | None = None) -> int | None:
    """Return a whole number as :func:`whole` does; None stays None."""
    return None if value is None else whole(name, value, least, most)


def seed_number(name: str, value: Any) -> int | None:
    """Return a seed, or None where none was given."""
    return optional_whole(name, value, 0, LARGEST_SEED)


def _as_index(value: Any) -> int | None:
    if isinstance(value, bool) or _is_bool_scalar(value):
        return None
    try:
        return operator.index(value)
    except ODD:
        return None


def _is_bool_scalar(value: Any) -> bool:
    """Return True for numpy's and torch's booleans."""
    try:
        return "bool" in str(value.dtype)
    except ODD:
        return False


def number(name: str, value: Any, what: str) -> int | float:
    """Return a finite number: an int for an integer type, else a float. ``what`` ends the message."""
    index = _as_index(value)
    if index is not None:
        return index
    found: float | None = None
    if not isinstance(value, (bool, str, bytes)) and not _is_bool_scalar(value):
        try:
            found = float(value)
        except ODD:
            found = None
    if found is None or not math.isfinite(found):
        raise DataError(f"{name}={shown(value)} {what}")
    return found


def flag(name: str, value: Any) -> bool:
    """Return True or False; numpy's and torch's booleans, and 0 and 1, are accepted too."""
    if isinstance(value, bool):
        return value
    if _is_bool_scalar(value):
        try:
            return bool(value)
        except ODD:  # an array of several
            value_is = None
    else:
        value_is = _as_index(value)
    if value_is not in (0, 1):
        raise DataError(f"{name}={shown(value)} must be True or False.")
    return bool(value_is)


def one_of(name: str, value: Any, choices: Sequence[str | None], advice: str = "Use one of them.") -> Any:
    """Return the value where it is one of ``choices``."""
    if (value is None and None in choices) or (isinstance(value, str) and value in choices):
        return None if value is None else str(value)
    there = ", ".join(repr(choice) for choice in choices)
    raise DataError(f"{name}={shown(value)} is unknown: it must be one of {there}. {advice}")


def values_of(name: str, value: Any, what: str) -> list[Any]:
    """Return the values of an iterable of moderate length; text, bytes and dicts are refused. ``what`` ends the
    message."""
    if isinstance(value, (str, bytes, bytearray, memoryview, Mapping)):
        raise DataError(f"{name}={shown(value)} is one {type(value).__name__}. {what}")
    try:
        found = list(itertools.islice(iter(value), _MOST_VALUES + 1))
    except ODD as error:
        raise DataError(
            f"{name}={shown(value)} cannot be read through ({type(error).__name__}). {what}"
        ) from error
    if len(found) > _MOST_VALUES:
        raise DataError(f"{name} gives more than {_MOST_VALUES} values. {what}")
    return found


def column_names(method: str, value: Any) -> tuple[str, ...]:
    """Return names of columns: one given as text, or several in an iterable."""
    what = "Give at least one name of a column, as str."
    found = [value] if isinstance(value, str) else values_of(f"{method}(): the columns", value, what)
    if not found or not all(isinstance(name, str) for name in found):
        raise DataError(f"{method}() takes names of columns, and got {shown(found)}. Give at least one str.")
    return tuple(column_name(method, name) for name in found)


def column_name(method: str, name: str) -> str:
    """Return a valid column name: text that can be encoded."""
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{method}: the name {shown(name)} of a column has half a character in it (a lone surrogate), which no "
            "file can hold. Give it as proper text."
        ) from error
    return str(name)


def keyword_arguments(name: str, value: Any) -> dict[str, Any]:
    """Return keyword arguments for a user's function; empty for None."""
    if value is None:
        return {}
    try:
        found = dict(value) if isinstance(value, Mapping) else None
    except ODD:
        found = None
    if found is None or not all(isinstance(key, str) for key in found):
        raise DataError(f"{name}={shown(value)} must be a dict from the names of arguments to their values.")
    return found


def positional_arguments(name: str, value: Any) -> tuple[Any, ...]:
    """Return positional arguments for a user's function; empty for None."""
    if value is None:
        return ()
    return tuple(values_of(name, value, "Give a list or tuple of arguments."))


def path_text(name: str, value: Any) -> str:
    """Return a path or address as text that the file system accepts."""
    try:
        found = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    except ODD:
        found = None
    if not isinstance(found, str) or not found:
        raise DataError(f"{name}={shown(value)} is not a path. Give a path or an address as str or Path.")
    if len(found) > _LONGEST_PATH:
        raise DataError(
            f"{name}={shown(value)} has {len(found)} characters. A path has at most {_LONGEST_PATH}."
        )
    if "\0" in found:
        raise DataError(f"{name}={shown(value)} has a NUL character in it, which no path can have.")
    try:
        os.fsencode(found)
    except UnicodeEncodeError as error:
        raise DataError(
            f"{name}={shown(value)} has half a character in it, which no path can have."
        ) from error
    return found


def option_of(name: str, value: Any, kind: type, example: str) -> Any:
    """Return an options object of this class; None stays None."""
    if value is None or isinstance(value, kind):
        return value
    raise DataError(f"{name}={shown(value)} is a {type(value).__name__}. Give {example}, or leave it out.")


def refused(what: str, value: Any, error: BaseException) -> DataError:
    """Return the error for a value that cannot be turned into rows."""
    try:
        reason = str(error).partition("\n")[0].rstrip(".")[:300]
    except ODD:
        reason = ""
    because = f"{type(error).__name__}: {reason}" if reason else type(error).__name__
    return DataError(f"{what} {shown(value)} ({because}).")


def texts(name: str, value: Any, what: str) -> tuple[str, ...] | None:
    """Return several texts, of which one may be given by itself; None stays None."""
    if value is None:
        return None
    found: Iterable[Any] = [value] if isinstance(value, str) else values_of(name, value, what)
    if not all(isinstance(one, str) for one in found):
        raise DataError(f"{name}={shown(value)} has values that are not text. {what}")
    return tuple(found)
