"""A Ray cluster: Ray finds the room, and everything else is ours.

A run of a fixed size has one placement group with a bundle for each worker, so that it gets all or nothing; an elastic
run has an actor for each, which holds what the worker needs, and takes them as they come. Bundles get such an actor
too where it has something to tell (the GPUs that Ray chose) or to do (feeding the worker). On each node that has a
slot an agent (:mod:`powertrain.engine.node`) starts the processes; what is said between it and this process goes over
the run's own wire, never through Ray. So a network that is cut for seconds loses nothing, and one that stays cut is a
silence on both sides: the node ends what it has started, and then this side gives it up.

All of Ray is asked on one thread. It wakes when Ray has an answer, and once a second to look at the cluster, for which
Ray has no event.
"""

from __future__ import annotations

import itertools
import logging
import os
import pickle
import queue
import secrets
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from powertrain import wire
from powertrain.engine import cluster, node
from powertrain.engine.base import (
    Capacity,
    Claim,
    Drain,
    EventSink,
    Exited,
    Granted,
    Inspection,
    OutputSink,
    ProcessSpec,
    Refused,
    Slot,
    SlotLost,
    SlotShape,
    Started,
    Waiting,
)
from powertrain.engine.output import append, open_log
from powertrain.engine.ray_actors import AgentActor, SlotActor, Whereabouts, own_address
from powertrain.engine.ray_streams import FedProcess, Stream, Streams
from powertrain.errors import ConfigError, EngineError, ResourceError
from powertrain.storage import Storage
from powertrain.version import __version__

_logger = logging.getLogger("powertrain")
_numbers = itertools.count(1)
#: Seconds of silence after which a node is given up: by then it has ended what it had started for the run.
LOST_AFTER = node.FENCED_AFTER + 3.0
_LOOK_EVERY = 1.0
#: Seconds for a look at a process of another node, and for all nodes to end.
_LOOK_WITHIN, _END_WITHIN = 6.0, 10.0
#: Seconds after which a node that was given up and is still one of the cluster counts as room again.
_FORGIVEN = 60.0
#: Seconds in which an actor that has room is there.
_STARTS_WITHIN = 5.0
#: How often an actor is started that ends before it is there.
_TRIES = 5
#: The claim under which processes beside the slots are kept.
_ATTENDANTS = "attendants"
#: What to do about a node that is not like the others.
_SAME_STORAGE = (
    "Every node must see the same storage and have the same version of Powertrain: set RunConfig(storage_path=...) to "
    "a shared file system or an object store such as s3://bucket/path."
)
#: What Ray says of actors that ended, with their nodes or by themselves.
_GONE = (ray.exceptions.ActorDiedError, ray.exceptions.ActorUnavailableError)


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    """What the engine is told of its run."""

    run: str
    #: The run's directories, the same on every node; the first of them is the driver's runtime directory.
    runtime_dir: str
    directories: Sequence[str] = ()
    #: Directories whose modules workers may import, by what nodes call them: ``node.LAUNCH``, ``node.SCRIPT``.
    modules: Mapping[str, str] = field(default_factory=dict)
    #: Where the driver finds modules.
    import_path: Sequence[str] = ()
    #: Directories of the driver that every node needs a copy of.
    copied: Sequence[str] = ()
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    trainer_resources: Mapping[str, float] = field(default_factory=dict)
    #: False for processes that need no torch: nodes are ready sooner then.
    preloads_torch: bool = True
    #: Datasets of Ray's that ranks are fed from.
    streams: Sequence[Stream] = ()


def connect(address: str | None = None, **options: Any) -> None:
    """Connect this process to a Ray cluster, unless it is connected. Raises :class:`EngineError`."""
    if address is not None and address.startswith("ray://"):
        raise EngineError(
            f"{address!r} is an address for Ray's client, whose process is not part of the cluster: workers could not "
            "reach the run in it. Start the script on a node of the cluster, or submit it with 'ray job submit'."
        )
    if ray.is_initialized():
        return
    try:
        # What actors print is nothing that a user of this library wants to see.
        ray.init(address=address, **{"log_to_driver": False, "logging_level": logging.WARNING, **options})
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        where = f"the Ray cluster at {address!r}" if address else "Ray"
        raise EngineError(
            f"This process cannot connect to {where}: {error} Check the address ('auto' finds a cluster on this "
            "machine), or start a cluster with 'ray start --head'."
        ) from error


