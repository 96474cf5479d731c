"""The Ray engine: Ray finds the resources, and Powertrain does the rest.

:mod:`powertrain.engine.ray.placing` manages the resources held in Ray. On each node that has a slot an agent
(:mod:`powertrain.engine.ray.agents`) starts the processes; its messages use the run's own wire, never Ray. So a network
failure of seconds loses nothing, and a longer one times out on both sides: the node ends its processes, and then this
side declares it lost.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ray

from powertrain.engine.base import (
    Capacity,
    Claim,
    Drain,
    EngineEvent,
    EventSink,
    Exited,
    Inspection,
    OutputSink,
    ProcessSpec,
    Slot,
    SlotLost,
    SlotShape,
    Started,
)
from powertrain.engine.output import append
from powertrain.engine.ray import capacity, client
from powertrain.engine.ray.actors import own_address
from powertrain.engine.ray.agents import Agent, Agents, AgentSinks
from powertrain.engine.ray.autoscaler import autoscales
from powertrain.engine.ray.claims import RayClaim, numbers
from powertrain.engine.ray.client import RayThread
from powertrain.engine.ray.options import RayOptions
from powertrain.engine.ray.placing import Placing
from powertrain.engine.ray.streams import FedProcess, Streams
from powertrain.errors import EngineError, ResourceError
from powertrain.storage import Storage
from powertrain.storage.files.descriptors import open_log
from powertrain.text.loggers import module_logger
from powertrain.wire.envelope import FromWorker
from powertrain.wire.from_node import ProcessEnded, ProcessOutput, ProcessSeen, ProcessStarted
from powertrain.wire.hub import Hub
from powertrain.wire.to_node import LookAt, SignalProcess, StartProcess

_logger = module_logger(__name__)
#: Seconds between looks at a cluster that has not noticed yet what was released.
_RELEASE_POLL_INTERVAL_S = 0.02
#: Seconds for a look at a process of another node.
_INSPECT_TIMEOUT_S = 6.0
#: The claim under which processes beside the slots are kept.
_ATTENDANTS = "attendants"


@dataclass(eq=False)
class _Process:
    slot: Slot
    agent: Agent
    log: int
    pid: int = 0
    #: True while it waits for its feeds, and its node has not received it.
    waits: bool = False


class RayEngine:
    """Slots on a Ray cluster that this process is connected to."""

    name = "ray"
    restarts = True
    replaces = True
    owns_processes = True
    shares_driver_process = False
    forks_driver = False
    rank_in_driver = None

    def __init__(self, options: RayOptions, storage: Storage | None = None) -> None:
        """Create the engine. ``storage`` is the run's: every node must prove that it sees the same."""
        self._events: EventSink = lambda _: None
        self._deliver: OutputSink = lambda _slot, _data: None
        self._hub: Hub | None = None
        #: Guards all that follows. Told when a process or node ends, and when a look is answered.
        self._changed = threading.Condition()
        self._ray = RayThread(self._look_at_cluster, self._watch_nodes, self._refuse, self._cluster_left)
        sinks = AgentSinks(
            on_message=self._on_message,
            ready=self._node_ready,
            lost=self._lose_node,
            refused=self._refuse,
            slow=self._node_slow,
        )
        self._agents = Agents(self._ray, self._changed, options, storage, sinks)
        self._placing = Placing(self._ray, self._changed, self._agents, options, self._emit, self._lose_slot)
        self._streams = Streams(options.streams)
        self._processes: dict[str, _Process] = {}
        self._by_slot: dict[str, str] = {}
        self._attendants: dict[str, Agent] = {}
        #: Slots that are given back when their processes have ended.
        self._leaving: set[str] = set()
        self._looks: dict[int, ProcessSeen | None] = {}
        self._watched: SlotShape | None = None
        self._wanted = 0
        self._sent_capacity = -1
        #: When Ray has noticed what this process had released before the capacity was watched, at the latest.
        self._settled_at = 0.0
        #: The cluster at the last look: set by the thread that talks to Ray, read by all.
        self._seen: Sequence[capacity.Node] = ()
        self._drained: set[str] = set()
        self._has_warned_of_no_room = False
        #: True once the cluster is known to autoscale.
        self._grows = False
        self._closed = False

    # ------------------------------------------------------------------ the protocol

    def connect(self, hub: Hub) -> None:
        self._hub = hub

    def start(self, events: EventSink, output: OutputSink) -> None:
        self._events, self._deliver = events, output
        self._agents.connect(self._hub, self.wire_address())
        self._ray.start()

    def wire_address(self) -> str:
        return own_address()

    def request(self, count: int, shape: SlotShape) -> RayClaim:
        # Ray may place it again by itself later: a node may come back.
        if shape.placement.startswith("STRICT_") and count > self._placing.vacant(shape):
            # Not queried again where it is known: an unresponsive head would block the whole run.
            never = capacity.why_never(self._seen or client.nodes(), shape, count)
            if never:
                raise ResourceError(never)
        return self._placing.request(count, shape)

    def withdraw(self, claim: Claim) -> None:
        self._placing.withdraw(claim.id)

    def watch_capacity(self, shape: SlotShape, wanted: int = 0) -> None:
        with self._changed:
            self._watched, self._wanted, self._sent_capacity = shape, wanted, -1
            self._settled_at = client.settled_at()
        self._ray.soon(self._look_at_cluster)

    def fork(self, slot: Slot, spec: ProcessSpec) -> None:
        with self._changed:
            if slot.id in self._by_slot:
                raise EngineError(f"slot {slot.id} has a process already")
            is_held = self._placing.holder_of(slot) is not None
            on = self._attendants.get(slot.id) or (self._agents.on(slot.node_id) if is_held else None)
            if on is None or on.lost or on.over:
                self._events(SlotLost(slot, "its node is gone"))
                return
            id = f"p{next(numbers)}"
            self._processes[id] = _Process(slot, on, open_log(spec.log_path))
            self._by_slot[slot.id] = id
            fed = spec.rank >= 0 and bool(self._streams)
            self._processes[id].waits = fed
            together = self._streams.gather(FedProcess(id, slot, spec)) if fed else []
        if together:
            self._ray.soon(lambda: self._feed(together))
        elif not fed:
            self._agents.send(on, _start_message(id, spec))

    def attend(self, beside: Slot, spec: ProcessSpec) -> Slot:
        slot = Slot(
            id=f"{_ATTENDANTS}/{next(numbers)}", host=beside.host, address=beside.address, node=beside.node
        )
        with self._changed:
            on = self._agents.on(beside.node_id)
            if on is not None:
                self._attendants[slot.id] = on
        self.fork(slot, spec)
        return slot

    def signal(self, slot: Slot, number: signal.Signals) -> None:
        id, process = self._process_on(slot)
        if process is None or (number == signal.SIGKILL and self._end_unstarted(id)):
            return
        self._agents.send(process.agent, SignalProcess(id=id, number=int(number)))

    def _end_unstarted(self, id: str) -> bool:
        """End a process that waits for its feeds and was not sent to its node; return False where it was."""
        with self._changed:
            process = self._processes.get(id)
            if process is None or not process.waits:
                return False
            self._streams.drop(id)
        self._process_ended(ProcessEnded(id=id, pid=0, code=-int(signal.SIGKILL)))
        return True

    def _process_on(self, slot: Slot) -> tuple[str, _Process | None]:
        with self._changed:
            id = self._by_slot.get(slot.id, "")
            return id, self._processes.get(id)

    def inspect(self, slot: Slot, stacks: bool = False) -> Inspection:
        id, process = self._process_on(slot)
        if process is None:
            return Inspection(pid=0, state="gone")
        ask = next(numbers)
        with self._changed:
            self._looks[ask] = None
        self._agents.send(process.agent, LookAt(ask=ask, id=id, stacks=stacks))
        with self._changed:
            self._changed.wait_for(
                lambda: self._looks[ask] is not None or process.agent.lost or self._closed,
                timeout=_INSPECT_TIMEOUT_S,
            )
            seen = self._looks.pop(ask)
        if seen is None:
            return Inspection(pid=process.pid, state="unknown")
        return Inspection(seen.pid, seen.state, tuple(seen.processes), seen.debugged)

    def is_in_doubt(self, since: float) -> bool:
        return self._agents.is_in_doubt(since)

    def release(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            with self._changed:
                busy = slot.id in self._by_slot
                if busy:
                    self._leaving.add(slot.id)
            if busy:
                self.signal(slot, signal.SIGKILL)
            else:
                self._give_back(slot)

    def close(self) -> None:
        """End every node's agent, and with it all its processes; then give back the run's resources."""
        with self._changed:
            if self._closed:
                return
            self._closed = self._ray.closing = True
            self._events = lambda _: None
            self._changed.notify_all()
        with contextlib.ExitStack() as last:  # each step runs even if another fails
            last.callback(self._agents.close_wire)
            last.callback(self._agents.sweep_storage)
            last.callback(self._leave_cluster)
            self._agents.end()

    def _leave_cluster(self) -> None:
        """Remove the remaining actors and groups; no process of the run lives any more. Where Ray does not answer they
        end with this process's job."""
        answers = self._ray.stop()
        for process in self._processes.values():
            _close_log(process)
        self._processes.clear()
        self._by_slot.clear()
        if answers and self._ray.is_connected:  # otherwise the user has left, and all of it is gone with that
            self._placing.leave()
            self._agents.leave({node.id for node in self._seen if node.draining})
            self._streams.end()

    # ------------------------------------------------------------------ results of requests

    def _emit(self, event: EngineEvent) -> None:
        self._events(event)

    def _refuse(self, reason: str) -> None:
        self._placing.refuse(reason)

    def _node_ready(self) -> None:
        self._placing.grant()

    def _node_slow(self, what: str) -> None:
        self._placing.report_waiting(what)

    def _cluster_left(self) -> None:
        """Handle that this process has left the cluster: Ray ends everything that it held there."""
        reason = "this process has left the Ray cluster (ray.shutdown() was called), which ends all that it had there"
        with self._changed:
            slots = [*self._placing.slots(), *(process.slot for process in self._processes.values())]
        for slot in slots:
            self._lose_slot(slot, reason)
        self._refuse(f"The run cannot continue: {reason}.")

    # ------------------------------------------------------------------ feeding

    def _feed(self, ranks: Sequence[FedProcess]) -> None:
        """Start the feeds of every rank's slot for Ray's datasets, then start the rank."""
        self._warn_of_no_room_for_tasks()
        try:
            begun = self._streams.begin(ranks)
        except Exception as error:  # any error of a Ray dataset
            problem = f"Ray cannot begin to give the rows of its datasets: {type(error).__name__}: {error}"
            for one in ranks:
                self._process_ended(ProcessEnded(id=one.id, pid=0, code=1, error=problem))
            return
        for one, feeds in zip(ranks, begun, strict=True):
            with self._changed:
                holder = self._placing.holder_of(one.slot)
            if holder is not None:
                self._ray.then(holder.actor.feed.remote(feeds), partial(self._fed, one))

    def _warn_of_no_room_for_tasks(self) -> None:
        if (
            not self._has_warned_of_no_room
            and sum(found.free.get("CPU", 0.0) for found in client.nodes()) < 1
        ):
            self._has_warned_of_no_room = True
            _logger.warning(
                "No CPU of the cluster is free, and Ray computes the rows of its datasets in tasks of its own, which "
                "need one: the ranks may wait for their first rows for ever. Ask for fewer workers or less CPU for "
                "each, or give DataConfig(snapshot=True)."
            )

    def _fed(self, one: FedProcess, _: Any, error: BaseException | None) -> None:
        with self._changed:
            process = self._processes.get(one.id)
            if process is None:
                return
            process.waits = False
        if error is None:
            self._agents.send(process.agent, _start_message(one.id, one.spec))
        else:
            self._process_ended(ProcessEnded(id=one.id, pid=0, code=1, error=str(error)))

    # ------------------------------------------------------------------ giving back and losing

    def _give_back(self, slot: Slot) -> None:
        with self._changed:
            self._leaving.discard(slot.id)
            self._attendants.pop(slot.id, None)
            holder = self._placing.take_slot(slot)
        if holder is not None:
            self._ray.soon(partial(self._placing.forget, holder))

    def _lose_slot(self, slot: Slot, reason: str) -> None:
        """Report a lost slot."""
        with self._changed:
            holder = self._placing.take_slot(slot)
            self._attendants.pop(slot.id, None)
            id = self._by_slot.pop(slot.id, "")
            process = self._processes.pop(id, None)
            self._streams.drop(id)
            if process is not None:
                _close_log(process)
            self._changed.notify_all()
        if process is not None:
            self._agents.send(process.agent, SignalProcess(id=id, number=int(signal.SIGKILL)))
        if holder is not None or process is not None:
            self._events(SlotLost(slot, reason))
        if holder is not None:
            self._ray.soon(partial(self._placing.forget, holder))

    def _lose_node(self, lost: Agent, reason: str) -> None:
        # Before the losses: a run that continues with fewer workers must not assume room for more.
        self._report_capacity(self._seen, at_once=True)
        with self._changed:
            held = self._placing.slots_on(lost.node)
            beside = [p.slot for p in self._processes.values() if p.agent is lost and p.slot not in held]
        for slot in [*held, *beside]:
            self._lose_slot(slot, f"{reason} ({lost.host})" if lost.host not in reason else reason)
        self._ray.soon(partial(self._placing.lost_node, lost.node))

    # ------------------------------------------------------------------ messages about processes

    def _on_message(self, message: FromWorker) -> None:
        """On the wire's thread."""
        if isinstance(message, ProcessOutput):
            self._printed(message)
        elif isinstance(message, ProcessStarted):
            self._process_started(message)
        elif isinstance(message, ProcessEnded):
            self._process_ended(message)
        elif isinstance(message, ProcessSeen):
            with self._changed:
                if message.ask in self._looks:
                    self._looks[message.ask] = message
                self._changed.notify_all()

    def _printed(self, message: ProcessOutput) -> None:
        with self._changed:
            process = self._processes.get(message.id)
            if process is None:
                return
            if process.log >= 0:
                append(process.log, message.data)
        self._deliver(process.slot, message.data)

    def _process_started(self, message: ProcessStarted) -> None:
        process = self._processes.get(message.id)
        if process is not None:
            process.pid = message.pid
            self._events(Started(process.slot, message.pid, message.waited, message.imports))

    def _process_ended(self, message: ProcessEnded) -> None:
        with self._changed:
            process = self._processes.pop(message.id, None)
            if process is None:
                return
            self._by_slot.pop(process.slot.id, None)
            leaving = process.slot.id in self._leaving
            _close_log(process)
            self._changed.notify_all()
        if message.lost:
            self._ray.soon(partial(self._lose_slot_of, process))
            return
        if leaving:
            self._give_back(process.slot)
        self._events(
            Exited(
                process.slot,
                message.pid,
                message.code,
                message.out_of_memory,
                message.error,
                row=message.row,
                reports=tuple(message.reports),
                steps=message.steps,
            )
        )

    def _lose_slot_of(self, process: _Process) -> None:
        """Report the lost slot of a process that is gone."""
        reason = f"the process that workers are forked from was killed on {process.agent.host}"
        with self._changed:
            is_held = self._placing.holder_of(process.slot) is not None
        if is_held:
            self._lose_slot(process.slot, reason)
        elif process.slot.id.startswith(_ATTENDANTS):
            # The loss of a claim's slot was reported meanwhile, when the slot was taken.
            self._events(SlotLost(process.slot, reason))

    # ------------------------------------------------------------------ looking at the cluster

    def _watch_nodes(self) -> None:
        if not self._closed:
            self._agents.watch()

    def _look_at_cluster(self) -> None:
        if self._closed:
            return
        seen = self._seen = self._nodes()
        self._placing.look(seen)
        self._report_capacity(seen)  # which a run waits for; a request may take Ray seconds
        self._request_nodes()
        self._report_drains()

    def _nodes(self) -> Sequence[capacity.Node]:
        """Return the nodes of the cluster, at the first look once Ray counts as free what this process has released
        before."""
        seen = client.nodes()
        while not self._closed and time.monotonic() < self._settled_at:
            most = self._capacity([replace(node, free=node.total) for node in seen]) or 0
            if (self._capacity(seen) or 0) >= min(self._wanted, most):
                break
            time.sleep(_RELEASE_POLL_INTERVAL_S)
            seen = client.nodes()
        self._settled_at = 0.0
        return seen

    def _report_capacity(self, seen: Sequence[capacity.Node], *, at_once: bool = False) -> None:
        """Report a changed capacity; with ``at_once`` also while slots in placement are not counted and it seems
        smaller."""
        count = self._capacity(seen)
        if count is None or (count < self._sent_capacity and not at_once and self._placing.is_placing()):
            return
        if count != self._sent_capacity:
            self._sent_capacity = count
            self._events(Capacity(count))

    def _capacity(self, seen: Sequence[capacity.Node]) -> int | None:
        """Return the number of workers that the run could have; None where it is not watched."""
        with self._changed:
            shape = self._watched
        if shape is None:
            return None
        room = [found for found in seen if self._agents.may_count_on(found.id)]
        held = self._placing.held_by_node(shape)
        return capacity.capacity(
            room, shape, {node: slots for node, slots in held.items() if self._agents.may_count_on(node)}
        )

    def _request_nodes(self) -> None:
        """Where the cluster autoscales, request the slots that the run would still use."""
        with self._changed:
            shape, wanted = self._watched, self._wanted
        if shape is not None and (self._grows or wanted):
            self._grows = self._grows or autoscales()
            if self._grows:
                self._placing.reserve_spares(shape, wanted)

    def _report_drains(self) -> None:
        draining: Mapping[str, int] = ray._private.state.state.get_draining_nodes()
        with self._changed:
            slots = [slot for node in draining for slot in self._placing.slots_on(node)]
        for slot in slots:
            if slot.id not in self._drained:
                self._drained.add(slot.id)
                deadline = draining[slot.node] / 1000.0
                self._events(Drain(slot, deadline, "Ray is draining its node"))


def _start_message(id: str, spec: ProcessSpec) -> StartProcess:
    return StartProcess(
        id=id,
        entry=spec.entry,
        payload=spec.payload,
        env=dict(spec.env),
        cwd=spec.cwd,
        title=spec.title,
        shielded=spec.shielded,
        stacks=spec.stacks,
        mark=spec.mark,
        staging=spec.staging,
        attempt=spec.attempt,
        rank=spec.rank,
        ring=spec.ring,
    )


def _close_log(process: _Process) -> None:
    if process.log >= 0:
        os.close(process.log)
        process.log = -1
