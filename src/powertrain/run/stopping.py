"""When a run has reached what the user set as its end (``RunConfig(stop=...)``). Pure but for the user's callable."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Union

Criterion = Union[Mapping[str, float], Callable[[str, dict[str, Any]], bool], None]


def reason_to_stop(
    criterion: Criterion, name: str, row: int, metrics: Mapping[str, Any], seconds: float
) -> str:
    """Why the run should end after this row of rank 0, or "". A mapping is met when a metric reaches its value."""
    if criterion is None:
        return ""
    result = {"training_iteration": row, "time_total_s": seconds, **metrics}
    if callable(criterion):
        return "the stop function asked for it" if criterion(name, result) else ""
    for key, bound in criterion.items():
        value = _nested(result, key)
        if isinstance(value, (int, float)) and value >= bound:
            return f"{key}={value:g} has reached {bound:g}"
    return ""


def _nested(result: Mapping[str, Any], key: str) -> Any:
    """``result["a/b"]``, or ``result["a"]["b"]``."""
    if key in result:
        return result[key]
    value: Any = result
    for part in key.split("/"):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value