def uploaded(runtime_env: Mapping[str, Any]) -> dict[str, Any]:
    """A ``runtime_env`` as an actor may have it: what names directories of this machine names copies in the cluster.

    Ray does that by itself for a whole job only. Raises :class:`ConfigError` for what Ray would not take.
    """
    from ray._private.runtime_env.py_modules import upload_py_modules_if_needed
    from ray._private.runtime_env.working_dir import upload_working_dir_if_needed

    env = dict(runtime_env)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            for upload in (upload_py_modules_if_needed, upload_working_dir_if_needed):
                env = upload(env, include_gitignore=True, scratch_dir=scratch, logger=_logger)
        env.pop("excludes", None)  # it was for the upload
        ray.runtime_env.RuntimeEnv(**env)
    except (ValueError, TypeError, OSError, ray.exceptions.RuntimeEnvSetupError) as error:
        raise ConfigError(
            f"ScalingConfig(engine_options={{'runtime_env': ...}}) cannot be used: {str(error).rstrip('. ')}. Ray's "
            "documentation says what a runtime_env may hold."
        ) from error
    return env


def nodes() -> list[cluster.Node]:
    """The live nodes of the cluster, now."""
    state: Any = ray._private.state.state
    free, draining = state.available_resources_per_node(), state.get_draining_nodes()
    return [
        cluster.Node(
            id=found["NodeID"],
            name=found["NodeManagerHostname"] or found["NodeManagerAddress"],
            total=found["Resources"],
            free=free.get(found["NodeID"], {}),
            labels=found.get("Labels") or {},
            draining=found["NodeID"] in draining,
        )
        for found in _alive()
    ]


def _alive() -> list[dict[str, Any]]:
    table: Any = ray.nodes  # not typed
    return [found for found in table() if found["Alive"]]


@dataclass(frozen=True)
class RayClaim:
    id: str
    count: int
    shape: SlotShape
    asked: float


@dataclass(eq=False)
class _Node:
    """A node that has, or had, slots of ours."""

    id: str
    agent: Any
    key: bytes
    heard: float
    host: str = ""
    address: str = ""
    #: True once it has been heard of, and once processes can be started on it.
    greeted: bool = False
    ready: bool = False
    problem: str = ""
    #: Once True nothing that it says counts any more.
    lost: bool = False
    over: bool = False


@dataclass(eq=False)
class _Holder:
    """What holds the resources of one slot: a bundle of a group, an actor, or an actor in a bundle."""

    claim: str
    #: Which worker of the claim it is for, and which bundle of the group.
    number: int
    index: int
    #: None where the bundle is enough.
    actor: Any
    group: _Group | None
    tries: int = 1
    where: Whereabouts | None = None
    slot: Slot | None = None
    #: True once its slot is given back or lost.
    gone: bool = False


@dataclass(eq=False)
class _Group:
    """A placement group, and its bundles that no slot uses: Ray places those of a lost node anew by itself."""

    group: PlacementGroup
    #: The claim that it was made for, and what each bundle has.
    claim: str
    shape: SlotShape
    used: set[int] = field(default_factory=set)
    vacant: list[int] = field(default_factory=list)


@dataclass(eq=False)
class _Process:
    slot: Slot
    node: _Node
    log: int
    pid: int = 0


