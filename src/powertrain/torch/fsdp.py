"""FSDP2 for ``prepare_model(parallel_strategy="fsdp")``: sharding with torch's ``fully_shard``.

Its own keyword arguments are passed on. Those of FSDP1 (``FullyShardedDataParallel``) are translated where FSDP2 has an
equivalent, and refused by name, with the alternative, where it has not.
"""

from __future__ import annotations

import dataclasses
import inspect
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from powertrain.errors import ConfigError
from powertrain.torch.gradient_scale import scale_in_place
from powertrain.worker.data.batch_plan import gradient_weight

#: Arguments of fully_shard that are passed on as they are.
_OWN = frozenset(inspect.signature(fully_shard).parameters) - {"module"}


@dataclasses.dataclass
class _Sharding:
    """The sharding of a model."""

    #: Keyword arguments of fully_shard.
    shard: dict[str, Any] = dataclasses.field(default_factory=dict)
    #: Chooses the parts that are sharded by themselves; ``None`` for the default choice.
    choose_parts: Callable[[nn.Module], list[nn.Module]] | None = None
    #: Every rank begins with rank 0's weights.
    from_rank_zero: bool = True
    buffer_dtype: torch.dtype | None = None


def shard_model(
    model: nn.Module, device: torch.device, arguments: dict[str, Any], precision: torch.dtype | None = None
) -> nn.Module:
    """Shard the parameters of ``model``, which is on ``device``, over all ranks of the mesh, in place, and return it.

    Every rank must call this at the same point; afterwards the weights of the mesh's first rank (rank 0) are
    everywhere. Optimizers are made after it. With ``precision`` it computes in that type and returns float32.
    """
    compiled = model
    while isinstance(inner := model.__dict__.get("_modules", {}).get("_orig_mod"), nn.Module):
        model = inner  # compiled on its first call, so the inner model may still be changed
    if isinstance(model, FSDPModule):
        if precision is not None:
            raise ConfigError(
                f"prepare_model(mixed_precision={precision}) was given a model that is sharded already, whose "
                "precision is fixed. Give mp_policy=MixedPrecisionPolicy(...) to your calls of fully_shard instead."
            )
        _weigh_when_needed(model)
        return compiled
    sharding = _translated(dict(arguments), model)
    if precision is not None:
        _set(sharding, "mp_policy", policy_of(precision), "mixed_precision")
    sharding.shard.setdefault("mesh", init_device_mesh(device.type, (dist.get_world_size(),)))
    if sharding.from_rank_zero:
        _take_first_weights(model, sharding.shard["mesh"])
    if sharding.buffer_dtype is not None:
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.data = buffer.to(sharding.buffer_dtype)
    choose = sharding.choose_parts or repeated_parts
    for part in choose(model):
        if part is not model:
            fully_shard(part, **sharding.shard)
    if precision is not None:
        sharding.shard["mp_policy"] = dataclasses.replace(
            sharding.shard["mp_policy"], output_dtype=torch.float32
        )
    fully_shard(model, **sharding.shard)
    _weigh_when_needed(model)
    return compiled


def policy_of(precision: torch.dtype) -> MixedPrecisionPolicy:
    """Return FSDP2's form of ``prepare_model(mixed_precision=...)``: gradients are summed in full precision.

    Parts pass on their own precision: only the whole model returns float32.
    """
    return MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32)


def _take_first_weights(model: nn.Module, mesh: DeviceMesh) -> None:
    """Broadcast the weights: ranks have different seeds, and shards of different models would be mixed.

    Only along ``mesh``: ranks beside it have another stage of a pipeline, or another part of each tensor.
    """
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_meta:
                continue  # has no values yet; the user sets them after sharding
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            for dimension in range(mesh.ndim):
                dist.broadcast(local, group=mesh.get_group(dimension), group_src=0)


# --------------------------------------------------------------------------- unequal ranks


def _weigh_when_needed(model: nn.Module) -> None:
    """Multiply this rank's gradients by its weight, from the first one other than 1 on. Idempotent."""
    this = weakref.ref(model)

    def weigh() -> None:
        if (living := this()) is not None:
            weigh_gradients(living)

    gradient_weight.when_uneven(weigh)


def weigh_gradients(model: nn.Module) -> None:
    """Multiply this rank's gradients by its weight before they are reduced. Changes all parts or none.

    Raises ConfigError where torch has no place for it.
    """
    groups = []
    for name, part in model.named_modules():
        if isinstance(part, FSDPModule):
            _check_reduce_scatter(name, part)
            groups += _parameter_groups(part)
    for group in groups:
        if not isinstance(group._reduce_scatter_comm, _WeightedReduceScatter):
            group._reduce_scatter_comm = _WeightedReduceScatter(group._reduce_scatter_comm)


