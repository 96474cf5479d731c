"""The line of the user's code that each profiled operator was called from."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterable
from typing import Any

import msgspec


class UserLines(msgspec.Struct, frozen=True):
    """Lines by operator."""

    #: As "train.py:31 in evaluate".
    lines: list[str]
    #: By the id of an operator in the trace ("External id"), the index of its line.
    operators: dict[int, int]
    #: Begin and end of calls that wait for the device outside of operators, in nanoseconds, each with the index of its
    #: line.
    waits: list[tuple[int, int, int]] = []


def lines_of(roots: Iterable[Any], is_user_code: FileJudge | None = None) -> UserLines:
    """Return the innermost line of the user's code above each operator and each wait of a profiler's event tree.

    Each node has ``name``, ``tag``, ``children``, ``correlation_id``, ``start_time_ns``, ``end_time_ns`` and
    ``extra_fields``, of which that of a Python call has ``caller``: the file, line and function that made it.
    """
    judge = is_user_code or FileJudge()
    indexes: dict[str, int] = {}
    operators: dict[int, int] = {}
    waits: list[tuple[int, int, int]] = []
    pending = [(root, -1) for root in roots]
    while pending:
        node, line = pending.pop()
        caller = getattr(node.extra_fields, "caller", None)
        if caller is not None and judge.is_of_user(caller.file_name):
            text = f"{caller.file_name}:{caller.line_number} in {caller.function_name}"
            line = indexes.setdefault(text, len(indexes))
        if line >= 0 and node.correlation_id and _is_operator(node):
            operators[node.correlation_id] = line
        if line >= 0 and "PyCCall" in str(node.tag) and "synchronize" in node.name:
            waits.append((node.start_time_ns, node.end_time_ns, line))
        pending += [(child, line) for child in node.children]
    return UserLines(list(indexes), operators, waits)


def _is_operator(node: Any) -> bool:
    return "TorchOp" in str(node.tag)


class FileJudge:
    """Tells the user's files from those of libraries.

    The profiler shortens file names by the entries of ``sys.path``, so that a file is looked for below each of them.
    """

    def __init__(self) -> None:
        paths = sysconfig.get_paths()
        self._libraries = tuple({paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})
        self._own = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        self._known: dict[str, bool] = {}

    def is_of_user(self, name: str) -> bool:
        if name not in self._known:
            self._known[name] = self._find(name)
        return self._known[name]

    def _find(self, name: str) -> bool:
        if name.startswith("<") and not name.startswith(("<stdin", "<string", "<ipython")):
            return False  # of an import hook, or generated
        places = [entry for entry in sys.path if os.path.exists(os.path.join(entry, name))]
        path = os.path.join(places[0], name) if places else os.path.abspath(name)
        is_library = "site-packages" in path or "dist-packages" in path or path.startswith(self._libraries)
        return not (is_library or path.startswith(self._own))
