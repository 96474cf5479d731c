"""What a training function calls to become distributed: device, model, data loader, optimizer.

Each works the same at any world size, also 1, and on CPU and GPU, so one script serves all.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import random
import sys
import weakref
from collections.abc import Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from powertrain.arguments import as_flag, as_text_keys, as_whole, has_attribute, shorten
from powertrain.config import did_you_mean
from powertrain.data.device import map_tensors
from powertrain.errors import ArgumentError, ConfigError
from powertrain.torch.data_loader import PreparedDataLoader as PreparedDataLoader
from powertrain.torch.data_loader import prepare_data_loader as prepare_data_loader
from powertrain.worker.batch_plan import gradient_weight

if TYPE_CHECKING:
    from powertrain.worker.context import TrainContext


@dataclasses.dataclass
class _Settings:
    """What this process's training function has asked for so far, and what it was given."""

    #: GPUs of this worker: one, unless the run gave it more.
    gpus: int = 1
    amp: bool = False
    scaler: torch.amp.GradScaler | None = None
    #: The seed of ``enable_reproducibility``.
    seed: int | None = None


_settings = _Settings()
_watching = False


def begin(gpus: int = 1) -> None:
    """Start anew for one training function in this worker, which has ``gpus`` GPUs; count its steps."""
    global _settings
    _settings = _Settings(gpus=gpus)
    gradient_weight.reset()
    watch_optimizer_steps()


def _context(caller: str) -> TrainContext:
    """Where this worker stands; raises ``OutsideWorkerError``, naming ``caller``, elsewhere."""
    from powertrain.worker.context import current

    return current(caller).context


def _progress() -> Any:
    """This process's counters of batches and optimizer steps."""
    from powertrain.worker.progress import progress

    return progress


# --------------------------------------------------------------------------- device


def get_device() -> torch.device:
    """Return the device of this worker: its (first) GPU, or the CPU when it was given none.

    Raises:
        OutsideWorkerError: Called outside a training worker.
    """
    return _own_device("get_device")


def get_devices() -> list[torch.device]:
    """Return all devices of this worker: its GPUs, its current one first, or the CPU when it was given none.

    Raises:
        OutsideWorkerError: Called outside a training worker.
    """
    _context("get_devices")
    return own_devices()


def _own_device(caller: str) -> torch.device:
    _context(caller)
    return own_devices()[0]


def own_devices() -> list[torch.device]:
    """The devices of this process, which must be a worker: in the driver, looking for CUDA would spoil later forks."""
    if _settings.gpus == 0 or not torch.cuda.is_available():
        return [torch.device("cpu")]
    first = torch.cuda.current_device()
    beyond = min(first + _settings.gpus, torch.cuda.device_count())
    return [torch.device("cuda", index) for index in range(first, beyond)]


# --------------------------------------------------------------------------- model


