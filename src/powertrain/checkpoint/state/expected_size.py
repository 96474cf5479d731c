"""The expected size of a rank's state file, before its first save."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from powertrain.checkpoint.state.capture import unwrapped
from powertrain.checkpoint.state.pieces import holders, local_part

#: Bytes of the file beside the tensors: for each of them, and in all; and the share for what is not counted here.
_PER_TENSOR, _BASE, _MARGIN = 400, 2**20, 0.01


@dataclass(frozen=True)
class ExpectedSize:
    """The size of a rank's file, and the index of the GPU that has most of it; None for none."""

    bytes: int
    gpu: int | None


def of(objects: Iterable[Any], world_size: int) -> ExpectedSize:
    """Return the size of a state with these objects: modules and optimizers; others are small and not counted.

    Sparse tensors are not counted either. Tensors that all ranks have alike are written by all of them together.
    """
    total, count, by_gpu = 0.0, 0, dict[int, float]()
    seen: set[int] = set()
    with torch.no_grad():
        for tensor in _tensors_of(objects):
            if id(tensor) in seen or tensor.is_meta or tensor.layout != torch.strided:
                continue
            seen.add(id(tensor))
            local = local_part(tensor)
            share = local.nbytes / max(1, len(holders(tensor, world_size)))
            total, count = total + share, count + 1
            if local.is_cuda:
                index = local.device.index
                by_gpu[index] = by_gpu.get(index, 0.0) + share
    size = int((1.0 + _MARGIN) * total) + _PER_TENSOR * count + _BASE
    return ExpectedSize(size, max(by_gpu, key=lambda index: by_gpu[index], default=None))


def _tensors_of(objects: Iterable[Any]) -> Iterator[torch.Tensor]:
    for one in objects:
        if isinstance(one, nn.Module):
            inner = unwrapped(one)
            yield from inner.parameters()
            yield from inner.buffers()
        elif isinstance(one, Optimizer):
            for entries in one.state.values():
                if isinstance(entries, dict):
                    yield from (value for value in entries.values() if isinstance(value, torch.Tensor))
