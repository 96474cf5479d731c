"""The objects of a training loop as tensors with names and plain values, and back.

Names are the same whatever wraps the model and however many ranks there are: ``model.layers.0.weight`` for a
parameter, ``optimizer.state.model.layers.0.weight.exp_avg`` for what an optimizer keeps about it. So a state saved with
DistributedDataParallel loads into FSDP and the other way round.

Parameters and optimizer state are alike on all ranks that hold them (or shards of one whole) and written once. Buffers
are those of the first rank that has them, as with DistributedDataParallel. Everything else is each rank's own: loaded
with as many ranks as it was saved, a rank gets back its own; with another number all get rank 0's.

Values go into JSON. What JSON cannot say is an object with one key that starts with "$", as in
``powertrain.checkpoint.manifest``; here also ``$tuple``, ``$set``, ``$counter``, ``$ordered``, ``$dtype``, ``$device``,
and ``$tensor`` or ``$numpy`` with the name under which its numbers are.
"""

from __future__ import annotations

import collections
import random
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from powertrain.checkpoint.manifest import from_json_value, to_json_value
from powertrain.errors import CheckpointError

#: Parts of a key that wrappers put in and that are no part of the model.
_WRAPPER_NAMES = ("_orig_mod.", "_checkpoint_wrapped_module.")
#: How many names an error lists before it counts.
_LISTED = 5


#: Of a whole number: Python writes no longer ones out.
_MOST_BITS = 4096


@dataclass
class Captured:
    """The state of some objects at one moment; the tensors are the objects' own, not copies."""

    #: All tensors by name.
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    #: Names of those that are this rank's own.
    own: set[str] = field(default_factory=set)
    #: Names of those that rank 0 writes for all.
    of_first: set[str] = field(default_factory=set)
    #: What is not a tensor, in words of JSON: {"objects": {name: {"kind", "values"}}, "extras": …, "rng": …}.
    values: dict[str, Any] = field(default_factory=dict)


# --------------------------------------------------------------------------- what an object is


def kind_of(value: Any) -> str:
    """How an object's state is taken: module, optimizer, generator, stateful or (a plain) value."""
    if isinstance(value, nn.Module):
        return "module"
    if isinstance(value, Optimizer):
        return "optimizer"
    if isinstance(value, torch.Generator):
        return "generator"
    try:
        methods = getattr(value, "state_dict", None), getattr(value, "load_state_dict", None)
    except Exception:  # whatever looking for an attribute raises
        return "value"
    return "stateful" if all(map(callable, methods)) else "value"


def unwrapped(module: nn.Module) -> nn.Module:
    """The user's model inside DistributedDataParallel and compiled wrappers."""
    while True:
        if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            module = module.module
        elif isinstance(inner := module.__dict__.get("_modules", {}).get("_orig_mod"), nn.Module):
            module = inner
        else:
            return module


def plain_key(key: str) -> str:
    """A state dict's key without what wrappers put into it."""
    for name in _WRAPPER_NAMES:
        key = key.replace(name, "")
    return key


def parameter_names(objects: Mapping[str, Any]) -> dict[torch.Tensor, str]:
    """The name of every parameter of the modules among ``objects``, as its values have it in the file."""
    names: dict[torch.Tensor, str] = {}
    for name, value in objects.items():
        if isinstance(value, nn.Module):
            for key, parameter in unwrapped(value).named_parameters():
                names.setdefault(parameter, f"{name}.{plain_key(key)}")
    return names


def _listing(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - _LISTED} more" if len(ordered) > _LISTED else ""
    return ", ".join(repr(name) for name in ordered[:_LISTED]) + more


# --------------------------------------------------------------------------- taking


def capture(objects: Mapping[str, Any], *, rng: bool = True) -> Captured:
    """The state of ``objects``, and of this rank's random generators."""
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
            captured.values["rng"] = _capture_rng(captured)
    _refuse_tensors_without_data(captured)
    return captured


def _encode_value(name: str, value: Any, captured: Captured) -> Any:
    try:
        return _encode(value, name, captured)
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
            rest[plain] = _encode(value, f"{name}.{plain}", captured)
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
                rest.setdefault(parameter, {})[key] = _encode(value, where, captured)
    groups = [
        {
            **{
                key: _encode(value, f"{name}.groups.{number}.{key}", captured)
                for key, value in group.items()
                if key not in ("params", "param_names")
            },
            "params": [by_number[index] for index in group["params"]],
        }
        for number, group in enumerate(state["param_groups"])
    ]
    taken = {"groups": groups, "rest": rest}
    if (scaler := _scaler_of(optimizer)) is not None:
        taken["scaler"] = _encode(scaler.state_dict(), f"{name}.scaler", captured)
    return taken


