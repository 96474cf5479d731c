"""Functions that make a training function distributed: device, model, data loader, optimizer.

Each works the same at any world size, also 1, and on CPU and GPU, so one script serves all.
"""

from __future__ import annotations

import functools
import inspect
import os
import random
import sys
import weakref
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from powertrain.config.checks import did_you_mean
from powertrain.errors import ArgumentError, ConfigError
from powertrain.torch.device import context, own_device, reset_settings, settings
from powertrain.torch.gradient_scale import scale_in_place
from powertrain.torch.mixed_precision import (
    LossScaler,
    as_float32,
    autocast_forward,
    device_type_of,
    precision_of,
)
from powertrain.torch.state_keys import drop_wrapper_name, versions_under_wrapper, with_metadata, wrapped_key
from powertrain.values.arguments import as_flag, as_text_keys, as_whole, shorten
from powertrain.worker.checkpoints.state import expect_model, on_optimizer_step
from powertrain.worker.data.batch_plan import gradient_weight

_watching = False


def begin(gpus: int = 1) -> None:
    """Reset the state for one training function in this worker, which has ``gpus`` GPUs; count its steps."""
    reset_settings(gpus)
    gradient_weight.reset()
    watch_optimizer_steps()


def _progress() -> Any:
    """Return this process's counters of batches and optimizer steps."""
    from powertrain.worker.progress import progress

    return progress


class DistributedModel(DistributedDataParallel):
    """DistributedDataParallel whose state dict is that of the model inside, and whose ranks may count unequally.

    ``state_dict`` has no ``module.`` prefix, and ``load_state_dict`` takes keys with and without it, also
    where this model is a part of a larger one. Once a gradient weight other than 1 is set (see
    ``get_context().batch_plan``), this rank's gradients are multiplied by it before they are averaged.
    In a group of one rank nothing is exchanged, so a step takes as long as that of the model inside; a
    communication hook or a gradient weight is still applied. Everything else is torch's.
    """

    #: The precision of the forward pass, if it differs from the parameters' type.
    precision: torch.dtype | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._needs_reducer = _is_reduced(self)
        _weigh_when_needed(self)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Compute the output of the model inside, and prepare the exchange of gradients where there is one."""
        if self.precision is None:
            return self._forward_in_own_precision(*inputs, **kwargs)
        with torch.autocast(device_type_of(self), dtype=self.precision):
            output = self._forward_in_own_precision(*inputs, **kwargs)
        return as_float32(output)

    def _forward_in_own_precision(self, *inputs: Any, **kwargs: Any) -> Any:
        this = cast(Any, self)
        if self._needs_reducer or this._join_config.enable:
            return cast(Any, super()).forward(*inputs, **kwargs)
        # The reducer's autograd hooks do nothing in a backward pass that it was not prepared for, as in no_sync().
        if self.device_ids:
            moved, moved_kwargs = this.to_kwargs(inputs, kwargs, self.device_ids[0])
            inputs, kwargs = moved[0], moved_kwargs[0]
        return self.module(*inputs, **kwargs)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Register ``hook`` to reduce the gradients, as torch's method does. It gets weighted gradients."""
        if _reduces_in_compiled_code(self):
            super().register_comm_hook(state, hook)
            return
        cast(Any, self)._check_comm_hook(hook)
        reduction = _reduction_of(self)
        if reduction.then is not None:
            raise RuntimeError(
                "register_comm_hook was called a second time on this model, and DDP takes one communication "
                "hook. Combine both in one function and register that."
            )
        reduction.then = functools.partial(hook, state)

    def __setstate__(self, state: dict[str, Any]) -> None:
        cast(Any, super()).__setstate__(state)
        self._needs_reducer = _is_reduced(self)
        _weigh_when_needed(self)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the model inside, without the prefix ``module.``; the arguments are torch's."""
        state = super().state_dict(*args, **kwargs)
        if not _is_called_by_torch_checkpoint():
            prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
            drop_wrapper_name(state, prefix)
        return state

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state whose keys may have the prefix ``module.`` or not.

        Args:
            state_dict: The state.
            strict: Refuse missing and unexpected keys, as torch does.
            assign: Keep the tensors of the state itself, as torch does.

        Returns:
            The missing and the unexpected keys, as torch returns them.
        """
        named: Any = dict(state_dict)
        self._add_wrapper_name(named, "")
        metadata = getattr(state_dict, "_metadata", None)
        if metadata is not None:
            named = with_metadata(named, versions_under_wrapper(metadata))
        return super().load_state_dict(named, strict=strict, assign=assign)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        # The entry point when this model is a part of a larger one that is being loaded.
        self._add_wrapper_name(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _add_wrapper_name(self, state: MutableMapping[str, Any], prefix: str) -> None:
        inner_keys = set(self.module.state_dict())
        for key in [key for key in state if key.startswith(prefix)]:
            state[prefix + wrapped_key(key[len(prefix) :], inner_keys)] = state.pop(key)


class _WeightedReduction:
    """DDP's one communication hook: this rank's weight first, then the user's hook, or the average over ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        #: The user's hook with its state.
        self.then: Callable[[Any], Any] | None = None

    def reduce(self, bucket: Any) -> Any:
        """Return a future of the reduced gradients of ``bucket``."""
        gradients: torch.Tensor = bucket.buffer()
        if self.then is not None:
            scale_in_place(gradients, gradient_weight.value)
            return self.then(bucket)
        # One factor for weight and average: no slower than torch's own division, and divided first, so that
        # the sum of low-precision gradients cannot overflow.
        scale_in_place(gradients, gradient_weight.value / self._group.size())
        work = dist.all_reduce(gradients, group=self._group, async_op=True)
        return cast(Any, work).get_future().then(_only_tensor)


