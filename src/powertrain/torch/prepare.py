"""What a training function calls to become distributed: device, model, data loader, optimizer.

Each works the same at any world size, also 1, and on CPU and GPU, so one script serves all.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import os
import random
import signal
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from powertrain.errors import ConfigError
from powertrain.worker.batch_plan import gradient_weight

if TYPE_CHECKING:
    from powertrain.worker.context import TrainContext

#: The generator that spreads ranks' seeds: 2**64 divided by the golden ratio.
_SEED_STRIDE = 0x9E3779B97F4A7C15


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


def _context() -> TrainContext:
    """Where this worker stands; raises ``OutsideWorkerError`` elsewhere."""
    from powertrain.worker.context import get_context

    return get_context()


def _progress() -> Any:
    """This process's counters of batches and optimizer steps."""
    from powertrain.worker.progress import progress

    return progress


# --------------------------------------------------------------------------- device


def get_device() -> torch.device:
    """The device of this worker: its (first) GPU, or the CPU when it was given none."""
    return get_devices()[0]


def get_devices() -> list[torch.device]:
    """All devices of this worker: its GPUs, its current one first, or the CPU when it was given none."""
    # Asked first: in the driver, looking for CUDA would spoil every later fork.
    _context()
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
    Everything else is torch's.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _weigh_when_needed(self)

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
    return reduction


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
        return shard_model(model, device or _device_of(model), parallel_strategy_kwargs or {})
    return DistributedModel(model, **{**_device_arguments(model), **(parallel_strategy_kwargs or {})})


def _check_strategy(parallel_strategy: str | None) -> None:
    if parallel_strategy not in ("ddp", "fsdp", None):
        raise ConfigError(
            f'parallel_strategy is {parallel_strategy!r}; it must be "ddp", "fsdp" or None (no wrapping).'
        )


def _device_for(move_to_device: bool | torch.device) -> torch.device | None:
    """Where to move, ``None`` for nowhere. A GPU named by the user becomes the current one."""
    if isinstance(move_to_device, torch.device):
        if move_to_device.type == "cuda":
            torch.cuda.set_device(move_to_device)
        return move_to_device
    return get_device() if move_to_device else None


def _device_of(model: nn.Module) -> torch.device:
    """Where the model is, or would be were it not on the meta device."""
    device = next(model.parameters()).device
    return get_device() if device.type == "meta" else device


def _check_group() -> None:
    if not dist.is_initialized():
        _context()
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
    _settings.amp = amp
    device = get_device().type
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
    scaled: Any = _settings.scaler.scale(tensor) if _settings.scaler is not None else tensor
    scaled.backward()


def watch_optimizer_steps() -> None:
    """Count every optimizer step of this process from here on, of any optimizer. Twice is once."""
    global _watching
    if _watching:
        return
    from torch.optim.optimizer import register_optimizer_step_post_hook

    count = _progress().step
    register_optimizer_step_post_hook(lambda optimizer, args, kwargs: count())
    _watching = True


# --------------------------------------------------------------------------- data loader


def prepare_data_loader(
    data_loader: DataLoader[Any],
    add_dist_sampler: bool = True,
    move_to_device: bool = True,
    auto_transfer: bool = True,
) -> DataLoader[Any]:
    """The loader, giving this worker its share of the rows, on its device.

    All options of the loader are kept. Shuffling differs from epoch to epoch by itself; a call of
    ``loader.sampler.set_epoch(n)`` is honoured and counting goes on from ``n``. Where rows do not divide
    evenly, ranks get equal numbers: some rows come twice, or with ``drop_last`` the rest is left out.

    A custom sampler or batch sampler is drawn from alike on every rank, and each rank takes its share.
    ``add_dist_sampler=False`` gives every rank all rows. On a GPU, ``auto_transfer`` copies the next batch
    on a stream of its own while the current one is computed on.
    """
    if not isinstance(data_loader, DataLoader):
        raise ConfigError(
            f"prepare_data_loader was given a {type(data_loader).__name__}; it takes a torch DataLoader. "
            "Wrap a dataset as torch.utils.data.DataLoader(dataset, batch_size=...)."
        )
    context = _context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    # A copy has every option, also those of a subclass; only what differs per rank is replaced in it.
    loader = copy.copy(data_loader)
    loader.__dict__["_iterator"] = None
    if isinstance(loader.dataset, IterableDataset):
        if add_dist_sampler and world_size > 1 and rank == 0:
            _warn_of_iterable_dataset(loader.dataset)
    elif add_dist_sampler:
        _shard_samplers(loader, rank, world_size)
    if loader.num_workers > 0:
        loader.worker_init_fn = _RankSeeded(rank, loader.worker_init_fn)
    return PreparedDataLoader(loader, get_device() if move_to_device else None, auto_transfer)


