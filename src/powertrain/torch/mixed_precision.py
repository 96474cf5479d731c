"""Mixed precision: forward passes in a lower precision, parameters and optimizer state in their own.

A model that is replicated computes under ``torch.autocast``. FSDP2 casts what it gathers (``MixedPrecisionPolicy``);
see :mod:`powertrain.torch.fsdp`. Losses of float16, whose range is small, are scaled (:class:`LossScaler`) where the
training function calls ``backward`` and ``prepare_optimizer``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from powertrain.data.rows.device import map_tensors
from powertrain.errors import ConfigError
from powertrain.values.arguments import shorten

#: The names of ``prepare_model(mixed_precision=...)``, beside torch's own types.
_PRECISIONS: dict[str, torch.dtype | None] = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "half": torch.float16,
    "fp32": None,
    "float32": None,
    "no": None,
}


def precision_of(value: str | torch.dtype | None) -> torch.dtype | None:
    """Return the type to compute in, ``None`` for that of the parameters.

    Raises:
        ConfigError: ``value`` is not a type that autocast computes in.
    """
    if value is None or value is torch.float32:
        return None
    if value in (torch.bfloat16, torch.float16):
        return value
    if isinstance(value, str) and value in _PRECISIONS:
        return _PRECISIONS[value]
    raise ConfigError(
        f'prepare_model(mixed_precision=...) is {shorten(value)}; it must be "bf16", "fp16", torch.bfloat16, '
        "torch.float16, or None for the precision of the parameters."
    )


def amp_precision(device: torch.device) -> torch.dtype:
    """Return the lower precision of ``accelerate(amp=True)``: torch's default for the device."""
    return torch.get_autocast_dtype(device.type)


def device_type_of(model: nn.Module) -> str:
    """Return the kind of device that ``model`` computes on; "cpu" for one without parameters."""
    return next((parameter.device.type for parameter in model.parameters()), "cpu")


def as_float32(output: Any) -> Any:
    """Return ``output`` with its low-precision tensors as float32, so that losses are computed in full precision."""
    return map_tensors(output, _upcast)


def _upcast(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


# --------------------------------------------------------------------------- models without a wrapper


class _AutocastForward:
    """A model's ``forward`` in lower precision. An object and not a closure, so that copies of the model and pickles
    of it call their own."""

    def __init__(self, model: nn.Module, precision: torch.dtype) -> None:
        self.model, self.precision = model, precision
        self.device_type = device_type_of(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self.device_type, dtype=self.precision):
            output = type(self.model).forward(self.model, *args, **kwargs)
        return as_float32(output)


def autocast_forward(model: nn.Module, precision: torch.dtype) -> None:
    """Make ``model`` compute in ``precision``; for a compiled one the model inside, which it calls."""
    while isinstance(inner := model.__dict__.get("_modules", {}).get("_orig_mod"), nn.Module):
        model = inner
    model.__dict__["forward"] = _AutocastForward(model, precision)


# --------------------------------------------------------------------------- scaled losses


class LossScaler(torch.amp.GradScaler):
    """Torch's gradient scaler for any number of prepared optimizers.

    The scale changes before the next loss is scaled, not with the first optimizer's step: the gradients of the
    others still have the old one. ``unscale_`` takes prepared optimizers, for clipping gradients.
    """

    _has_stepped = False

    def scale(self, outputs: Any) -> Any:
        """Multiply a loss, or several, by the scale."""
        self.update_if_stepped()
        return super().scale(outputs)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients of ``optimizer`` by the scale now. Its next step does not do so again."""
        super().unscale_(_inner(optimizer))

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step ``optimizer``, unless a gradient of it is infinite or not a number."""
        result = super().step(_inner(optimizer), *args, **kwargs)
        self._has_stepped = True
        return result

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Change the scale as the steps since the last call require."""
        self._has_stepped = False
        super().update(new_scale)

    def update_if_stepped(self) -> None:
        """Make the change of scale that the newest steps require."""
        if self._has_stepped:
            self.update()

    def get_scale(self) -> float:
        """Return the scale of the next loss."""
        self.update_if_stepped()
        return super().get_scale()

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the newest steps."""
        self.update_if_stepped()
        return super().state_dict()


def _inner(optimizer: Optimizer) -> Optimizer:
    return optimizer.optimizer if isinstance(optimizer, ScaledOptimizer) else optimizer


class ScaledOptimizer(Optimizer):
    """The user's optimizer, stepped through the gradient scaler of mixed precision.

    ``optimizer`` is the user's own and ``scaler`` the :class:`LossScaler`. To clip gradients, call
    ``optimizer.scaler.unscale_(optimizer)`` first.
    """

    def __init__(self, optimizer: Optimizer, scaler: torch.amp.GradScaler) -> None:
        # Not Optimizer's own __init__: parameters, state and hooks are the inner optimizer's. Its step is not copied,
        # which a scheduler may have replaced: that one does not use the scaler.
        self.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
        self.optimizer, self.scaler = optimizer, scaler

    def step(self, closure: Any = None) -> Any:
        """Step the optimizer with unscaled gradients; left out where one of them is infinite or not a number.

        Raises:
            ConfigError: A closure was given.
        """
        if closure is not None:
            raise ConfigError(
                "step(closure) was called while mixed precision scales the gradients, and torch's scaler takes no "
                'closure. Call step() without one, or train with mixed_precision="bf16", which needs no scaling.'
            )
        result = self.scaler.step(self.optimizer)
        if not isinstance(self.scaler, LossScaler):
            self.scaler.update()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters."""
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> Any:
        """Return the state of the optimizer inside."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Load a state of the optimizer inside."""
        self.optimizer.load_state_dict(state_dict)
        # Loading gives the inner optimizer new containers.
        self.__dict__.update(state=self.optimizer.state, param_groups=self.optimizer.param_groups)

    def add_param_group(self, param_group: Any) -> None:
        """Add parameters to the optimizer inside."""
        self.optimizer.add_param_group(param_group)
