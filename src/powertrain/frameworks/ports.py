"""Ports that ranks meet at, and the addresses under which they reach each other."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from powertrain.backend import Worker
from powertrain.errors import EngineError


class ReservedPort:
    """A port of this rank, from the time that it is chosen: this process's own until it is closed or handed over."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None

    def open(self, address: str, *, listens: bool) -> tuple[str, int]:
        """Take a port of ``address`` (loopback when it is ""); see :func:`bind`."""
        self.close()
        self._socket = bind(address, listens=listens)
        host, port = self._socket.getsockname()[:2]
        return host, port

    def take_descriptor(self) -> int:
        """Hand the listening socket to the store that serves it."""
        if self._socket is None:
            raise EngineError("rank 0 received the request to join before the request to listen")
        listener, self._socket = self._socket, None
        return listener.detach()

    def close(self) -> None:
        """Let go of the port."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def bind(address: str, *, listens: bool = True) -> socket.socket:
    """Return a socket on ``address`` alone (loopback when it is ""), on a port the system chose.

    One that does not listen only keeps the system from giving the port to another process: a connection to it is
    refused, and a server of this process that shares addresses, as torch's and gRPC's do, can still listen there.
    """
    problem: OSError | None = None
    for host in [address] if address else ["127.0.0.1", "::1"]:
        bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            if not listens:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind((host, 0))
            if listens:
                bound.listen(socket.SOMAXCONN)
            return bound
        except OSError as error:
            bound.close()
            problem = error
    raise EngineError(
        f"This rank could not open a port on {address or 'the loopback interface'} for the other workers: {problem}. "
        "Check that the address belongs to the node."
    )


def joined(host: str, port: int) -> str:
    """Return "host:port", with brackets around an address of IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def on_one_host(workers: Sequence[Worker]) -> bool:
    """True when all workers reach each other through the loopback interface."""
    return len({(worker.metadata.hostname, worker.metadata.node_ip) for worker in workers}) <= 1


def on_one_node(workers: Sequence[Worker]) -> bool:
    """True when all workers also see the same files: two nodes of a cluster may be containers of one host."""
    return on_one_host(workers) and len({worker.metadata.node_id for worker in workers}) <= 1


def addresses(workers: Sequence[Worker]) -> list[str]:
    """Return by rank the address to listen at: "" for the loopback interface where all workers share a host."""
    if on_one_host(workers):
        return [""] * len(workers)
    return [worker.metadata.node_ip for worker in workers]
