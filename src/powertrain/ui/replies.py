"""Replies as JSON, made once for all viewers of the same state."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import msgspec
from starlette.responses import Response

from powertrain.text.printable import escape_lines

_T = TypeVar("_T")
#: Replies and tables that are kept.
_MOST_KEPT = 128


def json_reply(content: Any, status: int = 200) -> Response:
    """Return a value as JSON; NaN and infinities are null, and texts have no control characters but line ends."""
    return Response(encoded(content), status, media_type="application/json")


def encoded(content: Any) -> bytes:
    """Return the bytes of a JSON reply."""
    return msgspec.json.encode(_shown(msgspec.to_builtins(content, enc_hook=str)))


def _shown(value: Any) -> Any:
    if isinstance(value, str):
        return escape_lines(value)
    if isinstance(value, dict):
        return {escape_lines(str(key)): _shown(item) for key, item in value.items()}
    if isinstance(value, list) and value and type(value[0]) in (int, float):
        return value  # the arrays of charts
    return [_shown(item) for item in value] if isinstance(value, (list, tuple)) else value


class Memo(Generic[_T]):
    """Values by key, made once also where several threads ask for one at the same time; the oldest are dropped."""

    def __init__(self, most: int = _MOST_KEPT) -> None:
        self._most = most
        self._guard = threading.Lock()
        self._kept: OrderedDict[Hashable, _T] = OrderedDict()
        self._making: dict[Hashable, threading.Lock] = {}

    def get(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """Return the value of ``key``. An error of ``make`` is not kept."""
        with self._guard:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            making = self._making.setdefault(key, threading.Lock())
        with making:
            with self._guard:
                if key in self._kept:
                    return self._kept[key]
            try:
                value = make()
            except BaseException:
                with self._guard:
                    self._making.pop(key, None)
                raise
            with self._guard:
                self._kept[key] = value
                self._making.pop(key, None)
                while len(self._kept) > self._most:
                    self._kept.popitem(last=False)
            return value