def named_parameters_of(optimizer: Optimizer, names: Mapping[torch.Tensor, str]) -> list[str]:
    """The names of an optimizer's parameters in its own order; the number where no module has the parameter."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [names.get(parameter, str(number)) for number, parameter in enumerate(parameters)]


def _scaler_of(optimizer: Optimizer) -> Any:
    """The gradient scaler that mixed precision has put into a prepared optimizer."""
    scaler = getattr(optimizer, "scaler", None)
    return scaler if kind_of(scaler) == "stateful" else None


def _take_stateful(name: str, value: Any, captured: Captured, _names: Any) -> Any:
    return _encode(value.state_dict(), name, captured)


def _take_generator(name: str, generator: torch.Generator, captured: Captured, _names: Any) -> Any:
    return _encode(generator.get_state(), name, captured)


_TAKE: dict[str, Callable[..., Any]] = {
    "module": _take_module,
    "optimizer": _take_optimizer,
    "stateful": _take_stateful,
    "generator": _take_generator,
}


# --------------------------------------------------------------------------- values and JSON


def _encode(value: Any, where: str, captured: Captured) -> Any:
    """``value`` in words of JSON; its tensors are noted in ``captured`` under names that begin with ``where``."""
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise CheckpointError(
            f"{where!r} holds a whole number of {value.bit_length()} bits, and at most {_MOST_BITS} can be saved. Save "
            "it as text."
        )
    if value is None or isinstance(value, (bool, int, float, str, bytes, bytearray)):
        return to_json_value(value)
    if isinstance(value, torch.Tensor):
        return {"$tensor": _note(value, where, captured)}
    if isinstance(value, Mapping):
        return _encode_mapping(value, where, captured)
    if isinstance(value, (list, collections.deque)):
        return [_encode(item, f"{where}.{number}", captured) for number, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": [_encode(item, f"{where}.{number}", captured) for number, item in enumerate(value)]}
    if isinstance(value, (set, frozenset)):
        return {"$set": [_encode(item, where, captured) for item in value]}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"$device": str(value)}
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic) and value.dtype.kind in "biuf":
        return to_json_value(value.item())
    if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc":
        return {"$numpy": _note(torch.from_numpy(numpy.ascontiguousarray(value)), where, captured)}
    raise CheckpointError(
        f"{where!r} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be saved without running "
        "code to read it back. Save numbers, text, tensors, lists and dicts of them, or give the object "
        "state_dict() and load_state_dict()."
    )


def _encode_mapping(value: Mapping[Any, Any], where: str, captured: Captured) -> Any:
    special = "$counter" if isinstance(value, collections.Counter) else ""
    special = "$ordered" if isinstance(value, collections.OrderedDict) else special
    if special or not all(type(key) is str for key in value):
        pairs = [
            [_encode(key, where, captured), _encode(item, f"{where}.{key}", captured)]
            for key, item in value.items()
        ]
        return {special or "$pairs": pairs}
    plain = {key: _encode(item, f"{where}.{key}", captured) for key, item in value.items()}
    return {"$plain": plain} if len(plain) == 1 and next(iter(plain)).startswith("$") else plain


def _note(tensor: torch.Tensor, where: str, captured: Captured) -> str:
    name, number = where, 1
    while name in captured.tensors:  # a key with a dot in it may look like a nested one
        number += 1
        name = f"{where}~{number}"
    captured.tensors[name] = tensor.detach()
    if not isinstance(tensor, DTensor):
        captured.own.add(name)
    return name


def decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The inverse of what :func:`capture` put into ``values``, with ``tensors`` by name."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    kind: str
    content: Any
    kind, content = next(iter(value.items()), ("", None))
    if len(value) != 1 or not kind.startswith("$"):
        return {key: decode(item, tensors) for key, item in value.items()}
    if kind == "$plain":
        return {key: decode(item, tensors) for key, item in content.items()}
    if kind in _MAPPINGS:
        return _MAPPINGS[kind]({decode(key, tensors): decode(item, tensors) for key, item in content})
    if kind == "$tuple":
        return tuple(decode(item, tensors) for item in content)
    if kind == "$set":
        return {decode(item, tensors) for item in content}
    if kind == "$tensor":
        return tensors[content]
    if kind == "$numpy":
        return tensors[content].numpy()
    if kind == "$dtype":
        return getattr(torch, content)
    return torch.device(content) if kind == "$device" else from_json_value(value)


_MAPPINGS: dict[str, Any] = {
    "$pairs": dict,
    "$counter": collections.Counter,
    "$ordered": collections.OrderedDict,
}


def tensor_names(value: Any) -> set[str]:
    """The names of all tensors that :func:`decode` will ask for."""
    if isinstance(value, list):
        return set().union(*(tensor_names(item) for item in value))
    if not isinstance(value, dict):
        return set()
    if len(value) == 1:
        if (name := value.get("$tensor", value.get("$numpy"))) is not None:
            return {name}
        value = value.get("$plain", value)
    return set().union(*(tensor_names(item) for item in value.values()))


# --------------------------------------------------------------------------- random generators


def _capture_rng(captured: Captured) -> dict[str, Any]:
    """The states of Python's, numpy's, torch's and this rank's CUDA generator."""
    version, numbers, gauss = random.getstate()
    # 625 numbers of 32 bits each.
    python = torch.frombuffer(
        bytearray(b"".join(n.to_bytes(4, "little") for n in numbers)), dtype=torch.uint8
    )
    taken = {
        "python": [version, _encode(python, "rng/python", captured), to_json_value(gauss)],
        "torch": _encode(torch.get_rng_state(), "rng/torch", captured),
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, position, has_gauss, cached = numpy.random.get_state()
        words = torch.from_numpy(keys.astype("<u4").view("u1"))
        taken["numpy"] = [
            kind,
            _encode(words, "rng/numpy", captured),
            position,
            has_gauss,
            to_json_value(cached),
        ]
    cuda: Any = torch.cuda
    if cuda.is_initialized():
        taken["cuda"] = _encode(torch.cuda.get_rng_state(), "rng/cuda", captured)
    return taken


def restore_rng(values: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Put the generators of this rank into the states that were captured."""
    version, words, gauss = decode(values["python"], tensors)
    content = words.numpy().tobytes()
    numbers = tuple(int.from_bytes(content[at : at + 4], "little") for at in range(0, len(content), 4))
    random.setstate((version, numbers, gauss))
    torch.set_rng_state(tensors["rng/torch"])
    if "numpy" in values:
        import numpy

        kind, words, position, has_gauss, cached = decode(values["numpy"], tensors)
        numpy.random.set_state((kind, words.numpy().view("<u4"), position, has_gauss, cached))
    if "cuda" in values and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["rng/cuda"])


