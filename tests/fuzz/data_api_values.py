"""Values that no argument expects: wrong types, odd numbers and texts, objects that raise whatever is asked of them."""

from __future__ import annotations

import datetime
import decimal
import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch


class FromAnObject(Exception):
    """Raised by an object that an argument was given: a package that lets it through has not checked the argument."""


class FromAFunction(Exception):
    """Raised by a user's function, which may come out of a ``collate_fn`` as it is."""


def _raising(*names: str) -> type:
    def fail(self: Any, *args: Any) -> Any:
        raise FromAnObject("an object of the fuzzer was asked for something")

    return type("Raises_" + "_".join(name.strip("_") for name in names), (), dict.fromkeys(names, fail))


class _StopsWhenShown:
    def __repr__(self) -> str:
        raise StopIteration

    def __str__(self) -> str:
        raise SystemExit(3)


class _Endless:
    """A sequence without an end."""

    def __getitem__(self, index: Any) -> int:
        return 0


class _WrongLength:
    def __init__(self, length: Any) -> None:
        self._length = length

    def __len__(self) -> Any:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        return {"x": index}


def raises(*args: Any, **kwargs: Any) -> Any:
    raise FromAFunction("a function of the fuzzer")


def stops(*args: Any, **kwargs: Any) -> Any:
    raise StopIteration


def exits(*args: Any, **kwargs: Any) -> Any:
    raise SystemExit(4)


def recurses(*args: Any, **kwargs: Any) -> Any:
    return recurses(*args, **kwargs)


def _generator(error: type[BaseException] | None = None) -> Any:
    yield {"x": 1}
    if error is not None:
        raise error
    yield {"x": 2}


def _self_list() -> list[Any]:
    made: list[Any] = [1]
    made.append(made)
    return made


def _self_dict() -> dict[str, Any]:
    made: dict[str, Any] = {"a": 1}
    made["self"] = made
    return made


def _deep(depth: int = 5000) -> Any:
    made: Any = 1
    for _ in range(depth):
        made = [made]
    return made


def _closed_file() -> Any:
    file = io.BytesIO(b"x")
    file.close()
    return file