def _check_reduce_scatter(name: str, part: Any) -> None:
    if not all(hasattr(group, "_reduce_scatter_comm") for group in _parameter_groups(part)):
        raise _cannot_weigh(
            f"torch {torch.__version__} lets nobody touch FSDP's gradients before they are reduced; a newer "
            "torch does"
        )
    meshes = {one.device_mesh for one in part.parameters() if isinstance(one, DTensor)}
    # With one shard there is only the all-reduce over replicas, which torch does by itself.
    if dist.get_world_size() > 1 and any(mesh.size(-1) == 1 for mesh in meshes):
        raise _cannot_weigh(f"its part {name!r} is replicated, not sharded, over the ranks")


def _parameter_groups(part: Any) -> list[Any]:
    """Return the groups that FSDP reduces at once; older torch has at most one for a module."""
    state = part._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


class _WeightedReduceScatter:
    """The reduction of torch or the user, applied to weighted gradients."""

    def __init__(self, reduce_scatter: Any) -> None:
        self._reduce_scatter = reduce_scatter
        self.allocate = reduce_scatter.allocate

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        scale_in_place(input_tensor, gradient_weight.value)
        return self._reduce_scatter(output_tensor, input_tensor, *args, **kwargs)


def _cannot_weigh(why: str) -> ConfigError:
    return ConfigError(
        f"The ranks have unequal numbers of samples, and this FSDP model cannot weigh their gradients: {why}. Use a "
        'global batch size that the number of workers divides, or parallel_strategy="ddp".'
    )


# --------------------------------------------------------------------------- which parts


def repeated_parts(model: nn.Module) -> list[nn.Module]:
    """Return the members of the outermost module lists, for example the blocks of a transformer.

    Each of them is gathered for its computation and freed afterwards, which saves memory.
    """
    parts: list[nn.Module] = []
    for child in model.children():
        if isinstance(model, nn.ModuleList) and _can_compute(child):
            parts.append(child)
        else:
            parts += repeated_parts(child)
    return [part for part in parts if any(True for _ in part.parameters())]


def _can_compute(module: nn.Module) -> bool:
    """Return False for plain containers, which fully_shard refuses."""
    return not isinstance(module, (nn.ModuleList, nn.ModuleDict))


def _parts_by_policy(policy: Any) -> Callable[[nn.Module], list[nn.Module]]:
    """Return FSDP1's ``auto_wrap_policy`` as a choice of parts: a policy object, a function, or a set of classes."""
    if isinstance(policy, (set, frozenset, list, tuple)) and all(isinstance(one, type) for one in policy):
        classes = tuple(policy)
        return lambda model: [one for one in _inner_first(model) if isinstance(one, classes)]
    if hasattr(policy, "_run_policy"):
        return lambda model: _chosen_by_object(policy, model)
    if callable(policy):
        return lambda model: _chosen_by_function(policy, model)
    raise ConfigError(
        f"parallel_strategy_kwargs has auto_wrap_policy={policy!r}; it must be a policy of "
        "torch.distributed.fsdp.wrap, or a set of module classes."
    )


def _inner_first(model: nn.Module) -> Iterable[nn.Module]:
    for child in model.children():
        yield from _inner_first(child)
    yield model


def _chosen_by_object(policy: Any, model: nn.Module) -> list[nn.Module]:
    chosen = policy._run_policy(model, set(), {})
    if any(chosen.values()):
        raise ConfigError(
            "The auto_wrap_policy gives some modules arguments of their own, which FSDP2 does not take this way. "
            "Call torch.distributed.fsdp.fully_shard on those modules yourself before prepare_model."
        )
    return [module for module in _inner_first(model) if module in chosen]


def _chosen_by_function(policy: Callable[..., bool], model: nn.Module) -> list[nn.Module]:
    """Apply a policy from the inside out, as FSDP1 did: with the number of parameters not taken by inner parts."""
    chosen: list[nn.Module] = []
    taken: set[nn.Parameter] = set()
    for module in _inner_first(model):
        left = [one for one in module.parameters() if one not in taken]
        size = sum(one.numel() for one in left)
        if left and _can_compute(module) and policy(module=module, recurse=False, nonwrapped_numel=size):
            chosen.append(module)
            taken.update(left)
    return chosen


# --------------------------------------------------------------------------- arguments of FSDP1


def _translated(arguments: dict[str, Any], model: nn.Module) -> _Sharding:
    sharding = _Sharding(shard={name: arguments.pop(name) for name in list(arguments) if name in _OWN})
    for name, value in arguments.items():
        translate = _TRANSLATIONS.get(name)
        if translate is None:
            raise ConfigError(
                f"parallel_strategy_kwargs has {name!r}, which FSDP2 does not know. It takes "
                f"{', '.join(sorted(_OWN))}, and of FSDP1 {', '.join(sorted(_TRANSLATIONS))}."
            )
        translate(name, value, sharding, model)
    return sharding


def _set(sharding: _Sharding, name: str, value: Any, because: str) -> None:
    if name in sharding.shard:
        raise ConfigError(
            f"parallel_strategy_kwargs has both {because} (FSDP1) and {name} (FSDP2), which say the same thing. Keep "
            f"{name}."
        )
    sharding.shard[name] = value


