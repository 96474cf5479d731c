"""A saved state as one rank's objects need it, whichever ranks held its tensors when it was saved.

The tensors of a state have one name over all ranks, so a stage of a pipeline finds its own by name, also where the
stages are cut elsewhere than before. Other values lie in a file of each rank and are merged here: the
settings of parameter groups, and the values that modules and optimizers keep beside their tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from powertrain.checkpoint.parallel.holdings import Gather
from powertrain.checkpoint.state import capture, encoding
from powertrain.errors import CheckpointError


@dataclass(frozen=True)
class Claims:
    """The parts of a state that the objects of one rank take."""

    #: Names of modules' entries.
    entries: frozenset[str]
    #: Names of parameters as optimizers have them: ``optimizer.state.model.layers.0.weight``.
    states: frozenset[str]

    @classmethod
    def of(cls, objects: Mapping[str, Any]) -> Claims:
        """Return the claims of these objects."""
        names = capture.parameter_names(objects)
        entries: set[str] = set()
        states: set[str] = set()
        for name, value in objects.items():
            if isinstance(value, nn.Module):
                entries |= {f"{name}.{key}" for key in _keys(value)}
            elif isinstance(value, Optimizer):
                states |= {f"{name}.state.{one}" for one in capture.named_parameters_of(value, names)}
        return cls(frozenset(entries), frozenset(states))

    def without(self, other: Claims) -> Claims:
        """Return the claims without those of ``other``."""
        return Claims(self.entries - other.entries, self.states - other.states)

    def covers(self, name: str) -> bool:
        """Return True when the tensor of this name is claimed."""
        return name in self.entries or name.rpartition(".")[0] in self.states

    def __bool__(self) -> bool:
        return bool(self.entries or self.states)


def _keys(module: nn.Module) -> set[str]:
    return {capture.plain_key(key) for key in capture.unwrapped(module).state_dict()}


def takes_only_a_part(
    objects: Mapping[str, Any], stored: Iterable[str], by_rank: Mapping[int, Mapping[str, Any]]
) -> bool:
    """Return True when the objects have only tensors of the state, and not all of their stored ones.

    That is how a stage of a pipeline looks. A whole model needs no other rank, so one rank may load it alone; a model
    with other tensors does not fit in any case.
    """
    mine = Claims.of(objects)
    noted = _noted(by_rank)
    of_objects = {
        f"{name}." if isinstance(value, nn.Module) else f"{name}.state."
        for name, value in objects.items()
        if isinstance(value, (nn.Module, Optimizer))
    }
    names = {name for name in stored if name.startswith(tuple(of_objects)) and name not in noted}
    tensors = {
        f"{name}.{capture.plain_key(key)}"
        for name, value in objects.items()
        if isinstance(value, nn.Module)
        for key, one in capture.unwrapped(value).state_dict().items()
        if isinstance(one, torch.Tensor)
    }
    return tensors <= names and not all(map(mine.covers, names))


def _noted(by_rank: Mapping[int, Mapping[str, Any]]) -> set[str]:
    """Return names of tensors among the values of single ranks."""
    return set().union(*(encoding.tensor_names(list(one["objects"].values())) for one in by_rank.values()))


def claimed_elsewhere(objects: Mapping[str, Any], gather: Gather | None) -> Claims:
    """Return the claims of other ranks' objects only. With ``gather`` all ranks call this."""
    mine = Claims.of(objects)
    by_rank: list[Claims] = [mine] if gather is None else gather(mine)
    together = Claims(
        frozenset().union(*(one.entries for one in by_rank)),
        frozenset().union(*(one.states for one in by_rank)),
    )
    return together.without(mine)


@dataclass(frozen=True)
class StateView:
    """A state as one rank sees it: its values, and under which name each of its tensors is stored."""

    values: Mapping[str, Any]
    stored: Mapping[str, str]


