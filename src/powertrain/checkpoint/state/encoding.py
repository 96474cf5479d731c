"""Values as JSON, with tensors replaced by their names, and back."""

from __future__ import annotations

import collections
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from powertrain.checkpoint.manifest import from_json_value, to_json_value
from powertrain.errors import CheckpointError

#: How many names an error lists before it counts.
LISTED = 5

#: Of a whole number: Python writes no longer ones out.
_MOST_BITS = 4096


@dataclass
class Captured:
    """The state of some objects at one moment; the tensors are the objects' own, not copies."""

    #: All tensors by name.
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    #: Names of this rank's own tensors.
    own: set[str] = field(default_factory=set)
    #: Names of the tensors that rank 0 writes for all.
    of_first: set[str] = field(default_factory=set)
    #: The other values, as JSON: {"objects": {name: {"kind", "values"}}, "extras": …, "rng": …}.
    values: dict[str, Any] = field(default_factory=dict)


def encode(value: Any, where: str, captured: Captured) -> Any:
    """Encode ``value`` as JSON; its tensors are recorded in ``captured`` under names that begin with ``where``."""
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise CheckpointError(
            f"{where!r} holds a whole number of {value.bit_length()} bits, and at most {_MOST_BITS} can be saved. Save "
            "it as text."
        )
    if value is None or isinstance(value, (bool, int, float, str, bytes, bytearray)):
        return to_json_value(value)
    if isinstance(value, torch.Tensor):
        return {"$tensor": _note(value, where, captured)}
    if isinstance(value, Mapping):
        return _encode_mapping(value, where, captured)
    if isinstance(value, (list, collections.deque)):
        return [encode(item, f"{where}.{number}", captured) for number, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": [encode(item, f"{where}.{number}", captured) for number, item in enumerate(value)]}
    if isinstance(value, (set, frozenset)):
        return {"$set": [encode(item, where, captured) for item in value]}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"$device": str(value)}
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic) and value.dtype.kind in "biuf":
        return to_json_value(value.item())
    if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc":
        return {"$numpy": _note(torch.from_numpy(numpy.ascontiguousarray(value)), where, captured)}
    raise CheckpointError(
        f"{where!r} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be saved without running "
        "code to read it back. Save numbers, text, tensors, lists and dicts of them, or give the object "
        "state_dict() and load_state_dict()."
    )


def _encode_mapping(value: Mapping[Any, Any], where: str, captured: Captured) -> Any:
    special = "$counter" if isinstance(value, collections.Counter) else ""
    special = "$ordered" if isinstance(value, collections.OrderedDict) else special
    if special or not all(type(key) is str for key in value):
        pairs = [
            [encode(key, where, captured), encode(item, f"{where}.{key}", captured)]
            for key, item in value.items()
        ]
        return {special or "$pairs": pairs}
    plain = {key: encode(item, f"{where}.{key}", captured) for key, item in value.items()}
    return {"$plain": plain} if len(plain) == 1 and next(iter(plain)).startswith("$") else plain


def _note(tensor: torch.Tensor, where: str, captured: Captured) -> str:
    name, number = where, 1
    while name in captured.tensors:  # a key with a dot in it may look like a nested one
        number += 1
        name = f"{where}~{number}"
    captured.tensors[name] = tensor.detach()
    if not isinstance(tensor, DTensor):
        captured.own.add(name)
    return name


def decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Decode a value that :func:`capture` put into ``values``, with ``tensors`` by name."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    kind: str
    content: Any
    kind, content = next(iter(value.items()), ("", None))
    if len(value) != 1 or not kind.startswith("$"):
        return {key: decode(item, tensors) for key, item in value.items()}
    if kind == "$plain":
        return {key: decode(item, tensors) for key, item in content.items()}
    if kind in _MAPPINGS:
        return _MAPPINGS[kind]({decode(key, tensors): decode(item, tensors) for key, item in content})
    if kind == "$tuple":
        return tuple(decode(item, tensors) for item in content)
    if kind == "$set":
        return {decode(item, tensors) for item in content}
    if kind == "$tensor":
        return tensors[content]
    if kind == "$numpy":
        return tensors[content].numpy()
    if kind == "$dtype":
        return getattr(torch, content)
    return torch.device(content) if kind == "$device" else from_json_value(value)


_MAPPINGS: dict[str, Any] = {
    "$pairs": dict,
    "$counter": collections.Counter,
    "$ordered": collections.OrderedDict,
}


def tensor_names(value: Any) -> set[str]:
    """Return the names of all tensors that :func:`decode` needs."""
    if isinstance(value, list):
        return set().union(*(tensor_names(item) for item in value))
    if not isinstance(value, dict):
        return set()
    if len(value) == 1:
        if (name := value.get("$tensor", value.get("$numpy"))) is not None:
            return {name}
        value = value.get("$plain", value)
    return set().union(*(tensor_names(item) for item in value.values()))
