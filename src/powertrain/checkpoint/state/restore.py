"""Restore the objects of a training loop from a saved state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from powertrain.checkpoint.state.capture import (
    kind_of,
    listing,
    named_parameters_of,
    parameter_names,
    plain_key,
    scaler_of,
    unwrapped,
)
from powertrain.checkpoint.state.encoding import LISTED, Captured, decode, encode, tensor_names
from powertrain.checkpoint.state.random_state import set_generator
from powertrain.errors import CheckpointError


@dataclass(frozen=True)
class StoredState:
    """A stored state, as needed to restore it."""

    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    #: Names of tensors that were DTensors.
    sharded: frozenset[str]
    values: Mapping[str, Any]
    #: Where it is, for errors.
    where: str


@dataclass
class Restoring:
    """The restoring of one object: ``targets`` are filled with stored values, then ``finish`` is called."""

    targets: dict[str, torch.Tensor]
    finish: Callable[[], None]


def restoring(objects: Mapping[str, Any], saved: StoredState) -> list[Restoring]:
    """Plan the restoring of each object. Changes nothing yet.

    Raises :class:`CheckpointError` where an object, a name or a shape differs from the saved one.
    """
    names = parameter_names(objects)
    parts = []
    for name, value in objects.items():
        kind = kind_of(value)
        entry = saved.values["objects"].get(name)
        if entry is None:
            raise CheckpointError(_unknown_object(name, saved))
        if entry["kind"] != kind:
            raise CheckpointError(
                f"load_state was given a {type(value).__name__} as {name!r}, and in {saved.where} that name is a "
                f"{entry['kind']}. Give each object the name it was saved under."
            )
        parts.append(_GIVE[kind](name, value, entry["values"], saved, names))
    return parts


def _unknown_object(name: str, saved: StoredState) -> str:
    if name in saved.values["extras"]:
        return (
            f"{name!r} is a plain value in {saved.where}: it was not saved as an object with a state. load_state "
            "gives plain values back in the dict that it returns; leave this one out."
        )
    known = listing(saved.values["objects"]) or "no object at all"
    return f"The state in {saved.where} has no {name!r}; it has {known}. Give each object the name it was saved under."


def _check_shapes(owner: str, targets: Mapping[str, torch.Tensor], saved: StoredState) -> None:
    missing = [name for name in targets if name not in saved.shapes]
    if missing:
        raise CheckpointError(
            f"The state in {saved.where} does not fit {owner!r}: it lacks {listing(missing)}. Was it saved with "
            "another model?"
        )
    other = [
        f"{name!r} has shape {tuple(target.shape)}, and {saved.shapes[name]} was saved"
        for name, target in targets.items()
        if tuple(target.shape) != saved.shapes[name]
    ]
    if other:
        more = f", and {len(other) - LISTED} more" if len(other) > LISTED else ""
        raise CheckpointError(
            f"The state in {saved.where} does not fit {owner!r}: {'; '.join(other[:LISTED])}{more}. Was it saved "
            "with another model?"
        )


def _check_surplus(owner: str, prefix: str, wanted: Iterable[str], saved: StoredState) -> None:
    surplus = {name for name in saved.shapes if name.startswith(prefix)} - set(wanted)
    if surplus:
        raise _surplus(owner, surplus, saved)


def _surplus(owner: str, names: Iterable[str], saved: StoredState) -> CheckpointError:
    return CheckpointError(
        f"The state in {saved.where} does not fit {owner!r}, which lacks {listing(names)}. Was it saved with another "
        "model?"
    )


def _fresh(
    names: Iterable[str], like: Mapping[str, torch.Tensor], saved: StoredState
) -> dict[str, torch.Tensor]:
    """Return memory for stored tensors: as the tensor of the same name in ``like`` has it, or else on the CPU."""
    targets = {}
    for name in names:
        if name not in saved.shapes:
            raise CheckpointError(f"The state in {saved.where} is damaged: the tensor {name!r} is missing.")
        model = like.get(name)
        if model is not None and tuple(model.shape) == saved.shapes[name]:
            targets[name] = torch.empty_like(model, dtype=saved.dtypes[name], requires_grad=False)
        else:
            targets[name] = torch.empty(saved.shapes[name], dtype=saved.dtypes[name])
    return targets


def _give_module(name: str, module: nn.Module, values: Any, saved: StoredState, _names: Any) -> Restoring:
    inner = unwrapped(module)
    state = inner.state_dict()
    targets = {f"{name}.{plain_key(key)}": one for key, one in state.items() if isinstance(one, torch.Tensor)}
    _check_shapes(name, targets, saved)
    nested = _fresh(tensor_names(values), {}, saved)
    _check_surplus(name, f"{name}.", {*targets, *nested}, saved)

    def finish() -> None:
        for key in state:
            if plain_key(key) in values:
                state[key] = decode(values[plain_key(key)], nested)
        try:
            inner.load_state_dict(state)
        except RuntimeError as error:
            raise CheckpointError(f"The state in {saved.where} does not fit {name!r}: {error}") from error

    return Restoring({**targets, **nested}, finish)


def _give_optimizer(
    name: str, optimizer: Optimizer, values: Any, saved: StoredState, names: dict[torch.Tensor, str]
) -> Restoring:
    own = named_parameters_of(optimizer, names)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    groups = _matched_groups(name, optimizer, own, values["groups"], saved)
    targets: dict[str, torch.Tensor] = {}
    places: list[tuple[int, str, str]] = []
    number_of = {parameter: number for number, parameter in enumerate(own)}
    prefix = f"{name}.state."
    for stored in saved.shapes:
        if stored.startswith(prefix):
            parameter, _, key = stored.removeprefix(prefix).rpartition(".")
            if parameter not in number_of:
                raise _surplus(name, {stored}, saved)
            places.append((number_of[parameter], key, stored))
            targets[stored] = _like_parameter(parameters[number_of[parameter]], stored, saved)
    rest = {"groups": groups, "rest": values["rest"], "scaler": values.get("scaler")}
    nested = _fresh(tensor_names(rest), {}, saved)

    def finish() -> None:
        state: dict[int, dict[Any, Any]] = {}
        for number, key, stored in sorted(places):
            state.setdefault(number, {})[key] = targets[stored]
        for parameter, entries in values["rest"].items():
            for key, value in entries.items():
                state.setdefault(number_of[parameter], {})[key] = decode(value, nested)
        optimizer.load_state_dict({"state": state, "param_groups": decode(groups, nested)})
        if (scaler := scaler_of(optimizer)) is not None and rest["scaler"] is not None:
            scaler.load_state_dict(decode(rest["scaler"], nested))

    return Restoring({**targets, **nested}, finish)


def _like_parameter(parameter: torch.Tensor, stored: str, saved: StoredState) -> torch.Tensor:
    """Return memory for one entry of an optimizer's state: laid out as its parameter where the shapes are equal."""
    shape, dtype = saved.shapes[stored], saved.dtypes[stored]
    if shape == tuple(parameter.shape) and len(shape):
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    if isinstance(parameter, DTensor) and (len(shape) or stored in saved.sharded):
        mesh = parameter.device_mesh
        whole = torch.empty(shape, dtype=dtype, device=parameter.to_local().device)
        return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return torch.empty(shape, dtype=dtype)


