"""Calls of a user's function on rows: random numbers, and the location of errors."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import inspect
import linecache
import os
import random
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np

from powertrain.data.plan.order import Ints
from powertrain.errors import DataError

#: Directory of this package.
_OURS = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))), "")


def _one_after_the_other(function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    return [function(item) for item in items]


@dataclass(frozen=True)
class Setting:
    """The inputs of a call beside its rows. Independent of ranks, threads and processes, but for the last two."""

    seed: int
    epoch: int
    #: Number of the operation in the dataset: two of them draw different numbers for the same row.
    position: int
    #: Number of the function in the operation, where that has several.
    ordinal: int = 0
    #: True in a process that does one call at a time: the global generators belong to that call, and are seeded for it.
    own_process: bool = False
    #: ``[function(item) for item in items]``, on several threads where available.
    over: Callable[[Callable[[Any], Any], Iterable[Any]], list[Any]] = field(
        default=_one_after_the_other, repr=False
    )

    def words(self, number: int, copy: int) -> bytes:
        """Return 16 random bytes of row ``number``, or of the ``copy``-th row that was made from it."""
        key = f"{self.seed}/{self.epoch}/{self.position}/{number}/{copy}"
        key += f"/{self.ordinal}" if self.ordinal else ""
        return hashlib.blake2b(key.encode(), digest_size=16, person=b"powertrain.rng").digest()


class FunctionFailed(Exception):
    """A user's function raised, or returned a value that cannot be used. Can be pickled, whatever was raised.

    ``problem`` describes the error, ``number`` is the row, ``rows`` the number of rows of the call (0 for the
    constructor of a class); ``file`` and ``line`` are the user's, or "" and 0. ``error`` is the raised exception.
    """

    def __init__(
        self,
        problem: str,
        number: int = -1,
        rows: int = 0,
        file: str = "",
        line: int = 0,
        error: BaseException | None = None,
    ) -> None:
        super().__init__(problem, number, rows, file, line, error)
        self.problem, self.number, self.rows = problem, number, rows
        self.file, self.line, self.error = file, line, error

    def __str__(self) -> str:
        return self.problem

    def sentence(self, operation: str, name_row: Callable[[int], str]) -> str:
        """Return the message for the user: operation and function, row, line, problem."""
        # The text of a notebook's cells is only available in the rank's own process, so it is looked up here.
        source = linecache.getline(self.file, self.line).strip() if self.file else ""
        place = f" at {self.file}, line {self.line}" if self.file else ""
        place += f" ({source})" if source else ""
        return f"{operation} failed{_on_rows(self.number, self.rows, name_row)}{place}: {self.problem}"


def _on_rows(number: int, rows: int, name_row: Callable[[int], str]) -> str:
    if rows == 0:
        return ""
    if rows == 1:
        return f" on {name_row(number)}"
    return f" on the batch of {rows} rows that begins with {name_row(number)}"


class Call:
    """A user's function, or an instance of their class, ready to be called in this process."""

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        constructor_args: tuple[Any, ...] = (),
        constructor_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Raise :class:`FunctionFailed` where ``fn`` is a class and its constructor raises."""
        self._args, self._kwargs = args, dict(kwargs or {})
        self.file, _ = defined_at(fn)
        #: Threads share the one instance of a class, which need not be thread-safe.
        self._one_at_a_time = threading.Lock() if isinstance(fn, type) else None
        if isinstance(fn, type):
            try:
                fn = fn(*constructor_args, **(constructor_kwargs or {}))
            except (Exception, SystemExit) as error:
                raise self._failed(error, -1, 0) from error
        self._fn = fn
        self._events = _EventLoop() if _is_async(fn) else None
        self._draws = "rng" not in self._kwargs and _takes_rng(fn)

    def __call__(self, argument: Any, setting: Setting, numbers: Ints, copy: int = 0) -> Any:
        """Return the function's result for ``argument``, which holds the rows of these numbers."""
        try:
            keywords = self._keywords(setting, int(numbers[0]), copy)
            if self._events is not None:
                return self._events.result(lambda: self._fn(argument, *self._args, **keywords))
            if self._one_at_a_time is None:
                return self._fn(argument, *self._args, **keywords)
            with self._one_at_a_time:
                return self._fn(argument, *self._args, **keywords)
        except (Exception, SystemExit) as error:
            raise self._failed(error, int(numbers[0]), len(numbers)) from error

    def failed(self, error: BaseException, numbers: Ints) -> FunctionFailed:
        """Return the error to raise where the function raised ``error`` while its result was iterated over."""
        return self._failed(error, int(numbers[0]), len(numbers))

    def returned(self, problem: str, numbers: Ints) -> FunctionFailed:
        """Return the error to raise where the result for these rows cannot be used."""
        return FunctionFailed(problem, int(numbers[0]), len(numbers), *self._first_line())

    def _first_line(self) -> tuple[str, int]:
        return defined_at(self._fn)

    def _keywords(self, setting: Setting, number: int, copy: int) -> dict[str, Any]:
        if setting.own_process:
            _seed_globals(setting.words(number, copy))
        if not self._draws:
            return self._kwargs
        key = np.frombuffer(setting.words(number, copy), "<u8").astype(np.uint64)
        return {**self._kwargs, "rng": np.random.Generator(np.random.Philox(key=key))}

    def _failed(self, error: BaseException, number: int, rows: int) -> FunctionFailed:
        file, line = users_line(error.__traceback__, self.file)
        return FunctionFailed(error_text(error), number, rows, file, line, error)


