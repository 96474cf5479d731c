"""Values that a public function may be handed by mistake or on purpose, and by which rule its answer is judged."""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import os
import random
import tempfile
import threading
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from powertrain.errors import PowertrainError


class HostileError(Exception):
    """What a hostile value raises when it is touched. It must not come out of a public function."""


def _hostile(*names: str) -> Any:
    def raises(self: Any, *_: Any, **__: Any) -> Any:
        raise HostileError("touched")

    return type("Hostile", (), dict.fromkeys(names, raises))()


class _Colour(enum.Enum):
    RED = 1


def _deep() -> list[Any]:
    value: list[Any] = []
    for _ in range(20_000):
        value = [value]
    return value


def _self_list() -> list[Any]:
    value: list[Any] = [1]
    value.append(value)
    return value


def _self_dict() -> dict[str, Any]:
    value: dict[str, Any] = {"a": 1}
    value["self"] = value
    return value


def _closed_file() -> Any:
    file = tempfile.TemporaryFile()  # noqa: SIM115 (closed is what it is to be)
    file.close()
    return file


def _generator() -> Any:
    yield 1
    raise HostileError("iterated")


#: Each makes a value anew: some are changed or used up by being tried.
VALUES: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "False": lambda: False,
    "0": lambda: 0,
    "-1": lambda: -1,
    "1": lambda: 1,
    "2": lambda: 2,
    "2**31": lambda: 2**31,
    "2**63": lambda: 2**63,
    "2**64": lambda: 2**64,
    "2**100": lambda: 2**100,
    "-2**100": lambda: -(2**100),
    "10**5000": lambda: 10**5000,
    "0.5": lambda: 0.5,
    "-0.0": lambda: -0.0,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "-inf": lambda: float("-inf"),
    "1e308": lambda: 1e308,
    "complex": lambda: 1j,
    "Decimal": lambda: decimal.Decimal("1.5"),
    "Decimal sNaN": lambda: decimal.Decimal("sNaN"),
    "Fraction": lambda: fractions.Fraction(1, 3),
    "datetime": lambda: datetime.datetime(2020, 1, 1),
    "timedelta": lambda: datetime.timedelta(days=1),
    "''": lambda: "",
    "' '": lambda: " ",
    "text": lambda: "x",
    "digits": lambda: "5",
    "relative path": lambda: "../up",
    "huge text": lambda: "a" * 1_000_000,
    "NUL": lambda: "a\0b",
    "lone surrogate": lambda: "a\ud800b",
    "escape": lambda: "\x1b[2J[bold]x[/nope]\n",
    "braces": lambda: "{0} {x!r} %s %",
    "b''": lambda: b"",
    "bytes": lambda: b"\xff\x00x",
    "bytearray": lambda: bytearray(b"x"),
    "memoryview": lambda: memoryview(b"x"),
    "Path('NUL')": lambda: Path("\0"),
    "long Path": lambda: Path("x" * 5000),
    "Path": lambda: Path("nowhere"),
    "[]": list,
    "()": tuple,
    "{}": dict,
    "set": lambda: {1, 2},
    "[None]": lambda: [None],
    "['a']": lambda: ["a"],
    "{'a': 1}": lambda: {"a": 1},
    "{'a': None}": lambda: {"a": None},
    "{1: 2}": lambda: {1: 2},
    "{None: 1}": lambda: {None: 1},
    "{b'x': 1}": lambda: {b"x": 1},
    "{(1, 2): 3}": lambda: {(1, 2): 3},
    "{'a': object()}": lambda: {"a": object()},
    "{'a': surrogate}": lambda: {"a": "\ud800", "\ud800": 1},
    "{'a': 2**100}": lambda: {"a": 2**100},
    "{'a': nan}": lambda: {"a": float("nan")},
    "mapping proxy": lambda: types.MappingProxyType({"a": 1}),
    "self list": _self_list,
    "self dict": _self_dict,
    "deep list": _deep,
    "{'a': deep}": lambda: {"a": _deep()},
    "generator": _generator,
    "range": lambda: range(3),
    "lambda": lambda: lambda *_, **__: None,
    "wrong lambda": lambda: lambda: None,
    "builtin": lambda: len,
    "class": lambda: int,
    "module": lambda: os,
    "exception": lambda: ValueError("x"),
    "object": object,
    "Ellipsis": lambda: ...,
    "NotImplemented": lambda: NotImplemented,
    "slice": lambda: slice(1),
    "lock": threading.Lock,
    "enum": lambda: _Colour.RED,
    "closed file": _closed_file,
    "np.int64": lambda: np.int64(3),
    "np.uint64 max": lambda: np.uint64(2**64 - 1),
    "np.float32 nan": lambda: np.float32("nan"),
    "np.bool_": lambda: np.bool_(True),
    "np.str_": lambda: np.str_("x"),
    "np.array": lambda: np.array([1, 2]),
    "np 0-d": lambda: np.array(3),
    "np empty": lambda: np.array([]),
    "np object": lambda: np.array([object()], dtype=object),
    "np.datetime64": lambda: np.datetime64("2020-01-01"),
    "tensor int": lambda: torch.tensor(3),
    "tensor float": lambda: torch.tensor(1.5),
    "tensor bool": lambda: torch.tensor(True),
    "tensor nan": lambda: torch.tensor(float("nan")),
    "tensor": lambda: torch.tensor([1.0, 2.0]),
    "tensor empty": lambda: torch.empty(0),
    "tensor meta": lambda: torch.empty((), device="meta"),
    "tensor complex": lambda: torch.tensor(1j),
    "module of torch": lambda: torch.nn.Linear(1, 1),
    "raises str": lambda: _hostile("__str__", "__repr__", "__format__"),
    "raises eq": lambda: _hostile("__eq__", "__ne__", "__hash__"),
    "raises bool": lambda: _hostile("__bool__"),
    "raises len": lambda: _hostile("__len__", "__iter__", "__contains__", "__getitem__"),
    "raises call": lambda: _hostile("__call__"),
    "raises number": lambda: _hostile("__int__", "__float__", "__index__", "__lt__", "__le__", "__gt__"),
    "raises path": lambda: _hostile("__fspath__"),
    "raises getattr": lambda: _hostile("__getattr__"),
    "raises items": lambda: _hostile("items", "keys", "__iter__", "__len__"),
    "raises state": lambda: _hostile("state_dict", "load_state_dict"),
    "raises pickle": lambda: _hostile("__reduce__", "__reduce_ex__", "__getstate__"),
    "raises path attribute": lambda: type("Hostile", (), {"path": property(_raise)})(),
}


