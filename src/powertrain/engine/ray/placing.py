"""Placement of a run's workers: requests to Ray, their grants, and the resulting slots.

A claim for a gang is one placement group with a bundle for each worker, so that it gets all or nothing; of other claims
each worker has an actor, which holds its resources, and they are granted one by one. Bundles get such an actor too
where it is needed to report the GPUs that Ray chose or to feed the worker.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import ray
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from powertrain.engine.base import ClaimRefused, EventSink, Granted, Slot, SlotShape, Waiting
from powertrain.engine.ray import capacity, client
from powertrain.engine.ray.actors import SlotLocation, slot_actor
from powertrain.engine.ray.agents import Agents
from powertrain.engine.ray.claims import NODE_LABEL, Group, RayClaim, SlotHolder, numbers
from powertrain.engine.ray.client import RayThread, in_a_line
from powertrain.engine.ray.groups import PlacementGroups, is_removed, node_of
from powertrain.engine.ray.options import RayOptions
from powertrain.engine.ray.trainer_resources import TrainerResources

#: Seconds in which an actor that has room is there.
_START_TIMEOUT_S = 5.0
#: The number of spare bundles that a run requests ahead of time: each is polled once a second. And the seconds for
#: which it keeps unused ones, and afterwards requests none.
_MOST_SPARES, _SPARE_TIMEOUT_S = 32, 300.0


class Placing:
    """Claims and slots of one run. Used on the thread that calls Ray, unless noted otherwise."""

    def __init__(
        self,
        asking: RayThread,
        changed: threading.Condition,
        agents: Agents,
        options: RayOptions,
        emit: EventSink,
        lose: Callable[[Slot, str], None],
    ) -> None:
        """Create the placement. ``changed`` guards requests and holdings; ``lose`` is called for a slot that lost its
        resources."""
        self._ray, self._changed, self._agents, self._options = asking, changed, agents, options
        self._emit, self._lose = emit, lose
        #: The claims that are not met yet.
        self._claims: dict[str, RayClaim] = {}
        self._withdrawn: set[str] = set()
        self._holders: dict[str, list[SlotHolder]] = {}
        self._slots: dict[str, SlotHolder] = {}
        self._groups = PlacementGroups(asking, changed, agents, options.run)
        self._last_reason: dict[str, str] = {}
        #: The trainer's own resources, and the claims that come after it.
        self._trainer = TrainerResources(asking, options, self._on_trainer_held, self.refuse)
        self._after_trainer: list[RayClaim] = []
        #: No spares before this time: the run did not use the last ones.
        self._spares_from = 0.0
        self._seen: Sequence[capacity.Node] = ()

    # -- asking

    def request(self, count: int, shape: SlotShape) -> RayClaim:
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
        """Return the number of vacant bundles of this shape. Any thread."""
        return self._groups.count_vacant(shape)

    def refuse(self, reason: str) -> None:
        """Refuse all waiting claims. Any thread."""
        with self._changed:
            claims = list(self._claims)
        for id in claims:
            self._emit(ClaimRefused(id, reason))

    def report_waiting(self, what: str) -> None:
        """Report the reason for the wait to all waiting claims. Any thread."""
        with self._changed:
            claims = [(id, sum(h.slot is not None for h in self._holders[id])) for id in self._claims]
        for id, granted in claims:
            self._emit(Waiting(id, granted, what))

    def is_placing(self) -> bool:
        """Return True while some request is not placed. Any thread."""
        with self._changed:
            return any(holder.where is None for id in self._claims for holder in self._holders[id])

    # -- spares

    def reserve_spares(self, shape: SlotShape, wanted: int) -> None:
        """Request a spare bundle, in a group of its own, for every worker that is missing to ``wanted``.

        An autoscaler adds nodes for requests that find no room. A granted bundle is kept vacant for the next claim, so
        that the room is still there when the run reaches a point where it can grow; but not for ever, since others may
        need it. While a claim waits there are no spares: they could take the room that it needs. Workers with a joint
        placement constraint are not requested one by one.
        """
        spares, now = self._groups.unused_spares(), time.monotonic()
        if any(group.vacant and now - group.granted > _SPARE_TIMEOUT_S for group in spares):
            self._spares_from = now + _SPARE_TIMEOUT_S
        can = not self._claims and now >= self._spares_from
        can = can and shape.placement in ("PACK", "SPREAD") and len(shape.labels) <= 1
        can = can and bool(capacity.demand(shape))
        missing = min(_MOST_SPARES, max(0, wanted - len(self._live(shape)))) if can else 0
        # Those without room go first: a vacant bundle is as good as a worker.
        for group in sorted(spares, key=lambda group: len(group.vacant))[: max(0, len(spares) - missing)]:
            self._groups.remove(group)
        for _ in range(missing - len(spares)):
            group = self._groups.reserve("", shape, [self._selector(shape, 0)])
            self._ray.then(group.group.ready(), partial(self._on_spare_granted, group))

    def _on_spare_granted(self, group: Group, _: Any, error: BaseException | None) -> None:
        if error is None and group in self._groups:
            group.granted, group.node = time.monotonic(), node_of(group, 0)
            with self._changed:
                group.vacant.append(0)

    # -- placing

    def _place(self, claim: RayClaim) -> None:
        """Request the holders of a claim from Ray."""
        if claim.id in self._withdrawn or self._ray.closing:
            return
        if not self._trainer.reserve():
            self._after_trainer.append(claim)
            return
        reused = list(itertools.islice(self._groups.usable(claim.shape), claim.count))
        for number, (group, index) in enumerate(reused):
            group.vacant.remove(index)
            self._hold(claim, number, group, index)
        rest = range(len(reused), claim.count)
        if not rest:
            return
        for spare in self._groups.unused_spares():
            self._groups.remove(spare)
        if claim.shape.gang and capacity.demand(claim.shape):
            self._place_together(claim, rest)
        else:
            for number in rest:
                self._hold(claim, number, None, -1)

    def _place_together(self, claim: RayClaim, workers: range) -> None:
        selectors = [self._selector(claim.shape, number) for number in workers]
        group = self._groups.reserve(claim.id, claim.shape, selectors)

        def ready(_: Any, error: BaseException | None) -> None:
            if group not in self._groups or self._ray.closing:
                return
            if error is not None:
                self._emit(ClaimRefused(claim.id, f"Ray cannot place the workers: {in_a_line(error)}"))
                return
            if claim.id not in self._withdrawn:
                nodes_of_bundles = placement_group_table(group.group)["bundles_to_node_id"]
                self._agents.start(nodes_of_bundles.values())
                for index, number in enumerate(workers):
                    self._take_bundle(claim, number, group, index, nodes_of_bundles[index])
                self.grant()

        self._ray.then(group.group.ready(), ready)

    def _take_bundle(self, claim: RayClaim, number: int, group: Group, index: int, node: str) -> None:
        """Take one worker's resources in a placed bundle: without an actor where it would have no task, since its
        process would start just when the node is busiest."""
        with self._changed:
            found = self._agents.on(node)
        if claim.shape.gpus or self._options.streams or found is None:
            self._hold(claim, number, group, index)
            return
        group.used.add(index)
        where = SlotLocation(node, found.address, found.host, gpus=())
        with self._changed:
            self._holders[claim.id].append(
                SlotHolder(claim.id, claim.shape, number, index, None, group, where=where)
            )

    def _selector(self, shape: SlotShape, number: int) -> dict[str, str]:
        """Return the required labels for the node of this worker, which exclude refused nodes."""
        refused = self._agents.refused()
        others = {NODE_LABEL: f"!in({','.join(refused)})"} if refused else {}
        return {**others, **capacity.selector(shape, number)}

    def _on_trainer_held(self) -> None:
        claims, self._after_trainer = self._after_trainer, []
        for claim in claims:
            self._ray.soon(partial(self._place, claim))

    def _hold(self, claim: RayClaim, number: int, group: Group | None, index: int, tries: int = 1) -> None:
        """Start the actor that holds one worker's resources."""
        options: dict[str, Any] = {}
        if group is not None:
            group.used.add(index)
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                group.group, placement_group_bundle_index=index
            )
        else:
            if selector := self._selector(claim.shape, number):
                options["label_selector"] = selector
            if claim.shape.placement == "SPREAD":
                options["scheduling_strategy"] = "SPREAD"
        actor = slot_actor(self._options.runtime_env, capacity.demand(claim.shape), **options).remote()
        holder = SlotHolder(claim.id, claim.shape, number, index, actor, group, tries)
        with self._changed:
            self._holders[claim.id].append(holder)
        self._ray.then(actor.where.remote(), partial(self._found, holder))

    def _found(self, holder: SlotHolder, where: SlotLocation | None, error: BaseException | None) -> None:
        """Handle the result of an actor's placement."""
        if holder.gone or self._ray.closing:
            return
        if error is not None or where is None:
            self._try_again(holder, error)
            return
        holder.where = where
        self._ray.then(holder.actor.hold.remote(), partial(self._ended, holder))
        self._agents.start([where.node])
        self.grant()

    def _try_again(self, holder: SlotHolder, error: BaseException | None) -> None:
        """Retry the placement of an actor whose node is gone, or refuse the claim where it can never start."""
        with self._changed:
            claim = self._claims.get(holder.claim)
        if claim is None:
            self.forget(holder)
            return
        with self._changed:
            holder.gone = True
            self._holders[claim.id].remove(holder)
        self._ray.kill(holder.actor)
        if isinstance(error, ray.exceptions.RuntimeEnvSetupError):
            reason = "Ray cannot set up ScalingConfig(engine_options={'runtime_env': ...})"
            self._emit(ClaimRefused(claim.id, f"{reason}: {in_a_line(error)}"))
        elif holder.tries >= client.TRIES:
            why = in_a_line(error) if error is not None else "its node went away each time"
            reason = f"Ray has tried {holder.tries} times to start a process that holds a worker's resources: {why}"
            self._emit(ClaimRefused(claim.id, reason))
        else:
            self._ray.at_next_look(partial(self._hold_again, claim, holder))

    def _hold_again(self, claim: RayClaim, ended: SlotHolder) -> None:
        """Start another actor in place of one that has ended, unless its claim was withdrawn."""
        if claim.id not in self._withdrawn:
            self._hold(claim, ended.number, ended.group, ended.index, ended.tries + 1)
        elif ended.group is not None:
            self._groups.vacate(ended.group, ended.index)

    # -- granting

    def grant(self) -> None:
        """Grant slots whose resources are held and whose node's agent is ready: for a gang, when all are."""
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
            self._emit(Granted(claim.id, slots))

    def _is_ready(self, holder: SlotHolder) -> bool:
        return not holder.gone and holder.where is not None and self._agents.is_ready(holder.where.node)

    def _slot_of(self, holder: SlotHolder) -> Slot:
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

    def holder_of(self, slot: Slot) -> SlotHolder | None:
        """Return the holder of a slot that the run has. Any thread, with the guard held."""
        return self._slots.get(slot.id)

    def slots(self) -> list[Slot]:
        """Return all slots of the run. Any thread, with the guard held."""
        return [holder.slot for holder in self._slots.values() if holder.slot is not None]

    def slots_on(self, node: str) -> list[Slot]:
        """Return the slots that the run has on a node. Any thread, with the guard held."""
        return [slot for slot in self.slots() if slot.node_id == node]

    def held_by_node(self, shape: SlotShape) -> Counter[str]:
        """Return the number of workers of this shape on each node: slots, slots in placement, and granted spares."""
        there = {found.id for found in self._seen if not found.draining}
        with self._changed:
            spares = [
                group.node
                for group in self._groups.unused_spares()
                if group.shape == shape and group.vacant and group.node in there
            ]
        return Counter(spares) + Counter(
            holder.where.node for holder in self._live(shape) if holder.where is not None
        )

    def _live(self, shape: SlotShape) -> list[SlotHolder]:
        with self._changed:
            holders = [holder for holders in self._holders.values() for holder in holders]
        return [holder for holder in holders if holder.shape == shape and not holder.gone]

    # -- giving back and losing

    def take_slot(self, slot: Slot) -> SlotHolder | None:
        """Remove a slot from the run and return its holder. Any thread, with the guard held."""
        return self._slots.pop(slot.id, None)

    def forget(self, holder: SlotHolder) -> None:
        """Release the resources of a holder; those of a bundle with its whole group."""
        with self._changed:
            if holder.gone:
                return
            holder.gone = True
            holders = self._holders.get(holder.claim, [])
            if holder in holders:
                holders.remove(holder)
        self._ray.kill(holder.actor)
        if holder.group is not None:
            self._groups.vacate(holder.group, holder.index)

    def _drop_pending(self, claim: str) -> None:
        """Cancel the pending requests of a withdrawn claim."""
        with self._changed:
            pending = [holder for holder in self._holders.get(claim, []) if holder.slot is None]
        for holder in pending:
            self.forget(holder)
        for group in [g for g in self._groups if g.claim == claim and not g.used and not g.vacant]:
            self._groups.remove(group)

    def _ended(self, holder: SlotHolder, _: None, error: BaseException | None) -> None:
        """Handle the end of an actor, which loses its resources."""
        if holder.gone or self._ray.closing:
            return
        if holder.slot is None:
            self._try_again(holder, error)
        else:
            # Where its whole node is gone, the end of the node's agent reports it with a better reason.
            self._ray.at_next_look(partial(self._lost_alone, holder))

    def _lost_alone(self, holder: SlotHolder) -> None:
        if holder.slot is not None and not holder.gone:
            self._lose(holder.slot, f"the actor that held its resources on {holder.slot.host} ended")

    def lost_node(self, node: str) -> None:
        """Request the slots in placement on a lost node again."""
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

    def look(self, seen: Sequence[capacity.Node]) -> None:
        """Report changes since the last poll: groups removed by others, and missing resources."""
        self._seen = seen
        for group in self._groups:
            if is_removed(group):
                self._group_removed(group)
            elif group.is_spare and group.vacant:
                group.node = node_of(group, 0)
        for claim in list(self._claims.values()):
            self._report_missing(claim, seen)

    def _group_removed(self, group: Group) -> None:
        """Handle a group that was removed from outside."""
        with self._changed:
            slots = [slot for slot in self.slots() if self._slots[slot.id].group is group]
        for slot in slots:
            self._lose(slot, f"the placement group of its resources on {slot.host} was removed")
        if not slots and group in self._groups:
            self._groups.remove(group)
            if group.claim in self._claims:
                self._emit(
                    ClaimRefused(group.claim, "the placement group that the run waited for was removed")
                )

    def _report_missing(self, claim: RayClaim, seen: Sequence[capacity.Node]) -> None:
        with self._changed:
            if claim.id in self._withdrawn:
                return
            granted = sum(holder.slot is not None for holder in self._holders[claim.id])
            held = sum(holder.where is not None for holder in self._holders[claim.id])
            missing = claim.count - max(held, granted)
        if claim in self._after_trainer:
            reason = f"waiting for room for trainer_resources={self._trainer.needs!r}, before the workers"
            self._report_reason(claim, granted, reason)
            return
        if (
            missing <= 0
            or self._is_being_placed(claim)
            or capacity.fitting(seen, claim.shape, missing) >= missing
        ):
            return
        self._report_reason(
            claim, granted, f"waiting for room: {capacity.why_waiting(seen, claim.shape, missing)}"
        )

    def _report_reason(self, claim: RayClaim, granted: int, reason: str) -> None:
        if self._last_reason.get(claim.id) != reason:
            self._last_reason[claim.id] = reason
            self._emit(Waiting(claim.id, granted, reason))

    def _is_being_placed(self, claim: RayClaim) -> bool:
        """Return True when Ray has found the room, or may have, although the actors are not there yet."""
        are_placed = self._groups.are_placed(claim.id)
        if are_placed is not None:
            return are_placed
        # For a single actor Ray does not report whether it waits for room or is being started.
        return time.monotonic() - claim.requested_at < _START_TIMEOUT_S

    # -- the end

    def leave(self) -> None:
        """Remove everything from the cluster. Called after the Ray thread has stopped."""
        for holder in [holder for holders in self._holders.values() for holder in holders]:
            self._ray.kill(holder.actor)
        self._trainer.release()
        self._groups.remove_all()
