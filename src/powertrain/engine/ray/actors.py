"""The actors of a run in Ray's own processes: an agent on each node, and a resource holder for each worker."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import ray

if TYPE_CHECKING:
    from powertrain.engine.local.warm_server import WarmServer


@dataclass(frozen=True)
class SlotLocation:
    """The node of a slot, and its GPUs."""

    node: str
    address: str
    host: str
    gpus: tuple[str, ...]


def whereabouts() -> SlotLocation:
    """Of the Ray process that calls this."""
    context = ray.get_runtime_context()
    gpus: Sequence[str] = context.get_accelerator_ids().get("GPU", [])
    return SlotLocation(
        node=context.get_node_id(),
        address=own_address(),
        host=socket.gethostname(),
        gpus=tuple(map(str, gpus)),
    )


def own_address() -> str:
    """Under which other nodes of the cluster reach this one."""
    address: Any = ray.util.get_node_ip_address  # not typed
    return str(address())


class SlotActor:
    """Holds one worker's resources for its lifetime. The worker itself is a process of the node's agent."""

    async def where(self) -> SlotLocation:
        return whereabouts()

    async def hold(self) -> None:
        """Never return: a pending call reports the actor's end to its caller."""
        await asyncio.Event().wait()

    async def feed(self, streams: Mapping[str, Any]) -> None:
        """Serve these iterators over Ray's datasets, by the path of the socket for each, in place of earlier ones."""
        await asyncio.to_thread(self._serve, streams)

    def _serve(self, streams: Mapping[str, Any]) -> None:
        from powertrain.engine.ray.feed import Feed

        # Ray warns about blocking calls in an actor with an event loop; feeds make them on threads of their own.
        os.environ.setdefault("RAY_WARN_BLOCKING_GET_INSIDE_ASYNC", "0")
        for feed in getattr(self, "_feeds", []):
            feed.close()
        for path in streams:
            os.makedirs(os.path.dirname(path), exist_ok=True)
        self._feeds = [Feed(iterator, path) for path, iterator in streams.items()]


def slot_actor(runtime_env: Mapping[str, Any], needs: Mapping[str, float], **options: Any) -> Any:
    """Return the class of an actor that holds these resources, with other options of Ray's."""
    custom = {name: amount for name, amount in needs.items() if name not in ("CPU", "GPU", "memory")}
    return ray.remote(SlotActor).options(
        num_cpus=needs.get("CPU", 0),
        num_gpus=needs.get("GPU", 0),
        memory=int(needs["memory"]) if needs.get("memory") else None,
        resources=custom,
        runtime_env=dict(runtime_env) or None,
        max_concurrency=100,
        **options,
    )


@dataclass(frozen=True)
class AgentEnd:
    """The end of a run on one node."""

    #: Why the agent never reached the run, "" where it did.
    unreachable: str
    #: True where the actor can serve another run.
    is_clean: bool


class AgentActor:
    """The node's agent, in a process that the node's raylet started and ends. It serves one run after the other."""

    def __init__(self) -> None:
        self._working_dir, self._is_of_job = self._find_working_dir()
        os.chdir("/")  # its directory may be one that goes with the job
        # Ray's debugger is for its own processes, and workers are none.
        os.environ.pop("PYTHONBREAKPOINT", None)
        self._server: WarmServer | None = None
        self._changed = threading.Condition()
        #: How many runs have begun here, whether one goes on, and whether none may begin any more. Guarded.
        self._runs, self._is_running, self._is_ending = 0, False, False

    @staticmethod
    def _find_working_dir() -> tuple[str, bool]:
        """Return the path of the ``working_dir`` of a ``runtime_env``, "" where none was given; and True where it is
        the whole job's. Call before this process changes its directory."""
        given = ray.get_runtime_context().runtime_env.get("working_dir")
        worker: Any = ray._private.worker.global_worker  # not typed
        job = worker.core_worker.get_job_config()
        of_job = json.loads(job.runtime_env_info.serialized_runtime_env or "{}").get("working_dir")
        return (os.getcwd(), given == of_job) if given else ("", False)

    def run(self, spec: bytes) -> AgentEnd:
        """Serve a run, given an encoded :class:`NodeSpec`. Returns when everything of it on the node is over."""
        from powertrain.engine.ray.node.agent import NodeAgent
        from powertrain.engine.ray.node.spec import NodeSpec  # not needed by actors that only hold resources

        with self._changed:
            if self._is_ending:
                raise RuntimeError("This agent has ended, since no run came in time.")
            self._runs, self._is_running = self._runs + 1, True
            self._changed.notify_all()
        server, self._server = self._server, None
        self._agent = NodeAgent(
            msgspec.msgpack.decode(spec, type=NodeSpec),
            self._working_dir,
            is_of_job=self._is_of_job,
            server=server,
            keeps_server=True,
        )
        unreachable = self._agent.run()
        self._server = self._agent.kept_server
        with self._changed:
            self._is_running = False
        return AgentEnd(unreachable, is_clean=self._server is not None)

    def wait_for_run(self, seconds: float) -> None:
        """End this process unless a run comes within so many seconds."""
        with self._changed:
            before = self._runs
            if self._changed.wait_for(lambda: self._is_running or self._runs > before, seconds):
                return
            self._is_ending = True
        ray.actor.exit_actor()  # type: ignore[no-untyped-call]

    def bring(self, parcels: Mapping[str, Any]) -> None:
        """Unpack archives, given as references, each at its place."""
        self._agent.bring({place: ray.get(archive) for place, archive in parcels.items()})
