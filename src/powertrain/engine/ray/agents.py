"""The nodes on which a run has slots: the agent of each, what it brings there, and when a node is given up.

An agent (:mod:`powertrain.engine.ray.node.agent`) is an actor, so that Ray ends it with its node. What is said to it
and by it goes over the run's own wire.
"""

from __future__ import annotations

import os
import pickle
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from powertrain.engine.ray import client
from powertrain.engine.ray.actors import AgentActor
from powertrain.engine.ray.client import RayThread
from powertrain.engine.ray.node import agent as node
from powertrain.engine.ray.node import files
from powertrain.engine.ray.node import storage as node_storage
from powertrain.engine.ray.node.spec import NodeSpec
from powertrain.engine.ray.options import RayOptions
from powertrain.storage import Storage
from powertrain.storage.addresses import without_secrets
from powertrain.text.loggers import module_logger
from powertrain.version import __version__
from powertrain.wire.envelope import FromController, FromWorker
from powertrain.wire.from_node import NodeReady
from powertrain.wire.hub import Hub
from powertrain.wire.keys import Door, Received
from powertrain.wire.to_node import EndNode

_logger = module_logger(__name__)
#: Seconds of silence after which a node is given up: by then it has ended what it had started for the run.
LOST_AFTER = node.FENCED_AFTER + 3.0
#: Seconds for all nodes to end.
_END_WITHIN = 10.0
#: Seconds after which one that has said nothing yet is spoken of, and after which its node is refused.
_SLOW_AFTER, _SILENT_AFTER = 15.0, 600.0
#: Seconds for the storage to take or give the few bytes that prove it.
_PROVEN_WITHIN = 60.0
#: Seconds after which a node that was given up and is still one of the cluster counts as room again.
_FORGIVEN = 60.0
#: What to do about a node that is not like the others.
_SAME_STORAGE = (
    "Every node must see the same storage and have the same version of Powertrain: set RunConfig(storage_path=...) to "
    "a shared file system or an object store such as s3://bucket/path."
)
_OPEN_PORT = (
    "A firewall may be in between: open the port that RunConfig(port=...) names, from every node to the one on which "
    "the script runs."
)


@dataclass(eq=False)
class Agent:
    """The run's agent on one node, as far as it is known here."""

    node: str
    actor: Any
    key: bytes
    heard: float
    host: str
    address: str
    started: float = field(default_factory=time.monotonic)
    #: True once it was spoken of as slow, once it has been heard of, and once processes can be started on its node.
    told_slow: bool = False
    greeted: bool = False
    ready: bool = False
    #: Once True nothing that it says counts any more.
    lost: bool = False
    #: True once its actor has ended.
    over: bool = False


@dataclass(frozen=True, kw_only=True)
class AgentSinks:
    """Who is told of agents. ``said`` is called on the wire's thread, ``ready`` on the one that talks to Ray, the
    others there or on the one that watches."""

    said: Callable[[FromWorker], None]
    #: Processes can be started on one more node.
    ready: Callable[[], None]
    #: This node is given up, for this reason; nothing that comes from it counts any more.
    lost: Callable[[Agent, str], None]
    #: A node cannot take part in the run, and why.
    refused: Callable[[str], None]
    #: A node keeps the run waiting, and how.
    slow: Callable[[str], None]


