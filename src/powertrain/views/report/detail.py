"""How much of a run a report holds, so that its file stays small. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from powertrain.views.metrics import chosen_ranks

#: Bytes of the largest report, which a mail or a chat still takes.
MOST_BYTES = 1_500_000
#: Bytes for all curves, and for the ends of all logs.
_BYTES_OF_CURVES, BYTES_OF_LOGS = 600_000, 250_000
#: Bytes of a curve's pixel: its row, and its last, lowest and highest value.
_BYTES_OF_PIXEL = 34
#: Pixels of a curve: a chart of the page has about as many, and fewer than the least show no course.
_MOST_PIXELS, _LEAST_PIXELS = 400, 60
#: Characters of a text, and entries of a list that is not a curve.
_LONGEST_TEXT, _MOST_CHECKPOINTS = 1000, 200


@dataclass(frozen=True)
class CurveDetail:
    """The curves of a report."""

    metrics: Sequence[str]
    ranks: Sequence[int]
    pixels: int


def choose_curves(metrics: Sequence[str], world_size: int) -> CurveDetail:
    """Return the curves that fit: of all ranks if possible, else of rank 0, else of the first metrics."""
    pixels = _BYTES_OF_CURVES // _BYTES_OF_PIXEL
    for ranks in (chosen_ranks(world_size), [0]):
        each = pixels // max(1, len(metrics) * len(ranks))
        if each >= _LEAST_PIXELS:
            return CurveDetail(metrics, ranks, min(each, _MOST_PIXELS))
    return CurveDetail(metrics[: pixels // _LEAST_PIXELS], [0], _LEAST_PIXELS)


def shorten_page(page: dict[str, Any], detail: CurveDetail) -> dict[str, Any]:
    """Return the page of a run as a report has it, with ``left_out`` in words."""
    left_out = []
    if len(detail.metrics) < len(page["metrics"]):
        left_out.append(
            f"This report has {len(detail.metrics)} of {len(page['metrics'])} metrics, of rank 0. "
            "The dashboard shows all."
        )
    elif len(detail.ranks) < len(chosen_ranks(page["ranks"])):
        left_out.append("This report has the metrics of rank 0. The dashboard shows those of all ranks.")
    checkpoints = page["checkpoints"]
    if checkpoints is not None and len(checkpoints["committed"]) > _MOST_CHECKPOINTS:
        known = checkpoints["committed"]
        newest = known[-_MOST_CHECKPOINTS:]
        best = [one for one in known[:-_MOST_CHECKPOINTS] if one["is_best"]]
        checkpoints = {**checkpoints, "committed": best + newest}
        left_out.append(
            f"This report has the newest {_MOST_CHECKPOINTS} of {len(known)} checkpoints, and the best one."
        )
    shown = {
        **page,
        "metrics": list(detail.metrics),
        "checkpoints": checkpoints,
        "kept_ranks": list(detail.ranks),
        "left_out": left_out,
        "can_control": False,
    }
    result: dict[str, Any] = _with_short_texts(shown)
    return result


def _with_short_texts(value: Any) -> Any:
    if isinstance(value, str):
        return value if len(value) <= _LONGEST_TEXT else f"{value[:_LONGEST_TEXT]}…"
    if isinstance(value, dict):
        return {key: _with_short_texts(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_short_texts(item) for item in value]
    return value
