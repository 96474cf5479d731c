"""Ray Train's older torch functions: ``accelerate``, ``prepare_optimizer`` and ``backward``.

Ray deprecates them; here they work, also together with ``prepare_model(mixed_precision=...)``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from powertrain.errors import ArgumentError
from powertrain.torch import device as torch_device
from powertrain.torch import prepare
from powertrain.torch.mixed_precision import ScaledOptimizer, amp_precision
from powertrain.values.arguments import as_flag, has_attribute, shorten


def accelerate(amp: bool = False) -> None:
    """Switch automatic mixed precision on or off for models and optimizers prepared from here on.

    A prepared model then computes in the device's lower precision (float16 on a GPU, bfloat16 on a CPU) and returns
    float32. On a GPU :func:`prepare_optimizer` and :func:`backward` scale the loss as well. An argument
    ``mixed_precision`` of ``prepare_model`` has precedence for that model.

    Args:
        amp: True for mixed precision.

    Raises:
        ArgumentError: ``amp`` is neither True nor False.
        ConfigError: The losses are to be scaled, and an optimizer was prepared before.
        OutsideWorkerError: Called outside a training worker.

    Example::

        accelerate(amp=True)
        model = prepare_model(Net())
        optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for rows, labels in loader:
            optimizer.zero_grad()
            backward(loss_fn(model(rows), labels))
            optimizer.step()
    """
    amp = as_flag(amp, "accelerate(amp=...)")
    device = torch_device.own_device("accelerate")
    settings = torch_device.settings()
    settings.amp = amp_precision(device) if amp else None
    if settings.amp is torch.float16:
        prepare.scale_losses(device.type, "accelerate(amp=True)")
    elif not amp:
        settings.scaler = None


def prepare_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer with its steps counted, and stepped through a gradient scaler where losses are scaled.

    Losses are scaled after ``accelerate(amp=True)`` on a GPU and after ``prepare_model(mixed_precision="fp16")``, both
    of which come before this call.

    Args:
        optimizer: Any torch optimizer. One that is prepared already is returned as it is.

    Returns:
        The optimizer itself, or a :class:`~powertrain.torch.mixed_precision.ScaledOptimizer` around it. To clip its
        gradients, call ``optimizer.scaler.unscale_(optimizer)`` first.

    Raises:
        ArgumentError: ``optimizer`` is not a torch optimizer.

    Example::

        optimizer = prepare_optimizer(torch.optim.AdamW(model.parameters()))
    """
    if not isinstance(optimizer, Optimizer):
        raise ArgumentError(
            f"prepare_optimizer() was given {shorten(optimizer)}. Give a torch.optim.Optimizer."
        )
    prepare.watch_optimizer_steps()
    settings = torch_device.settings()
    if isinstance(optimizer, ScaledOptimizer):
        return optimizer
    if settings.scaler is None:
        settings.has_plain_optimizer = True
        return optimizer
    return ScaledOptimizer(optimizer, settings.scaler)


def backward(tensor: torch.Tensor) -> None:
    """Compute the gradients of a loss, which is scaled first where the optimizer is stepped through a scaler.

    Args:
        tensor: The loss.

    Raises:
        ArgumentError: ``tensor`` is not a tensor.

    Example::

        backward(loss_fn(model(rows), labels))
    """
    if not has_attribute(tensor, "backward"):
        raise ArgumentError(f"backward() was given {shorten(tensor)}. Give the loss, a tensor.")
    scaler = torch_device.settings().scaler
    scaled: Any = scaler.scale(tensor) if scaler is not None else tensor
    scaled.backward()
