"""The random number generators of a process: capture and restore."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from powertrain.checkpoint.manifest import to_json_value
from powertrain.checkpoint.state.encoding import decode, encode

if TYPE_CHECKING:
    from powertrain.checkpoint.state.encoding import Captured


def capture_rng(captured: Captured) -> dict[str, Any]:
    """Return the states of Python's, numpy's, torch's and this rank's CUDA generator."""
    version, numbers, gauss = random.getstate()
    # 625 numbers of 32 bits each.
    python = torch.frombuffer(
        bytearray(b"".join(n.to_bytes(4, "little") for n in numbers)), dtype=torch.uint8
    )
    taken = {
        "python": [version, encode(python, "rng/python", captured), to_json_value(gauss)],
        "torch": encode(torch.get_rng_state(), "rng/torch", captured),
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, position, has_gauss, cached = numpy.random.get_state()
        words = torch.from_numpy(keys.astype("<u4").view("u1"))
        taken["numpy"] = [
            kind,
            encode(words, "rng/numpy", captured),
            position,
            has_gauss,
            to_json_value(cached),
        ]
    cuda: Any = torch.cuda
    if cuda.is_initialized():
        taken["cuda"] = encode(torch.cuda.get_rng_state(), "rng/cuda", captured)
    return taken


def restore_rng(values: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Put the generators of this rank into the states that were captured."""
    version, words, gauss = decode(values["python"], tensors)
    content = words.numpy().tobytes()
    numbers = tuple(int.from_bytes(content[at : at + 4], "little") for at in range(0, len(content), 4))
    random.setstate((version, numbers, gauss))
    torch.set_rng_state(tensors["rng/torch"])
    if "numpy" in values:
        import numpy

        kind, words, position, has_gauss, cached = decode(values["numpy"], tensors)
        numpy.random.set_state((kind, words.numpy().view("<u4"), position, has_gauss, cached))
    if "cuda" in values and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["rng/cuda"])


def set_generator(generator: torch.Generator, state: torch.Tensor) -> None:
    generator.set_state(state)