class DistributedModel(DistributedDataParallel):
    """DistributedDataParallel whose state dict is that of the model inside, and whose ranks may count unequally.

    ``state_dict`` has no ``module.`` prefix, and ``load_state_dict`` takes keys with and without it, also
    where this model is a part of a larger one. Once a gradient weight other than 1 is set (see
    ``get_context().batch_plan``), this rank's gradients are multiplied by it before they are averaged.
    In a group of one rank nothing is exchanged, so a step takes as long as that of the model inside; a
    communication hook or a gradient weight is still applied. Everything else is torch's.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._needs_reducer = _is_reduced(self)
        _weigh_when_needed(self)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Compute the output of the model inside, and prepare the exchange of gradients where there is one."""
        this = cast(Any, self)
        if self._needs_reducer or this._join_config.enable:
            return cast(Any, super()).forward(*inputs, **kwargs)
        # The reducer's autograd hooks do nothing in a backward pass that it was not prepared for, as in no_sync().
        if self.device_ids:
            moved, moved_kwargs = this.to_kwargs(inputs, kwargs, self.device_ids[0])
            inputs, kwargs = moved[0], moved_kwargs[0]
        return self.module(*inputs, **kwargs)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """As torch's: ``hook`` reduces the gradients from here on. It is given them weighted already."""
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
        state = super().state_dict(*args, **kwargs)
        if not _asked_by_torch_checkpoint():
            prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
            _drop_wrapper_name(state, prefix)
        return state

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        named: Any = dict(state_dict)
        self._add_wrapper_name(named, "")
        metadata = getattr(state_dict, "_metadata", None)
        if metadata is not None:
            named = _with_metadata(named, _versions_under_wrapper(metadata))
        return super().load_state_dict(named, strict=strict, assign=assign)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        # The way in when this model is a part of a larger one that is being loaded.
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
        """A future of the reduced gradients of ``bucket``."""
        gradients: torch.Tensor = bucket.buffer()
        if self.then is not None:
            scale_in_place(gradients, gradient_weight.value)
            return self.then(bucket)
        # One factor for weight and average: no slower than torch's own division, and divided first, so that
        # the sum of low-precision gradients cannot overflow.
        scale_in_place(gradients, gradient_weight.value / self._group.size())
        work = dist.all_reduce(gradients, group=self._group, async_op=True)
        return cast(Any, work).get_future().then(_only_tensor)


#: Of each model that has one. No attribute, because a copy of a model has a new reducer, without a hook.
_reductions: weakref.WeakKeyDictionary[DistributedDataParallel, _WeightedReduction] = (
    weakref.WeakKeyDictionary()
)


def _weigh_when_needed(model: DistributedDataParallel) -> None:
    """From the first gradient weight other than 1 on, this rank's gradients are multiplied by it. Twice is once."""
    # A weak reference, because whoever waits for a weight must not keep the model alive.
    this = weakref.ref(model)

    def weigh() -> None:
        if (living := this()) is not None:
            _reduction_of(living)

    gradient_weight.when_uneven(weigh)


def _reduction_of(model: DistributedDataParallel) -> _WeightedReduction:
    """The communication hook of ``model``, given to torch when it is first asked for."""
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
        # Torch's own note of it would go into copies, which cannot have it.
        model._comm_hooks.pop()
    _reductions[model] = reduction
    if isinstance(model, DistributedModel):
        model._needs_reducer = True
    return reduction


def _is_reduced(model: DistributedDataParallel) -> bool:
    """True where torch's reducer changes gradients or parameters: among several ranks, or with reduced precision."""
    this = cast(Any, model)
    return (
        this.process_group.size() > 1 or this.mixed_precision is not None or _reduces_in_compiled_code(model)
    )


def _reduces_in_compiled_code(model: DistributedDataParallel) -> bool:
    return bool(getattr(model, "_use_python_reducer", False))


def _only_tensor(future: Any) -> torch.Tensor:
    return cast(torch.Tensor, future.value()[0])


def scale_in_place(tensor: torch.Tensor, factor: float) -> None:
    """``tensor *= factor``; with 0 everything becomes 0, NaN too: a filler row must not spoil other ranks."""
    if factor == 0.0:
        tensor.zero_()
    elif factor != 1.0:
        tensor.mul_(factor)


def wrapped_key(key: str, inner_keys: set[str]) -> str:
    """``key`` of a state dict as DDP names it, whether or not it has the ``module.`` prefix already.

    ``inner_keys`` are those of the model inside, which may have a part called ``module`` of its own.
    """
    if key in inner_keys:
        return f"module.{key}"
    return key if key.startswith("module.") else f"module.{key}"


def _drop_wrapper_name(state: Any, prefix: str) -> None:
    """Rename ``prefix + "module.…"`` to ``prefix + "…"`` in place, keeping the order."""
    wrapper = f"{prefix}module."
    for key in list(state):
        value = state.pop(key)
        state[prefix + key[len(wrapper) :] if key.startswith(wrapper) else key] = value
    metadata = getattr(state, "_metadata", None)
    if metadata is None:
        return
    # The versions of both spellings are kept: whoever loads this looks under one or the other.
    for name in list(metadata):
        if f"{name}.".startswith(wrapper):
            metadata[(prefix + name[len(wrapper) :]).rstrip(".")] = metadata[name]