def _warn_of_iterable_dataset(dataset: Any) -> None:
    warnings.warn(
        f"{type(dataset).__name__} is an IterableDataset, which no sampler can shard: every worker will read "
        "all of it. Let its __iter__ give each worker its own part (see powertrain.get_context()), or pass "
        "add_dist_sampler=False to say that it does.",
        stacklevel=3,
    )


class PreparedDataLoader(DataLoader[Any]):
    """A DataLoader that advances the epoch, counts batches and brings them to the device.

    Everything else, reading and setting attributes included, is the inner loader's.
    """

    def __init__(self, inner: DataLoader[Any], device: torch.device | None, auto_transfer: bool) -> None:
        # Not DataLoader's own __init__: all options are in the inner loader.
        self.__dict__.update(_inner=inner, _device=device, _auto_transfer=auto_transfer)

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # asked by copy and pickle before anything is there
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._inner, name, value)

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Any:
        sampler = self._inner.sampler
        if isinstance(sampler, (_ShuffledShard, _DrawnShard)):
            sampler.advance()
        batches = iter(self._inner)
        if self._device is not None and self._device.type == "cuda":
            batches = self._on_gpu(batches)
        return self._counted(batches)

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        count = _progress().batch
        for batch in batches:
            count()
            yield batch

    def _on_gpu(self, batches: Iterator[Any]) -> Iterator[Any]:
        if self._auto_transfer:
            return _copied_ahead(batches, self._device)
        return (move_batch(batch, self._device) for batch in batches)


# -- shares of the rows


class _EpochCount:
    """Which epoch comes next, unless the user says so with ``set_epoch``."""

    epoch: int

    def __init__(self) -> None:
        self._told = True  # the first iteration is epoch 0, or what the user sets

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self._told = True

    def advance(self) -> None:
        """Called as an iteration begins."""
        if not self._told:
            self.set_epoch(self.epoch + 1)
        self._told = False


class _ShuffledShard(_EpochCount, DistributedSampler[Any]):
    """A rank's share of a dataset, in order or shuffled by (seed, epoch)."""

    def __init__(self, dataset: Any, rank: int, world_size: int, **options: Any) -> None:
        DistributedSampler.__init__(self, dataset, num_replicas=world_size, rank=rank, **options)
        _EpochCount.__init__(self)


class _DrawnShard(_EpochCount, DistributedSampler[Any]):
    """A rank's share of what the user's own sampler (or batch sampler) gives.

    Each rank draws the whole order, under one seed so that all draw the same, and takes its part.
    """

    def __init__(self, drawn_from: Any, rank: int, world_size: int, seed: int, drop_last: bool) -> None:
        # Not DistributedSampler's own __init__, which wants the length of a dataset.
        self.dataset, self.num_replicas, self.rank = drawn_from, world_size, rank
        self.shuffle, self.seed, self.drop_last, self.epoch = False, seed, drop_last, 0
        _EpochCount.__init__(self)

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        sampler: Any = self.dataset
        if not hasattr(sampler, "__len__"):
            return endless_share(sampler, self.rank, self.num_replicas)
        with _drawing_alike(self.seed + self.epoch):
            drawn = list(sampler)
        return iter(share(drawn, self.rank, self.num_replicas, self.drop_last))

    def __len__(self) -> int:
        return len(share(range(len(cast(Any, self.dataset))), self.rank, self.num_replicas, self.drop_last))


