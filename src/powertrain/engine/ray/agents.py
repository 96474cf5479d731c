"""The agents on the nodes of a run: their start, the files shipped to them, and the timeout for lost nodes.

An agent (:mod:`powertrain.engine.ray.node.agent`) is an actor, so that Ray ends it with its node. All messages to and
from it use the run's own wire.
"""

from __future__ import annotations

import os
import pickle
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from powertrain.engine.ray import client
from powertrain.engine.ray import idle_agents as idle
from powertrain.engine.ray.actors import AgentActor, AgentEnd
from powertrain.engine.ray.client import RayThread
from powertrain.engine.ray.idle_agents import AgentKind, idle_agents, kind_of
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
from powertrain.wire.keys import ConnectionInfo, Received
from powertrain.wire.to_node import EndNode

_logger = module_logger(__name__)
#: Seconds without a heartbeat after which a node is lost: by then it has ended the run's processes.
LOST_TIMEOUT_S = node.FENCE_TIMEOUT_S + 3.0
#: Seconds for all nodes to end.
_END_TIMEOUT_S = 10.0
#: Seconds without a first message after which a slow agent is reported, and after which its node is refused.
_SLOW_TIMEOUT_S, _SILENT_TIMEOUT_S = 15.0, 600.0
#: Seconds for the storage to take or give the few bytes that prove it.
_PROVEN_TIMEOUT_S = 60.0
#: Seconds after which a node that was given up and is still one of the cluster counts as room again.
_RETRY_NODE_DELAY_S = 60.0
#: The remedy for a node that differs from the others.
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
    last_message: float
    host: str
    address: str
    started: float = field(default_factory=time.monotonic)
    #: True once it was reported as slow, once its first message arrived, and once its node can start processes.
    told_slow: bool = False
    greeted: bool = False
    ready: bool = False
    #: Once True, its messages are ignored.
    lost: bool = False
    #: True once it serves this run no more, and where its actor can serve another.
    over: bool = False
    is_clean: bool = False
    #: True for an actor that has served an earlier run.
    is_reused: bool = False


@dataclass(frozen=True, kw_only=True)
class AgentSinks:
    """Callbacks for events of agents. ``on_message`` is called on the wire's thread, ``ready`` on the thread that calls
    Ray, the others there or on the watching thread."""

    on_message: Callable[[FromWorker], None]
    #: Processes can be started on one more node.
    ready: Callable[[], None]
    #: This node is given up, for this reason; nothing that comes from it counts any more.
    lost: Callable[[Agent, str], None]
    #: A node cannot take part in the run, and why.
    refused: Callable[[str], None]
    #: A node keeps the run waiting, and how.
    slow: Callable[[str], None]


