"""What tests of the wire listen and speak with."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from powertrain.wire.envelope import Envelope, FromController, FromWorker
from powertrain.wire.from_controller import Ack
from powertrain.wire.from_worker import Noted
from powertrain.wire.hub import Hub
from powertrain.wire.keys import ConnectionInfo, Received
from powertrain.wire.link import Link

PATIENCE = 30.0
#: Bytes before what a frame brings.
HEADER = 9


class WatchedHub(Hub):
    """Tells of every frame of anybody that it is done with."""

    def __init__(self, *arguments: Any, done: Callable[[bytes], None], **options: Any) -> None:
        self._done = done
        super().__init__(*arguments, **options)

    def _receive(self, route: bytes, frame: zmq.Frame) -> None:
        super()._receive(route, frame)
        self._done(frame.bytes)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()


class Ear:
    """A hub, and all that it delivered and rejected."""

    def __init__(self, directory: str, address: str = "ipc", **options: Any) -> None:
        #: The frames that the hub is done with.
        self.done: list[bytes] = []
        self.received: list[Received] = []
        self.rejected: list[str] = []
        #: While it is not set, the hub's thread stands still at the next delivery.
        self.reads = threading.Event()
        self.reads.set()
        self.acknowledges = True
        self._changed = threading.Condition()
        self.hub = WatchedHub(
            address, self._deliver, self._reject, directory=directory, done=self._add_done, **options
        )

    def _add_done(self, frame: bytes) -> None:
        with self._changed:
            self.done.append(frame)
            self._changed.notify_all()

    def _deliver(self, received: Received) -> None:
        self.reads.wait(PATIENCE)
        if self.acknowledges:
            self.hub.acknowledge(received)
        with self._changed:
            self.received.append(received)
            self._changed.notify_all()

    def _reject(self, problem: str) -> None:
        with self._changed:
            self.rejected.append(problem)
            self._changed.notify_all()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, PATIENCE), (self.received, self.rejected)

    def seqs(self) -> list[int]:
        return [received.number for received in self.received]

    def notes(self) -> list[str]:
        return [m.message for r in self.received for m in r.envelope.messages if isinstance(m, Noted)]


#: Those that a test has made.
links: list[Link] = []


def connect(connection: ConnectionInfo, rank: int, attempt: int) -> Link:
    """A link that is closed after the test, however the test ends."""
    link = Link(connection, rank, attempt)
    links.append(link)
    return link


def note(text: str) -> list[FromWorker]:
    return [Noted(message=text)]


def pump(link: Link, until: Callable[[], bool]) -> list[FromController]:
    """Let the link work until something holds; returns the commands that came."""
    commands: list[FromController] = []
    deadline = time.monotonic() + PATIENCE
    while not until():
        assert time.monotonic() < deadline, "it did not come to hold"
        commands += link.poll(0.02)[0]
    return commands


def wait_acknowledged(link: Link) -> None:
    pump(link, lambda: link.is_acknowledged)


def envelope(number: int, rank: int = 0, **fields: Any) -> bytes:
    """The one frame of a batch."""
    return frame(
        number,
        msgspec.msgpack.encode(
            Envelope(rank=rank, attempt=0, boundary=0, row=0, messages=fields.pop("messages", []), **fields)
        ),
    )


def frame(number: int, body: bytes, ends: int = 1) -> bytes:
    return struct.pack(">BQ", ends, number) + body


class RawClient:
    """A socket with good keys that sends whatever a test likes."""

    def __init__(self, connection: ConnectionInfo, routing_id: bytes = b"") -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.setsockopt(zmq.RECONNECT_IVL, 10)
        if routing_id:
            self.socket.setsockopt(zmq.ROUTING_ID, routing_id)
        self.socket.curve_serverkey = connection.hub_key
        self.socket.curve_publickey, self.socket.curve_secretkey = (
            connection.keys.public,
            connection.keys.secret,
        )
        self.socket.connect(connection.endpoint)

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        self._context.term()

    def acknowledged(self) -> int:
        """The number in the next acknowledgement."""
        assert self.socket.poll(int(PATIENCE * 1000))
        answer = self.socket.recv()
        assert answer.startswith(frame(0, b""))
        return msgspec.msgpack.decode(answer[HEADER:], type=Ack).seq
