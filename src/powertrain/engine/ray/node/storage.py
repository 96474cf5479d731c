"""Prove that a node reaches the same storage as the driver."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

from powertrain.errors import PowertrainError
from powertrain.storage import Storage

if TYPE_CHECKING:
    from powertrain.engine.ray.node.spec import NodeSpec

#: Seconds for which a node tries to reach the storage.
_PROOF_TIMEOUT_S = 20.0


def prove_storage(spec: NodeSpec) -> str:
    """Read the driver's probe from the storage, and write a reply beside it; return the problem, or ""."""
    if not spec.storage:
        return ""
    try:
        storage: Storage = pickle.loads(spec.storage).within(_PROOF_TIMEOUT_S)
        found = storage.get(proof_key(spec.proof))
        storage.put(proof_key(spec.answer), spec.answer.encode())
    except FileNotFoundError:
        return f"it does not see the file that the driver has just written to the storage {spec.storage_name}"
    except (OSError, PowertrainError) as error:
        return f"it cannot use the storage {spec.storage_name}: {error}"
    if found != spec.proof.encode():
        return f"its file in the storage {spec.storage_name} differs from the one that the driver has just written"
    return ""


def proof_key(name: str) -> str:
    """Return the key of a probe by which nodes check that they share the storage."""
    return f"probe/{name}"
