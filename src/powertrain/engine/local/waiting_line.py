"""Pure: the one line of all who wait for something of this machine, and whose turn it is.

Who came first is served first. A later one passes only those who want other things: a GPU that the earlier one could
not be given, a resource of another name. So nobody who waits is passed for ever, and nothing lies idle for the sake of
somebody who would not use it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from powertrain.engine.base import SlotShape
from powertrain.engine.resources import Holding, Machine, counted, free_gpus, missing, slots_free, taken

#: Stands for the cores of a process that does not know its own: they may be anybody's.
_ANY_CORE = -1
#: How many holders are named to one who waits.
_MOST_NAMED = 3


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What somebody wants, whole, and of which machine, as it is told to the other processes of this user."""

    #: Who waits, as people are told: "run digits".
    run: str
    host: str
    pid: int
    #: Amounts by name, as :func:`~powertrain.engine.resources.counted` has them.
    wanted: dict[str, float]
    machine: Machine


@dataclass(frozen=True)
class QueuePosition:
    """Where somebody stands among those who want the same: 1 is the next; ``behind`` is who stands before him."""

    number: int
    behind: Wish | None = None


@dataclass(frozen=True)
class _Reach:
    """Which things a wish may be given: names, and of GPUs and cores which."""

    names: frozenset[str]
    gpus: frozenset[str]
    cores: frozenset[int]

    def meets(self, other: _Reach) -> bool:
        """True when what one takes may be missing to the other."""
        names = self.names & other.names
        if names - {"GPU", "CPU"} or ("GPU" in names and self.gpus & other.gpus):
            return True
        known = _ANY_CORE not in self.cores | other.cores
        return "CPU" in names and not (known and self.cores.isdisjoint(other.cores))


def _reach(wish: Wish) -> _Reach:
    machine, names = wish.machine, frozenset(wish.wanted)
    return _Reach(
        names,
        frozenset(machine.identities if "GPU" in names else ()),
        (machine.cores or frozenset({_ANY_CORE})) if "CPU" in names else frozenset(),
    )


def contend(one: Wish, other: Wish) -> bool:
    """True when what is given to one may be missing to the other."""
    return _reach(one).meets(_reach(other))


def shares(held: Iterable[Holding], line: Sequence[Wish]) -> list[Holding | None]:
    """What each of the line can have now beside what is held, None for those who have to wait on.

    All of it can be given at once. Whoever gives only a part of it takes nothing from the others.
    """
    given, found = list(held), list[Holding | None]()
    waiting: set[_Reach] = set()
    for wish in line:
        reach = _reach(wish)
        if any(map(reach.meets, waiting)) or missing(wish.machine, given, wish.wanted):
            waiting.add(reach)
            found.append(None)
        else:
            share = _share(wish, given)
            given.append(share)
            found.append(share)
    return found


def _share(wish: Wish, held: Collection[Holding]) -> Holding:
    """What a wish holds once it is met; there must be enough."""
    gpus = free_gpus(wish.machine, held)[: int(wish.wanted.get("GPU", 0))]
    return holding_of(wish, wish.wanted, gpus)


def holding_of(wish: Wish, amounts: Mapping[str, float], gpus: Iterable[str]) -> Holding:
    """What somebody holds who has so much of what he wanted, and these entries of ``machine.visible``."""
    return Holding(
        run=wish.run,
        host=wish.host,
        pid=wish.pid,
        gpus=tuple(map(wish.machine.identity, gpus)),
        amounts={name: amount for name, amount in amounts.items() if name != "GPU"},
        cores=tuple(sorted(wish.machine.cores)) if "CPU" in amounts else (),
    )


def places(line: Sequence[Wish]) -> list[QueuePosition]:
    """Where each of the line stands."""
    found = list[QueuePosition]()
    #: Of those who want the same: how many there are so far, and where in the line the last is.
    before: dict[_Reach, tuple[int, int]] = {}
    for index, wish in enumerate(line):
        reach = _reach(wish)
        ahead = [seen for other, seen in before.items() if reach.meets(other)]
        number = 1 + sum(count for count, _ in ahead)
        found.append(QueuePosition(number, line[max(last for _, last in ahead)] if ahead else None))
        before[reach] = (before.get(reach, (0, 0))[0] + 1, index)
    return found


def room(machine: Machine, shape: SlotShape, held: Collection[Holding], line: Iterable[Wish]) -> int:
    """How many slots of a shape fit beside what is held and what the line wants."""
    one = Wish(run="", host="", pid=0, wanted=counted(shape, 1), machine=machine)
    return slots_free(machine, shape, held, [wish.wanted for wish in line if contend(one, wish)])


# --------------------------------------------------------------------------- in words


def reason(wish: Wish, held: Sequence[Holding], place: QueuePosition) -> str:
    """ "waiting for 1 GPU held by run digits (pid 7 on here); 2nd in line, behind run letters (pid 8 on here)"."""
    lacking = missing(wish.machine, held, wish.wanted)
    parts = [
        _amount(name, amount) + (f" ({lacking[name]:g} free)" if lacking.get(name) else "")
        for name, amount in wish.wanted.items()
        if not lacking or name in lacking
    ]
    holders = [_who(holding) for holding in held if _holds(holding, wish.machine, lacking)]
    by = f" held by {_listed(list(dict.fromkeys(holders)))}" if holders else ""
    behind = f", behind {_who(place.behind)}" if place.behind else ""
    return f"waiting for {' and '.join(parts)}{by}; {_ordinal(place.number)} in line{behind}"


def _holds(holding: Holding, machine: Machine, names: Collection[str]) -> bool:
    """True when a claim has something of these names that the machine would have otherwise."""
    has_gpu = "GPU" in names and not set(machine.identities).isdisjoint(holding.gpus)
    return has_gpu or any(taken(machine, holding, name) > 0 for name in names)


def _amount(name: str, amount: float) -> str:
    plural = "s" if name in ("GPU", "CPU") and amount != 1 else ""
    return f"{amount:g} {name}{plural}"


def _who(somebody: Holding | Wish) -> str:
    return f"{somebody.run} (pid {somebody.pid} on {somebody.host})"


def _listed(names: list[str]) -> str:
    shown, more = names[:_MOST_NAMED], len(names) - _MOST_NAMED
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if number % 100 in (11, 12, 13) else ending}"