class RayEngine:
    """Slots on a Ray cluster that this process is connected to."""

    name = "ray"
    restarts = True
    replaces = True

    def __init__(self, options: RayOptions, storage: Storage | None = None) -> None:
        """``storage`` is the run's: every node must prove that it sees the same."""
        self._options, self._storage = options, storage
        self._token = node.write_token(options.runtime_dir)
        self._events: EventSink = lambda _: None
        self._deliver: OutputSink = lambda _slot, _data: None
        self._hub: wire.Hub | None = None
        self._own_hub = False
        #: Guards all that follows. Told when a process or node ends, and when a look is answered.
        self._changed = threading.Condition()
        #: Those that are not met yet.
        self._claims: dict[str, RayClaim] = {}
        self._withdrawn: set[str] = set()
        self._holders: dict[str, list[_Holder]] = {}
        self._slots: dict[str, _Holder] = {}
        self._groups: list[_Group] = []
        self._nodes: dict[str, _Node] = {}
        self._processes: dict[str, _Process] = {}
        self._by_slot: dict[str, str] = {}
        self._attendants: dict[str, _Node] = {}
        self._leaving: set[str] = set()
        self._looks: dict[int, wire.ProcessSeen | None] = {}
        self._watched: SlotShape | None = None
        self._told_capacity = -1
        #: The cluster at the last look. The engine's thread only.
        self._seen: Sequence[cluster.Node] = ()
        self._told_waiting: dict[str, str] = {}
        self._drained: set[str] = set()
        #: When nodes were given up.
        self._lost_at: dict[str, float] = {}
        self._proof = ""
        self._parcels: dict[str, Any] | None = None
        self._trainer_holder: Any = None
        self._trouble = ""
        #: What is done at the next look at the cluster, and how often it has failed. The engine's thread only.
        self._later: list[Callable[[], None]] = []
        self._failures: Counter[Callable[[], None]] = Counter()
        self._streams = Streams(options.streams)
        self._closed = False
        self._todo: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="powertrain-ray", daemon=True)

    # ------------------------------------------------------------------ the protocol

    def connect(self, hub: wire.Hub) -> None:
        self._hub = hub

    def start(self, events: EventSink, output: OutputSink) -> None:
        self._events, self._deliver = events, output
        if self._hub is None:
            self._hub, self._own_hub = wire.Hub(self.wire_address(), lambda _: None), True
        self._thread.start()

    def wire_address(self) -> str:
        return own_address()

    def request(self, count: int, shape: SlotShape) -> RayClaim:
        with self._changed:
            vacant = sum(len(group.vacant) for group in self._groups if group.shape == shape)
        # What Ray places anew by itself is a matter of time: a node may come back.
        if count > vacant and (never := cluster.why_never(nodes(), shape, count)):
            raise ResourceError(never)
        claim = RayClaim(f"ray-{next(_numbers)}", count, shape, time.monotonic())
        with self._changed:
            self._claims[claim.id] = claim
            self._holders[claim.id] = []
        self._todo.put(lambda: self._place(claim))
        return claim

    def withdraw(self, claim: Claim) -> None:
        with self._changed:
            if claim.id not in self._claims:
                return
            self._withdrawn.add(claim.id)
        self._todo.put(lambda: self._drop_pending(claim.id))

    def watch_capacity(self, shape: SlotShape) -> None:
        with self._changed:
            self._watched, self._told_capacity = shape, -1
        self._todo.put(self._look_at_cluster)

    def fork(self, slot: Slot, spec: ProcessSpec) -> None:
        with self._changed:
            if slot.id in self._by_slot:
                raise EngineError(f"slot {slot.id} has a process already")
            holder = self._slots.get(slot.id)
            on = self._attendants.get(slot.id) or (self._nodes.get(slot.node_id) if holder else None)
            if on is None or on.lost or on.over:
                self._events(SlotLost(slot, "its node is gone"))
                return
            id = f"p{next(_numbers)}"
            self._processes[id] = _Process(slot, on, open_log(spec.log_path))
            self._by_slot[slot.id] = id
            fed = spec.rank >= 0 and bool(self._streams)
            together = self._streams.gather(FedProcess(id, slot, spec)) if fed else []
        if together:
            self._todo.put(lambda: self._feed(together))
        elif not fed:
            self._send(on, _start_message(id, spec))

    def attend(self, beside: Slot, spec: ProcessSpec) -> Slot:
        slot = Slot(
            id=f"{_ATTENDANTS}/{next(_numbers)}", host=beside.host, address=beside.address, node=beside.node
        )
        with self._changed:
            on = self._nodes.get(beside.node_id)
            if on is not None:
                self._attendants[slot.id] = on
        self.fork(slot, spec)
        return slot

    def signal(self, slot: Slot, number: signal.Signals) -> None:
        with self._changed:
            id = self._by_slot.get(slot.id)
            process = self._processes.get(id) if id else None
        if process is not None and id is not None:
            self._send(process.node, wire.SignalProcess(id=id, number=int(number)))

    def inspect(self, slot: Slot, stacks: bool = False) -> Inspection:
        with self._changed:
            id = self._by_slot.get(slot.id)
            process = self._processes.get(id) if id else None
            if process is None or id is None:
                return Inspection(pid=0, state="gone")
            ask = next(_numbers)
            self._looks[ask] = None
        self._send(process.node, wire.LookAt(ask=ask, id=id, stacks=stacks))
        with self._changed:
            self._changed.wait_for(
                lambda: self._looks[ask] is not None or process.node.lost or self._closed,
                timeout=_LOOK_WITHIN,
            )
            seen = self._looks.pop(ask)
        if seen is None:
            return Inspection(pid=process.pid, state="unknown")
        return Inspection(seen.pid, seen.state, tuple(seen.processes), seen.debugged)

    def is_in_doubt(self, since: float) -> bool:
        with self._changed:
            return any(found.heard < since for found in self._nodes.values() if found.ready)

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
        """Ends every node's agent, and with it all that it started; then gives back what the run holds."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._events = lambda _: None
            self._changed.notify_all()
            # One that has not been heard of has started nothing: its actor is ended below.
            open_nodes = [f for f in self._nodes.values() if f.greeted and not (f.lost or f.over)]
        for found in open_nodes:
            self._send(found, wire.EndNode())
        with self._changed:
            self._changed.wait_for(
                lambda: all(found.over or found.lost for found in open_nodes), timeout=_END_WITHIN
            )
        if self._thread.is_alive():
            self._todo.put(None)
            self._thread.join()
        self._leave_cluster()
        if self._own_hub and self._hub is not None:
            self._hub.close()

    # ------------------------------------------------------------------ the thread that talks to Ray

    def _run(self) -> None:
        look_at = time.monotonic() + _LOOK_EVERY
        while True:
            try:
                task = self._todo.get(timeout=max(0.0, look_at - time.monotonic()))
                if task is None:
                    return
                tasks = [task]
            except queue.Empty:
                tasks, self._later = [*self._later, self._look_at_cluster], []
                look_at = time.monotonic() + _LOOK_EVERY
            for task in tasks:
                try:
                    task()
                except Exception as error:  # of Ray: the cluster may be going away
                    self._failed(task, error)

    def _failed(self, task: Callable[[], None], error: Exception) -> None:
        """Ray did not do it: it is tried again for a while, since a cluster may be busy, and then given up."""
        problem = f"{type(error).__name__}: {error}"
        if problem != self._trouble:
            self._trouble = problem
            _logger.warning("Ray could not do what it was asked (%s). It is asked again.", problem)
        if task == self._look_at_cluster or self._closed:
            return
        self._failures[task] += 1
        if self._failures[task] < _TRIES:
            self._later.append(task)
            return
        self._refuse(f"Ray could not do what the run needs: {problem}")

    def _refuse(self, reason: str) -> None:
        """Tell that what is still waited for will never come."""
        for id in list(self._claims):
            self._events(Refused(id, reason))

    def _then(self, reference: Any, act: Callable[[Any, BaseException | None], None]) -> None:
        """Call ``act`` on the engine's thread with what ``reference`` stands for, or with why there is nothing."""

        def done(future: Any) -> None:
            error = future.exception()
            value = None if error is not None else future.result()
            self._todo.put(lambda: act(value, error))

        reference.future().add_done_callback(done)

    # ------------------------------------------------------------------ placing

    def _place(self, claim: RayClaim) -> None:
        """Ask Ray for the holders of a claim."""
        if claim.id in self._withdrawn or self._closed:
            return
        needs = cluster.demand(claim.shape)
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
        self._reserve_for_trainer()
        if claim.shape.gang and needs:
            self._place_together(claim, rest)
        else:
            for number in rest:
                self._hold(claim, number, None, -1)

    def _place_together(self, claim: RayClaim, numbers: range) -> None:
        shape = claim.shape
        bundles = [cluster.demand(shape) for _ in numbers]
        selectors = [cluster.selector(shape, number) for number in numbers]
        group = _Group(
            placement_group(
                bundles,
                strategy=shape.placement,
                name=f"powertrain-{self._options.run}-{secrets.token_hex(4)}",
                bundle_label_selector=selectors if any(selectors) else None,
            ),
            claim.id,
            shape,
        )
        self._groups.append(group)

        def ready(_: Any, error: BaseException | None) -> None:
            if error is None and group in self._groups and not self._closed:
                nodes_of_bundles = placement_group_table(group.group)["bundles_to_node_id"]
                self._start_agents(nodes_of_bundles.values())
                for index, number in enumerate(numbers):
                    self._take_bundle(claim, number, group, index, nodes_of_bundles[index])
                self._grant_who_is_ready()

        self._then(group.group.ready(), ready)

    def _take_bundle(self, claim: RayClaim, number: int, group: _Group, index: int, node_id: str) -> None:
        """Have one worker's resources in a bundle that Ray has placed: without an actor where nothing would be asked of
        it, since its process would start just when the node has most to do."""
        found = self._nodes.get(node_id)
        if claim.shape.gpus or self._streams or found is None:
            self._hold(claim, number, group, index)
            return
        group.used.add(index)
        where = Whereabouts(node_id, found.address, found.host, gpus=())
        with self._changed:
            self._holders[claim.id].append(_Holder(claim.id, number, index, None, group, where=where))

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

    def _hold(self, claim: RayClaim, number: int, group: _Group | None, index: int, tries: int = 1) -> None:
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
        holder = _Holder(claim.id, number, index, actor, group, tries)
        with self._changed:
            self._holders[claim.id].append(holder)
        self._then(actor.where.remote(), lambda where, error: self._found(holder, where, error))

    def _found(self, holder: _Holder, where: Whereabouts | None, error: BaseException | None) -> None:
        """An actor has its resources, or never will."""
        if holder.gone or self._closed:
            return
        if error is not None or where is None:
            self._try_again(holder, error)
            return
        holder.where = where
        self._then(holder.actor.hold.remote(), lambda _, error: self._holder_ended(holder, error))
        self._start_agents([where.node])
        self._grant_who_is_ready()

    def _try_again(self, holder: _Holder, error: BaseException | None) -> None:
        """Its node went away before the actor was there; or it cannot be started at all, and the claim never met."""
        with self._changed:
            claim = self._claims.get(holder.claim)
            is_wanted = claim is not None and claim.id not in self._withdrawn
        if claim is None or not is_wanted:
            self._forget(holder)
            return
        with self._changed:
            holder.gone = True
            self._holders[claim.id].remove(holder)
        _kill(holder.actor)
        if holder.tries >= _TRIES or isinstance(error, ray.exceptions.RuntimeEnvSetupError):
            reason = f"Ray cannot start what a worker's resources are held by: {error}"
            self._events(Refused(claim.id, reason))
        else:
            self._later.append(partial(self._hold_again, claim, holder))

    def _hold_again(self, claim: RayClaim, ended: _Holder) -> None:
        """Start another actor in place of one that has ended, unless nobody waits for it any more."""
        if claim.id not in self._withdrawn:
            self._hold(claim, ended.number, ended.group, ended.index, ended.tries + 1)
        elif ended.group is not None:
            self._vacate(ended.group, ended.index)

    def _start_agents(self, ids: Any) -> None:
        for id in dict.fromkeys(ids):
            known = self._nodes.get(id)
            if known is None or known.over:
                self._start_agent(id)

    def _start_agent(self, id: str) -> None:
        assert self._hub is not None
        facts = next((found for found in _alive() if found["NodeID"] == id), None)
        if facts is None:
            return
        door = self._hub.admit(deliver=lambda received: self._received(id, received))
        spec = node.NodeSpec(
            door=door,
            version=__version__,
            token=self._token,
            runtime_dir=self._options.runtime_dir,
            directories=[path for path in self._options.directories if path],
            address=facts["NodeManagerAddress"],
            storage=self._pickled_storage(),
            storage_name=self._storage.uri if self._storage is not None else "",
            proof=self._proof,
            answer=f"{self._proof}-{id}",
            preloads_torch=self._options.preloads_torch,
            import_path=list(self._options.import_path),
        )
        kind: Any = ray.remote(AgentActor)
        agent = kind.options(
            num_cpus=0,
            runtime_env=dict(self._options.runtime_env) or None,
            scheduling_strategy=NodeAffinitySchedulingStrategy(id, soft=False),
            max_concurrency=2,
        ).remote(msgspec.msgpack.encode(spec))
        started = _Node(
            id,
            agent,
            door.keys.public,
            time.monotonic(),
            host=facts["NodeManagerHostname"],
            address=facts["NodeManagerAddress"],
        )
        with self._changed:
            self._nodes[id] = started
        self._then(agent.run.remote(), partial(self._agent_ended, started))

    def _pickled_storage(self) -> bytes:
        """The storage for a node to prove that it sees it; what it has to find there is written first."""
        if self._storage is None:
            return b""
        if not self._proof:
            self._proof = secrets.token_hex(8)
            self._storage.put(node.proof_key(self._proof), self._proof.encode())
        return pickle.dumps(self._storage)

    def _shipped(self) -> dict[str, Any]:
        """References to what a node gets that does not share the driver's files."""
        if self._parcels is None:
            copied = [path for path in self._options.copied if os.path.isdir(path)]
            self._parcels = {path: ray.put(node.pack(path)) for path in copied}
            for place, path in self._options.modules.items():
                if path and "working_dir" not in self._options.runtime_env:
                    self._parcels[place] = ray.put(node.pack_modules(path))
        return self._parcels

    def _grant_who_is_ready(self) -> None:
        """Tell of slots whose resources are held and whose node's agent is there: of a gang, when all are."""
        for claim in list(self._claims.values()):
            with self._changed:
                if claim.id in self._withdrawn:
                    continue
                waiting = [
                    holder for holder in self._holders[claim.id] if holder.slot is None and not holder.gone
                ]
                ready = [holder for holder in waiting if self._is_ready(holder)]
                granted = sum(holder.slot is not None for holder in self._holders[claim.id])
                if not ready or (claim.shape.gang and len(ready) + granted < claim.count):
                    continue
                slots = tuple(self._slot_of(holder) for holder in ready)
                if len(slots) + granted == claim.count:
                    del self._claims[claim.id]
            self._events(Granted(claim.id, slots))

    def _is_ready(self, holder: _Holder) -> bool:
        if holder.where is None:
            return False
        found = self._nodes.get(holder.where.node)
        return found is not None and found.ready and not found.lost

    def _slot_of(self, holder: _Holder) -> Slot:
        where = holder.where
        assert where is not None
        slot = Slot(
            id=f"{holder.claim}/{next(_numbers)}",
            host=where.host,
            address=where.address,
            local=where.node == ray.get_runtime_context().get_node_id(),
            gpus=where.gpus,
            node=where.node,
        )
        holder.slot = slot
        self._slots[slot.id] = holder
        return slot

    # ------------------------------------------------------------------ feeding

    def _feed(self, ranks: Sequence[FedProcess]) -> None:
        """Have every rank's slot serve its rows of Ray's datasets, then start the rank."""
        for one, feeds in zip(ranks, self._streams.begin(ranks), strict=True):
            with self._changed:
                holder = self._slots.get(one.slot.id)
            if holder is not None:
                self._then(holder.actor.feed.remote(feeds), partial(self._fed, one))

    def _fed(self, one: FedProcess, _: Any, error: BaseException | None) -> None:
        with self._changed:
            process = self._processes.get(one.id)
        if process is None:
            return
        if error is None:
            self._send(process.node, _start_message(one.id, one.spec))
        else:
            self._process_ended(wire.ProcessEnded(id=one.id, pid=0, code=1, error=str(error)))

    # ------------------------------------------------------------------ giving back and losing

    def _give_back(self, slot: Slot) -> None:
        with self._changed:
            self._leaving.discard(slot.id)
            self._attendants.pop(slot.id, None)
            holder = self._slots.pop(slot.id, None)
        if holder is not None:
            self._todo.put(lambda: self._forget(holder))

    def _forget(self, holder: _Holder) -> None:
        """Its resources are free again; those of a bundle when the whole group is."""
        with self._changed:
            if holder.gone:
                return
            holder.gone = True
            holders = self._holders.get(holder.claim, [])
            if holder in holders:
                holders.remove(holder)
        _kill(holder.actor)
        if holder.group is not None:
            self._vacate(holder.group, holder.index)

    def _vacate(self, group: _Group, index: int) -> None:
        group.used.discard(index)
        group.vacant.append(index)
        if not group.used:
            self._remove(group)

    def _remove(self, group: _Group) -> None:
        self._groups.remove(group)
        remove_placement_group(group.group)

    def _drop_pending(self, claim: str) -> None:
        """What a withdrawn claim still waits for."""
        with self._changed:
            pending = [holder for holder in self._holders.get(claim, []) if holder.slot is None]
        for holder in pending:
            self._forget(holder)
        for group in [g for g in self._groups if g.claim == claim and not g.used and not g.vacant]:
            self._remove(group)

    def _holder_ended(self, holder: _Holder, error: BaseException | None) -> None:
        """An actor that holds resources is gone, and with it the right to them."""
        if holder.gone or self._closed:
            return
        slot = holder.slot
        if slot is None:
            self._try_again(holder, error)
            return
        # Where its whole node is gone, the end of the node's agent tells so too.
        self._lose_slot(slot, f"what held its resources on {slot.host} was ended")

    def _lose_slot(self, slot: Slot, reason: str) -> None:
        """Nothing runs on it any more, and nothing can."""
        with self._changed:
            holder = self._slots.pop(slot.id, None)
            self._attendants.pop(slot.id, None)
            id = self._by_slot.pop(slot.id, None)
            process = self._processes.pop(id) if id is not None else None
            self._changed.notify_all()
        if process is not None:
            _close_log(process)
            if id is not None and not process.node.lost:
                self._send(process.node, wire.SignalProcess(id=id, number=int(signal.SIGKILL)))
        if holder is not None:
            self._forget(holder)
        if holder is not None or process is not None:
            self._events(SlotLost(slot, reason))

    def _agent_ended(self, ended: _Node, unreachable: str | None, error: BaseException | None) -> None:
        """``unreachable`` is why the agent has never come through to this process, where that is why it ended."""
        with self._changed:
            ended.over = True
            self._changed.notify_all()
        if self._closed or ended.lost:
            return
        if unreachable:
            advice = (
                "A firewall may be in between: open the port that RunConfig(port=...) names, from every node to the "
                "one on which the script runs."
            )
            self._refuse_node(ended, unreachable, advice)
        elif isinstance(error, ray.exceptions.ActorDiedError) and error.actor_init_failed:
            self._refuse_node(ended, f"what starts workers there failed: {error}", "")
        else:
            self._lose_node(ended, f"the node {ended.host} is gone: what the run had there has ended")

    def _lose_node(self, lost: _Node, reason: str) -> None:
        """Whatever it says from now on does not count. Its agent ends by itself when it can hear nobody."""
        with self._changed:
            if lost.lost:
                return
            lost.lost = True
            lost.problem = reason
            self._lost_at[lost.id] = time.monotonic()
            self._changed.notify_all()
            held = [h.slot for h in self._slots.values() if h.slot is not None and h.slot.node_id == lost.id]
            beside = [p.slot for p in self._processes.values() if p.node is lost and p.slot not in held]
            pending = [
                h
                for hs in self._holders.values()
                for h in hs
                if h.slot is None and h.where and h.where.node == lost.id
            ]
        assert self._hub is not None
        self._hub.expel(lost.key)
        # Before the losses: a run that goes on with fewer workers must not think that there is room for more.
        self._tell_capacity(self._seen)
        for slot in [*held, *beside]:
            self._lose_slot(slot, f"{reason} ({lost.host})" if lost.host not in reason else reason)
        _kill(lost.agent)
        with self._changed:
            self._nodes.pop(lost.id, None)
        for holder in pending:
            self._try_again(holder, None)

    # ------------------------------------------------------------------ what agents say

    def _send(self, to: _Node, message: wire.FromController) -> None:
        assert self._hub is not None
        if not to.lost:
            self._hub.send(to.key, message)

    def _received(self, id: str, received: wire.Received) -> None:
        """On the hub's thread."""
        found = self._nodes.get(id)
        if found is None or found.lost or found.key != received.sender:
            return
        found.heard = time.monotonic()
        for message in received.envelope.messages:
            self._handle(found, message)
        assert self._hub is not None
        self._hub.acknowledge(received)

    def _handle(self, found: _Node, message: wire.FromWorker) -> None:
        if isinstance(message, wire.ProcessOutput):
            self._printed(message)
        elif isinstance(message, wire.ProcessStarted):
            self._process_started(message)
        elif isinstance(message, wire.ProcessEnded):
            self._process_ended(message)
        elif isinstance(message, wire.ProcessSeen):
            with self._changed:
                if message.ask in self._looks:
                    self._looks[message.ask] = message
                self._changed.notify_all()
        elif isinstance(message, wire.NodeReady):
            found.greeted = True
            self._todo.put(lambda: self._node_ready(found, message))

    def _node_ready(self, found: _Node, message: wire.NodeReady) -> None:
        if message.wants_files and not message.problem:
            self._then(found.agent.bring.remote(self._shipped()), partial(self._brought, found))
            return
        problem = message.problem or self._missing_answer(found)
        if problem:
            self._refuse_node(found, problem, _SAME_STORAGE)
            return
        found.ready = True
        self._grant_who_is_ready()

    def _missing_answer(self, found: _Node) -> str:
        """What is wrong when the driver does not see what the node has written."""
        if self._storage is None:
            return ""
        try:
            self._storage.get(node.proof_key(f"{self._proof}-{found.id}"))
        except FileNotFoundError:
            return f"the driver does not see what it has just written to the storage {self._storage.uri}"
        except OSError as error:
            return f"the driver cannot read the storage {self._storage.uri}: {error}"
        return ""

    def _brought(self, found: _Node, _: None, error: BaseException | None) -> None:
        """The run's files are on their way into a node's directories, or not: one that is gone is told as lost."""
        if error is not None and not (self._closed or found.lost or isinstance(error, _GONE)):
            self._refuse_node(found, f"the run's files cannot be brought to it: {error}", "")

    def _refuse_node(self, found: _Node, problem: str, advice: str) -> None:
        """Nothing may run on a node that has another storage, say: tell so, and end before anything was trained."""
        found.problem = problem
        what = problem.rstrip(".")
        self._lost_at[found.id] = float("inf")  # it is no room for us
        self._refuse(f"The node {found.host} cannot take part in the run: {what}. {advice}".rstrip())

    def _printed(self, message: wire.ProcessOutput) -> None:
        process = self._processes.get(message.id)
        if process is not None:
            if process.log >= 0:
                append(process.log, message.data)
            self._deliver(process.slot, message.data)

    def _process_started(self, message: wire.ProcessStarted) -> None:
        process = self._processes.get(message.id)
        if process is not None:
            process.pid = message.pid
            self._events(Started(process.slot, message.pid))

    def _process_ended(self, message: wire.ProcessEnded) -> None:
        with self._changed:
            process = self._processes.pop(message.id, None)
            if process is None:
                return
            self._by_slot.pop(process.slot.id, None)
            leaving = process.slot.id in self._leaving
            self._changed.notify_all()
        _close_log(process)
        if message.lost:
            self._todo.put(lambda: self._lose_slot_of(process))
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
                reports=tuple(message.sealed),
            )
        )

    def _lose_slot_of(self, process: _Process) -> None:
        reason = f"the process that workers are forked from was killed on {process.node.host}"
        if process.slot.id in self._slots:
            self._lose_slot(process.slot, reason)
        else:
            self._events(SlotLost(process.slot, reason))

    # ------------------------------------------------------------------ looking at the cluster

    def _look_at_cluster(self) -> None:
        if self._closed:
            return
        now = time.monotonic()
        for found in list(self._nodes.values()):
            if not found.lost and not found.over and found.ready and now - found.heard > LOST_AFTER:
                self._lose_node(found, f"nothing was heard of {found.host} for {LOST_AFTER:g} s")
        self._look_at_groups()
        seen = self._seen = nodes()
        for claim in list(self._claims.values()):
            self._tell_waiting(claim, seen)
        self._tell_capacity(seen)
        self._tell_drains()

    def _look_at_groups(self) -> None:
        """A group that somebody else has removed holds nothing any more."""
        for group in list(self._groups):
            if placement_group_table(group.group).get("state", "REMOVED") != "REMOVED":
                continue
            with self._changed:
                slots = [h.slot for h in self._slots.values() if h.group is group and h.slot is not None]
            for slot in slots:
                self._lose_slot(slot, f"the placement group of its resources on {slot.host} was removed")

    def _tell_waiting(self, claim: RayClaim, seen: Sequence[cluster.Node]) -> None:
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
            self._events(Waiting(claim.id, granted, reason))

    def _is_being_placed(self, claim: RayClaim) -> bool:
        """True when Ray has found the room, or may have, although the actors are not there yet."""
        groups = [group for group in self._groups if group.claim == claim.id]
        if groups:
            return all(placement_group_table(g.group)["state"] == "CREATED" for g in groups)
        # Of a single actor Ray does not tell whether it waits for room or is being started.
        return time.monotonic() - claim.asked < _STARTS_WITHIN

    def _tell_capacity(self, seen: Sequence[cluster.Node]) -> None:
        now = time.monotonic()
        # Ray learns later than we do that a node is gone; one that was only cut off may come back.
        seen = [found for found in seen if self._lost_at.get(found.id, -_FORGIVEN) + _FORGIVEN < now]
        with self._changed:
            shape = self._watched
            if shape is None:
                return
            lost = {found.id for found in self._nodes.values() if found.lost}
            held = Counter(
                h.where.node
                for hs in self._holders.values()
                for h in hs
                if h.where and not h.gone and h.where.node not in lost
            )
        count = cluster.capacity(seen, shape, held)
        if count != self._told_capacity:
            self._told_capacity = count
            self._events(Capacity(count))

    def _tell_drains(self) -> None:
        draining: Mapping[str, int] = ray._private.state.state.get_draining_nodes()
        with self._changed:
            slots = [h.slot for h in self._slots.values() if h.slot and h.slot.node in draining]
        for slot in slots:
            if slot.id not in self._drained:
                self._drained.add(slot.id)
                deadline = draining[slot.node] / 1000.0
                self._events(Drain(slot, deadline, "Ray is draining its node"))

    # ------------------------------------------------------------------ the end

    def _leave_cluster(self) -> None:
        """Give back what is left: only actors and groups, since no process of ours lives any more."""
        if not ray.is_initialized():  # the user has left the cluster, and all of it is gone with that
            return
        with self._changed:
            holders = [holder for holders in self._holders.values() for holder in holders]
            agents = [found.agent for found in self._nodes.values()]
            for process in self._processes.values():
                _close_log(process)
            self._processes.clear()
            self._by_slot.clear()
        for actor in [*(holder.actor for holder in holders), *agents]:
            _kill(actor)
        if self._trainer_holder is not None:
            _kill(self._trainer_holder)
        for group in self._groups:
            remove_placement_group(group.group)
        self._groups.clear()
        self._streams.end()
        if self._storage is not None and self._proof:
            self._storage.delete_tree("probe")


def _start_message(id: str, spec: ProcessSpec) -> wire.StartProcess:
    return wire.StartProcess(
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
    )


def _close_log(process: _Process) -> None:
    if process.log >= 0:
        os.close(process.log)
        process.log = -1


def _kill(actor: Any) -> None:
    if actor is None:
        return
    try:
        ray.kill(actor)
    except Exception:  # it is gone already, or Ray is
        pass