#: The hook of each model that has one. Not an attribute, because a copy of a model has a new reducer, without a hook.
_reductions: weakref.WeakKeyDictionary[DistributedDataParallel, _WeightedReduction] = (
    weakref.WeakKeyDictionary()
)


def _weigh_when_needed(model: DistributedDataParallel) -> None:
    """Multiply this rank's gradients by its weight, from the first one other than 1 on. Idempotent."""
    # A weak reference, because a callback that waits for a weight must not keep the model alive.
    this = weakref.ref(model)

    def weigh() -> None:
        if (living := this()) is not None:
            _reduction_of(living)

    gradient_weight.when_uneven(weigh)


def _reduction_of(model: DistributedDataParallel) -> _WeightedReduction:
    """Return the communication hook of ``model``, registered with torch on first use."""
    if model in _reductions:
        return _reductions[model]
    if _reduces_in_compiled_code(model):
        raise ConfigError(
            'torch._dynamo.config.optimize_ddp is "python_reducer", with which DDP reduces each parameter inside '
            "compiled code, where gradients cannot be weighted. Leave that setting at True, or use a global "
            "batch size that the number of workers divides."
        )
    reduction = _WeightedReduction(model.process_group)
    try:
        # A lambda, because torch compares annotations, and those of this module are strings.
        DistributedDataParallel.register_comm_hook(
            model, reduction, lambda state, bucket: state.reduce(bucket)
        )
    except RuntimeError as error:
        raise ConfigError(
            f"Torch holds a communication hook of this model already, so gradients cannot be weighted ({error}). "
            "Give prepare_model the model as it was before DistributedDataParallel, and register the hook on what "
            "it returns with register_comm_hook(state, hook); or use a global batch size that the number of "
            "workers divides."
        ) from error
    finally:
        # Torch's own record of it would go into copies, which cannot have it.
        model._comm_hooks.pop()
    _reductions[model] = reduction
    if isinstance(model, DistributedModel):
        model._needs_reducer = True
    return reduction


def _is_reduced(model: DistributedDataParallel) -> bool:
    """Return True where torch's reducer changes gradients or parameters: with several ranks, or reduced precision."""
    this = cast(Any, model)
    return (
        this.process_group.size() > 1 or this.mixed_precision is not None or _reduces_in_compiled_code(model)
    )


def _reduces_in_compiled_code(model: DistributedDataParallel) -> bool:
    return bool(getattr(model, "_use_python_reducer", False))


def _only_tensor(future: Any) -> torch.Tensor:
    return cast(torch.Tensor, future.value()[0])


def _is_called_by_torch_checkpoint() -> bool:
    """Return True inside ``torch.distributed.checkpoint.state_dict``, which drops DDP's prefix itself.

    It walks the modules along each key and fails where the prefix is missing. It offers no other hook for a DDP
    subclass.
    """
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") in (
        "torch.nn.modules.module",
        __name__,
    ):
        frame = frame.f_back
    return frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict"


