"""Which checkpoints to delete, and which is best. Pure: manifests in, names out.

Metrics that a validation found count like any other: give manifests as ``commit.with_validations`` makes them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from powertrain.checkpoint.manifest import Manifest


def to_delete(
    manifests: Sequence[Manifest],
    *,
    num_to_keep: int | None,
    score_attribute: str | None = None,
    score_order: str = "max",
    pinned: Collection[str] = frozenset(),
) -> list[str]:
    """Return the names of the checkpoints to delete, the oldest first.

    ``manifests`` are oldest first. Kept are the ``num_to_keep`` best by score (the newest ones without a
    ``score_attribute``), the newest because a restart needs it, and the pinned ones, which are in use.
    None keeps all.
    """
    if num_to_keep is None:
        return []
    ranked = _worst_first(manifests, score_attribute, score_order) if score_attribute else list(manifests)
    kept = {manifest.name for manifest in ranked[max(0, len(ranked) - num_to_keep) :]}
    kept |= {manifest.name for manifest in manifests[-1:]} | set(pinned)
    return [manifest.name for manifest in manifests if manifest.name not in kept]


def best(manifests: Sequence[Manifest], attribute: str, order: str = "max") -> Manifest | None:
    """Return the checkpoint with the best score, the newer of equals; None when none has a score."""
    ranked = [
        m for m in _worst_first(manifests, attribute, order) if not math.isnan(score(m.metrics, attribute))
    ]
    return ranked[-1] if ranked else None


def score(metrics: Mapping[str, Any], attribute: str) -> float:
    """Return the number under ``attribute``, NaN where it is missing.

    "a/b" means the key "a/b" where it exists, else ``metrics["a"]["b"]``.
    """
    value: Any = metrics
    if attribute in metrics:
        value = metrics[attribute]
    else:
        for part in attribute.split("/"):
            value = value.get(part) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, (int, float)) else math.nan


def score_names(manifests: Sequence[Manifest]) -> list[str]:
    """Return all names under which :func:`score` finds a number, sorted."""
    return sorted({name for manifest in manifests for name in _numbers_in(manifest.metrics)})


def missing_score(manifests: Sequence[Manifest], attribute: str) -> str:
    """Return a warning where none of these checkpoints has a number under ``attribute``; "" where one has."""
    if not all(math.isnan(score(manifest.metrics, attribute)) for manifest in manifests):
        return ""
    names = score_names(manifests)
    there = f"Their metrics are {', '.join(names)}." if names else "They have no metric that is a number."
    return (
        f"No checkpoint has a number under checkpoint_score_attribute={attribute!r}, so the newest count as the best. "
        f"{there} Report it with each checkpoint, or correct CheckpointConfig(checkpoint_score_attribute=...)."
    )


def _numbers_in(metrics: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in metrics.items():
        if isinstance(value, Mapping):
            yield from _numbers_in(value, f"{prefix}{key}/")
        elif isinstance(value, (int, float)):
            yield f"{prefix}{key}"


def _worst_first(manifests: Sequence[Manifest], attribute: str, order: str) -> list[Manifest]:
    """Sort manifests by score: those without a number first; of equals the older first."""
    sign = {"max": 1.0, "min": -1.0}[order]

    def rank(manifest: Manifest) -> tuple[bool, float]:
        value = score(manifest.metrics, attribute)
        return (False, 0.0) if math.isnan(value) else (True, sign * value)

    return sorted(manifests, key=rank)
