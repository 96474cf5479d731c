"""Placement groups of one run: reserved, used bundle by bundle, kept vacant for the next claim, and removed."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence

from ray.util.placement_group import placement_group, placement_group_table

from powertrain.engine.base import SlotShape
from powertrain.engine.ray import capacity, client
from powertrain.engine.ray.agents import Agents
from powertrain.engine.ray.claims import Group
from powertrain.engine.ray.client import RayThread


class PlacementGroups:
    """All groups of a run. The thread that talks to Ray, unless stated otherwise."""

    def __init__(self, asking: RayThread, changed: threading.Condition, agents: Agents, run: str) -> None:
        """``changed`` guards the list of groups."""
        self._ray, self._changed, self._agents, self._run = asking, changed, agents, run
        self._groups: list[Group] = []

    def __contains__(self, group: Group) -> bool:
        return group in self._groups

    def __iter__(self) -> Iterator[Group]:
        """Yield the groups as they are now, also while they are removed."""
        return iter(list(self._groups))

    def reserve(self, claim: str, shape: SlotShape, selectors: Sequence[Mapping[str, str]]) -> Group:
        """Request a group with a bundle for each worker, on a node with the labels of its selector."""
        made = placement_group(
            [capacity.demand(shape) for _ in selectors],
            strategy=shape.placement,
            name=f"powertrain-{self._run}-{secrets.token_hex(4)}",
            bundle_label_selector=[dict(one) for one in selectors] if any(selectors) else None,
        )
        group = Group(made, claim, shape)
        with self._changed:
            self._groups.append(group)
        return group

    def remove(self, group: Group) -> None:
        """Give a group back to Ray."""
        with self._changed:
            self._groups.remove(group)
        self._ray.remove(group.group)

    def remove_all(self) -> None:
        """Give all groups back. After the thread that talks to Ray has stopped."""
        for group in self._groups:
            self._ray.remove(group.group)
        self._groups.clear()

    def vacate(self, group: Group, index: int) -> None:
        """Keep a bundle for the next claim; remove the group when no worker uses it."""
        group.used.discard(index)
        group.vacant.append(index)
        if not group.used:
            self.remove(group)

    def count_vacant(self, shape: SlotShape) -> int:
        """Return how many bundles of this shape have no worker. Any thread."""
        with self._changed:
            return sum(len(group.vacant) for group in self._groups if group.shape == shape)

    def unused_spares(self) -> list[Group]:
        """Return the groups that were reserved ahead of time and have no worker."""
        return [group for group in self._groups if group.is_spare and not group.used]

    def usable(self, shape: SlotShape) -> Iterator[tuple[Group, int]]:
        """Yield vacant bundles that a worker may have.

        Ray starts nothing in those on a node that is drained, and a node that was given up may still be there for Ray.
        """
        candidates = [
            (group, index) for group in self._groups if group.shape == shape for index in group.vacant
        ]
        leaving = {found.id for found in client.nodes() if found.draining} if candidates else set()
        for group, index in candidates:
            node = node_of(group, index)  # none while Ray places it anew
            if node not in leaving and (not node or self._agents.may_count_on(node)):
                yield group, index

    def are_placed(self, claim: str) -> bool | None:
        """Return whether Ray has placed all groups of a claim; None where it has none."""
        groups = [group for group in self._groups if group.claim == claim]
        if not groups:
            return None
        return all(placement_group_table(g.group)["state"] == "CREATED" for g in groups)


def node_of(group: Group, index: int) -> str:
    """Return the id of the node that a bundle lies on; empty while Ray places it."""
    return str(placement_group_table(group.group).get("bundles_to_node_id", {}).get(index) or "")


def is_removed(group: Group) -> bool:
    """Return whether another process has removed the group."""
    return bool(placement_group_table(group.group).get("state", "REMOVED") == "REMOVED")
