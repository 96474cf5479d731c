"""Prove that a node reaches the same storage as the driver."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

from powertrain.errors import PowertrainError
from powertrain.storage import Storage

if TYPE_CHECKING:
    from powertrain.engine.ray.node.spec import NodeSpec

#: Seconds for which a node tries to reach the storage.
_PROOF_WITHIN = 20.0


def prove_storage(spec: NodeSpec) -> str:
    """Read what the driver has put into the storage, and answer beside it; returns what is wrong, or ""."""
    if not spec.storage:
        return ""
    try:
        storage: Storage = pickle.loads(spec.storage).within(_PROOF_WITHIN)
        found = storage.get(proof_key(spec.proof))
        storage.put(proof_key(spec.answer), spec.answer.encode())
    except FileNotFoundError:
        return f"it does not see what the driver has just written to the storage {spec.storage_name}"
    except (OSError, PowertrainError) as error:
        return f"it cannot use the storage {spec.storage_name}: {error}"
    if found != spec.proof.encode():
        return (
            f"what it finds in the storage {spec.storage_name} is not what the driver has just written there"
        )
    return ""


def proof_key(name: str) -> str:
    """Where nodes prove to each other that they see the same storage."""
    return f"probe/{name}"
