"""Keys of state dicts with and without DistributedDataParallel's prefix ``module.``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def wrapped_key(key: str, inner_keys: set[str]) -> str:
    """Return ``key`` of a state dict as DDP names it, whether or not it has the ``module.`` prefix already.

    ``inner_keys`` are those of the model inside, which may have a part called ``module`` of its own.
    """
    if key in inner_keys:
        return f"module.{key}"
    return key if key.startswith("module.") else f"module.{key}"


def drop_wrapper_name(state: Any, prefix: str) -> None:
    """Rename ``prefix + "module.…"`` to ``prefix + "…"`` in place, keeping the order."""
    wrapper = f"{prefix}module."
    for key in list(state):
        value = state.pop(key)
        state[prefix + key[len(wrapper) :] if key.startswith(wrapper) else key] = value
    metadata = getattr(state, "_metadata", None)
    if metadata is None:
        return
    # The versions of both spellings are kept: a loader looks under one or the other.
    for name in list(metadata):
        if f"{name}.".startswith(wrapper):
            metadata[(prefix + name[len(wrapper) :]).rstrip(".")] = metadata[name]


def versions_under_wrapper(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return module versions by the names that DDP's loading uses."""
    versions = dict(metadata)
    for name, version in metadata.items():
        versions.setdefault(f"module.{name}".rstrip("."), version)
    return versions


def with_metadata(state: dict[str, Any], metadata: dict[str, Any]) -> Any:
    """Return ``state`` with the versions of its modules where torch looks for them."""

    class Annotated(dict[str, Any]):
        """A dict with an attribute for the versions, which a plain dict cannot have."""

    annotated: Any = Annotated(state)
    annotated._metadata = metadata
    return annotated