def _versions_under_wrapper(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Module versions by the names under which DDP's loading looks for them."""
    versions = dict(metadata)
    for name, version in metadata.items():
        versions.setdefault(f"module.{name}".rstrip("."), version)
    return versions


def _with_metadata(state: dict[str, Any], metadata: dict[str, Any]) -> Any:
    class Annotated(dict[str, Any]):
        """A plain dict takes no attribute, and torch reads the versions from one."""

    annotated: Any = Annotated(state)
    annotated._metadata = metadata
    return annotated


def _asked_by_torch_checkpoint() -> bool:
    """True inside ``torch.distributed.checkpoint.state_dict``, which drops DDP's prefix itself.

    It walks the modules along each key and fails where the prefix is missing. It offers no other seam that
    a DDP subclass could use.
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
) -> nn.Module:
    """The model, moved to this worker's device and wrapped so that gradients are averaged over all workers.

    ``.module`` is the model itself, at any world size. The state dict has the model's own keys. Every rank
    must call this at the same point. ``parallel_strategy_kwargs`` go to DistributedDataParallel
    (``find_unused_parameters=True``, say). With ``parallel_strategy=None`` the model is only moved.

    ``parallel_strategy="fsdp"`` shards parameters, gradients and optimizer state over all workers (FSDP2,
    ``torch.distributed.fsdp.fully_shard``), the members of module lists each by themselves; make the
    optimizer afterwards. ``parallel_strategy_kwargs`` then go to ``fully_shard``; those of FSDP1 are
    translated.

    Where ranks have unequal numbers of samples (``get_context().batch_plan``), each rank's gradient counts
    accordingly; not with ``parallel_strategy=None``.

    A model without a trainable parameter has no gradient to average: it is returned as it is.
    """
    _check_strategy(parallel_strategy)
    kwargs = as_text_keys(parallel_strategy_kwargs, "prepare_model(parallel_strategy_kwargs=...)")
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"prepare_model() was given {shorten(model)}. Give a torch.nn.Module.")
    if isinstance(model, DistributedDataParallel):
        _weigh_when_needed(model)
        return model
    device = _device_for(move_to_device)
    if device is not None:
        model = model.to(device)
    if _settings.amp:
        cast(Any, model).forward = _AutocastForward(model)
    if parallel_strategy is None:
        return model
    if not any(parameter.requires_grad for parameter in model.parameters()):
        # Past nn.Module's own __setattr__, which would make the model a part of itself.
        model.__dict__.setdefault("module", model)
        return model
    _check_group()
    if parallel_strategy == "fsdp":
        from powertrain.torch.fsdp import shard_model

        # Past nn.Module's own __setattr__, as above.
        model.__dict__.setdefault("module", model)
        return shard_model(model, device or _device_of(model), kwargs)
    _refuse_unknown_options(kwargs)
    return DistributedModel(model, **{**_device_arguments(model), **kwargs})


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
    """Where to move, ``None`` for nowhere. A GPU named by the user becomes the current one."""
    if isinstance(move_to_device, torch.device):
        if move_to_device.type == "cuda":
            torch.cuda.set_device(move_to_device)
        return move_to_device
    return _own_device("prepare_model") if as_flag(move_to_device, "move_to_device") else None


def _device_of(model: nn.Module) -> torch.device:
    """Where the model is, or would be were it not on the meta device."""
    device = next(model.parameters()).device
    return _own_device("prepare_model") if device.type == "meta" else device


def _check_group() -> None:
    if not dist.is_initialized():
        _context("prepare_model")
        raise ConfigError(
            "prepare_model needs torch's process group, and none is set up in this worker. Run the training "
            "function with TorchTrainer, or pass parallel_strategy=None."
        )


def _device_arguments(model: nn.Module) -> dict[str, Any]:
    """DDP's device arguments: named when the whole model is on one GPU, as DDP wants it."""
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) == 1 and (device := devices.pop()).type == "cuda":
        return {"device_ids": [device], "output_device": device}
    return {}


