"""Arguments of public functions as plain values: numbers, flags and paths of Python, numpy and torch.

Each function takes the value, its place (``"report(barrier=...)"``) and the error to raise. The error names the value
and what to give instead; exceptions that the value raises when it is inspected never escape.
"""

from __future__ import annotations

import math
import numbers
import os
import sys
from collections.abc import Mapping
from typing import Any

from powertrain.errors import ArgumentError, ConfigError, PowertrainError
from powertrain.text.reprs import short_repr

#: Bytes in a name and in a whole path, on Linux.
_LONGEST_NAME, _LONGEST_PATH = 255, 4095


def shorten(value: Any) -> str:
    """Return a repr for a message: bounded, without secrets, and never an error of its own."""
    return short_repr(value)


def plain_scalar(value: Any) -> Any:
    """Return the Python number, bool or text in a scalar of numpy or torch; anything else as it is."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    try:
        if numpy is not None and isinstance(value, (numpy.generic, numpy.ndarray)):
            return value.item() if value.ndim == 0 else value
        if torch is not None and isinstance(value, torch.Tensor) and value.dim() == 0:
            return value.item()
    except Exception:  # a tensor without data, say
        return value
    return value


def has_attribute(value: Any, name: str) -> bool:
    """Return whether a value has an attribute, whatever exception the lookup raises."""
    try:
        return hasattr(value, name)
    except Exception:
        return False


def as_flag(value: Any, given_as: str, error: type[PowertrainError] = ArgumentError) -> bool:
    """Return True or False; 0 and 1 stand for them, as do scalars of numpy and torch."""
    if value is True or value is False:
        return value
    plain = plain_scalar(value)
    if isinstance(plain, (bool, int, float)) and plain in (0, 1):
        return bool(plain)
    raise error(
        f"{given_as} was given {shorten(value)}, which is neither True nor False. Write True or False."
    )


def flag_from_environment(name: str) -> bool:
    """Return whether an environment variable is set to 1 or true; False where it is 0, false, empty or not set.

    Raises:
        ConfigError: It has another value.
    """
    value = os.environ.get(name, "").strip().lower()
    if value in ("1", "true"):
        return True
    if value in ("", "0", "false"):
        return False
    raise ConfigError(
        f"The environment variable {name}={shorten(value)} is neither 1 nor 0. Set it to 1 or 0."
    )


def as_seconds(value: Any, given_as: str, error: type[PowertrainError] = ArgumentError) -> float | None:
    """Return a number of seconds from 0 on; None, also for infinity, where there is no limit."""
    if value is None:
        return None
    plain = plain_scalar(value)
    if isinstance(plain, numbers.Real) and not isinstance(plain, bool):
        try:
            seconds = float(plain)
        except OverflowError:
            seconds = math.inf
        except Exception:
            seconds = math.nan
        if seconds >= 0:
            return seconds if math.isfinite(seconds) else None
    raise error(
        f"{given_as} was given {shorten(value)}, which is not a number of seconds. Give a number from 0 on, or None "
        "for no limit."
    )


def as_whole(
    value: Any,
    given_as: str,
    at_least: int,
    at_most: int,
    error: type[PowertrainError] = ArgumentError,
) -> int:
    """Return a whole number within bounds."""
    plain = plain_scalar(value)
    if (
        isinstance(plain, numbers.Integral)
        and not isinstance(plain, bool)
        and at_least <= int(plain) <= at_most
    ):
        return int(plain)
    raise error(f"{given_as} was given {shorten(value)}. Give a whole number from {at_least} to {at_most}.")


def as_path(value: Any, given_as: str, error: type[PowertrainError] = ArgumentError) -> str:
    """Return a path or address as text that the system can take."""
    try:
        text = os.fspath(value)
        if isinstance(text, str) and "\0" not in text and not _is_too_long(text):
            return text
    except Exception:  # no path at all, or one whose characters the file system cannot name
        pass
    raise error(
        f"{given_as} was given {shorten(value)}, which cannot be a path. Give a string or a Path without NUL or half "
        f"characters, of names of at most {_LONGEST_NAME} bytes."
    )


def _is_too_long(text: str) -> bool:
    """Return whether no file system of this machine can hold a plain path. Raises for names that are not valid."""
    encoded = os.fsencode(text)
    if "://" in text:
        return False
    return len(encoded) > _LONGEST_PATH or any(len(name) > _LONGEST_NAME for name in encoded.split(b"/"))


def as_text_keys(value: Any, given_as: str, error: type[PowertrainError] = ArgumentError) -> dict[str, Any]:
    """Return a copy of a mapping whose keys are strings; an empty one for None."""
    if value is None:
        return {}
    try:
        found = dict(value) if isinstance(value, Mapping) else None
    except Exception:
        found = None
    if found is not None and all(isinstance(key, str) for key in found):
        return found
    raise error(f"{given_as} was given {shorten(value)}. Give a dict whose keys are strings.")