def _raise(_: Any) -> Any:
    raise HostileError("touched")


def pick(source: random.Random) -> tuple[str, Any]:
    """One of the values, with its name; the calls on it decide nothing about the next."""
    name = source.choice(list(VALUES))
    return name, VALUES[name]()


# --------------------------------------------------------------------------- the rule


def verdict(error: BaseException | None, allowed: tuple[type[BaseException], ...] = ()) -> str:
    """What the outcome of one call counts as: "returned", "refused", or what is wrong with it.

    A call may return or raise a ``PowertrainError``. A ``TypeError`` may come from Python itself, for arguments that do
    not fit the signature: then no frame of the called function is in its traceback. A function may name further
    errors that are its documented answer (``allowed``). Everything else is a raw error.
    """
    if error is None:
        return "returned"
    if isinstance(error, (PowertrainError, *allowed)):
        return "refused" if _is_readable(error) else f"unreadable {type(error).__name__}"
    if isinstance(error, TypeError) and _is_of_the_signature(error):
        return "refused"
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(last.filename).name}:{last.lineno}"
    return f"raw {type(error).__name__} at {where}"


def _is_readable(error: BaseException) -> bool:
    """Whether its text is there, bounded, and printable as it is."""
    try:
        text = str(error)
        text.encode()
    except Exception:
        return False
    return 0 < len(text) < 20_000


def _is_of_the_signature(error: TypeError) -> bool:
    """Whether no code of Powertrain was running yet."""
    inside = os.path.join("src", "powertrain", "")
    return all(inside not in frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__))
