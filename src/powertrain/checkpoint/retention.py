"""Which checkpoints to delete, and which is best. Pure: manifests in, names out.

Metrics that a validation found count like any other: give manifests as ``commit.with_validations`` makes them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
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
    """Names of the checkpoints to delete, the oldest first.

    ``manifests`` are oldest first. Kept are the ``num_to_keep`` best by score (the newest ones without a
    ``score_attribute``), the newest because a restart needs it, and the pinned because somebody reads them.
    None keeps all.
    """
    if num_to_keep is None:
        return []
    ranked = _worst_first(manifests, score_attribute, score_order) if score_attribute else list(manifests)
    kept = {manifest.name for manifest in ranked[max(0, len(ranked) - num_to_keep) :]}
    kept |= {manifest.name for manifest in manifests[-1:]} | set(pinned)
    return [manifest.name for manifest in manifests if manifest.name not in kept]


def best(manifests: Sequence[Manifest], attribute: str, order: str = "max") -> Manifest | None:
    """The checkpoint with the best score, the newer of equals; None when none has a score."""
    ranked = [
        m for m in _worst_first(manifests, attribute, order) if not math.isnan(score(m.metrics, attribute))
    ]
    return ranked[-1] if ranked else None


def score(metrics: Mapping[str, Any], attribute: str) -> float:
    """The number under ``attribute``, NaN where there is none.

    "a/b" means the key "a/b" where there is one, else ``metrics["a"]["b"]``.
    """
    value: Any = metrics
    if attribute in metrics:
        value = metrics[attribute]
    else:
        for part in attribute.split("/"):
            value = value.get(part) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, (int, float)) else math.nan


def _worst_first(manifests: Sequence[Manifest], attribute: str, order: str) -> list[Manifest]:
    """Manifests without a number come first; of equals the older comes first."""
    sign = {"max": 1.0, "min": -1.0}[order]

    def rank(manifest: Manifest) -> tuple[bool, float]:
        value = score(manifest.metrics, attribute)
        return (False, 0.0) if math.isnan(value) else (True, sign * value)

    return sorted(manifests, key=rank)