HOSTILE: list[Callable[[], Any]] = [
    lambda: None,
    lambda: True,
    lambda: 0,
    lambda: -1,
    lambda: 1.5,
    lambda: float("nan"),
    lambda: float("inf"),
    lambda: 2**31,
    lambda: 2**63,
    lambda: 2**100,
    lambda: -(2**63),
    lambda: 10**400,
    lambda: 1 + 2j,
    lambda: decimal.Decimal("NaN"),
    lambda: "",
    lambda: "x",
    lambda: "x" * 100_000,
    lambda: "\0",
    lambda: "a\0b",
    lambda: "\udc80",
    lambda: "s3://",
    lambda: "nowhere://x/y",
    lambda: "~nobody/there",
    lambda: b"",
    lambda: b"\xff\x00",
    lambda: Path("\0"),
    lambda: Path("missing"),
    list,
    lambda: [None],
    lambda: [[]],
    lambda: ["x", 1],
    lambda: ["x", "x"],
    lambda: ["id", "\udc80"],
    dict,
    lambda: {1: 2},
    lambda: {"id": None},
    lambda: {"id": "id\0"},
    lambda: {None: "x"},
    lambda: (),
    lambda: (1, 2, 3),
    lambda: {1, 2},
    lambda: frozenset(["id"]),
    _self_list,
    _self_dict,
    _deep,
    lambda: [_self_list()],
    lambda: [{"a": _self_dict()}],
    lambda: object(),
    lambda: object,
    lambda: int,
    lambda: Ellipsis,
    lambda: _raising("__repr__", "__str__")(),
    lambda: _raising("__eq__", "__ne__", "__hash__")(),
    lambda: _raising("__bool__")(),
    lambda: _raising("__len__", "__bool__")(),
    lambda: _raising("__iter__")(),
    lambda: _raising("__iter__", "__next__", "__getitem__", "__len__")(),
    lambda: _raising("__getattr__")(),
    lambda: _raising("__index__", "__int__", "__float__")(),
    lambda: _raising("__fspath__")(),
    lambda: _raising("__call__")(),
    lambda: _raising("__lt__", "__le__", "__gt__", "__ge__")(),
    lambda: [_raising("__repr__", "__str__", "__eq__", "__hash__")()],
    lambda: {"id": _raising("__repr__", "__str__", "__eq__", "__bool__")()},
    lambda: _StopsWhenShown(),
    lambda: [_StopsWhenShown()],
    lambda: _Endless(),
    lambda: _WrongLength(-1),
    lambda: _WrongLength("many"),
    lambda: _WrongLength(2**62),
    lambda: _WrongLength(3),
    lambda: _generator(),
    lambda: _generator(StopIteration),
    lambda: _generator(SystemExit),
    lambda: _generator(FromAFunction),
    lambda: iter(()),
    lambda: raises,
    lambda: stops,
    lambda: exits,
    lambda: recurses,
    lambda: print,
    lambda: lambda: None,
    lambda: lambda a, b, c: a,
    lambda: lambda row: None,
    lambda: lambda row: row,
    lambda: lambda row: {"x": _self_list()},
    lambda: lambda row: {"x": object()},
    lambda: lambda row: {1: 2},
    lambda: lambda row: {"x": _raising("__repr__", "__eq__", "__bool__", "__len__")()},
    lambda: lambda row: _generator(SystemExit),
    lambda: np.int64(3),
    lambda: np.int8(-1),
    lambda: np.float32("nan"),
    lambda: np.float64(0.5),
    lambda: np.bool_(True),
    lambda: np.str_("id"),
    lambda: np.datetime64("NaT"),
    lambda: np.array(3),
    lambda: np.array([]),
    lambda: np.array([1, 2, 3]),
    lambda: np.array([[1, 2], [3, 4]]),
    lambda: np.array([{"a": 1}, None], object),
    lambda: np.zeros((2, 0, 3)),
    lambda: np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    lambda: np.array(["a", "\udc80"]),
    lambda: torch.tensor(3),
    lambda: torch.tensor(True),
    lambda: torch.tensor(0.5),
    lambda: torch.zeros(2, 3),
    lambda: torch.zeros(3, requires_grad=True),
    lambda: torch.zeros(2, device="meta"),
    lambda: torch.float32,
    lambda: torch.device("cpu"),
    lambda: "cuda:99",
    lambda: "meta",
    lambda: pa.table({}),
    lambda: pa.table({"id": pa.array([], pa.int64())}),
    lambda: pa.table([pa.array([1]), pa.array([2])], names=["x", "x"]),
    lambda: pa.table({"": pa.nulls(3)}),
    lambda: pa.table({"u": pa.array([1, 2], pa.uint64()), "d": pa.array([None, "x"]).dictionary_encode()}),
    lambda: pa.table({"m": pa.array([[("a", 1)], None], pa.map_(pa.string(), pa.int8()))}),
    lambda: pa.schema([("id", pa.int64())]),
    lambda: pa.array([1, None]),
    lambda: pa.scalar(3),
    lambda: pa.int64(),
    lambda: pa.compute.field("id"),
    lambda: pa.compute.field("missing") > 3,
    lambda: pa.compute.scalar(True),
    lambda: pa.py_buffer(b"nonsense"),
    lambda: datetime.datetime(1, 1, 1),
    lambda: datetime.timedelta.max,
    lambda: slice(None),
    lambda: range(2**62),
    lambda: memoryview(b"abc"),
    _closed_file,
    lambda: open("/dev/null"),  # noqa: SIM115
    lambda: random.Random(1),
    lambda: super,
    lambda: NotImplemented,
    lambda: ValueError("a value that is an error"),
]
