"""Compilations of ``torch.compile`` in a rank: how often, how long, why again, and where a graph breaks.

torch keeps the metrics of its newest compilations, and counts breaks by their reason; both are read on the service
thread. Where the internals that hold them have moved, nothing is recorded.
"""

from __future__ import annotations

import sys
from typing import Any

#: Functions that are listed, and reasons of each.
_FUNCTIONS_LIMIT, _REASONS_LIMIT = 16, 32
_METRICS = "torch._dynamo.utils"


class Compilations:
    """The compilations of this process so far. One thread."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._functions: dict[str, dict[str, Any]] = {}

    def news(self) -> list[dict[str, Any]] | None:
        """Return all functions that were compiled, if any was compiled since the last call; else None.

        Each has the place where it is defined, the number of its compilations, their seconds, the seconds of the first,
        and the reasons of the others.
        """
        new = [metrics for metrics in _metrics() if self._is_new(metrics)]
        for metrics in new:
            self._add(metrics)
        if not new:
            return None
        longest = sorted(self._functions.values(), key=lambda one: -one["seconds"])
        return longest[:_FUNCTIONS_LIMIT]

    def _is_new(self, metrics: Any) -> bool:
        key = f"{getattr(metrics, 'compile_id', '')} {getattr(metrics, 'start_time', '')}"
        is_new = key not in self._seen
        self._seen.add(key)
        return is_new

    def _add(self, metrics: Any) -> None:
        file, line = getattr(metrics, "co_filename", None), getattr(metrics, "co_firstlineno", None)
        name = getattr(metrics, "co_name", None)
        if not name:  # of a backward that was compiled later, say
            return
        where = f"{file}:{line} in {name}"
        seconds = float(getattr(metrics, "entire_frame_compile_time_s", None) or 0.0)
        function = self._functions.setdefault(
            where, {"where": where, "count": 0, "seconds": 0.0, "first_seconds": seconds, "reasons": []}
        )
        function["count"] += 1
        function["seconds"] += seconds
        if (reason := getattr(metrics, "recompile_reason", None)) and len(
            function["reasons"]
        ) < _REASONS_LIMIT:
            function["reasons"].append(str(reason)[:500])


def graph_breaks() -> dict[str, int]:
    """Return how often the compiler had to break a graph or leave a function alone, by its reason.

    Code counts once however often it runs, and again each time it is compiled.
    """
    counters = getattr(sys.modules.get(_METRICS), "counters", {})
    try:
        found = dict(counters.get("unimplemented", {})) | dict(counters.get("graph_break", {}))
    except Exception:  # another thread adds to them
        return {}
    most = sorted(found.items(), key=lambda item: -item[1])[:_REASONS_LIMIT]
    return {_in_one_line(str(reason)): int(count) for reason, count in most}


def _in_one_line(reason: str) -> str:
    """Return the first line of a reason of the compiler, and its explanation."""
    first, *others = (line.strip() for line in reason.splitlines() or [""])
    why = next(
        (line.removeprefix("Explanation: ") for line in others if line.startswith("Explanation: ")), ""
    )
    return f"{first}: {why}"[:500] if why else first[:500]


def _metrics() -> list[Any]:
    """Return torch's metrics of its newest compilations. Never imports anything."""
    utils = sys.modules.get(_METRICS)
    read = getattr(utils, "get_compilation_metrics", None)
    if read is None:
        return []
    try:
        return list(read())
    except Exception:  # another thread adds to them
        return []
