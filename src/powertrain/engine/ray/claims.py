"""Claims on a Ray cluster: the slots of one request, and the placement groups that hold them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from ray.util.placement_group import PlacementGroup

from powertrain.engine.base import Slot, SlotShape
from powertrain.engine.ray.actors import SlotLocation

#: A label that Ray gives every node.
NODE_LABEL = "ray.io/node-id"
#: For claims and slots of all engines of this process.
numbers = itertools.count(1)


@dataclass(frozen=True)
class RayClaim:
    id: str
    count: int
    shape: SlotShape
    requested_at: float


@dataclass(eq=False)
class Group:
    """A placement group, and its bundles that no slot uses: Ray places those of a lost node anew by itself."""

    group: PlacementGroup
    #: The claim that it was made for, "" for a spare; and the resources of each bundle.
    claim: str
    shape: SlotShape
    used: set[int] = field(default_factory=set)
    vacant: list[int] = field(default_factory=list)
    #: For a spare: the time of its grant, and its node as of the last poll.
    granted: float = 0.0
    node: str = ""

    @property
    def is_spare(self) -> bool:
        return not self.claim


@dataclass(eq=False)
class SlotHolder:
    """Holds the resources of one slot: a bundle of a group, an actor, or an actor in a bundle."""

    claim: str
    shape: SlotShape
    #: Which worker of the claim it is for, and which bundle of the group.
    number: int
    index: int
    #: None where the bundle is enough.
    actor: Any
    group: Group | None
    tries: int = 1
    where: SlotLocation | None = None
    slot: Slot | None = None
    #: True once its slot is given back or lost.
    gone: bool = False