def share(drawn: Sequence[Any], rank: int, world_size: int, drop_last: bool) -> Sequence[Any]:
    """Every ``world_size``-th element from ``rank`` on; all ranks get equally many.

    What does not divide evenly is left out with ``drop_last`` and otherwise filled up from the beginning.
    """
    if drop_last:
        return drawn[rank : len(drawn) - len(drawn) % world_size : world_size]
    part = list(drawn[rank::world_size])
    if drawn and len(part) < -(-len(drawn) // world_size):
        part.append(drawn[(len(drawn) - len(drawn) % world_size + rank) % len(drawn)])
    return part


def endless_share(drawn: Iterable[Any], rank: int, world_size: int) -> Iterator[Any]:
    """As :func:`share` for a sampler without a length, which must itself draw alike on every rank."""
    rounds = iter(drawn)
    while len(round_ := list(itertools.islice(rounds, world_size))) == world_size:
        yield round_[rank]


@contextlib.contextmanager
def _drawing_alike(seed: int) -> Iterator[None]:
    """Inside, random numbers follow from ``seed``; outside, nothing has happened."""
    seed %= 2**32
    torch_state, python_state, numpy_state = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        # Not torch.manual_seed, which would reseed the GPU too.
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def _shard_samplers(loader: DataLoader[Any], rank: int, world_size: int) -> None:
    """Replace the samplers of ``loader`` by this rank's share of them; a distributed one is kept."""
    batches: Any = loader.batch_sampler
    own_batches = loader.batch_size is None and batches is not None
    if _is_distributed(loader.sampler) or _is_distributed(batches):
        return
    if not own_batches:
        sampler = _shard(loader.sampler, loader, rank, world_size, loader.drop_last)
        if loader.batch_size is not None:
            batches = BatchSampler(sampler, loader.batch_size, loader.drop_last)
    elif type(batches) is BatchSampler:
        sampler = _shard(batches.sampler, loader, rank, world_size, batches.drop_last)
        batches = BatchSampler(sampler, batches.batch_size, batches.drop_last)
    else:
        sampler = batches = _shard(batches, loader, rank, world_size, drop_last=False)
    # Past DataLoader's guard against changes, which is there for loaders already in use.
    loader.__dict__.update(sampler=sampler, batch_sampler=batches)


def _is_distributed(sampler: Any) -> bool:
    """True when the user's sampler already gives each rank its own part."""
    return any(
        isinstance(part, DistributedSampler) or hasattr(part, "num_replicas")
        for part in (sampler, getattr(sampler, "sampler", None))
    )


def _shard(sampler: Any, loader: DataLoader[Any], rank: int, world_size: int, drop_last: bool) -> Any:
    shuffled = (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source)
    )
    if shuffled or type(sampler) is SequentialSampler:
        return _ShuffledShard(
            sampler.data_source,
            rank,
            world_size,
            shuffle=shuffled,
            seed=_order_seed(getattr(sampler, "generator", None) or loader.generator, world_size),
            drop_last=drop_last,
        )
    if world_size == 1:
        return sampler
    return _DrawnShard(sampler, rank, world_size, _order_seed(loader.generator, world_size), drop_last)


def _order_seed(generator: torch.Generator | None, world_size: int) -> int:
    """The seed of the row order, the same on every rank: the user's generator's, or that of
    ``enable_reproducibility``, or 0; alone, what the user's ``torch.manual_seed`` said."""
    if generator is not None:
        seed = generator.initial_seed()
    elif _settings.seed is not None:
        seed = _settings.seed
    else:
        seed = torch.initial_seed() if world_size == 1 else 0
    return int(seed) & (2**62 - 1)


