"""Where a run's workers lie: what Ray was asked for, what it has given, and which slots that makes.

A claim for a gang is one placement group with a bundle for each worker, so that it gets all or nothing; of other claims
each worker has an actor, which holds what the worker needs, and they come one by one. Bundles get such an actor too
where it has something to tell (the GPUs that Ray chose) or to do (feeding the worker).
"""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from powertrain.engine import cluster, ray_client
from powertrain.engine.base import EventSink, Granted, Refused, Slot, SlotShape, Waiting
from powertrain.engine.ray_actors import SlotActor, Whereabouts
from powertrain.engine.ray_agents import Agents
from powertrain.engine.ray_client import RayThread
from powertrain.engine.ray_options import RayOptions

#: Seconds in which an actor that has room is there.
_STARTS_WITHIN = 5.0
#: How many workers a run asks room for ahead of time: each is looked after once a second.
_MOST_WISHES = 32
#: For claims and slots of all engines of this process.
numbers = itertools.count(1)


@dataclass(frozen=True)
class RayClaim:
    id: str
    count: int
    shape: SlotShape
    asked: float


@dataclass(eq=False)
class Group:
    """A placement group, and its bundles that no slot uses: Ray places those of a lost node anew by itself."""

    group: PlacementGroup
    #: The claim that it was made for, "" for a wish; and what each bundle has.
    claim: str
    shape: SlotShape
    used: set[int] = field(default_factory=set)
    vacant: list[int] = field(default_factory=list)

    @property
    def is_wish(self) -> bool:
        return not self.claim


@dataclass(eq=False)
class Holder:
    """What holds the resources of one slot: a bundle of a group, an actor, or an actor in a bundle."""

    claim: str
    shape: SlotShape
    #: Which worker of the claim it is for, and which bundle of the group.
    number: int
    index: int
    #: None where the bundle is enough.
    actor: Any
    group: Group | None
    tries: int = 1
    where: Whereabouts | None = None
    slot: Slot | None = None
    #: True once its slot is given back or lost.
    gone: bool = False


