"""Capture the objects of a training loop as tensors with names and plain values."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from powertrain.checkpoint.state.encoding import LISTED, Captured, encode
from powertrain.checkpoint.state.random_state import capture_rng
from powertrain.errors import CheckpointError

#: Parts of a key that wrappers put in and that are no part of the model.
_WRAPPER_NAMES = ("_orig_mod.", "_checkpoint_wrapped_module.")


def kind_of(value: Any) -> str:
    """Return the kind of an object's state: module, optimizer, generator, stateful or (a plain) value."""
    if isinstance(value, nn.Module):
        return "module"
    if isinstance(value, Optimizer):
        return "optimizer"
    if isinstance(value, torch.Generator):
        return "generator"
    try:
        methods = getattr(value, "state_dict", None), getattr(value, "load_state_dict", None)
    except Exception:  # an attribute lookup may raise anything
        return "value"
    return "stateful" if all(map(callable, methods)) else "value"


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the user's model inside DistributedDataParallel and compiled wrappers."""
    while True:
        if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            module = module.module
        elif isinstance(inner := module.__dict__.get("_modules", {}).get("_orig_mod"), nn.Module):
            module = inner
        else:
            return module


def plain_key(key: str) -> str:
    """Return a state dict's key without the prefixes of wrappers."""
    for name in _WRAPPER_NAMES:
        key = key.replace(name, "")
    return key


def parameter_names(objects: Mapping[str, Any]) -> dict[torch.Tensor, str]:
    """Return the name of every parameter of the modules among ``objects``, as its values have it in the file."""
    names: dict[torch.Tensor, str] = {}
    for name, value in objects.items():
        if isinstance(value, nn.Module):
            _reshard(value)
            for key, parameter in unwrapped(value).named_parameters():
                names.setdefault(parameter, f"{name}.{plain_key(key)}")
    return names


def _reshard(module: nn.Module) -> None:
    """Register the sharded parameters of FSDP2 again: after a forward without a backward the whole ones are there.

    An optimizer knows only the sharded ones. Local to this rank.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not loaded: no module is of FSDP2
    if fsdp is not None:
        for part in module.modules():
            if isinstance(part, fsdp.FSDPModule):
                part.reshard()


def listing(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - LISTED} more" if len(ordered) > LISTED else ""
    return ", ".join(repr(name) for name in ordered[:LISTED]) + more


def capture(objects: Mapping[str, Any], *, rng: bool = True) -> Captured:
    """Return the state of ``objects``, and of this rank's random generators."""
    captured = Captured(values={"objects": {}, "extras": {}})
    names = parameter_names(objects)
    with torch.no_grad():
        for name, value in objects.items():
            _check_object_name(name)
            kind = kind_of(value)
            if kind == "value":
                captured.values["extras"][name] = _encode_value(name, value, captured)
                continue
            values = _TAKE[kind](name, value, captured, names)
            captured.values["objects"][name] = {"kind": kind, "values": values}
        if rng:
            captured.values["rng"] = capture_rng(captured)
    _refuse_tensors_without_data(captured)
    return captured


def _encode_value(name: str, value: Any, captured: Captured) -> Any:
    try:
        return encode(value, name, captured)
    except RecursionError:
        raise CheckpointError(
            f"{name!r} is nested too deeply to be saved, or contains itself. Save lists and dicts a few levels deep."
        ) from None


def _refuse_tensors_without_data(captured: Captured) -> None:
    for name, tensor in captured.tensors.items():
        if tensor.is_meta:
            raise CheckpointError(
                f"The tensor {name!r} is on torch's meta device, where tensors have no data, so it cannot be saved. "
                "Move the model to a device first, with to_empty(device=...) or prepare_model."
            )


def _check_object_name(name: str) -> None:
    if not name.isidentifier():
        raise CheckpointError(
            f"{name!r} cannot name a part of the state: names are those that Python gives to arguments. Write "
            "save_state(model=model), say."
        )


def _take_module(name: str, module: nn.Module, captured: Captured, _names: Any) -> Any:
    inner = unwrapped(module)
    if type(inner).__name__ == "FullyShardedDataParallel":
        raise CheckpointError(
            f"{name!r} is wrapped in FSDP1 (FullyShardedDataParallel), whose state torch no longer develops. Use "
            'prepare_model(model, parallel_strategy="fsdp") or torch.distributed.fsdp.fully_shard.'
        )
    trained = {plain_key(key) for key, _ in inner.named_parameters(remove_duplicate=False)}
    rest = {}
    for key, value in inner.state_dict().items():
        plain = plain_key(key)
        if not isinstance(value, torch.Tensor):
            rest[plain] = encode(value, f"{name}.{plain}", captured)
            continue
        captured.tensors[f"{name}.{plain}"] = value
        if plain not in trained and not isinstance(value, DTensor):
            captured.of_first.add(f"{name}.{plain}")
    return rest


def _take_optimizer(
    name: str, optimizer: Optimizer, captured: Captured, names: dict[torch.Tensor, str]
) -> Any:
    state = optimizer.state_dict()
    by_number = dict(enumerate(named_parameters_of(optimizer, names)))
    rest: dict[str, Any] = {}
    for number, entries in state["state"].items():
        parameter = by_number.get(number, str(number))
        for key, value in entries.items():
            if isinstance(value, torch.Tensor) and isinstance(key, str) and "." not in key:
                captured.tensors[f"{name}.state.{parameter}.{key}"] = value
            else:
                where = f"{name}.nested.{parameter}.{key}"
                rest.setdefault(parameter, {})[key] = encode(value, where, captured)
    groups = [
        {
            **{
                key: encode(value, f"{name}.groups.{number}.{key}", captured)
                for key, value in group.items()
                if key not in ("params", "param_names")
            },
            "params": [by_number[index] for index in group["params"]],
        }
        for number, group in enumerate(state["param_groups"])
    ]
    taken = {"groups": groups, "rest": rest}
    if (scaler := scaler_of(optimizer)) is not None:
        taken["scaler"] = encode(scaler.state_dict(), f"{name}.scaler", captured)
    return taken


def named_parameters_of(optimizer: Optimizer, names: Mapping[torch.Tensor, str]) -> list[str]:
    """Return the names of an optimizer's parameters in its own order; the number where no module has the parameter."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [names.get(parameter, str(number)) for number, parameter in enumerate(parameters)]


def scaler_of(optimizer: Optimizer) -> Any:
    """Return the gradient scaler that mixed precision has put into a prepared optimizer."""
    scaler = getattr(optimizer, "scaler", None)
    return scaler if kind_of(scaler) == "stateful" else None


def _take_stateful(name: str, value: Any, captured: Captured, _names: Any) -> Any:
    return encode(value.state_dict(), name, captured)


def _take_generator(name: str, generator: torch.Generator, captured: Captured, _names: Any) -> Any:
    return encode(generator.get_state(), name, captured)


_TAKE: dict[str, Callable[..., Any]] = {
    "module": _take_module,
    "optimizer": _take_optimizer,
    "stateful": _take_stateful,
    "generator": _take_generator,
}