class _RankSeeded:
    """A ``worker_init_fn`` that seeds a loader's processes apart on each rank, then calls the user's.

    Torch seeds them from the rank's own generator, and ranks whose script sets one seed for all would
    augment alike. Rank 0 keeps torch's seeds. A scheduler's SIGTERM to every process of a job does not end
    them: the rank needs its batches until it has saved, and they end with it.
    """

    def __init__(self, rank: int, then: Callable[[int], None] | None) -> None:
        self.rank, self.then = rank, then

    def __call__(self, worker_id: int) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        if self.rank:
            seed = (torch.initial_seed() + self.rank * _SEED_STRIDE) % 2**63
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed([seed >> 32, seed & 0xFFFFFFFF])
        if self.then is not None:
            self.then(worker_id)


# -- to the device


def _copied_ahead(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """Each batch on ``device``, the following one already being copied on a stream of its own."""
    make: Any = torch.cuda.Stream
    stream = make(device)
    ahead = next(batches, _END)
    moved: list[torch.Tensor] = []
    if ahead is not _END:
        ahead = move_batch(ahead, device, stream, moved)
    while ahead is not _END:
        computing = torch.cuda.current_stream(device)
        computing.wait_stream(stream)
        for tensor in moved:
            # The memory belongs to the copying stream; it must not be given away while computing uses it.
            tensor.record_stream(computing)
        batch, moved = ahead, []
        ahead = next(batches, _END)
        if ahead is not _END:
            ahead = move_batch(ahead, device, stream, moved)
        yield batch


_END = object()


def move_batch(
    batch: Any,
    device: torch.device,
    stream: torch.cuda.Stream | None = None,
    moved: list[torch.Tensor] | None = None,
) -> Any:
    """``batch`` with every tensor in it on ``device``.

    Where ``stream`` is given, tensors are copied on it and noted in ``moved``.
    Objects that move themselves (with ``.to``) do so on the current stream: their memory cannot be
    recorded for another.
    """

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if stream is None or moved is None:
            return tensor.to(device)
        with torch.cuda.stream(stream):
            there = tensor.to(device, non_blocking=True)
        moved.append(there)
        return there

    return map_tensors(batch, move, lambda item: item.to(device))


def map_tensors(
    item: Any, change: Callable[[torch.Tensor], Any], change_other: Callable[[Any], Any] | None = None
) -> Any:
    """``item`` with ``change`` applied to every tensor in (nested) tuples, lists, mappings and dataclasses.

    ``change_other`` is applied to other objects that have a ``to`` method. Anything else stays.
    """
    again = functools.partial(map_tensors, change=change, change_other=change_other)
    if isinstance(item, torch.Tensor):
        return change(item)
    if change_other is not None and callable(getattr(item, "to", None)) and not isinstance(item, type):
        return change_other(item)
    if isinstance(item, tuple):
        values = [again(value) for value in item]
        return type(item)(*values) if hasattr(item, "_fields") else type(item)(values)
    if isinstance(item, list):
        return [again(value) for value in item]
    if type(item) is dict:
        return {key: again(value) for key, value in item.items()}
    if isinstance(item, Mapping):
        return _changed_mapping(item, again)
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        changed = copy.copy(item)
        for field in dataclasses.fields(item):
            object.__setattr__(changed, field.name, again(getattr(item, field.name)))
        return changed
    return item


def _changed_mapping(item: Mapping[Any, Any], again: Callable[[Any], Any]) -> Any:
    """A mapping of the same kind where it is a dict's child, a plain dict otherwise."""
    changed: Any = copy.copy(item) if isinstance(item, dict) else {}
    for key in item:
        changed[key] = again(item[key])
    return changed


# --------------------------------------------------------------------------- reproducibility


def enable_reproducibility(seed: int = 0) -> None:
    """Make this worker repeat itself: seeds, deterministic algorithms, no benchmarking of convolutions.

    Also seeds the order of loaders prepared from here on. Call it first in the training function. It
    costs speed, and an operation without a deterministic form raises.
    """
    # cuBLAS reads it when the first GPU operation comes.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    _settings.seed = seed