class Agents:
    """The agents of one run. The thread that talks to Ray, unless said otherwise."""

    def __init__(
        self,
        asking: RayThread,
        changed: threading.Condition,
        options: RayOptions,
        storage: Storage | None,
        sinks: AgentSinks,
    ) -> None:
        """``changed`` guards what is known of agents, and is told when one has ended or is lost."""
        self._ray, self._changed, self._options, self._storage = asking, changed, options, storage
        self._sinks = sinks
        self._token = files.write_token(options.runtime_dir)
        self._hub: Hub | None = None
        self._own_hub = False
        self._agents: dict[str, Agent] = {}
        #: When nodes were given up; those that were refused are so for ever. Guarded.
        self._lost_at: dict[str, float] = {}
        #: The name of what nodes have to find in the storage; and of what they are brought, references.
        self._proof = ""
        self._parcels: dict[str, Any] | None = None

    def connect(self, hub: Hub | None, address: str) -> None:
        """Talk over this wire, or over one of its own that listens on ``address``. Before any agent starts."""
        self._own_hub = hub is None
        self._hub = Hub(address, lambda _: None) if hub is None else hub

    # -- asking about them

    def on(self, id: str) -> Agent | None:
        """The agent of a node that has one and was not given up. Any thread, with the guard held."""
        return self._agents.get(id)

    def is_ready(self, id: str) -> bool:
        """Whether processes can be started on the node. Any thread, with the guard held."""
        found = self._agents.get(id)
        return found is not None and found.ready and not found.lost

    def is_in_doubt(self, since: float) -> bool:
        """True while one was not heard of ``since`` then. Any thread."""
        with self._changed:
            return any(found.heard < since for found in self._agents.values() if found.ready)

    def may_count_on(self, id: str) -> bool:
        """False for a node that was refused, or given up not long ago: Ray learns later than we do that a node is gone,
        and one that was only cut off may come back."""
        return self._lost_at.get(id, -_FORGIVEN) + _FORGIVEN < time.monotonic()

    def refused(self) -> list[str]:
        """Nodes that cannot take part. Any thread."""
        with self._changed:
            return [id for id, when in self._lost_at.items() if when == float("inf")]

    def send(self, to: Agent, message: FromController) -> None:
        """Any thread."""
        assert self._hub is not None
        if not to.lost:
            self._hub.send(to.key, message)

    # -- starting

    def start(self, nodes: Iterable[str]) -> None:
        """Have an agent on each of these nodes."""
        for id in dict.fromkeys(nodes):
            known = self._agents.get(id)
            if known is None or known.over:
                self._start(id)

    def _start(self, id: str) -> None:
        assert self._hub is not None
        facts = next((found for found in client.alive() if found["NodeID"] == id), None)
        if facts is None:
            return
        door = self._hub.admit(deliver=lambda received: self._received(id, received))
        kind: Any = ray.remote(AgentActor)
        actor = kind.options(
            num_cpus=0,
            runtime_env=dict(self._options.runtime_env) or None,
            scheduling_strategy=NodeAffinitySchedulingStrategy(id, soft=False),
            max_concurrency=2,
        ).remote(msgspec.msgpack.encode(self._spec(door, id, facts["NodeManagerAddress"])))
        started = Agent(
            id,
            actor,
            door.keys.public,
            time.monotonic(),
            host=facts["NodeManagerHostname"],
            address=facts["NodeManagerAddress"],
        )
        with self._changed:
            self._agents[id] = started
        self._ray.then(actor.run.remote(), partial(self._ended, started))

    def _spec(self, door: Door, id: str, address: str) -> NodeSpec:
        options = self._options
        return NodeSpec(
            door=door,
            version=__version__,
            token=self._token,
            runtime_dir=options.runtime_dir,
            directories=[path for path in options.directories if path],
            address=address,
            storage=self._pickled_storage(),
            storage_name=without_secrets(self._storage.uri) if self._storage is not None else "",
            proof=self._proof,
            answer=f"{self._proof}-{id}",
            preload=list(options.preload),
            import_path=list(options.import_path),
        )

    def _pickled_storage(self) -> bytes:
        """The storage for a node to prove that it sees it; what it has to find there is written first."""
        if self._storage is None:
            return b""
        if not self._proof:
            proof = secrets.token_hex(8)
            self._storage.within(_PROVEN_WITHIN).put(node_storage.proof_key(proof), proof.encode())
            self._proof = proof
        return pickle.dumps(self._storage)

    # -- what they say

    def _received(self, id: str, received: Received) -> None:
        """On the wire's thread."""
        found = self._agents.get(id)
        if found is None or found.lost or found.key != received.sender:
            return
        found.heard = time.monotonic()
        for message in received.envelope.messages:
            if isinstance(message, NodeReady):
                found.greeted = True
                self._ray.soon(partial(self._greeted, found, message))
            else:
                self._sinks.said(message)
        assert self._hub is not None
        self._hub.acknowledge(received)

    def _greeted(self, found: Agent, message: NodeReady) -> None:
        if message.wants_files and not message.problem:
            self._ray.then(found.actor.bring.remote(self._shipped()), partial(self._brought, found))
            return
        problem = message.problem or self._missing_answer(found)
        if problem:
            self._refuse(found, problem, _SAME_STORAGE)
            return
        found.ready = True
        self._sinks.ready()

    def _shipped(self) -> dict[str, Any]:
        """References to what a node gets that does not share the driver's files."""
        if self._parcels is None:
            copied = [path for path in self._options.copied if os.path.isdir(path)]
            self._parcels = {path: ray.put(files.pack(path)) for path in copied}
            for place, path in self._options.modules.items():
                if path and "working_dir" not in self._options.runtime_env:
                    self._parcels[place] = ray.put(files.pack_modules(path))
        return self._parcels

    def _brought(self, found: Agent, _: None, error: BaseException | None) -> None:
        """The run's files are on their way into a node's directories, or not: one that is gone is told as lost."""
        if error is not None and not (self._ray.closing or found.lost or isinstance(error, client.GONE)):
            self._refuse(found, f"the run's files cannot be brought to it: {error}", "")

    def _missing_answer(self, found: Agent) -> str:
        """What is wrong when the driver does not see what the node has written."""
        if self._storage is None:
            return ""
        place = without_secrets(self._storage.uri)
        try:
            self._storage.within(_PROVEN_WITHIN).get(node_storage.proof_key(f"{self._proof}-{found.node}"))
        except FileNotFoundError:
            return f"the driver does not see what it has just written to the storage {place}"
        except OSError as error:
            return f"the driver cannot read the storage {place}: {error}"
        return ""

    # -- refusing and losing them

    def _refuse(self, found: Agent, problem: str, advice: str) -> None:
        """Nothing may run on a node that has another storage, say: tell so, and end before anything was trained."""
        self._part_with(found, float("inf"))
        what = problem.rstrip(".")
        self._sinks.refused(f"The node {found.host} cannot take part in the run: {what}. {advice}".rstrip())

    def _ended(self, ended: Agent, unreachable: str | None, error: BaseException | None) -> None:
        """``unreachable`` is why the agent has never come through to this process, where that is why it ended."""
        with self._changed:
            ended.over = True
            self._changed.notify_all()
        if self._ray.closing or ended.lost:
            return
        if unreachable:
            self._refuse(ended, unreachable, _OPEN_PORT)
        elif isinstance(error, ray.exceptions.ActorDiedError) and error.actor_init_failed:
            self._refuse(ended, f"what starts workers there failed: {error}", "")
        else:
            self._lose(ended, f"the node {ended.host} is gone: what the run had there has ended")

    def watch(self) -> None:
        """Give up those that were silent for too long. Asks nothing of Ray: its head may be what is silent."""
        now = time.monotonic()
        with self._changed:
            known = [found for found in self._agents.values() if not (found.lost or found.over)]
        for found in known:
            if found.ready and now - found.heard > LOST_AFTER:
                self._lose(found, f"nothing was heard of {found.host} for {LOST_AFTER:g} s")
            elif not found.greeted and now - found.started > _SILENT_AFTER:
                self._refuse(found, f"what starts workers there has said nothing for {_SILENT_AFTER:g} s", "")
            elif not (found.greeted or found.told_slow) and now - found.started > _SLOW_AFTER:
                found.told_slow = True
                self._sinks.slow(
                    f"what starts workers on {found.host} has said nothing for {_SLOW_AFTER:g} s"
                )

    def _lose(self, lost: Agent, reason: str) -> None:
        """Whatever it says from now on does not count. It ends by itself when it can hear nobody."""
        if self._part_with(lost, time.monotonic()):
            self._sinks.lost(lost, reason)

    def _part_with(self, agent: Agent, when: float) -> bool:
        """Have no more to do with it: ``when`` its node was given up, infinity for good. False where that was done."""
        with self._changed:
            if agent.lost:
                return False
            agent.lost = True
            self._lost_at[agent.node] = when
            if self._agents.get(agent.node) is agent:
                del self._agents[agent.node]
            self._changed.notify_all()
        assert self._hub is not None
        self._hub.expel(agent.key)
        self._ray.soon(partial(self._ray.kill, agent.actor))
        return True

    # -- the end

    def end(self) -> None:
        """End all of them, and with them all that they have started. The engine's caller's thread."""
        with self._changed:
            # One that has not been heard of has started nothing: ending its actor is enough.
            open_to_us = [
                found for found in self._agents.values() if found.greeted and not (found.lost or found.over)
            ]
        for found in open_to_us:
            self.send(found, EndNode())
        with self._changed:
            self._changed.wait_for(
                lambda: all(found.over or found.lost for found in open_to_us), timeout=_END_WITHIN
            )

    def leave(self) -> None:
        """Nothing of them stays in the cluster. After the thread that talks to Ray has stopped."""
        for found in self._agents.values():
            self._ray.kill(found.actor)

    def sweep_storage(self) -> None:
        """Nothing of the proof stays in the storage; a run is not failed for what it cannot sweep."""
        if self._storage is None or not self._proof:
            return
        try:
            self._storage.within(_PROVEN_WITHIN).delete_tree("probe")
        except OSError as error:
            _logger.warning(
                "The directory 'probe' stays in %s: %s", without_secrets(self._storage.uri), error
            )

    def close_wire(self) -> None:
        if self._own_hub and self._hub is not None:
            self._hub.close()