def _matched_groups(
    name: str, optimizer: Optimizer, own: list[str], groups: list[dict[str, Any]], saved: StoredState
) -> list[dict[str, Any]]:
    """Return the saved groups in the order of the optimizer's, each with this optimizer's own parameter numbers."""
    matched, number = [], 0
    for group in optimizer.param_groups:
        members = own[number : number + len(group["params"])]
        same = next((one for one in groups if set(one["params"]) == set(members)), None)
        if same is None:
            raise CheckpointError(
                f"The state in {saved.where} does not fit {name!r}: no parameter group of it has exactly "
                f"{listing(members)}. Make the optimizer with the same parameter groups as when it was saved, and "
                "give load_state the same modules as save_state."
            )
        matched.append({**same, "params": list(range(number, number + len(members)))})
        number += len(members)
    if len(matched) != len(groups):
        raise CheckpointError(
            f"The state in {saved.where} does not fit {name!r}: it has {len(groups)} parameter groups, and the "
            f"optimizer has {len(matched)}. Make the optimizer with the same parameter groups as when it was saved."
        )
    return matched


def _give_stateful(name: str, value: Any, values: Any, saved: StoredState, _names: Any) -> Restoring:
    now = Captured()
    if needed := tensor_names(values):
        encode(value.state_dict(), name, now)
    targets = _fresh(needed, now.tensors, saved)
    return Restoring(targets, lambda: value.load_state_dict(decode(values, targets)))


def _give_generator(
    name: str, generator: torch.Generator, values: Any, saved: StoredState, _names: Any
) -> Restoring:
    targets = _fresh(tensor_names(values), {}, saved)
    return Restoring(targets, lambda: set_generator(generator, decode(values, targets)))


_GIVE: dict[str, Callable[..., Restoring]] = {
    "module": _give_module,
    "optimizer": _give_optimizer,
    "stateful": _give_stateful,
    "generator": _give_generator,
}


def extras_of(saved: StoredState) -> tuple[dict[str, torch.Tensor], Callable[[], dict[str, Any]]]:
    """Return memory for the tensors among the plain values, and a function for the values once it is filled."""
    values = saved.values["extras"]
    targets = _fresh(tensor_names(values), {}, saved)
    return targets, lambda: {name: decode(value, targets) for name, value in values.items()}