def prepare_model(
    model: nn.Module,
    move_to_device: bool | torch.device = True,
    parallel_strategy: str | None = "ddp",
    parallel_strategy_kwargs: dict[str, Any] | None = None,
    *,
    mixed_precision: str | torch.dtype | None = None,
) -> nn.Module:
    """Return the model, moved to this worker's device and wrapped so that gradients are averaged over all workers.

    ``.module`` is the model itself, at any world size. The state dict has the model's own keys. Every rank must call
    this at the same point. A model compiled with ``torch.compile`` may be given, and the prepared one may be compiled.
    A model without a trainable parameter has no gradient to average: it is returned as it is.

    Where ranks have unequal numbers of samples (``get_context().batch_plan``), each rank's gradient counts
    accordingly; not with ``parallel_strategy=None``.

    Args:
        model: The model. One that is in DistributedDataParallel or sharded already is not wrapped again.
        move_to_device: True for this worker's device, False for none, or a device.
        parallel_strategy: "ddp" replicates the model. "fsdp" shards parameters, gradients and optimizer state over all
            workers (FSDP2, ``torch.distributed.fsdp.fully_shard``), the members of module lists each by themselves;
            make the optimizer afterwards. With None the model is only moved.
        parallel_strategy_kwargs: Arguments of DistributedDataParallel (``find_unused_parameters=True``, say), or of
            ``fully_shard``, where those of FSDP1 are translated.
        mixed_precision: "bf16" or "fp16" (or ``torch.bfloat16``, ``torch.float16``) to compute forward passes in that
            type and return float32; parameters, gradients and optimizer state keep their own. "ddp" and None use
            ``torch.autocast``, "fsdp" a ``MixedPrecisionPolicy``. With "fp16" also call ``prepare_optimizer`` and
            ``backward``, which scale the loss. None leaves the choice to ``accelerate(amp=...)``.

    Returns:
        The prepared model.

    Raises:
        ArgumentError: ``model`` is not a module, or an option is unknown.
        ConfigError: A strategy or precision is unknown, or options exclude each other.
        OutsideWorkerError: Called outside a training worker.

    Example::

        model = prepare_model(Net(), mixed_precision="bf16")
    """
    _check_strategy(parallel_strategy)
    kwargs = as_text_keys(parallel_strategy_kwargs, "prepare_model(parallel_strategy_kwargs=...)")
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"prepare_model() was given {shorten(model)}. Give a torch.nn.Module.")
    precision = precision_of(mixed_precision) if mixed_precision is not None else settings().amp
    prepared = _prepared(model, move_to_device, parallel_strategy, kwargs, precision)
    expect_model(prepared)
    return prepared


def _prepared(
    model: nn.Module,
    move_to_device: bool | torch.device,
    parallel_strategy: str | None,
    kwargs: dict[str, Any],
    precision: torch.dtype | None,
) -> nn.Module:
    """Move and wrap the model."""
    if isinstance(model, DistributedDataParallel):
        _weigh_when_needed(model)
        _compute_in(model, precision)
        return model
    device = _device_for(move_to_device)
    if device is not None:
        model = model.to(device)
    if parallel_strategy is None:
        _compute_in(model, precision)
        return model
    if not any(parameter.requires_grad for parameter in model.parameters()):
        _compute_in(model, precision)
        # Past nn.Module's own __setattr__, which would make the model a part of itself.
        model.__dict__.setdefault("module", model)
        return model
    _check_group()
    if parallel_strategy == "fsdp":
        return _sharded(model, device, kwargs, precision)
    _refuse_unknown_options(kwargs)
    prepared = DistributedModel(model, **{**_device_arguments(model), **kwargs})
    _compute_in(prepared, precision)
    return prepared


def _sharded(
    model: nn.Module, device: torch.device | None, kwargs: dict[str, Any], precision: torch.dtype | None
) -> nn.Module:
    from powertrain.torch.fsdp import shard_model

    device = device or _device_of(model)
    if precision is torch.float16:
        scale_losses(device.type, 'prepare_model(mixed_precision="fp16")')
    # Past nn.Module's own __setattr__, as above.
    model.__dict__.setdefault("module", model)
    return shard_model(model, device, kwargs, precision)


