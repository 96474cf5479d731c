"""What the programs print of the weights they end with."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from torch import Tensor


def hash_of(weights: Mapping[str, Tensor]) -> str:
    """Return a hash of names and exact values: equal only for bit-identical weights."""
    digest = hashlib.sha256()
    for name, tensor in weights.items():
        digest.update(name.encode() + tensor.cpu().numpy().tobytes())
    return digest.hexdigest()