class Placing:
    """Claims and slots of one run. The thread that talks to Ray, unless said otherwise."""

    def __init__(
        self,
        asking: RayThread,
        changed: threading.Condition,
        agents: Agents,
        options: RayOptions,
        tell: EventSink,
        lose: Callable[[Slot, str], None],
    ) -> None:
        """``changed`` guards what is asked for and held; ``lose`` is called for a slot whose resources are gone."""
        self._ray, self._changed, self._agents, self._options = asking, changed, agents, options
        self._tell, self._lose = tell, lose
        #: Those that are not met yet.
        self._claims: dict[str, RayClaim] = {}
        self._withdrawn: set[str] = set()
        self._holders: dict[str, list[Holder]] = {}
        self._slots: dict[str, Holder] = {}
        self._groups: list[Group] = []
        self._told_waiting: dict[str, str] = {}
        self._trainer_holder: Any = None

    # -- asking

    def ask(self, count: int, shape: SlotShape) -> RayClaim:
        """Any thread."""
        claim = RayClaim(f"ray-{next(numbers)}", count, shape, time.monotonic())
        with self._changed:
            self._claims[claim.id] = claim
            self._holders[claim.id] = []
        self._ray.soon(partial(self._place, claim))
        return claim

    def withdraw(self, claim: str) -> None:
        """Any thread."""
        with self._changed:
            if self._claims.pop(claim, None) is None:
                return
            self._withdrawn.add(claim)
        self._ray.soon(partial(self._drop_pending, claim))

    def vacant(self, shape: SlotShape) -> int:
        """How many bundles of this shape have no worker and wait for one. Any thread."""
        with self._changed:
            return sum(len(group.vacant) for group in self._groups if group.shape == shape)

    def refuse(self, reason: str) -> None:
        """Tell that what is still waited for will never come."""
        for id in list(self._claims):
            self._tell(Refused(id, reason))

    # -- wishing

    def wish(self, shape: SlotShape, wanted: int) -> None:
        """Have a bundle asked for, each in a group of its own, for every worker that is missing to ``wanted``.

        An autoscaler adds nodes for what is asked for and finds no room. A bundle that gets room is kept vacant for the
        next claim, so that the room is still there when the run has come to a point where it can grow. While a claim
        waits there are no wishes: they could get the room that it needs. Workers that must lie in a certain way to each
        other are not wished for one by one.
        """
        wishes = self._wishes()
        can = not self._claims and shape.placement in ("PACK", "SPREAD")
        can = can and len(shape.labels) <= 1 and bool(cluster.demand(shape))
        missing = min(_MOST_WISHES, max(0, wanted - len(self._live(shape)))) if can else 0
        # Those without room go first: a vacant bundle is as good as a worker.
        for group in sorted(wishes, key=lambda group: len(group.vacant))[: max(0, len(wishes) - missing)]:
            self._remove(group)
        for _ in range(missing - len(wishes)):
            group = self._reserve("", shape, range(1))
            self._ray.then(group.group.ready(), partial(self._wish_granted, group))

    def _wishes(self) -> list[Group]:
        return [group for group in self._groups if group.is_wish and not group.used]

    def _wish_granted(self, group: Group, _: Any, error: BaseException | None) -> None:
        if error is None and group in self._groups:
            with self._changed:
                group.vacant.append(0)

    # -- placing

    def _place(self, claim: RayClaim) -> None:
        """Ask Ray for the holders of a claim."""
        if claim.id in self._withdrawn or self._ray.closing:
            return
        free = itertools.chain.from_iterable(
            ((group, index) for index in group.vacant) for group in self._groups if group.shape == claim.shape
        )
        reused = list(itertools.islice(free, claim.count))
        for number, (group, index) in enumerate(reused):
            group.vacant.remove(index)
            self._hold(claim, number, group, index)
        rest = range(len(reused), claim.count)
        if not rest:
            return
        for wish in self._wishes():
            self._remove(wish)
        self._reserve_for_trainer()
        if claim.shape.gang and cluster.demand(claim.shape):
            self._place_together(claim, rest)
        else:
            for number in rest:
                self._hold(claim, number, None, -1)

    def _place_together(self, claim: RayClaim, workers: range) -> None:
        group = self._reserve(claim.id, claim.shape, workers)

        def ready(_: Any, error: BaseException | None) -> None:
            if error is None and group in self._groups and not self._ray.closing:
                nodes_of_bundles = placement_group_table(group.group)["bundles_to_node_id"]
                self._agents.start(nodes_of_bundles.values())
                for index, number in enumerate(workers):
                    self._take_bundle(claim, number, group, index, nodes_of_bundles[index])
                self.grant()

        self._ray.then(group.group.ready(), ready)

    def _reserve(self, claim: str, shape: SlotShape, workers: range) -> Group:
        """Ask for a placement group with a bundle for each of these workers."""
        selectors = [cluster.selector(shape, number) for number in workers]
        made = placement_group(
            [cluster.demand(shape) for _ in workers],
            strategy=shape.placement,
            name=f"powertrain-{self._options.run}-{secrets.token_hex(4)}",
            bundle_label_selector=selectors if any(selectors) else None,
        )
        group = Group(made, claim, shape)
        with self._changed:
            self._groups.append(group)
        return group

    def _take_bundle(self, claim: RayClaim, number: int, group: Group, index: int, node: str) -> None:
        """Have one worker's resources in a bundle that Ray has placed: without an actor where nothing would be asked of
        it, since its process would start just when the node has most to do."""
        with self._changed:
            found = self._agents.on(node)
        if claim.shape.gpus or self._options.streams or found is None:
            self._hold(claim, number, group, index)
            return
        group.used.add(index)
        where = Whereabouts(node, found.address, found.host, gpus=())
        with self._changed:
            self._holders[claim.id].append(
                Holder(claim.id, claim.shape, number, index, None, group, where=where)
            )

    def _reserve_for_trainer(self) -> None:
        amounts = {name: amount for name, amount in self._options.trainer_resources.items() if amount}
        if amounts and self._trainer_holder is None:
            self._trainer_holder = self._actor(amounts).remote()

    def _actor(self, needs: Mapping[str, float], **options: Any) -> Any:
        custom = {name: amount for name, amount in needs.items() if name not in ("CPU", "GPU", "memory")}
        return ray.remote(SlotActor).options(
            num_cpus=needs.get("CPU", 0),
            num_gpus=needs.get("GPU", 0),
            memory=int(needs["memory"]) if needs.get("memory") else None,
            resources=custom,
            runtime_env=dict(self._options.runtime_env) or None,
            max_concurrency=100,
            **options,
        )

    def _hold(self, claim: RayClaim, number: int, group: Group | None, index: int, tries: int = 1) -> None:
        """Start the actor that holds one worker's resources."""
        options: dict[str, Any] = {}
        if group is not None:
            group.used.add(index)
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                group.group, placement_group_bundle_index=index
            )
        elif selector := cluster.selector(claim.shape, number):
            options["label_selector"] = selector
        elif claim.shape.placement == "SPREAD":
            options["scheduling_strategy"] = "SPREAD"
        actor = self._actor(cluster.demand(claim.shape), **options).remote()
        holder = Holder(claim.id, claim.shape, number, index, actor, group, tries)
        with self._changed:
            self._holders[claim.id].append(holder)
        self._ray.then(actor.where.remote(), partial(self._found, holder))

    def _found(self, holder: Holder, where: Whereabouts | None, error: BaseException | None) -> None:
        """An actor has its resources, or never will."""
        if holder.gone or self._ray.closing:
            return
        if error is not None or where is None:
            self._try_again(holder, error)
            return
        holder.where = where
        self._ray.then(holder.actor.hold.remote(), partial(self._ended, holder))
        self._agents.start([where.node])
        self.grant()

    def _try_again(self, holder: Holder, error: BaseException | None) -> None:
        """Its node went away before the actor was there; or it cannot be started at all, and the claim never met."""
        with self._changed:
            claim = self._claims.get(holder.claim)
        if claim is None:
            self.forget(holder)
            return
        with self._changed:
            holder.gone = True
            self._holders[claim.id].remove(holder)
        ray_client.kill(holder.actor)
        if holder.tries >= ray_client.TRIES or isinstance(error, ray.exceptions.RuntimeEnvSetupError):
            reason = f"Ray cannot start what a worker's resources are held by: {error}"
            self._tell(Refused(claim.id, reason))
        else:
            self._ray.at_next_look(partial(self._hold_again, claim, holder))

    def _hold_again(self, claim: RayClaim, ended: Holder) -> None:
        """Start another actor in place of one that has ended, unless nobody waits for it any more."""
        if claim.id not in self._withdrawn:
            self._hold(claim, ended.number, ended.group, ended.index, ended.tries + 1)
        elif ended.group is not None:
            self._vacate(ended.group, ended.index)

    # -- granting

    def grant(self) -> None:
        """Tell of slots whose resources are held and whose node's agent is there: of a gang, when all are."""
        for claim in list(self._claims.values()):
            with self._changed:
                if claim.id in self._withdrawn:
                    continue
                holders = self._holders[claim.id]
                ready = [holder for holder in holders if holder.slot is None and self._is_ready(holder)]
                granted = sum(holder.slot is not None for holder in holders)
                if not ready or (claim.shape.gang and len(ready) + granted < claim.count):
                    continue
                slots = tuple(self._slot_of(holder) for holder in ready)
                if len(slots) + granted == claim.count:
                    del self._claims[claim.id]
            self._tell(Granted(claim.id, slots))

    def _is_ready(self, holder: Holder) -> bool:
        return not holder.gone and holder.where is not None and self._agents.is_ready(holder.where.node)

    def _slot_of(self, holder: Holder) -> Slot:
        where = holder.where
        assert where is not None
        slot = Slot(
            id=f"{holder.claim}/{next(numbers)}",
            host=where.host,
            address=where.address,
            local=where.node == ray.get_runtime_context().get_node_id(),
            gpus=where.gpus,
            node=where.node,
        )
        holder.slot = slot
        self._slots[slot.id] = holder
        return slot

    def holder_of(self, slot: Slot) -> Holder | None:
        """What holds the slot, as long as the run has it. Any thread, with the guard held."""
        return self._slots.get(slot.id)

    def slots_on(self, node: str) -> list[Slot]:
        """The slots that the run has on a node. Any thread, with the guard held."""
        return [h.slot for h in self._slots.values() if h.slot is not None and h.slot.node_id == node]

    def held_by_node(self, shape: SlotShape) -> Counter[str]:
        """For how many workers of this shape there is something on each node: a slot, what is on the way to one, or a
        wish that came true."""
        wishes = [group for group in self._groups if group.is_wish and group.vacant and group.shape == shape]
        tables = [placement_group_table(group.group)["bundles_to_node_id"] for group in wishes]
        return Counter(node for table in tables if (node := table.get(0))) + Counter(
            holder.where.node for holder in self._live(shape) if holder.where is not None
        )

    def _live(self, shape: SlotShape) -> list[Holder]:
        with self._changed:
            holders = [holder for holders in self._holders.values() for holder in holders]
        return [holder for holder in holders if holder.shape == shape and not holder.gone]

    # -- giving back and losing

    def take_slot(self, slot: Slot) -> Holder | None:
        """The run has the slot no more; what held it is to be forgotten. Any thread, with the guard held."""
        return self._slots.pop(slot.id, None)

    def forget(self, holder: Holder) -> None:
        """Its resources are free again; those of a bundle when the whole group is."""
        with self._changed:
            if holder.gone:
                return
            holder.gone = True
            holders = self._holders.get(holder.claim, [])
            if holder in holders:
                holders.remove(holder)
        ray_client.kill(holder.actor)
        if holder.group is not None:
            self._vacate(holder.group, holder.index)

    def _vacate(self, group: Group, index: int) -> None:
        group.used.discard(index)
        group.vacant.append(index)
        if not group.used:
            self._remove(group)

    def _remove(self, group: Group) -> None:
        with self._changed:
            self._groups.remove(group)
        remove_placement_group(group.group)

    def _drop_pending(self, claim: str) -> None:
        """What a withdrawn claim still waits for."""
        with self._changed:
            pending = [holder for holder in self._holders.get(claim, []) if holder.slot is None]
        for holder in pending:
            self.forget(holder)
        for group in [g for g in self._groups if g.claim == claim and not g.used and not g.vacant]:
            self._remove(group)

    def _ended(self, holder: Holder, _: None, error: BaseException | None) -> None:
        """An actor that holds resources is gone, and with it the right to them."""
        if holder.gone or self._ray.closing:
            return
        if holder.slot is None:
            self._try_again(holder, error)
        else:
            # Where its whole node is gone, the end of the node's agent says so, and says it better.
            self._ray.at_next_look(partial(self._lost_alone, holder))

    def _lost_alone(self, holder: Holder) -> None:
        if holder.slot is not None and not holder.gone:
            self._lose(holder.slot, f"what held its resources on {holder.slot.host} was ended")

    def lost_node(self, node: str) -> None:
        """What was on the way to a slot on a node that is lost is asked for again."""
        with self._changed:
            pending = [
                holder
                for holders in self._holders.values()
                for holder in holders
                if holder.slot is None and holder.where is not None and holder.where.node == node
            ]
        for holder in pending:
            self._try_again(holder, None)

    # -- looking

    def look(self, seen: Sequence[cluster.Node]) -> None:
        """Tell what has changed since the last look: groups that somebody has removed, and what is missing."""
        for group in list(self._groups):
            if placement_group_table(group.group).get("state", "REMOVED") == "REMOVED":
                with self._changed:
                    slots = [h.slot for h in self._slots.values() if h.group is group and h.slot is not None]
                for slot in slots:
                    self._lose(slot, f"the placement group of its resources on {slot.host} was removed")
                if group.is_wish and group in self._groups:
                    self._remove(group)
        for claim in list(self._claims.values()):
            self._tell_missing(claim, seen)

    def _tell_missing(self, claim: RayClaim, seen: Sequence[cluster.Node]) -> None:
        with self._changed:
            if claim.id in self._withdrawn:
                return
            granted = sum(holder.slot is not None for holder in self._holders[claim.id])
            held = sum(holder.where is not None for holder in self._holders[claim.id])
            missing = claim.count - max(held, granted)
        if (
            missing <= 0
            or self._is_being_placed(claim)
            or cluster.fitting(seen, claim.shape, missing) >= missing
        ):
            return
        reason = f"waiting for room: {cluster.why_waiting(seen, claim.shape, missing)}"
        if self._told_waiting.get(claim.id) != reason:
            self._told_waiting[claim.id] = reason
            self._tell(Waiting(claim.id, granted, reason))

    def _is_being_placed(self, claim: RayClaim) -> bool:
        """True when Ray has found the room, or may have, although the actors are not there yet."""
        groups = [group for group in self._groups if group.claim == claim.id]
        if groups:
            return all(placement_group_table(g.group)["state"] == "CREATED" for g in groups)
        # Of a single actor Ray does not tell whether it waits for room or is being started.
        return time.monotonic() - claim.asked < _STARTS_WITHIN

    # -- the end

    def leave(self) -> None:
        """Nothing of it stays in the cluster. After the thread that talks to Ray has stopped."""
        for holder in [holder for holders in self._holders.values() for holder in holders]:
            ray_client.kill(holder.actor)
        ray_client.kill(self._trainer_holder)
        for group in self._groups:
            remove_placement_group(group.group)
        self._groups.clear()