def _sharding_strategy(name: str, value: Any, sharding: _Sharding, model: nn.Module) -> None:
    strategy = str(getattr(value, "name", value)).upper()
    if strategy == "NO_SHARD":
        raise _refused(name, value, 'FSDP2 always shards; use parallel_strategy="ddp"')
    if strategy not in _RESHARDS:
        raise _refused(name, value, f"it must be one of {', '.join(_RESHARDS)}")
    mesh = sharding.shard.get("mesh")
    if "HYBRID" in strategy and (mesh is None or mesh.ndim != 2):
        raise _refused(
            name,
            value,
            'give mesh=init_device_mesh("cuda", (replicas, shards), mesh_dim_names=("replicate", "shard")) as '
            "well, which says what is a replica",
        )
    _set(sharding, "reshard_after_forward", _RESHARDS[strategy], name)


_RESHARDS = {"FULL_SHARD": True, "SHARD_GRAD_OP": False, "HYBRID_SHARD": True, "_HYBRID_SHARD_ZERO2": False}


def _cpu_offload(name: str, value: Any, sharding: _Sharding, model: nn.Module) -> None:
    if getattr(value, "offload_params", value):
        _set(sharding, "offload_policy", CPUOffloadPolicy(), name)


def _mixed_precision(name: str, value: Any, sharding: _Sharding, model: nn.Module) -> None:
    if value is None:
        return
    if getattr(value, "keep_low_precision_grads", False):
        raise _refused(
            name, value, "FSDP2 gives gradients in the parameters' type; leave keep_low_precision_grads out"
        )
    if not getattr(value, "cast_root_forward_inputs", True):
        raise _refused(name, value, "write mp_policy=MixedPrecisionPolicy(..., cast_forward_inputs=False)")
    policy = MixedPrecisionPolicy(param_dtype=value.param_dtype, reduce_dtype=value.reduce_dtype)
    _set(sharding, "mp_policy", policy, name)
    sharding.buffer_dtype = value.buffer_dtype


def _auto_wrap_policy(name: str, value: Any, sharding: _Sharding, model: nn.Module) -> None:
    sharding.choose_parts = _parts_by_policy(value) if value is not None else lambda model: []


def _device_mesh(name: str, value: Any, sharding: _Sharding, model: nn.Module) -> None:
    _set(sharding, "mesh", value, name)


def _ignored(name: str, value: Any, sharding: _Sharding, model: nn.Module) -> None:
    parameters = set(sharding.shard.get("ignored_params") or ())
    for one in value or ():
        parameters.update(one.parameters() if isinstance(one, nn.Module) else [one])
    if parameters:
        sharding.shard["ignored_params"] = parameters


def _sync_module_states(name: str, value: Any, sharding: _Sharding, model: nn.Module) -> None:
    sharding.from_rank_zero = bool(value)


def _always(*allowed: Any, instead: str) -> Callable[..., None]:
    """Handle an argument with one fixed value in FSDP2: that value is accepted, others are refused."""

    def check(name: str, value: Any, sharding: _Sharding, model: nn.Module) -> None:
        if getattr(value, "name", value) not in allowed:
            raise _refused(name, value, instead)

    return check


def _never(instead: str) -> Callable[..., None]:
    def refuse(name: str, value: Any, sharding: _Sharding, model: nn.Module) -> None:
        if value is not None:
            raise _refused(name, value, instead)

    return refuse


def _refused(name: str, value: Any, instead: str) -> ConfigError:
    return ConfigError(
        f"parallel_strategy_kwargs has {name}={value!r}, an argument of FSDP1 that FSDP2 does not take: {instead}."
    )


_PREFETCH = (
    "FSDP2 prefetches by itself; on the prepared model call set_modules_to_{}_prefetch for another order"
)
#: FSDP1's arguments: each handler sets the equivalent in the sharding, or raises with the alternative.
_TRANSLATIONS: dict[str, Callable[[str, Any, _Sharding, nn.Module], None]] = {
    "sharding_strategy": _sharding_strategy,
    "cpu_offload": _cpu_offload,
    "mixed_precision": _mixed_precision,
    "auto_wrap_policy": _auto_wrap_policy,
    "device_mesh": _device_mesh,
    "ignored_modules": _ignored,
    "ignored_states": _ignored,
    "ignored_parameters": _ignored,
    "sync_module_states": _sync_module_states,
    "backward_prefetch": _always("BACKWARD_PRE", instead=_PREFETCH.format("backward")),
    "forward_prefetch": _always(False, None, instead=_PREFETCH.format("forward")),
    "limit_all_gathers": _always(True, instead="FSDP2 always limits them; leave it out"),
    "use_orig_params": _always(True, instead="FSDP2 always keeps the model's own parameters; leave it out"),
    "process_group": _never('give mesh=init_device_mesh("cuda", (ranks,)) instead'),
    "param_init_fn": _never(
        'build the model under torch.device("meta"), prepare it with move_to_device=False, then call '
        "model.to_empty(device=...) and initialise it"
    ),
    "device_id": _never("prepare_model moves the model; name a device with move_to_device= instead"),
}
