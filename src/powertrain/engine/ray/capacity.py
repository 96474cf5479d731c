"""The number of workers that fit on the nodes of a cluster, and messages about the obstacles. Pure: nodes come in as
values.

All workers of a run need the same, so packing them is plain division, node by node. Only label selectors that differ
between workers make it a matching. Amounts are counted in whole ten-thousandths, the finest that Ray knows, so that
ten times 0.1 is 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from powertrain.engine.base import SlotShape
from powertrain.engine.resources import BOUNDLESS

_UNITS = 10_000
_ACCELERATOR = "accelerator_type:"
#: Amounts of these are bytes.
_IN_BYTES = ("memory", "object_store_memory")
#: How many things of a kind a clause names.
_SHOWN = 3

Selector = Mapping[str, str]
#: A selector, and how many workers have it.
_Group = tuple[Selector, int]


@dataclass(frozen=True)
class Node:
    """One live node as the cluster reports it."""

    id: str
    #: A name for people: its host or address.
    name: str
    total: Mapping[str, float]
    free: Mapping[str, float]
    labels: Mapping[str, str]
    #: True for a node that will be taken away: nothing new is placed on it.
    draining: bool = False


# --------------------------------------------------------------------------- demand


def demand(shape: SlotShape) -> dict[str, float]:
    """Return the needs of one worker, by name, in amounts that Ray accepts; zero amounts are left out.

    Amounts are cut to four decimals and never rounded up: six workers with 1/6 of a GPU each share one GPU.
    """
    return {name: units / _UNITS for name, units in _need(shape).items()}


def selector(shape: SlotShape, worker: int) -> dict[str, str]:
    """Return the labels that the node of this worker must have, as Ray reads them; empty where any node will do.

    Spaces are left out: of "in(a, b)" Ray would take " b" for a value, and no label has such a value.
    """
    if not shape.labels:
        return {}
    return {key: value.replace(" ", "") for key, value in shape.labels[worker % len(shape.labels)].items()}


def _need(shape: SlotShape) -> dict[str, int]:
    amounts = {"CPU": shape.cpus, "GPU": shape.gpus, **shape.custom}
    # The sum is for floats: 0.57 times 10000 is a little less than 5700.
    return {name: max(1, int(amount * _UNITS + 1e-6)) for name, amount in amounts.items() if amount > 0}


def _groups(shape: SlotShape, count: int) -> list[_Group]:
    """Return the selectors of ``count`` workers, equal ones together."""
    if len(shape.labels) <= 1:
        return [(selector(shape, 0), count)] if count > 0 else []
    counted: dict[tuple[tuple[str, str], ...], int] = {}
    for worker in range(count):
        key = tuple(sorted(selector(shape, worker).items()))
        counted[key] = counted.get(key, 0) + 1
    return [(dict(key), workers) for key, workers in counted.items()]


def _matches(labels: Mapping[str, str], wanted: Selector) -> bool:
    return all(_value_matches(labels.get(key), condition) for key, condition in wanted.items())


def _value_matches(value: str | None, condition: str) -> bool:
    """A condition is "v", "!v", "in(a,b)" or "!in(a,b)". A label that a node does not have is not equal to anything."""
    plain = condition.removeprefix("!")
    several = plain.startswith("in(") and plain.endswith(")")
    values = plain[3:-1].split(",") if several else [plain]
    return (value in values) != condition.startswith("!")


# --------------------------------------------------------------------------- how many fit


def fitting(nodes: Sequence[Node], shape: SlotShape, count: int) -> int:
    """Return how many of ``count`` new workers fit into the free resources, by strategy and labels."""
    return _fit(nodes, shape, {}, _groups(shape, count))


def capacity(nodes: Sequence[Node], shape: SlotShape, held: Mapping[str, int]) -> int:
    """Return the number of workers possible now: those with held slots, by node id, and those that still fit.

    Held resources must not be in the nodes' ``free``. Held slots count wherever they are; a strategy or a selector
    limits only additional ones. At most :data:`~powertrain.engine.resources.BOUNDLESS`, or one for each selector.
    """
    return _fit(nodes, shape, held, _groups(shape, len(shape.labels) if len(shape.labels) > 1 else BOUNDLESS))


def _fit(nodes: Sequence[Node], shape: SlotShape, held: Mapping[str, int], groups: Sequence[_Group]) -> int:
    """Return the number of workers of ``groups`` that can be placed, including ``held``."""
    taken = {node: slots for node, slots in held.items() if slots > 0}
    open_to = [node for node in nodes if any(_matches(node.labels, wanted) for wanted, _ in groups)]
    if shape.placement == "STRICT_PACK" and taken:
        open_to = [node for node in open_to if set(taken) == {node.id}]
    room = [taken.get(node.id, 0) + _new_on(node, shape, taken.get(node.id, 0)) for node in open_to]
    if shape.placement == "STRICT_PACK":
        placed = max(
            (_matched([node], [slots], groups) for node, slots in zip(open_to, room, strict=True)), default=0
        )
    else:
        placed = _matched(open_to, room, groups)
    elsewhere = sum(taken.values()) - sum(taken.get(node.id, 0) for node in open_to)
    return max(sum(taken.values()), min(sum(workers for _, workers in groups), placed + elsewhere))


def _new_on(node: Node, shape: SlotShape, taken: int) -> int:
    """Return the number of new workers that fit on a node with ``taken`` workers."""
    if node.draining or (shape.placement == "STRICT_SPREAD" and taken):
        return 0
    need = _need(shape)
    # Held resources are put back first: of two shared GPUs with 0.4 free each, 0.8 in all, neither has room for 0.6.
    # No more than the total: the cluster's free amounts may be a moment older than our holdings.
    ours = {
        name: min(_units(node.total, name), _units(node.free, name) + taken * units)
        for name, units in need.items()
    }
    room = max(0, _times(ours, need) - taken)
    return min(room, 1) if shape.placement == "STRICT_SPREAD" else room


def _could_hold_one(node: Node, need: Mapping[str, int]) -> bool:
    """Return True when a worker fits on the node when it is empty."""
    return _times({name: _units(node.total, name) for name in need}, need) > 0


def _times(have: Mapping[str, int], need: Mapping[str, int]) -> int:
    """Return how often ``need`` fits into ``have``."""
    return min((_times_one(name, have[name], units) for name, units in need.items()), default=BOUNDLESS)


def _times_one(name: str, have: int, units: int) -> int:
    if name == "GPU" and units < _UNITS:  # a part of one GPU is never made up of parts of two
        whole, rest = divmod(have, _UNITS)
        return whole * (_UNITS // units) + rest // units
    return have // units


def _units(amounts: Mapping[str, float], name: str) -> int:
    """Ray lets the free CPUs go below zero for a while."""
    return max(0, round(amounts.get(name, 0.0) * _UNITS))


def _matched(nodes: Sequence[Node], room: Sequence[int], groups: Sequence[_Group]) -> int:
    """Return the most workers that find a node with their labels, when each node takes at most its ``room``."""
    may = [[at for at, node in enumerate(nodes) if _matches(node.labels, wanted)] for wanted, _ in groups]
    if len(groups) == 1:
        return min(groups[0][1], sum(room[at] for at in may[0]))
    left = list(room)
    lies = [[0] * len(nodes) for _ in groups]

    def place(group: int, tried: set[int]) -> bool:
        """Place one more of this group, if need be by moving one of another group elsewhere."""
        for at in may[group]:
            if at in tried:
                continue
            tried.add(at)
            if left[at] > 0:
                left[at] -= 1
            else:
                moved = next((g for g in range(len(groups)) if lies[g][at] and place(g, tried)), None)
                if moved is None:
                    continue
                lies[moved][at] -= 1
            lies[group][at] += 1
            return True
        return False

    return sum(place(group, set()) for group, (_, workers) in enumerate(groups) for _ in range(workers))


# --------------------------------------------------------------------------- messages


def why_waiting(nodes: Sequence[Node], shape: SlotShape, count: int) -> str:
    """Return a clause with the number of ``count`` new workers that fit now, and the obstacle for the others."""
    fit = fitting(nodes, shape, count)
    if fit >= count:
        return f"{_fit_words(fit, count, shape)} and {'waits' if count == 1 else 'wait'} to be placed"
    parts = [_fit_words(fit, count, shape), _obstacle(nodes, shape, count)]
    leaving = [node.name for node in nodes if node.draining]
    if leaving:
        parts.append(f"nothing new goes to {_listed(leaving)}, soon to be taken away")
    return "; ".join(parts)


def why_never(nodes: Sequence[Node], shape: SlotShape, count: int) -> str:
    """Return a sentence where a strict strategy could not be met if all these nodes were empty; otherwise ""."""
    if shape.placement not in ("STRICT_PACK", "STRICT_SPREAD"):
        return ""
    empty = [replace(node, free=node.total, draining=False) for node in nodes]
    fit = fitting(empty, shape, count)
    if fit >= count:
        return ""
    if shape.placement == "STRICT_PACK":
        where, fix = "one node", "add a node that is large enough"
        largest = next((node.name for node in empty if fitting([node], shape, count) == fit), "")
        most = f"{largest} holds the most, {fit} of them" if fit else "none holds even one of them"
        why = f"no node is large enough, even empty: {most}"
    else:
        where, fix = "nodes of their own", "add nodes"
        could = f"only {_counted(fit, 'node')}" if fit else "no node"
        why = f"{could} of the cluster could hold one, even empty"
    if any(shape.labels):
        why += f" (nodes must have {_selector_words(_groups(shape, count))})"
    if fit:
        looser = shape.placement[len("STRICT_") :]
        less = f'Ask for at most {_counted(fit, "worker")}, use placement_strategy="{looser}"'
    else:
        less = "Ask for less per worker" + (" or for other labels" if any(shape.labels) else "")
    request = (
        f'ScalingConfig(placement_strategy="{shape.placement}") wants {_workers(count, shape)} on {where}'
    )
    return f"{request}, but {why}. {less}, or {fix}."


def _fit_words(fit: int, count: int, shape: SlotShape) -> str:
    if count == 1:
        return f"{_workers(1, shape)} {'fits' if fit else 'does not fit'} now"
    if fit == 0:
        return f"none of {_workers(count, shape)} fits now"
    where = {"STRICT_PACK": "on one node now", "STRICT_SPREAD": "on nodes of their own now"}
    part = "" if fit >= count else f"{fit} of "
    return f"{part}{_workers(count, shape)} fit {where.get(shape.placement, 'now')}"


def _obstacle(nodes: Sequence[Node], shape: SlotShape, count: int) -> str:
    """Return the obstacle to placing ``count`` workers, as a clause. Precondition: fewer do fit."""
    groups = _groups(shape, count)
    staying = [node for node in nodes if not node.draining]
    if not staying:
        return "the cluster has no node for new workers"
    open_to = [node for node in staying if any(_matches(node.labels, wanted) for wanted, _ in groups)]
    if not open_to:
        return f"no node has {_selector_words(groups)}"
    kind = f" with {_selector_words(groups)}" if len(open_to) < len(staying) else ""
    able = [node for node in open_to if _could_hold_one(node, _need(shape))]
    if not able:
        return _too_small(open_to, shape, f"no node{kind}")
    alone = [(group, _fit(staying, shape, {}, [group])) for group in groups if len(groups) > 1]
    short = [f"{fit} of {group[1]} with {_selector_words([group])}" for group, fit in alone if fit < group[1]]
    if short:
        return f"there is room for {_listed(short)}"
    if shape.placement == "STRICT_SPREAD":
        room = sum(_new_on(node, shape, 0) for node in able)
        return (
            f"{len(able)} of {_counted(len(nodes), 'node')} could hold one, with room now on {room or 'none'}"
        )
    if shape.placement == "STRICT_PACK":
        roomiest = max(able, key=lambda node: fitting([node], shape, count))
        return _shortage([roomiest], f"{roomiest.name}, which has most room,", shape, count)
    if len(able) == len(nodes):
        return _shortage(able, "the cluster", shape, count)
    if len(able) == 1:
        return _shortage(able, f"{able[0].name}, the only node{kind} that could hold one,", shape, count)
    return _shortage(able, f"the group of {len(able)} nodes{kind} that could hold one", shape, count)


def _too_small(nodes: Sequence[Node], shape: SlotShape, none: str) -> str:
    """Return the reason why none of these nodes could hold a worker, even empty."""
    for name, units in _need(shape).items():
        most, largest = max((_units(node.total, name), node.name) for node in nodes)
        if most == 0:
            return f"{none} has any {_resource(name)}"
        if most < units:
            return f"{none} is large enough for one: {largest} has the most, {_amount(name, most)}"
    return f"{none} has all that one needs"


def _shortage(able: Sequence[Node], whose: str, shape: SlotShape, count: int) -> str:
    """Return the shortage on the nodes that could hold a worker each; ``whose`` is their name, in the singular."""
    need = _need(shape)
    supplies = [_supply(name, able, units * count) for name, units in need.items()]
    if any(supplies):
        return f"{whose} has {_listed([supply for supply in supplies if supply])}"
    named = [name for name in need if not name.startswith(_ACCELERATOR)]
    pieces = [_listed([_amount(name, _units(node.free, name)) for name in named]) for node in able]
    where = [f"{node.name} ({piece})" for node, piece in zip(able, pieces, strict=True)]
    return f"the free resources are fragmented: {_listed(where)}"


def _supply(name: str, nodes: Sequence[Node], needed: int) -> str:
    """Such as "4 GPU in all, 2 of them free" where ``needed`` is not free; otherwise ""."""
    total = sum(_units(node.total, name) for node in nodes)
    free = sum(_units(node.free, name) for node in nodes)
    if free >= needed:
        return ""
    beyond = f" (needed: {_number(name, needed)})" if needed > total else ""
    part = "none" if free == 0 else "all" if free == total else _number(name, free)
    return f"{_amount(name, total)} in all{beyond}, {part} of {'it' if name in _IN_BYTES else 'them'} free"


def _workers(count: int, shape: SlotShape) -> str:
    """Such as "4 workers with 1 CPU and 1 GPU each"."""
    needs = _listed([_amount(name, units) for name, units in _need(shape).items()])
    return _counted(count, "worker") + (f" with {needs}{' each' if count != 1 else ''}" if needs else "")


def _amount(name: str, units: int) -> str:
    """Such as "2 GPU" or "16 GiB of memory"; the requested amount of an accelerator type is left out."""
    if name.startswith(_ACCELERATOR):
        return f"an {_resource(name)}"
    return f"{_number(name, units)}{' of' if name in _IN_BYTES else ''} {name}"


def _number(name: str, units: int) -> str:
    amount = units / _UNITS
    return f"{amount / 2**30:.4g} GiB" if name in _IN_BYTES else f"{amount:.12g}"


def _resource(name: str) -> str:
    return f"accelerator of type {name[len(_ACCELERATOR) :]}" if name.startswith(_ACCELERATOR) else name


def _selector_words(groups: Sequence[_Group]) -> str:
    """Such as "the labels zone=a and disk=!hdd", one after the other where workers have different ones."""
    described = [
        " and ".join(f"{key}={value}" for key, value in wanted.items()) for wanted, _ in groups if wanted
    ]
    more = " or others" if len(described) > _SHOWN else ""
    return f"the labels {' or '.join(described[:_SHOWN])}{more}" if described else "any labels"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _listed(words: Sequence[str]) -> str:
    """Such as "a, b and c"; of many only the first, and how many more there are."""
    shown = [*words[:_SHOWN], f"{len(words) - _SHOWN} more"] if len(words) > _SHOWN + 1 else list(words)
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)
