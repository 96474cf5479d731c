"""The stop criterion of a run (``RunConfig(stop=...)``). Pure except for the user's callable."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Union

Criterion = Union[Mapping[str, float], Callable[..., "bool | str"], None]


class StopHere(str):
    """A reason to end at the row that it is given for, where all ranks wait at that row.

    Without ``is_final`` the function will be continued: the row must have brought a checkpoint.
    """

    is_final = True


class PauseHere(StopHere):
    """A reason to end at a row whose checkpoint the function continues from later."""

    is_final = False


def reason_to_stop(
    criterion: Criterion,
    name: str,
    row: int,
    metrics: Mapping[str, Any],
    seconds: float,
    is_saved: bool | None = None,
) -> str:
    """Return why the run should end after this row of rank 0, or "". A mapping is met when a metric reaches its value.

    A function returns whether to stop; one of our own returns the reason instead of True, and is also given whether the
    row has brought a checkpoint (``is_saved``).
    """
    if criterion is None:
        return ""
    result = {"training_iteration": row, "time_total_s": seconds, **metrics}
    if callable(criterion):
        found = criterion(name, result) if is_saved is None else criterion(name, result, is_saved)
        if isinstance(found, str):
            return found
        return "the stop function asked for it" if found else ""
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