def fitted(
    view: StateView,
    objects: Mapping[str, Any],
    by_rank: Mapping[int, Mapping[str, Any]],
    source: int,
    elsewhere: Claims,
    place_of: Callable[[str, int], str],
) -> StateView:
    """Return the view without the claims of other ranks' objects, and with the values that other ranks have saved.

    Tensors that no rank takes stay in it, so that loading names them. ``by_rank`` has the values of the ranks that
    saved, ``source`` is the one whose values come first, and ``place_of`` gives the place of a rank's own tensor.
    """
    ranks = [source, *(rank for rank in by_rank if rank != source)]
    aliases: dict[str, str] = {}
    by_source: list[Mapping[str, Any]] = []
    for rank in ranks:
        entries = by_rank[rank]["objects"]
        if rank != source:
            names = {
                name: f"rank-{rank:05d}/{name}" for name in encoding.tensor_names(list(entries.values()))
            }
            aliases.update({alias: place_of(name, rank) for name, alias in names.items()})
            entries = _renamed(entries, names)
        by_source.append(entries)
    merged = _merged(objects, by_source, view.values["objects"])
    needed = encoding.tensor_names(list(merged.values()))
    noted = _noted(by_rank)
    stored = {
        name: place
        for name, place in view.stored.items()
        if name in needed or not (name in noted or elsewhere.covers(name))
    }
    stored.update({alias: place for alias, place in aliases.items() if alias in needed})
    return StateView({**view.values, "objects": merged}, stored)


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    """Return encoded values with other names of the tensors among them."""
    if isinstance(value, list):
        return [_renamed(item, names) for item in value]
    if not isinstance(value, dict):
        return value
    for kind in ("$tensor", "$numpy"):
        if len(value) == 1 and kind in value:
            return {kind: names[value[kind]]}
    return {key: _renamed(item, names) for key, item in value.items()}


def _merged(
    objects: Mapping[str, Any], by_source: list[Mapping[str, Any]], own: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the entry of each object, from the first rank that has it; modules' and optimizers' from all ranks."""
    merged = dict(own)
    parameters = capture.parameter_names(objects)
    for name, value in objects.items():
        entries = [one[name] for one in by_source if name in one]
        if not entries or entries[0]["kind"] != capture.kind_of(value):
            continue  # loading raises the error that names it
        merged[name] = entries[0]
        if isinstance(value, nn.Module):
            found: dict[str, Any] = {}
            for entry in reversed(entries):
                found.update(entry["values"])
            keys = _keys(value)
            merged[name] = {**entries[0], "values": {key: one for key, one in found.items() if key in keys}}
        elif isinstance(value, Optimizer):
            merged[name] = {**entries[0], "values": _optimizer_values(name, value, entries, parameters)}
    return merged


def _optimizer_values(
    name: str, optimizer: Optimizer, entries: list[Any], names: Mapping[Any, str]
) -> dict[str, Any]:
    own = capture.named_parameters_of(optimizer, names)
    rest: dict[str, Any] = {}
    for entry in reversed(entries):
        rest.update({one: kept for one, kept in entry["values"]["rest"].items() if one in own})
    saved = [group for entry in entries for group in entry["values"]["groups"]]
    groups, start = [], 0
    for group in optimizer.param_groups:
        members = own[start : start + len(group["params"])]
        groups.append(_group_of(name, members, saved))
        start += len(members)
    return {**entries[0]["values"], "groups": groups, "rest": rest}


def _group_of(name: str, members: list[str], saved: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a parameter group of these members: as saved, or with the settings that all groups they come from
    share."""
    for group in saved:
        if set(group["params"]) == set(members):
            return group
    sources = [group for group in saved if set(group["params"]) & set(members)]
    missing = set(members).difference(*(group["params"] for group in sources))
    if missing:
        raise CheckpointError(
            f"The state does not fit {name!r}: no parameter group of any rank has {min(missing)!r}. Give load_state "
            "the same modules as save_state, with the names that their parts had."
        )
    settings = [{key: one for key, one in group.items() if key != "params"} for group in sources]
    different = sorted(
        key for key in settings[0] if any(one.get(key) != settings[0][key] for one in settings)
    )
    if different:
        raise CheckpointError(
            f"The state does not fit {name!r}: parameters that are in one group now were in groups with different "
            f"values of {', '.join(different)} when it was saved. Make the optimizer with parameter groups that do not "
            "mix them."
        )
    return {**settings[0], "params": members}
