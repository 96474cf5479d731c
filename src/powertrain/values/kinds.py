"""Objects that have a plain form although they are neither numbers nor text: dates, enums, paths, sets, dataclasses.

Storage keeps the plain form. The driver can also get an object back: :func:`encoded` turns it into plain data with a
tag, and :func:`decoded` rebuilds it. Nothing is unpickled or imported: classes of the user's own are looked up in
modules that the driver has loaded, and only enums and dataclasses are accepted.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime
import decimal
import enum
import fractions
import math
import os
import pathlib
import sys
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

#: Whole numbers that the wire and Arrow can carry.
LEAST_INT, MOST_INT = -(2**63), 2**64 - 1
#: Python refuses to write longer numbers in decimal by default.
_MOST_DECIMAL_BITS = 14_000


class NoPlainForm(Exception):
    """The value has no plain form; the message is the reason, as the end of a sentence."""


class _Simple(NamedTuple):
    """A kind without parts. ``plain`` is for storage; ``encode`` and ``decode`` are exact."""

    tag: str
    type: type
    plain: Callable[[Any], Any]
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


def is_small(number: int) -> bool:
    """Return whether a whole number fits into the 64 bits that storage has for it."""
    return LEAST_INT <= number <= MOST_INT


def _digits(number: int) -> str:
    """Return the digits of a number of any size; a very long one in hexadecimal."""
    number = int.__int__(number)
    return int.__repr__(number) if number.bit_length() <= _MOST_DECIMAL_BITS else hex(number)


def _as_float(number: decimal.Decimal | fractions.Fraction) -> float | str:
    """Return the nearest float; text where the number is beyond all floats."""
    try:
        nearest = float(number)
    except OverflowError:
        return str(number)
    too_large = math.isinf(nearest) and not (isinstance(number, decimal.Decimal) and number.is_infinite())
    return str(number) if too_large else nearest


def _iso(moment: datetime.date | datetime.time) -> str:
    return moment.isoformat()


def _seconds(span: datetime.timedelta) -> float:
    return span.total_seconds()


def _text_of_bytes(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode("ascii")


#: In the order in which they are tried: a datetime is also a date.
_SIMPLE = (
    _Simple("datetime", datetime.datetime, _iso, _iso, datetime.datetime.fromisoformat),
    _Simple("date", datetime.date, _iso, _iso, datetime.date.fromisoformat),
    _Simple("time", datetime.time, _iso, _iso, datetime.time.fromisoformat),
    _Simple(
        "timedelta",
        datetime.timedelta,
        _seconds,
        lambda span: [span.days, span.seconds, span.microseconds],
        lambda parts: datetime.timedelta(*parts),
    ),
    _Simple(
        "path",
        pathlib.PurePath,
        str,
        lambda path: _text_of_bytes(os.fsencode(path)),  # names need not be UTF-8
        lambda text: pathlib.Path(os.fsdecode(base64.b64decode(text))),
    ),
    _Simple("decimal", decimal.Decimal, _as_float, str, decimal.Decimal),
    _Simple("fraction", fractions.Fraction, _as_float, str, fractions.Fraction),
    _Simple("uuid", uuid.UUID, str, str, uuid.UUID),
    _Simple("complex", complex, str, lambda z: [z.real, z.imag], lambda parts: complex(*parts)),
    _Simple("bytes", bytes, _text_of_bytes, _text_of_bytes, base64.b64decode),
    _Simple(
        "bytearray", bytearray, _text_of_bytes, _text_of_bytes, lambda text: bytearray(base64.b64decode(text))
    ),
    _Simple("int", int, _digits, _digits, lambda text: int(text, 0)),
)
_SIMPLE_BY_TAG = {kind.tag: kind for kind in _SIMPLE}


# --------------------------------------------------------------------------- plain forms


def plain_form(value: Any, plain: Callable[[Any], Any]) -> Any:
    """Return the plain form of an object of these kinds. ``plain`` converts its parts.

    Args:
        value: An object that is neither a plain value, nor a list, dict or tuple.
        plain: Converts each part; its exceptions are passed on.

    Raises:
        NoPlainForm: The object is not of a known kind.
    """
    if isinstance(value, enum.Enum):
        return _plain_enum(value, plain)
    if isinstance(value, (set, frozenset)):
        return [plain(item) for item in _ordered(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    kind = _simple_kind(value)
    if kind is None:
        raise NoPlainForm(f"is a {type(value).__module__}.{type(value).__qualname__}")
    return kind.plain(value)


def _plain_enum(member: enum.Enum, plain: Callable[[Any], Any]) -> Any:
    """Return its value in plain form; its name where the value has none."""
    try:
        return plain(member.value)
    except NoPlainForm:
        return member.name


def _ordered(items: set[Any] | frozenset[Any]) -> list[Any]:
    """Return the items in an order that does not change between processes."""
    try:
        return sorted(items)
    except Exception:  # of different types, or with comparisons of their own
        return sorted(items, key=repr)


def _simple_kind(value: Any) -> _Simple | None:
    if isinstance(value, int) and is_small(value):
        return None
    return next((kind for kind in _SIMPLE if isinstance(value, kind.type)), None)


# --------------------------------------------------------------------------- the objects themselves


def encoded(value: Any, plain: Callable[[Any], Any]) -> bytes:
    """Return a value as bytes, from which :func:`decoded` makes an equal object.

    Args:
        value: Anything that has a plain form.
        plain: Returns the plain form of values without a tag; its exceptions are passed on.
    """
    return msgspec.msgpack.encode(_tree(value, plain))


def _tree(value: Any, plain: Callable[[Any], Any]) -> list[Any]:
    """Return ``[tag, data]``."""
    if isinstance(value, enum.Enum):
        return ["enum", [*_class_name(type(value)), value.name]]
    if isinstance(value, dict):
        return ["dict", [[str(key), _tree(item, plain)] for key, item in value.items()]]
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return [kind.__name__, [_tree(item, plain) for item in value]]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [
            [field.name, _tree(getattr(value, field.name), plain)] for field in dataclasses.fields(value)
        ]
        return ["dataclass", [*_class_name(type(value)), fields]]
    simple = _simple_kind(value)
    if simple is not None:
        return [simple.tag, simple.encode(value)]
    return ["plain", plain(value)]


def decoded(data: bytes) -> Any:
    """Return the object that was encoded.

    Raises:
        NoPlainForm: A class is not known in this process, or the data were not made by :func:`encoded`.
    """
    try:
        return _rebuilt(msgspec.msgpack.decode(data))
    except NoPlainForm:
        raise
    except Exception as error:
        raise NoPlainForm(f"cannot be rebuilt: {type(error).__name__}: {error}") from error


def _rebuilt(tree: Any) -> Any:
    tag, data = tree
    if tag == "plain":
        return data
    if tag == "dict":
        return {key: _rebuilt(item) for key, item in data}
    if tag in _CONTAINERS:
        return _CONTAINERS[tag](map(_rebuilt, data))
    if tag == "enum":
        module, name, member = data
        return known_class(module, name, lambda found: issubclass(found, enum.Enum))[member]
    if tag == "dataclass":
        return _rebuilt_dataclass(*data)
    return _SIMPLE_BY_TAG[tag].decode(data)


_CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}


def with_originals(metrics: dict[str, Any] | None, originals: dict[str, bytes]) -> dict[str, Any] | None:
    """Return ``metrics`` with the reported objects in place of their plain forms, where possible.

    Args:
        metrics: Plain metrics, or None.
        originals: The results of :func:`encoded` by name.
    """
    if not metrics or not originals:
        return metrics
    whole = dict(metrics)
    for name, data in originals.items():
        try:
            if name in whole:
                whole[name] = decoded(data)
        except NoPlainForm:
            pass  # its plain form stays
    return whole


def _rebuilt_dataclass(module: str, name: str, fields: list[Any]) -> Any:
    """Set the fields of a new instance; neither ``__init__`` nor ``__post_init__`` runs."""
    kind = known_class(module, name, dataclasses.is_dataclass)
    values = {field: _rebuilt(tree) for field, tree in fields}
    if values.keys() != {field.name for field in dataclasses.fields(kind)}:
        raise NoPlainForm("has other fields in this process")
    rebuilt = object.__new__(kind)
    for field, value in values.items():
        object.__setattr__(rebuilt, field, value)
    return rebuilt


def _class_name(kind: type) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__


def known_class(module: str, name: str, is_accepted: Callable[[type], bool]) -> Any:
    """Return a class of a module that is loaded in this process; nothing is imported."""
    found: Any = sys.modules[module]
    for part in name.split("."):
        found = vars(found)[part]
    if not isinstance(found, type) or not is_accepted(found):
        raise NoPlainForm(f"is a {module}.{name}, which is neither an enum nor a dataclass here")
    return found
