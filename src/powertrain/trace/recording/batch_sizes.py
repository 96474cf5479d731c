"""Sizes of batches, and whether a copy goes to a device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

#: Smaller copies from pageable memory do not block, and are ignored.
SMALL_COPY = 64 * 1024

_SEQUENCES = (tuple, list)


def size_of(batch: Any) -> tuple[int, int]:
    """Return (samples, tokens): the first dimension of the first tensor or array, and the elements of ``input_ids``."""
    try:
        # The common case, which needs no search.
        if type(batch) in _SEQUENCES and (shape := getattr(batch[0], "shape", None)) and (count := shape[0]):
            return int(count), 0
        return _size_of(batch, depth=3)
    except Exception:  # an error in a user-defined batch type must not end training
        return 0, 0


def _size_of(batch: Any, depth: int) -> tuple[int, int]:
    if isinstance(batch, (list, tuple)):
        parts, tokens = iter(batch), 0
    elif (shape := getattr(batch, "shape", None)) is not None:
        return (int(shape[0]) if shape else 0), 0
    elif isinstance(batch, Mapping):
        ids: Any = batch.get("input_ids")
        parts, tokens = iter(batch.values()), math.prod(getattr(ids, "shape", None) or (0,))
    else:
        return 0, 0
    for part in parts if depth else ():
        samples, inner = _size_of(part, depth - 1)
        if samples:
            return samples, tokens or inner
    return 0, tokens


#: Device types without a host-to-device copy.
_NOT_DEVICES = ("cpu", "meta")


def goes_to_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether ``tensor.to(*args, **kwargs)`` copies a host tensor to a device."""
    if args and type(args[0]) is str:  # the common case
        return not args[0].startswith(_NOT_DEVICES)
    target = kwargs.get("device") or kwargs.get("other") or (args[0] if args else None)
    target = getattr(target, "device", target)
    kind = getattr(target, "type", None)
    if kind is None and isinstance(target, str):
        kind = target.partition(":")[0]
    if kind is None:
        # torch takes a plain integer as an index of the machine's accelerator; a dtype is not a device.
        return isinstance(target, int) and not isinstance(target, bool)
    return kind not in _NOT_DEVICES