class Agents:
    """The agents of one run. Used on the thread that calls Ray, unless noted otherwise."""

    def __init__(
        self,
        asking: RayThread,
        changed: threading.Condition,
        options: RayOptions,
        storage: Storage | None,
        sinks: AgentSinks,
    ) -> None:
        """Create the set of agents. ``changed`` guards their state, and is notified when one has ended or is lost."""
        self._ray, self._changed, self._options, self._storage = asking, changed, options, storage
        self._sinks = sinks
        self._token = files.write_token(options.runtime_dir)
        self._hub: Hub | None = None
        self._own_hub = False
        self._agents: dict[str, Agent] = {}
        #: Times at which nodes were lost; refusals are permanent. Guarded.
        self._lost_at: dict[str, float] = {}
        #: The name of the storage probe; and references to the shipped files.
        self._proof = ""
        self._parcels: dict[str, Any] | None = None

    def connect(self, hub: Hub | None, address: str) -> None:
        """Talk over this wire, or over one of its own that listens on ``address``. Before any agent starts."""
        self._own_hub = hub is None
        self._hub = Hub(address, lambda _: None) if hub is None else hub

    # -- asking about them

    def on(self, id: str) -> Agent | None:
        """Return the agent of a node that has one and is not lost. Any thread, with the guard held."""
        return self._agents.get(id)

    def is_ready(self, id: str) -> bool:
        """Return True when the node can start processes. Any thread, with the guard held."""
        found = self._agents.get(id)
        return found is not None and found.ready and not found.lost

    def is_in_doubt(self, since: float) -> bool:
        """Return True while an agent has sent nothing since ``since``. Any thread."""
        with self._changed:
            return any(found.last_message < since for found in self._agents.values() if found.ready)

    def may_count_on(self, id: str) -> bool:
        """Return False for a node that was refused, or lost recently: Ray detects the loss of a node later, and a node
        that was only disconnected may come back."""
        return self._lost_at.get(id, -_RETRY_NODE_DELAY_S) + _RETRY_NODE_DELAY_S < time.monotonic()

    def refused(self) -> list[str]:
        """Return the refused nodes. Any thread."""
        with self._changed:
            return [id for id, when in self._lost_at.items() if when == float("inf")]

    def send(self, to: Agent, message: FromController) -> None:
        """Any thread."""
        assert self._hub is not None
        if not to.lost:
            self._hub.send(to.key, message)

    # -- starting

    def start(self, nodes: Iterable[str]) -> None:
        """Start an agent on each of these nodes."""
        for id in dict.fromkeys(nodes):
            known = self._agents.get(id)
            if known is None or known.over:
                self._start(id)

    def _start(self, id: str, *, anew: bool = False) -> bool:
        """Start an agent, ``anew`` also where an idle one could be used. Return False for a node that is gone."""
        assert self._hub is not None
        facts = next((found for found in client.alive() if found["NodeID"] == id), None)
        if facts is None:
            return False
        connection = self._hub.admit(deliver=lambda received: self._received(id, received))
        # The storage may fail here. An idle agent is taken after that, since it waits for a limited time.
        spec = msgspec.msgpack.encode(self._spec(connection, id, facts["NodeManagerAddress"]))
        idle_actor = None if anew else idle_agents.take(self._kind(), id)
        started = Agent(
            id,
            idle_actor or self._new_actor(id),
            connection.keys.public,
            time.monotonic(),
            host=facts["NodeManagerHostname"],
            address=facts["NodeManagerAddress"],
            is_reused=idle_actor is not None,
        )
        with self._changed:
            self._agents[id] = started
        self._ray.then(started.actor.run.remote(spec), partial(self._ended, started))
        return True

    def _new_actor(self, id: str) -> Any:
        kind: Any = ray.remote(AgentActor)
        return kind.options(
            num_cpus=0,
            runtime_env=dict(self._options.runtime_env) or None,
            scheduling_strategy=NodeAffinitySchedulingStrategy(id, soft=False),
            max_concurrency=3,
        ).remote()

    def _kind(self) -> AgentKind:
        options = self._options
        job: str = ray.get_runtime_context().get_job_id()
        return kind_of(job, options.runtime_env, options.preload, options.import_path)

    def _spec(self, connection: ConnectionInfo, id: str, address: str) -> NodeSpec:
        options = self._options
        return NodeSpec(
            connection=connection,
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
        """Return the storage for a node's access check, after writing the probe that it has to find."""
        if self._storage is None:
            return b""
        if not self._proof:
            proof = secrets.token_hex(8)
            self._storage.within(_PROVEN_TIMEOUT_S).put(node_storage.proof_key(proof), proof.encode())
            self._proof = proof
        return pickle.dumps(self._storage)

    # -- messages from agents

    def _received(self, id: str, received: Received) -> None:
        """On the wire's thread."""
        found = self._agents.get(id)
        if found is None or found.lost or found.key != received.sender:
            return
        found.last_message = time.monotonic()
        for message in received.envelope.messages:
            if isinstance(message, NodeReady):
                found.greeted = True
                self._ray.soon(partial(self._greeted, found, message))
            else:
                self._sinks.on_message(message)
        assert self._hub is not None
        self._hub.acknowledge(received)

    def _greeted(self, found: Agent, message: NodeReady) -> None:
        if message.wants_files and not message.problem:
            self._ray.then(found.actor.bring.remote(self._shipped()), partial(self._on_files_shipped, found))
            return
        problem = message.problem or self._missing_answer(found)
        if problem:
            self._refuse(found, problem, _SAME_STORAGE)
            return
        found.ready = True
        self._sinks.ready()

    def _shipped(self) -> dict[str, Any]:
        """Return references to the files for a node that does not share the driver's file system."""
        if self._parcels is None:
            copied = [path for path in self._options.copied if os.path.isdir(path)]
            self._parcels = {path: ray.put(files.pack(path)) for path in copied}
            for place, path in self._options.modules.items():
                if path and "working_dir" not in self._options.runtime_env:
                    self._parcels[place] = ray.put(files.pack_modules(path))
        return self._parcels

    def _on_files_shipped(self, found: Agent, _: None, error: BaseException | None) -> None:
        """Handle the end of shipping the run's files to a node: a failure there is a lost node."""
        if error is not None and not (self._ray.closing or found.lost or isinstance(error, client.GONE)):
            self._refuse(found, f"the run's files cannot be brought to it: {error}", "")

    def _missing_answer(self, found: Agent) -> str:
        """Return the problem when the driver does not see the node's reply in the storage."""
        if self._storage is None:
            return ""
        place = without_secrets(self._storage.uri)
        try:
            self._storage.within(_PROVEN_TIMEOUT_S).get(node_storage.proof_key(f"{self._proof}-{found.node}"))
        except FileNotFoundError:
            return f"the driver does not see the file that the node has just written to the storage {place}"
        except OSError as error:
            return f"the driver cannot read the storage {place}: {error}"
        return ""

    # -- refusing and losing them

    def _refuse(self, found: Agent, problem: str, advice: str) -> None:
        """Refuse a node, such as one with another storage, and fail the run before any training."""
        self._part_with(found, float("inf"))
        what = problem.rstrip(".")
        self._sinks.refused(f"The node {found.host} cannot take part in the run: {what}. {advice}".rstrip())

    def _ended(self, ended: Agent, end: AgentEnd | None, error: BaseException | None) -> None:
        """Handle the end of an agent: its own result, or the error of its actor."""
        with self._changed:
            ended.over, ended.is_clean = True, end is not None and end.is_clean
            self._changed.notify_all()
        if self._ray.closing or ended.lost:
            return
        if end is not None and end.unreachable:
            self._refuse(ended, end.unreachable, _OPEN_PORT)
        elif ended.is_reused and not ended.greeted and error is not None:
            self._replace(ended)
        elif _has_never_run(ended, error):
            self._refuse(ended, f"the node's agent failed: {error}", "")
        else:
            self._lose(ended, f"the node {ended.host} is gone: the run's processes there have ended")

    def _replace(self, gone: Agent) -> None:
        """Start another agent in place of an idle one that had ended, or failed, before this run could use it."""
        assert self._hub is not None
        self._ray.kill(gone.actor, holds_resources=False)  # it may be alive, and only unreachable
        if not self._start(gone.node, anew=True):
            self._lose(gone, f"the node {gone.host} is gone")
            return
        self._hub.expel(gone.key)
        with self._changed:
            gone.lost = True

    def watch(self) -> None:
        """Declare agents lost after their timeout. Makes no Ray call: the Ray head may be the unresponsive part."""
        now = time.monotonic()
        with self._changed:
            known = [found for found in self._agents.values() if not (found.lost or found.over)]
        for found in known:
            if found.ready and now - found.last_message > LOST_TIMEOUT_S:
                self._lose(found, f"no heartbeat from {found.host} for {LOST_TIMEOUT_S:g} s")
            elif not found.greeted and now - found.started > _SILENT_TIMEOUT_S:
                self._refuse(found, f"the node's agent has sent no message for {_SILENT_TIMEOUT_S:g} s", "")
            elif not (found.greeted or found.told_slow) and now - found.started > _SLOW_TIMEOUT_S:
                found.told_slow = True
                self._sinks.slow(f"the agent on {found.host} has sent no message for {_SLOW_TIMEOUT_S:g} s")

    def _lose(self, lost: Agent, reason: str) -> None:
        """Declare an agent lost and ignore its messages. It exits by itself when it cannot reach the driver."""
        if self._part_with(lost, time.monotonic()):
            self._sinks.lost(lost, reason)

    def _part_with(self, agent: Agent, when: float) -> bool:
        """Drop an agent: ``when`` its node was lost, infinity for good. Return False where that was done."""
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
            # Without a first message it has started nothing: ending its actor is enough.
            open_to_us = [
                found for found in self._agents.values() if found.greeted and not (found.lost or found.over)
            ]
        for found in open_to_us:
            self.send(found, EndNode())
        with self._changed:
            self._changed.wait_for(
                lambda: all(found.over or found.lost for found in open_to_us), timeout=_END_TIMEOUT_S
            )

    def leave(self, draining: Collection[str]) -> None:
        """Keep the agents that can serve another run, and remove all others from the cluster, as well as those on nodes
        that are draining. Called after the Ray thread has stopped."""
        for found in self._agents.values():
            if found.node in draining or not (found.is_clean and self._keep(found)):
                self._ray.kill(found.actor, holds_resources=False)

    def _keep(self, found: Agent) -> bool:
        """Keep an agent for the next run of this process; return False where Ray does not answer."""
        try:
            with client.without_joining():
                ended = found.actor.wait_for_run.remote(idle.IDLE_TIMEOUT_S).future()
                kept = idle_agents.keep(self._kind(), found.node, found.actor, idle.IDLE_TIMEOUT_S)
                for surplus in idle_agents.take_surplus(found.node):
                    self._ray.kill(surplus, holds_resources=False)
        except Exception:  # this process leaves the cluster at this moment, which ends the actor
            return False
        # Ray ends an actor that is not referred to: so it ends also if the call does not reach it.
        ended.add_done_callback(lambda _: idle_agents.forget(kept))
        return True

    def sweep_storage(self) -> None:
        """Remove the probe files from the storage; a failure to do so does not fail the run."""
        if self._storage is None or not self._proof:
            return
        try:
            self._storage.within(_PROVEN_TIMEOUT_S).delete_tree("probe")
        except OSError as error:
            _logger.warning(
                "The directory 'probe' stays in %s: %s", without_secrets(self._storage.uri), error
            )

    def close_wire(self) -> None:
        if self._own_hub and self._hub is not None:
            self._hub.close()


def _has_never_run(ended: Agent, error: BaseException | None) -> bool:
    """Return whether an agent's actor failed before its first message."""
    if isinstance(error, ray.exceptions.ActorDiedError):
        return bool(error.actor_init_failed)
    return isinstance(error, ray.exceptions.RayTaskError) and not ended.greeted