def _is_async(fn: Any) -> bool:
    """Return True for coroutine functions and async generators, also as ``__call__`` of an object."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    target = fn if inspect.isroutine(fn) else getattr(fn, "__call__", fn)  # noqa: B004
    return inspect.iscoroutinefunction(target) or inspect.isasyncgenfunction(target)


class _EventLoop:
    """The event loop of an asynchronous function: one for all its calls, so that its clients may be kept."""

    def __init__(self) -> None:
        self._running = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def result(self, call: Callable[[], Any]) -> Any:
        """Return what a coroutine returns, or all that an asynchronous generator yields, as an iterator."""
        with self._running:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                weakref.finalize(self, self._loop.close)
            return self._loop.run_until_complete(self._finished(call))

    @staticmethod
    async def _finished(call: Callable[[], Any]) -> Any:
        made = call()
        if inspect.isasyncgen(made):
            return iter([each async for each in made])
        return await made


def name_of(fn: Any) -> str:
    """Return the name of a function for messages."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    name = getattr(fn, "__qualname__", None) or type(fn).__qualname__
    name = name.rpartition("<locals>.")[2]
    file, line = defined_at(fn)
    return f"lambda of {os.path.basename(file)}:{line}" if name == "<lambda>" else str(name)


def _takes_rng(fn: Callable[..., Any]) -> bool:
    if isinstance(fn, functools.partial) and "rng" in fn.keywords:
        return False
    try:
        return "rng" in inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return False  # some builtins have no signature


def _seed_globals(words: bytes) -> None:
    """Seed every generator that a function may use without being given one.

    Torch's only once torch is loaded, which a pool does beforehand where it can see that it will be used.
    """
    seed = int.from_bytes(words[:8], "little")
    random.seed(seed)
    np.random.seed(seed >> 32)  # more bits would take longer than all the rest
    torch = sys.modules.get("torch")
    if torch is not None:
        # torch.manual_seed would also record a call for CUDA, with its stack, on every row.
        torch.default_generator.manual_seed(seed & (2**63 - 1))


# --------------------------------------------------------------------------- locating errors


def error_text(error: BaseException) -> str:
    """Return type and message of an exception, also where its own ``__str__`` fails."""
    kind = type(error)
    name = kind.__qualname__
    if kind.__module__ not in ("builtins", "__main__"):
        name = f"{kind.__module__}.{name}"
    try:
        text = str(error)
    except Exception as fault:
        text = f"<its message cannot be shown: {type(fault).__name__}>"
    return f"{name}: {text}" if text else name


def defined_at(fn: Any) -> tuple[str, int]:
    """Return file and line of the definition of a function, method, class or callable; ("", 0) if unknown."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    fn = inspect.unwrap(fn) if callable(fn) else fn
    if not hasattr(fn, "__code__"):
        owner = fn if isinstance(fn, type) else type(fn)
        fn = getattr(fn, "__func__", None) or inspect.getattr_static(owner, "__call__", None)
    code = getattr(fn, "__code__", None)
    return (code.co_filename, code.co_firstlineno) if code is not None else ("", 0)


def users_line(tb: TracebackType | None, file: str) -> tuple[str, int]:
    """Return file and line of the innermost frame in ``file``, the function's; else of the innermost user frame."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(tb)]
    own = [place for place in frames if place[0] == file]
    others = [place for place in frames if not place[0].startswith(_OURS)]
    return (own or others or [("", 0)])[-1]


def users_place(error: BaseException, fn: Any) -> str:
    """Return where in the user's code ``fn`` raised ``error``: " at file, line 3 (source)", or "" if unknown."""
    file, line = users_line(error.__traceback__, defined_at(fn)[0])
    if not file:
        return ""
    source = linecache.getline(file, line).strip()
    return f" at {file}, line {line}" + (f" ({source})" if source else "")


def call_collate(collate_fn: Callable[[Any], Any], batch: Any) -> Any:
    """Call a user's ``collate_fn``. Its StopIteration or SystemExit, which would silently end the epoch or the
    process, becomes a DataError; other errors pass as they are."""
    try:
        return collate_fn(batch)
    except (StopIteration, SystemExit) as error:
        raise DataError(
            f"collate_fn {name_of(collate_fn)} failed{users_place(error, collate_fn)}: {error_text(error)}. Rows of "
            "the epoch would be missing. Let it return a batch for any rows that it is given; a next() in it that may "
            "find nothing needs a default."
        ) from error
