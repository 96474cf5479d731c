"""Pure: the queue of requests for resources of this machine, and the order in which they are served.

First come, first served. A later request overtakes only requests for other things: a GPU that the earlier one could not
be given, a resource of another name. So no request starves, and no resource lies idle for a request that would not use
it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from powertrain.engine.base import SlotShape
from powertrain.engine.resources import Holding, Machine, counted, free_gpus, missing, slots_free, taken

#: Stands for the cores of a process that does not know its own: they may overlap any other's.
_ANY_CORE = -1
#: The number of holders named in the reason for a wait.
_MOST_NAMED = 3


class ResourceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request for resources of a machine, to be granted whole, as published to this user's other processes."""

    #: The requester's display name: "run digits".
    run: str
    host: str
    pid: int
    #: Amounts by name, as :func:`~powertrain.engine.resources.counted` has them.
    wanted: dict[str, float]
    machine: Machine


@dataclass(frozen=True)
class QueuePosition:
    """The position of a request among those that contend with it: 1 is next; ``behind`` is the request before it."""

    number: int
    behind: ResourceRequest | None = None


@dataclass(frozen=True)
class _Reach:
    """The resources that a request may be given: their names, and the GPUs and cores."""

    names: frozenset[str]
    gpus: frozenset[str]
    cores: frozenset[int]

    def meets(self, other: _Reach) -> bool:
        """Return True when one request could take resources that the other needs."""
        names = self.names & other.names
        if names - {"GPU", "CPU"} or ("GPU" in names and self.gpus & other.gpus):
            return True
        known = _ANY_CORE not in self.cores | other.cores
        return "CPU" in names and not (known and self.cores.isdisjoint(other.cores))


def _reach(request: ResourceRequest) -> _Reach:
    machine, names = request.machine, frozenset(request.wanted)
    return _Reach(
        names,
        frozenset(machine.identities if "GPU" in names else ()),
        (machine.cores or frozenset({_ANY_CORE})) if "CPU" in names else frozenset(),
    )


def contend(one: ResourceRequest, other: ResourceRequest) -> bool:
    """Return True when granting one request could leave too little for the other."""
    return _reach(one).meets(_reach(other))


def shares(held: Iterable[Holding], line: Sequence[ResourceRequest]) -> list[Holding | None]:
    """Return the share that each queued request can have now beside what is held, None for those that keep waiting.

    All shares can be granted at once; granting only some of them takes nothing from the others.
    """
    given, found = list(held), list[Holding | None]()
    waiting: set[_Reach] = set()
    for request in line:
        reach = _reach(request)
        if any(map(reach.meets, waiting)) or missing(request.machine, given, request.wanted):
            waiting.add(reach)
            found.append(None)
        else:
            share = _share(request, given)
            given.append(share)
            found.append(share)
    return found


def _share(request: ResourceRequest, held: Collection[Holding]) -> Holding:
    """Return the holding of a request once it is met; there must be enough."""
    gpus = free_gpus(request.machine, held)[: int(request.wanted.get("GPU", 0))]
    return holding_of(request, request.wanted, gpus)


def holding_of(request: ResourceRequest, amounts: Mapping[str, float], gpus: Iterable[str]) -> Holding:
    """Return the holding of a request that has these amounts, and these entries of ``machine.visible``."""
    return Holding(
        run=request.run,
        host=request.host,
        pid=request.pid,
        gpus=tuple(map(request.machine.identity, gpus)),
        amounts={name: amount for name, amount in amounts.items() if name != "GPU"},
        cores=tuple(sorted(request.machine.cores)) if "CPU" in amounts else (),
    )


def places(line: Sequence[ResourceRequest]) -> list[QueuePosition]:
    """Return the position of each queued request."""
    found = list[QueuePosition]()
    #: By reach: the number of requests so far, and the index of the last one in the queue.
    before: dict[_Reach, tuple[int, int]] = {}
    for index, request in enumerate(line):
        reach = _reach(request)
        ahead = [seen for other, seen in before.items() if reach.meets(other)]
        number = 1 + sum(count for count, _ in ahead)
        found.append(QueuePosition(number, line[max(last for _, last in ahead)] if ahead else None))
        before[reach] = (before.get(reach, (0, 0))[0] + 1, index)
    return found


def room(
    machine: Machine, shape: SlotShape, held: Collection[Holding], line: Iterable[ResourceRequest]
) -> int:
    """Return the number of slots of a shape that fit beside what is held and what the queue wants."""
    one = ResourceRequest(run="", host="", pid=0, wanted=counted(shape, 1), machine=machine)
    return slots_free(machine, shape, held, [request.wanted for request in line if contend(one, request)])


# --------------------------------------------------------------------------- in words


def reason(request: ResourceRequest, held: Sequence[Holding], place: QueuePosition) -> str:
    """ "waiting for 1 GPU held by run digits (pid 7 on here); 2nd in line, behind run letters (pid 8 on here)"."""
    lacking = missing(request.machine, held, request.wanted)
    parts = [
        _amount(name, amount) + (f" ({lacking[name]:g} free)" if lacking.get(name) else "")
        for name, amount in request.wanted.items()
        if not lacking or name in lacking
    ]
    holders = [_describe_owner(holding) for holding in held if _holds(holding, request.machine, lacking)]
    by = f" held by {_listed(list(dict.fromkeys(holders)))}" if holders else ""
    behind = f", behind {_describe_owner(place.behind)}" if place.behind else ""
    return f"waiting for {' and '.join(parts)}{by}; {_ordinal(place.number)} in line{behind}"


def _holds(holding: Holding, machine: Machine, names: Collection[str]) -> bool:
    """Return True when a claim has something of these names that the machine would have otherwise."""
    has_gpu = "GPU" in names and not set(machine.identities).isdisjoint(holding.gpus)
    return has_gpu or any(taken(machine, holding, name) > 0 for name in names)


def _amount(name: str, amount: float) -> str:
    plural = "s" if name in ("GPU", "CPU") and amount != 1 else ""
    return f"{amount:g} {name}{plural}"


def _describe_owner(owner: Holding | ResourceRequest) -> str:
    return f"{owner.run} (pid {owner.pid} on {owner.host})"


def _listed(names: list[str]) -> str:
    shown, more = names[:_MOST_NAMED], len(names) - _MOST_NAMED
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if number % 100 in (11, 12, 13) else ending}"