# --------------------------------------------------------------------------- giving back


@dataclass(frozen=True)
class Saved:
    """What is stored, as far as giving it back needs to know."""

    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    #: Names of tensors that were DTensors.
    sharded: frozenset[str]
    values: Mapping[str, Any]
    #: Where it is, for errors.
    where: str


@dataclass
class Restoring:
    """One object on its way back: ``targets`` are filled with what is stored, then ``finish`` is called."""

    targets: dict[str, torch.Tensor]
    finish: Callable[[], None]


def restoring(objects: Mapping[str, Any], saved: Saved) -> list[Restoring]:
    """How each object gets its state back. Nothing is changed yet.

    Raises :class:`CheckpointError` where an object, a name or a shape is not what was saved.
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


def _unknown_object(name: str, saved: Saved) -> str:
    if name in saved.values["extras"]:
        return (
            f"{name!r} is a plain value in {saved.where}: it was not saved as an object with a state. load_state "
            "gives plain values back in the dict that it returns; leave this one out."
        )
    known = _listing(saved.values["objects"]) or "no object at all"
    return f"The state in {saved.where} has no {name!r}; it has {known}. Give each object the name it was saved under."


def _check_shapes(owner: str, targets: Mapping[str, torch.Tensor], saved: Saved) -> None:
    missing = [name for name in targets if name not in saved.shapes]
    if missing:
        raise CheckpointError(
            f"The state in {saved.where} does not fit {owner!r}: it lacks {_listing(missing)}. Was it saved with "
            "another model?"
        )
    other = [
        f"{name!r} has shape {tuple(target.shape)}, and {saved.shapes[name]} was saved"
        for name, target in targets.items()
        if tuple(target.shape) != saved.shapes[name]
    ]
    if other:
        more = f", and {len(other) - _LISTED} more" if len(other) > _LISTED else ""
        raise CheckpointError(
            f"The state in {saved.where} does not fit {owner!r}: {'; '.join(other[:_LISTED])}{more}. Was it saved "
            "with another model?"
        )


def _check_surplus(owner: str, prefix: str, wanted: Iterable[str], saved: Saved) -> None:
    surplus = {name for name in saved.shapes if name.startswith(prefix)} - set(wanted)
    if surplus:
        raise _surplus(owner, surplus, saved)


def _surplus(owner: str, names: Iterable[str], saved: Saved) -> CheckpointError:
    return CheckpointError(
        f"The state in {saved.where} does not fit {owner!r}, which lacks {_listing(names)}. Was it saved with another "
        "model?"
    )


def _fresh(names: Iterable[str], like: Mapping[str, torch.Tensor], saved: Saved) -> dict[str, torch.Tensor]:
    """Memory for stored tensors: as the tensor of the same name in ``like`` has it, or else on the CPU."""
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


def _give_module(name: str, module: nn.Module, values: Any, saved: Saved, _names: Any) -> Restoring:
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
    name: str, optimizer: Optimizer, values: Any, saved: Saved, names: dict[torch.Tensor, str]
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
        if (scaler := _scaler_of(optimizer)) is not None and rest["scaler"] is not None:
            scaler.load_state_dict(decode(rest["scaler"], nested))

    return Restoring({**targets, **nested}, finish)


def _like_parameter(parameter: torch.Tensor, stored: str, saved: Saved) -> torch.Tensor:
    """Memory for one entry of an optimizer's state: laid out as its parameter where the shapes are equal."""
    shape, dtype = saved.shapes[stored], saved.dtypes[stored]
    if shape == tuple(parameter.shape) and len(shape):
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    if isinstance(parameter, DTensor) and (len(shape) or stored in saved.sharded):
        mesh = parameter.device_mesh
        whole = torch.empty(shape, dtype=dtype, device=parameter.to_local().device)
        return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return torch.empty(shape, dtype=dtype)


