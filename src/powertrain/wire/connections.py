"""Connections to a listening process that have not proved a key: bounded in number.

ZeroMQ accepts every connection, one open file each, and knows only after a handshake whether its peer is a stranger. A
peer that opens thousands of connections and sends nothing would use up the files of this process until the handshakes
time out. So the listener counts them by the events of its socket, and the oldest unproven connections are closed when
there are too many: of the host that has most of them, so that a flood from one machine does not keep workers of others
out. A worker whose connection is closed this way reconnects by itself.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Any

#: The other end of a connection: its host, and its whole address.
Peer = tuple[str, Any]


class UnprovenConnections:
    """Accepted connections whose other end is not known yet, by their descriptors. Not thread-safe.

    Descriptors belong to ZeroMQ, which may close one at any moment; then the number may come to mean another
    file. So a connection is touched only through a duplicate, whose other end is compared with that of the accepted
    connection first.
    """

    def __init__(self) -> None:
        #: A descriptor reserved for duplicates, for when the process may open no more files; and its placeholder while
        #: unused.
        self._nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._spare = os.dup(self._nothing)
        self._peers: dict[int, Peer] = {}
        #: The descriptors by host, oldest first.
        self._of_host: dict[str, dict[int, None]] = {}

    def __len__(self) -> int:
        return len(self._peers)

    def add(self, descriptor: int) -> None:
        """Count a connection that was just accepted."""
        self.remove(descriptor)
        with self._duplicate(descriptor) as connection:
            peer = _peer_of(connection) if connection is not None else None
        if peer is not None:  # else it has ended already
            self._peers[descriptor] = peer
            self._of_host.setdefault(peer[0], {})[descriptor] = None

    def remove(self, descriptor: int) -> None:
        """Stop counting a connection: it has ended, or its other end is a worker of the run."""
        peer = self._peers.pop(descriptor, None)
        if peer is None:
            return
        of_host = self._of_host[peer[0]]
        del of_host[descriptor]
        if not of_host:
            del self._of_host[peer[0]]

    def close_beyond(self, most: int) -> int:
        """Close the oldest connections of the busiest hosts until ``most`` are left; returns how many were closed."""
        closed = 0
        while len(self._peers) > max(0, most):
            busiest = max(self._of_host.values(), key=len)
            self._hang_up(next(iter(busiest)))
            closed += 1
        return closed

    def close(self) -> None:
        """Let go of the spare descriptor; nothing can be counted any more."""
        os.close(self._spare)
        os.close(self._nothing)

    def _hang_up(self, descriptor: int) -> None:
        peer = self._peers[descriptor]
        self.remove(descriptor)
        with self._duplicate(descriptor) as connection:
            if connection is not None and _peer_of(connection) == peer:
                with contextlib.suppress(OSError):
                    connection.shutdown(
                        socket.SHUT_RDWR
                    )  # its owner reads the end of it, and closes its descriptor

    @contextlib.contextmanager
    def _duplicate(self, descriptor: int) -> Iterator[socket.socket | None]:
        """Yield the connection in the spare descriptor; None where it is not one any more."""
        try:
            os.dup2(descriptor, self._spare, inheritable=False)
            connection = socket.socket(fileno=self._spare)
        except OSError:
            yield None
            return
        try:
            yield connection
        finally:
            connection.detach()
            os.dup2(self._nothing, self._spare, inheritable=False)  # else the connection would stay half open


def _peer_of(connection: socket.socket) -> Peer | None:
    try:
        address = connection.getpeername()
    except OSError:
        return None
    return (str(address[0]), address) if isinstance(address, tuple) else None
