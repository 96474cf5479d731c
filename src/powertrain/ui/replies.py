"""Values of replies, made once for all viewers of the same state."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

_T = TypeVar("_T")
#: Replies and tables that are kept.
_MOST_KEPT = 128


class Memo(Generic[_T]):
    """Values by key, each of one version: a new version replaces the old one, which can be extended to it.

    A value is made once also where several threads ask for it at the same time. The least recently used are dropped.
    """

    def __init__(self, most: int = _MOST_KEPT) -> None:
        self._most = most
        self._guard = threading.Lock()
        self._kept: OrderedDict[Hashable, tuple[object, _T]] = OrderedDict()
        self._making: dict[Hashable, threading.Lock] = {}

    def get(self, key: Hashable, version: object, make: Callable[[_T | None], _T]) -> _T:
        """Return the value of ``key`` in this version.

        Args:
            key: What it is of.
            version: The value is made again when this differs.
            make: Called with the value of another version, or None. An error is not kept.
        """
        with self._guard:
            if (found := self._kept.get(key)) is not None and found[0] == version:
                self._kept.move_to_end(key)
                return found[1]
            making = self._making.setdefault(key, threading.Lock())
        with making:
            with self._guard:
                found = self._kept.get(key)
            if found is not None and found[0] == version:
                return found[1]
            try:
                value = make(found[1] if found is not None else None)
                with self._guard:
                    self._kept[key] = (version, value)
                    self._kept.move_to_end(key)
                    while len(self._kept) > self._most:
                        self._kept.popitem(last=False)
            finally:
                with self._guard:
                    if self._making.get(key) is making:
                        del self._making[key]
            return value