def _matched_groups(
    name: str, optimizer: Optimizer, own: list[str], groups: list[dict[str, Any]], saved: Saved
) -> list[dict[str, Any]]:
    """The saved groups in the order of the optimizer's, each with this optimizer's own parameter numbers."""
    matched, number = [], 0
    for group in optimizer.param_groups:
        members = own[number : number + len(group["params"])]
        same = next((one for one in groups if set(one["params"]) == set(members)), None)
        if same is None:
            raise CheckpointError(
                f"The state in {saved.where} does not fit {name!r}: no parameter group of it has exactly "
                f"{_listing(members)}. Make the optimizer with the same parameter groups as when it was saved, and "
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


def _give_stateful(name: str, value: Any, values: Any, saved: Saved, _names: Any) -> Restoring:
    now = Captured()
    if needed := tensor_names(values):
        _encode(value.state_dict(), name, now)
    targets = _fresh(needed, now.tensors, saved)
    return Restoring(targets, lambda: value.load_state_dict(decode(values, targets)))


def _give_generator(
    name: str, generator: torch.Generator, values: Any, saved: Saved, _names: Any
) -> Restoring:
    targets = _fresh(tensor_names(values), {}, saved)
    return Restoring(targets, lambda: _set_generator(generator, decode(values, targets)))


def _set_generator(generator: torch.Generator, state: torch.Tensor) -> None:
    generator.set_state(state)


_GIVE: dict[str, Callable[..., Restoring]] = {
    "module": _give_module,
    "optimizer": _give_optimizer,
    "stateful": _give_stateful,
    "generator": _give_generator,
}


def extras_of(saved: Saved) -> tuple[dict[str, torch.Tensor], Callable[[], dict[str, Any]]]:
    """Memory for the tensors among the plain values, and what gives the values once it is filled."""
    values = saved.values["extras"]
    targets = _fresh(tensor_names(values), {}, saved)
    return targets, lambda: {name: decode(value, targets) for name, value in values.items()}