# --------------------------------------------------------------------------- mixed precision


def accelerate(amp: bool = False) -> None:
    """Switch automatic mixed precision on or off for what is prepared from here on.

    With it, a prepared model computes in the device's lower precision and gives float32 results; on a GPU
    ``prepare_optimizer`` and :func:`backward` scale the loss as well.
    """
    _settings.amp = amp = as_flag(amp, "accelerate(amp=...)")
    device = _own_device("accelerate").type
    # The CPU's lower precision is bfloat16, whose range needs no scaling.
    _settings.scaler = torch.amp.GradScaler(device) if amp and device == "cuda" else None


class _AutocastForward:
    """A model's ``forward`` in lower precision. An object and not a closure, so that copies of the model
    and pickles of it call their own."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        device = next(self.model.parameters(), torch.empty(0)).device.type
        with torch.autocast(device):
            output = type(self.model).forward(self.model, *args, **kwargs)
        return map_tensors(output, lambda tensor: tensor.float() if tensor.is_floating_point() else tensor)


class ScaledOptimizer(Optimizer):
    """The user's optimizer, stepped through the gradient scaler of mixed precision."""

    def __init__(self, optimizer: Optimizer, scaler: torch.amp.GradScaler) -> None:
        # Not Optimizer's own __init__: parameters, state and hooks are the inner optimizer's.
        self.__dict__.update(optimizer.__dict__)
        self.optimizer, self.scaler = optimizer, scaler

    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            raise ConfigError(
                "step(closure) was called while mixed precision scales the gradients, and torch's scaler "
                "takes no closure. Call step() without one, or leave accelerate(amp=True) out."
            )
        result = self.scaler.step(self.optimizer)
        self.scaler.update()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict)
        # Loading gives the inner optimizer new containers.
        self.__dict__.update(state=self.optimizer.state, param_groups=self.optimizer.param_groups)

    def add_param_group(self, param_group: Any) -> None:
        self.optimizer.add_param_group(param_group)


def prepare_optimizer(optimizer: Optimizer) -> Optimizer:
    """The optimizer, with its steps counted, and scaled gradients when :func:`accelerate` asked for them."""
    watch_optimizer_steps()
    return ScaledOptimizer(optimizer, _settings.scaler) if _settings.scaler is not None else optimizer


def backward(tensor: torch.Tensor) -> None:
    """``tensor.backward()``, scaled when :func:`accelerate` asked for mixed precision on a GPU."""
    if not has_attribute(tensor, "backward"):
        raise ArgumentError(f"backward() was given {shorten(tensor)}. Give the loss, a tensor.")
    scaled: Any = _settings.scaler.scale(tensor) if _settings.scaler is not None else tensor
    scaled.backward()


def watch_optimizer_steps() -> None:
    """Count every optimizer step of this process from here on, of any optimizer. Twice is once."""
    global _watching
    if _watching:
        return
    from torch.optim.optimizer import register_optimizer_step_post_hook

    count = _progress().step

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        count()

    # A compiled step calls it as it is; a compiler that looked inside would warn of the clock that it reads.
    vars(stepped)["_torchdynamo_disable"] = True
    register_optimizer_step_post_hook(stepped)
    _watching = True


# --------------------------------------------------------------------------- reproducibility


def enable_reproducibility(seed: int = 0) -> None:
    """Make this worker repeat itself: seeds, deterministic algorithms, no benchmarking of convolutions.

    Also seeds the order of loaders prepared from here on. Call it first in the training function. It
    costs speed, and an operation without a deterministic form raises.
    """
    seed = as_whole(seed, "enable_reproducibility(seed=...)", -(2**63), 2**64 - 1)
    # cuBLAS reads it when the first GPU operation comes.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    _settings.seed = seed
