"""A worker's side of the wire."""

from __future__ import annotations

import socket as sockets
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import zmq.auth

from powertrain.wire import limits
from powertrain.wire.envelope import Envelope
from powertrain.wire.frames import (
    HEADER,
    Gathering,
    TooLarge,
    cut_into_frames,
    decode_command,
    encoded,
    frame_count,
    read_frame,
    shortened,
)
from powertrain.wire.from_controller import Ack
from powertrain.wire.wakeup import Wakeup

if TYPE_CHECKING:
    from powertrain.wire.envelope import FromController, FromWorker
    from powertrain.wire.keys import ConnectionInfo

#: Seconds for a connection to be made, when it is only looked whether that can be.
_CONNECT_TIMEOUT_S = 3.0


class Link:
    """A worker's connection. Not thread-safe: one thread owns it.

    ``poll`` waits for commands or for ``wake`` (from any thread); ``send`` numbers and sends a batch and
    keeps it until it is acknowledged; ``room`` is the number of further batches that may be in flight.
    """

    #: Frames under way at most, and so batches; beyond it the caller keeps its messages to itself.
    WINDOW = 8
    #: Seconds without an acknowledgement after which everything unacknowledged is sent again.
    RESEND_INTERVAL_S = 5.0
    #: Seconds without any answer at all after which it is looked into whether the hub can be reached.
    REACH_TIMEOUT_S = 30.0

    def __init__(
        self,
        connection: ConnectionInfo,
        rank: int,
        attempt: int,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        """Create a link. Several links of a process share one ``context``, which outlives them all."""
        self._rank, self._attempt = rank, attempt
        self.endpoint = connection.endpoint
        self._owns_context = context is None
        self._context = context or zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.curve_serverkey = connection.hub_key
        self._socket.curve_publickey, self._socket.curve_secretkey = (
            connection.keys.public,
            connection.keys.secret,
        )
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, HEADER.size + limits.FRAME_LIMIT + limits.ENCRYPTION)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._socket.connect(connection.endpoint)
        self._wake = Wakeup()
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake.fileno(), zmq.POLLIN)
        #: The last frame's number; frames in flight; and frames that wait for room.
        self._seq = 0
        self._unacked: deque[tuple[int, bytes]] = deque()
        self._waiting: deque[Iterator[tuple[int, bytes]]] = deque()
        #: The last command's number, and the frames so far of an incomplete one.
        self._commands = 0
        self._gathering = Gathering(limits.MESSAGE_LIMIT + limits.COMMAND_ROOM)
        self._heard = self._tried = time.monotonic()
        self._resent = 0.0
        #: True once the hub has answered anything.
        self.reached = False

    @property
    def room(self) -> int:
        """Batches that may still be sent before an acknowledgement is needed."""
        return 0 if self._waiting else self.WINDOW - len(self._unacked)

    @property
    def is_acknowledged(self) -> bool:
        """True when everything sent has been acknowledged."""
        return not self._unacked and not self._waiting

    @property
    def silence(self) -> float:
        """Return the seconds for which sent frames have been unacknowledged; 0 when all are acknowledged."""
        return time.monotonic() - self._heard if self._unacked else 0.0

    def why_unreachable(self) -> str:
        """Return the reason why the hub has never replied, after its timeout; "" while all may be well.

        A hub that takes the connection is there: its process may only have been stopped for a while."""
        now = time.monotonic()
        if self.reached or now - self._tried < self.REACH_TIMEOUT_S:
            return ""
        self._tried = now
        return _why_closed(self.endpoint)

    def watch(self, fileno: int) -> None:
        """Also return from ``poll`` when this descriptor becomes readable."""
        self._poller.register(fileno, zmq.POLLIN)

    def wake(self) -> None:
        """Make ``poll`` return. Any thread."""
        self._wake.set()

    def poll(self, timeout: float | None) -> tuple[list[FromController], set[int]]:
        """Wait for commands; returns them and the watched descriptors that are ready."""
        ready = self._poller.poll(None if timeout is None else max(0, int(timeout * 1000)))
        commands: list[FromController] = []
        watched: set[int] = set()
        for source, _ in ready:
            if source is self._socket:
                commands = self._receive_all()
            elif source == self._wake.fileno():
                self._wake.clear()
            else:
                watched.add(source)
        self._resend_if_silent()
        return commands, watched

    def send(
        self,
        messages: Iterable[FromWorker],
        boundary: int,
        row: int,
        extras: dict[str, Any] | None = None,
    ) -> None:
        """Send one batch. The caller has checked ``room``.

        A part that is too large for a message is left out, and the run is notified instead. Raises :class:`WireError`
        where nothing can be left out."""
        for body in self._bodies(list(messages), boundary, row, extras or {}):
            if self.is_acknowledged:
                self._heard = time.monotonic()
            self._waiting.append(cut_into_frames(body, self._seq + 1))
            self._seq += frame_count(body)
            self._send_waiting()

    def close(self) -> None:
        self._socket.close()
        if self._owns_context:
            self._context.term()
        self._wake.close()

    def _bodies(
        self, messages: list[FromWorker], boundary: int, row: int, extras: dict[str, Any]
    ) -> list[bytes]:
        """Return the messages as encoded envelopes: one, unless they are too large together."""
        envelope = Envelope(
            rank=self._rank,
            attempt=self._attempt,
            boundary=boundary,
            row=row,
            messages=messages,
            heard=self._commands,
            extras=extras,
        )
        try:
            return [encoded(envelope, limits.MESSAGE_LIMIT)]
        except TooLarge as error:
            size = error.size
        if len(messages) == 1:
            return self._bodies(shortened(messages[0], size), boundary, row, extras)
        middle = len(messages) // 2
        return [
            *self._bodies(messages[:middle], boundary, row, extras),
            *self._bodies(messages[middle:], boundary, row, extras),
        ]

    def _send_waiting(self) -> None:
        while self._waiting and len(self._unacked) < self.WINDOW:
            frame = next(self._waiting[0], None)
            if frame is None:
                self._waiting.popleft()
            else:
                self._unacked.append(frame)
                self._transmit(frame[1])

    def _transmit(self, frame: bytes) -> None:
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            pass  # the hub is closed: the link's owner must see the silence, and not block here

    def _receive_all(self) -> list[FromController]:
        commands: list[FromController] = []
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return commands
            number, ends, piece = read_frame(memoryview(frame))
            self._heard, self.reached = time.monotonic(), True
            if number == 0:
                self._acknowledged(decode_command(piece))
            elif number == self._commands + 1:  # any other has come already, over a connection that broke
                self._commands = number
                whole = self._gathering.add(number, ends, piece)
                if whole is not None:
                    commands.append(decode_command(whole))

    def _acknowledged(self, answer: FromController) -> None:
        assert isinstance(answer, Ack)
        while self._unacked and self._unacked[0][0] <= answer.seq:
            self._unacked.popleft()
        self._send_waiting()

    def _resend_if_silent(self) -> None:
        """Resend unacknowledged frames with backoff: copies pile up in front of a stalled hub."""
        now = time.monotonic()
        pause = max(self.RESEND_INTERVAL_S, (now - self._heard) / 4)
        if self._unacked and now - max(self._heard, self._resent) > pause:
            self._resent = now
            for _, frame in self._unacked:
                self._transmit(frame)


def _why_closed(endpoint: str) -> str:
    """Return the reason why an endpoint refuses connections; "" where it accepts them."""
    kind, _, place = endpoint.partition("://")
    try:
        if kind == "ipc":
            with sockets.socket(sockets.AF_UNIX) as plain:
                plain.settimeout(_CONNECT_TIMEOUT_S)
                plain.connect(place)
        else:
            host, _, port = place.rpartition(":")
            sockets.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_S).close()
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__
    return ""