def _compute_in(model: nn.Module, precision: torch.dtype | None) -> None:
    """Make ``model`` compute in ``precision``, and scale its losses where needed. ``None`` changes nothing."""
    if precision is None:
        return
    if precision is torch.float16:
        scale_losses(device_type_of(model), 'prepare_model(mixed_precision="fp16")')
    if isinstance(model, DistributedModel):
        model.precision = precision
    else:
        autocast_forward(model, precision)


def _refuse_unknown_options(kwargs: Mapping[str, Any]) -> None:
    known = [*inspect.signature(DistributedDataParallel.__init__).parameters][2:]
    for name in kwargs:
        if name not in known:
            raise ArgumentError(
                f"DistributedDataParallel has no option {name!r}, which prepare_model(parallel_strategy_kwargs=...) "
                f"was given. {did_you_mean(name, known)}It has {', '.join(known)}."
            )


def _check_strategy(parallel_strategy: str | None) -> None:
    if parallel_strategy is not None and (
        not isinstance(parallel_strategy, str) or parallel_strategy not in ("ddp", "fsdp")
    ):
        raise ConfigError(
            f'parallel_strategy is {shorten(parallel_strategy)}; it must be "ddp", "fsdp" or None (no wrapping).'
        )


def _device_for(move_to_device: bool | torch.device) -> torch.device | None:
    """Return the device to move to, ``None`` for no move. A GPU named by the user becomes the current one."""
    if isinstance(move_to_device, torch.device):
        if move_to_device.type == "cuda":
            torch.cuda.set_device(move_to_device)
        return move_to_device
    return own_device("prepare_model") if as_flag(move_to_device, "move_to_device") else None


def _device_of(model: nn.Module) -> torch.device:
    """Return the device of the model, or the one it would have were it not on the meta device."""
    device = next(model.parameters()).device
    return own_device("prepare_model") if device.type == "meta" else device


def _check_group() -> None:
    if not dist.is_initialized():
        context("prepare_model")
        raise ConfigError(
            "prepare_model needs torch's process group, and none is set up in this worker. Run the training "
            "function with TorchTrainer, or pass parallel_strategy=None."
        )


def _device_arguments(model: nn.Module) -> dict[str, Any]:
    """Return DDP's device arguments: set when the whole model is on one GPU, as DDP requires."""
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) == 1 and (device := devices.pop()).type == "cuda":
        return {"device_ids": [device], "output_device": device}
    return {}


def scale_losses(device_type: str, caller: str) -> None:
    """Scale the losses of ``backward`` from here on. Idempotent.

    Raises:
        ConfigError: An optimizer was prepared before, which would step with scaled gradients.
    """
    if settings().scaler is not None:
        return
    if settings().has_plain_optimizer:
        raise ConfigError(
            f"{caller} computes in float16, whose losses are scaled, and prepare_optimizer was called before it: that "
            'optimizer would step with scaled gradients. Call prepare_optimizer afterwards, or use "bf16".'
        )
    settings().scaler = LossScaler(device_type)


def watch_optimizer_steps() -> None:
    """Count every optimizer step of this process from here on, of any optimizer. Idempotent."""
    global _watching
    if _watching:
        return
    from torch.optim.optimizer import register_optimizer_step_post_hook

    count = _progress().step

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        count()
        on_optimizer_step(optimizer)

    # A compiled step calls it as it is; a compiler that traced it would warn of the clock that it reads.
    vars(stepped)["_torchdynamo_disable"] = True
    register_optimizer_step_post_hook(stepped)
    _watching = True


def enable_reproducibility(seed: int = 0) -> None:
    """Make this worker deterministic: seeds, deterministic algorithms, no benchmarking of convolutions.

    Also seeds the order of loaders prepared from here on. Call it first in the training function. It costs speed, and
    an operation without a deterministic form raises.

    Args:
        seed: The seed of all generators.

    Raises:
        ArgumentError: ``seed`` is not a whole number.

    Example::

        enable_reproducibility(42)
    """
    seed = as_whole(seed, "enable_reproducibility(seed=...)", -(2**63), 2**64 - 1)
    # cuBLAS reads it at the first GPU operation.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    settings().seed = seed
