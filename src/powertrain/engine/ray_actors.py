"""What of a run lives in Ray's own processes: on each node its agent, and for each worker what holds its resources."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import ray


@dataclass(frozen=True)
class Whereabouts:
    """Where a slot came to lie, and which GPUs of the node are its own."""

    node: str
    address: str
    host: str
    gpus: tuple[str, ...]


def whereabouts() -> Whereabouts:
    """Of the Ray process that calls this."""
    context = ray.get_runtime_context()
    gpus: Sequence[str] = context.get_accelerator_ids().get("GPU", [])
    return Whereabouts(
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
    """Holds one worker's resources as long as it lives. The worker itself is a process of the node's agent."""

    async def where(self) -> Whereabouts:
        return whereabouts()

    async def hold(self) -> None:
        """Never returns: whoever waits for it learns of the actor's end."""
        await asyncio.Event().wait()

    async def feed(self, streams: Mapping[str, Any]) -> None:
        """Serve these iterators over Ray's datasets, by the path of the socket for each, in place of earlier ones."""
        await asyncio.to_thread(self._serve, streams)

    def _serve(self, streams: Mapping[str, Any]) -> None:
        from powertrain.engine.ray_feed import Feed

        for feed in getattr(self, "_feeds", []):
            feed.close()
        for path in streams:
            os.makedirs(os.path.dirname(path), exist_ok=True)
        self._feeds = [Feed(iterator, path) for path, iterator in streams.items()]


class AgentActor:
    """The node's agent, in a process that the node's raylet started and ends."""

    def __init__(self, spec: bytes) -> None:
        """``spec`` is an encoded :class:`NodeSpec`."""
        from powertrain.engine.node import NodeAgent, NodeSpec  # not for those that only hold resources

        os.chdir("/")  # its directory may be one that goes with the job
        # Ray's debugger is for its own processes, and workers are none.
        os.environ.pop("PYTHONBREAKPOINT", None)
        self._agent = NodeAgent(msgspec.msgpack.decode(spec, type=NodeSpec))

    def run(self) -> str:
        """Returns when everything on the node is over: with why the run was never reached, or ""."""
        return self._agent.run()

    def bring(self, parcels: Mapping[str, Any]) -> None:
        """Unpack archives, given as references, each where it is to be."""
        self._agent.bring({place: ray.get(archive) for place, archive in parcels.items()})
