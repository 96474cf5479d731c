"""Nesting of values: Arrow would follow a value that contains itself until the process crashes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import numpy as np

from powertrain.errors import DataError

#: Largest depth of nested lists, dicts and tuples.
MOST_LEVELS = 64
_NUMBERS = (int, float, bool)


def check_nesting(values: Iterable[Any], where: str) -> None:
    """Raise :class:`DataError` where lists or dicts contain themselves, or are nested too deeply.

    Checks one level after the other, each container of a level once, so that the cost is one type check per value,
    and a cycle is found as a level too many.
    """
    contents: list[Any] = [values if isinstance(values, (list, tuple)) else list(values)]
    for depth in range(MOST_LEVELS):
        kinds = set(map(type, chain.from_iterable(contents)))
        nested = {kind for kind in kinds if issubclass(kind, (list, tuple, Mapping, np.ndarray))}
        if not nested:
            return
        containers = [value for value in chain.from_iterable(contents) if type(value) in nested]
        if depth > 2:  # the same list may be at many places, and in itself at ever more
            containers = list({id(value): value for value in containers}.values())
        plain = {kind for kind in nested if issubclass(kind, (list, tuple))}
        contents = [value for value in containers if type(value) in plain and not _has_only_numbers(value)]
        if plain != nested:
            contents += [
                found for value in containers if type(value) not in plain for found in _contents(value)
            ]
        if not contents:
            return
    raise DataError(
        f"A value of {where} contains itself, or has more than {MOST_LEVELS} lists or dicts in each other, so that it "
        "has no end or no type that a column can have. Give plain lists, dicts and values."
    )


def _contents(value: Any) -> list[list[Any]]:
    """Return the contents of a dict or an array, as one list; empty for arrays of numbers."""
    if isinstance(value, Mapping):
        return [list(value.values())]
    return [value.reshape(-1).tolist()] if value.dtype == object else []


def _has_only_numbers(value: Any) -> bool:
    """Return True for most lists of Python numbers: adding them up is ten times as fast as checking each type, and
    fails for nested lists."""
    if not value or type(value[0]) not in _NUMBERS:
        return False
    try:
        return type(sum(value)) in _NUMBERS
    except Exception:
        return False  # a value of another kind is among them
