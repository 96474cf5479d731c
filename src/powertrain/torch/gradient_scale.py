"""Scale gradients in place."""

from __future__ import annotations

import torch


def scale_in_place(tensor: torch.Tensor, factor: float) -> None:
    """Compute ``tensor *= factor``; with 0 everything becomes 0, also NaN: a filler row must not affect other ranks."""
    if factor == 0.0:
        tensor.zero_()
    elif factor != 1.0:
        tensor.mul_(factor)
