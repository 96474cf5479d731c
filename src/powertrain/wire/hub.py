"""The controller's side of the wire: one socket, many workers."""

from __future__ import annotations

import contextlib
import os
import resource
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import zmq.auth
from zmq.auth.base import Authenticator

from powertrain.errors import EngineError, WireError
from powertrain.text.loggers import module_logger
from powertrain.wire import limits
from powertrain.wire.connections import UnprovenConnections
from powertrain.wire.frames import (
    HEADER,
    Gathering,
    TooLarge,
    amount,
    cut_into_frames,
    encode,
    encoded,
    read_envelope,
    read_frame,
)
from powertrain.wire.from_controller import Ack
from powertrain.wire.keys import ConnectionInfo, KeyPair, Received, in_brackets
from powertrain.wire.link import Link
from powertrain.wire.wakeup import Wakeup

if TYPE_CHECKING:
    from powertrain.wire.envelope import Envelope, FromController


_logger = module_logger(__name__)
#: Characters of why a message was refused.
_LONGEST_REASON = 300
#: Bytes in the path of a Unix socket, the ending NUL left out.
_SOCKET_PATH_LIMIT = 107
#: Connections that may wait to be taken: all workers of a run come at the same moment. The system may allow fewer.
_BACKLOG = 4096
#: Connections to a TCP port that have not proved a key: how many beside those of expected workers, and how long.
MOST_UNPROVEN = 128
_HANDSHAKE_TIMEOUT_S = 10.0
#: Events of connections that are not read yet: ZeroMQ accepts none while there are more, so it is bounded how far it
#: runs ahead of the hub that counts them. 1,000 are ZeroMQ's own.
_EVENTS_AHEAD = 1000 + 1
#: ZeroMQ's format of such an event: its kind, and a number, which is the connection's descriptor.
_EVENT = struct.Struct("=HI")
#: Milliseconds for sending what is left when the hub closes, and seconds until ZeroMQ has closed its socket.
_LINGER_MS, _CLOSE_TIMEOUT_S = 200, 10.0
#: Files that a process has open beside its connections.
_OTHER_FILES = 512
#: Seconds between two polls of the hub, per known worker, so that with thousands it handles many messages at once;
#: below the second number it does not wait at all, and a few hundred workers are read at once.
_GATHER_EACH, _GATHER_LEAST, _GATHER_MOST = 5e-6, 2e-3, 2e-2


class _Peer:
    """The hub's state of one worker. The hub's thread only."""

    def __init__(self, deliver: Callable[[Received], None], speaks_as: tuple[int, int] | None) -> None:
        self.deliver = deliver
        #: The rank and attempt that its envelopes name; None until the first of them.
        self.speaks_as = speaks_as
        #: Where its connection is; None before it came.
        self.route: bytes | None = None
        #: The last frame that was taken, and the last that need not be sent again.
        self.seen = self.acknowledged = 0
        self.gathering = Gathering(limits.MESSAGE_LIMIT)
        #: The last command's number, and the commands not yet known to have arrived.
        self.number = 0
        self.unheard: deque[tuple[int, bytes]] = deque()
        #: True once a message of it could not be read: nothing of it is read from then on.
        self.is_refused = False
        #: True once it was logged that there was no memory for a message of it.
        self.has_warned_of_memory = False
        #: The descriptor of its connection, -1 while it has none.
        self.descriptor = -1

    def __str__(self) -> str:
        if self.speaks_as is None:
            return "a process of the run that has not identified itself yet"
        rank, attempt = self.speaks_as
        return f"rank {rank} of attempt {attempt}" if rank >= 0 else "a process of the run that is no rank"

    def dealt_with(self, number: int) -> None:
        """Acknowledge the batch that ended with this frame, and the incomplete frames after it."""
        self.acknowledged = max(self.acknowledged, number)
        if self.gathering.first and self.acknowledged >= self.gathering.first - 1:
            self.acknowledged = self.seen

    def heard(self, number: int) -> None:
        """Drop the commands up to this number, which have arrived."""
        while self.unheard and self.unheard[0][0] <= number:
            self.unheard.popleft()

    def check(self, envelope: Envelope) -> None:
        """Raise :class:`WireError` for an envelope that cannot be this worker's, or acknowledges unsent commands."""
        claims = (envelope.rank, envelope.attempt)
        if self.speaks_as is not None and claims != self.speaks_as:
            raise WireError(f"it claims to be of rank {claims[0]} of attempt {claims[1]}")
        if envelope.heard > self.number:
            raise WireError(f"it claims that command {envelope.heard} has arrived; {self.number} were sent")
        self.speaks_as = claims


class Hub:
    """Listens for links, delivers their batches in order and once, and sends to them.

    One thread owns the socket, reads and decodes. ``deliver`` is called on that thread with each new batch, which the
    handler must :meth:`acknowledge`; then, once for all batches that have come meanwhile, ``delivered``. So the handler
    is woken once for many of them. ``refused`` is called once for each worker that sent something which cannot be read
    or cannot be its own, with its key and a sentence; nothing of that worker is read from then on. Without ``refused``
    the sentence goes to ``rejected``, as do other warnings. Messages without a known key are dropped silently, because
    their sender is not known. Connections to a TCP port without a proved key are bounded, by :data:`MOST_UNPROVEN` and
    a timeout.

    ``parted`` is called with the key of a worker whose connection has ended, for any cause, at once. That alone means
    little: a link reconnects by itself while its process lives.
    """

    def __init__(
        self,
        address: str,
        deliver: Callable[[Received], None],
        rejected: Callable[[str], None] = _logger.warning,
        *,
        delivered: Callable[[], None] = lambda: None,
        parted: Callable[[bytes], None] = lambda _: None,
        refused: Callable[[bytes, str], None] | None = None,
        directory: str = "",
        port: int = 0,
        listen_on: str = "",
    ) -> None:
        """Listen on ``address``: "ipc" for a Unix socket in ``directory``, else an IP address (0: any free port).

        ``listen_on`` is another IP address of this node to use instead, or that for all of them, "0.0.0.0" or "::".
        """
        self.keys = KeyPair.new()
        self._deliver, self._rejected = deliver, rejected
        self._delivered, self._parted, self._refused = delivered, parted, refused
        self._context = zmq.Context()
        self._auth = Authenticator(self._context)
        self._peers: dict[bytes, _Peer] = {}
        #: The keys of the connected workers, by the descriptor of their connection. The thread's only.
        self._connected: dict[int, bytes] = {}
        self._auth.configure_curve_callback("*", credentials_provider=self)
        self._auth.start()
        self._socket = self._listening_socket()
        # A Unix socket lies in a directory that only this user can enter.
        self._unproven = UnprovenConnections() if address != "ipc" else None
        self._has_warned_of_flood = False
        self._events = self._event_socket()
        self._path = ""
        try:
            self.endpoint = self._bind(address, directory, port, listen_on)
        except BaseException:
            self._close_sockets()  # a context with open sockets would block its garbage collection
            raise
        #: For a worker: an encoded command, or the number of a batch that has been dealt with.
        self._outbox: deque[tuple[bytes, bytes | int]] = deque()
        #: Whom an acknowledgement is owed.
        self._owed: set[bytes] = set()
        #: True when something was delivered since ``delivered`` was called last.
        self._has_delivered = False
        self._wake = Wakeup()
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="powertrain-hub", daemon=True)
        self._thread.start()

    def callback(self, domain: str, key: bytes) -> bool:
        """Return True for an admitted key, for ZAP. (The name is the authenticator's.)"""
        return key in self._peers

    def admit(
        self,
        public: bytes = b"",
        deliver: Callable[[Received], None] | None = None,
        speaks_as: tuple[int, int] | None = None,
    ) -> ConnectionInfo:
        """Return the connection info of one more worker: with keys made here, or for the owner of the key ``public``.

        Its batches are given to ``deliver``, by default to the hub's own. Its envelopes must name the rank and
        attempt of ``speaks_as``; where that is not given, those that its first one names."""
        keys = KeyPair(public, b"") if public else KeyPair.new()
        self._peers.setdefault(keys.public, _Peer(deliver or self._deliver, speaks_as))
        make_room_for_connections(len(self._peers))
        return ConnectionInfo(endpoint=self.endpoint, hub_key=self.keys.public, keys=keys)

    def count_connected(self) -> int:
        """Return the number of admitted workers that are connected and have sent a frame. Any thread."""
        return len(self._connected)

    def expel(self, public: bytes) -> None:
        """Drop all later messages with this key, and send none to its owner. Any thread."""
        self._peers.pop(public, None)

    def acknowledge(self, received: Received) -> None:
        """Acknowledge a handled batch to its sender. Any thread."""
        self._outbox.append((received.sender, received.number))
        self._wake.set()

    def send(self, public: bytes, message: FromController) -> None:
        """Hand a message to the worker with this key, now or when it connects. Any thread.

        Raises :class:`EngineError` for one that is too large."""
        try:
            body = encoded(message, limits.MESSAGE_LIMIT + limits.COMMAND_ROOM)
        except TooLarge as error:
            raise EngineError(
                f"A message to a worker is too large: {error.size} ({type(message).__name__}); the limit is "
                f"{amount(limits.MESSAGE_LIMIT)}. Objects that the training function, its config or a backend hook "
                "refers to are pickled with it. Load large data in the workers, from files or datasets."
            ) from error
        self._outbox.append((public, body))
        self._wake.set()

    def close(self) -> None:
        """Flush the queue, stop, and remove the socket file."""
        if self._closing:
            return
        self._closing = True
        self._wake.set()
        self._thread.join()
        self._close_sockets()
        self._wake.close()
        if self._path:
            try:
                os.unlink(self._path)
            except FileNotFoundError:
                pass

    def _close_sockets(self) -> None:
        self._auth.stop()
        self._socket.close(linger=_LINGER_MS)
        self._drain_events()
        self._events.close()
        if self._unproven is not None:
            self._unproven.close()
        self._end_context()

    def _end_context(self) -> None:
        """End ZeroMQ's threads, which waits until all its sockets are closed.

        That once took for ever after 2,048 connections had ended at the same moment, with all of ZeroMQ's threads idle.
        A run must end all the same, so that the wait has a limit, and the threads end with the process then.
        """
        ending = threading.Thread(target=self._context.term, name="powertrain-hub-end", daemon=True)
        ending.start()
        ending.join(_CLOSE_TIMEOUT_S)
        if ending.is_alive():
            _logger.warning("ZeroMQ did not close the hub's sockets within %.0f s.", _CLOSE_TIMEOUT_S)

    def _drain_events(self) -> None:
        """Read events of connections until ZeroMQ has closed the socket, which waits while their queue is full.

        Not ``disable_monitor()``: pyzmq keeps the interpreter's lock while it waits for that queue, so that no thread
        could read from it, and the process would hang for ever.
        """
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        while (left := deadline - time.monotonic()) > 0 and self._events.poll(int(left * 1000) + 1):
            event, _ = _EVENT.unpack(self._events.recv_multipart()[0])
            if event == zmq.EVENT_MONITOR_STOPPED:
                return

    # -- the thread

    def _listening_socket(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.ROUTER)
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self.keys.public, self.keys.secret
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.BACKLOG, _BACKLOG)
        # Honest links have no more than a window under way, and may send it again.
        socket.setsockopt(zmq.RCVHWM, 4 * Link.WINDOW)
        socket.setsockopt(zmq.MAXMSGSIZE, HEADER.size + limits.FRAME_LIMIT + limits.ENCRYPTION)
        socket.setsockopt(zmq.HANDSHAKE_IVL, int(_HANDSHAKE_TIMEOUT_S * 1000))
        return socket

    def _event_socket(self) -> zmq.Socket[bytes]:
        """Return the socket on which ZeroMQ reports new and closed connections."""
        wanted = zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
        if self._unproven is not None:
            wanted |= zmq.EVENT_ACCEPTED
            make_room_for_connections(MOST_UNPROVEN + _EVENTS_AHEAD)
        events = self._context.socket(zmq.PAIR)
        events.setsockopt(zmq.RCVHWM, 1)
        self._socket.monitor("inproc://connections", wanted)
        events.connect("inproc://connections")
        return events

    def _bind(self, address: str, directory: str, port: int, listen_on: str) -> str:
        if address != "ipc":
            told = address if listen_on in ("", "0.0.0.0", "::") else listen_on
            port = self._bind_tcp(in_brackets(listen_on or address), port)
            return f"tcp://{in_brackets(told)}:{port}"
        path = os.path.join(directory, "wire")
        if len(os.fsencode(path)) > _SOCKET_PATH_LIMIT:
            raise WireError(
                f"The socket path {path!r} is longer than {_SOCKET_PATH_LIMIT} bytes, which the system does "
                "not allow. Set XDG_RUNTIME_DIR or TMPDIR to a shorter directory."
            )
        self._socket.bind(f"ipc://{path}")
        os.chmod(path, 0o600)
        self._path = path
        return f"ipc://{path}"

    def _bind_tcp(self, host: str, port: int) -> int:
        self._socket.setsockopt(zmq.IPV6, int(host.startswith("[")))
        try:
            if not port:
                return self._socket.bind_to_random_port(f"tcp://{host}")
            self._socket.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            if error.errno == zmq.EADDRINUSE:
                cure = "choose another in RunConfig(port=...), or leave it out to take any that is free"
                why = f"Another run or program may have the port: {cure}."
            else:
                why = "Is it an address of this machine? Leave TraceConfig(bind_host=...) out to take its usual one."
            raise WireError(
                f"The run cannot listen on {host}:{port} for its workers: {error}. {why}"
            ) from error
        return port

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._auth.zap_socket, zmq.POLLIN)
        poller.register(self._events, zmq.POLLIN)
        poller.register(self._wake.fileno(), zmq.POLLIN)
        while not self._closing:
            ready = poller.poll()
            if (pause := gathering_pause(len(self._peers))) > 0:
                time.sleep(pause)
                ready = poller.poll(0)
            for source, _ in ready:
                if source is self._auth.zap_socket:
                    self._let_in()
                elif source is self._socket:
                    self._receive_all()
                elif source is self._events:
                    self._take_events()
                else:
                    self._wake.clear()
            self._flush()
        self._flush()

    def _let_in(self) -> None:
        """Accept all pending connections: at the start of a run that is every worker at once."""
        while self._auth.zap_socket.poll(0):
            _run_now(self._auth.handle_zap_message(self._auth.zap_socket.recv_multipart()))

    def _receive_all(self) -> None:
        """Receive all pending frames, or so many that the outbox should be checked again."""
        for _ in range(256):
            try:
                route, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            if len(frames) == 1:
                self._receive(bytes(route.buffer), frames[0])
            elif frames and (peer := self._peers.get(sender := _sender(frames[0]))) is not None:
                self._refuse(sender, peer, f"it is made of {len(frames)} frames")
        if self._has_delivered:
            self._has_delivered = False
            self._delivered()

    def _take_events(self, most: int = 256) -> None:
        """Take in which connections have begun and ended, or so many that others should be looked at again."""
        for _ in range(most):
            try:
                event, descriptor = _EVENT.unpack(self._events.recv_multipart(zmq.NOBLOCK)[0])
            except zmq.Again:
                return
            if event == zmq.EVENT_DISCONNECTED:
                self._on_disconnect(descriptor)
            elif self._unproven is not None and event == zmq.EVENT_ACCEPTED:
                self._unproven.add(descriptor)
                self._bound_unproven(self._unproven)

    def _on_disconnect(self, descriptor: int) -> None:
        if self._unproven is not None:
            self._unproven.remove(descriptor)
        public = self._connected.pop(descriptor, None)
        peer = self._peers.get(public) if public is not None else None
        if public is not None and peer is not None and peer.descriptor == descriptor:
            peer.descriptor = -1
            self._parted(public)

    def _bound_unproven(self, unproven: UnprovenConnections) -> None:
        """Close the oldest connections that have proved no key, where there are more than workers can explain."""
        expected = max(0, len(self._peers) - len(self._connected))
        if unproven.close_beyond(MOST_UNPROVEN + expected) and not self._has_warned_of_flood:
            self._has_warned_of_flood = True
            self._rejected(
                f"More than {MOST_UNPROVEN} connections to {self.endpoint} have not proved that they are of this run; "
                "the oldest are closed. A port scanner or another program may use the port: close it to other "
                "machines than those of the run, or choose another with RunConfig(port=...)."
            )

    def _receive(self, route: bytes, frame: zmq.Frame) -> None:
        sender = _sender(frame)
        peer = self._peers.get(sender)
        if peer is None or peer.is_refused:
            return
        try:
            if peer.route != route:
                self._connects(sender, peer, frame.get(zmq.SRCFD))
            self._take(sender, peer, route, frame.buffer)
        except WireError as problem:
            self._answer_over(peer, route)  # so that it can be notified
            self._refuse(sender, peer, str(problem))
        except MemoryError:  # it comes again, and there may be room by then
            if not peer.has_warned_of_memory:
                peer.has_warned_of_memory = True
                self._rejected(f"No memory is left for a message of {peer}; it is sent again.")

    def _connects(self, sender: bytes, peer: _Peer, descriptor: int) -> None:
        """Note a new connection of a worker. Its descriptor may be reused; the old connection's end is reported
        before."""
        self._take_events(_EVENTS_AHEAD)
        if self._unproven is not None:
            self._unproven.remove(descriptor)
        peer.descriptor = descriptor
        self._connected[descriptor] = sender

    def _take(self, sender: bytes, peer: _Peer, route: bytes, frame: memoryview) -> None:
        """Handle one frame of a known worker; raises :class:`WireError` for an invalid one."""
        number, ends, piece = read_frame(frame)
        if number != peer.seen + 1:
            # Seen already: the acknowledgement was lost. Too early: it comes again, after those lost before it.
            self._owed.add(sender)
            self._answer_over(peer, route)
            return
        whole = peer.gathering.add(number, ends, piece)
        if whole is None:
            peer.seen = number
            peer.dealt_with(peer.acknowledged)
            self._owed.add(sender)
            self._answer_over(peer, route)
            return
        envelope = read_envelope(whole)
        peer.check(envelope)
        peer.seen = number
        peer.heard(envelope.heard)
        self._answer_over(peer, route)
        try:
            peer.deliver(Received(sender, number, envelope))
            self._has_delivered = True
        except Exception as error:  # a bug, which must not stop this thread from serving the others
            _logger.exception("A batch could not be dealt with.")
            raise WireError(f"it could not be dealt with ({type(error).__name__}: {error})") from error

    def _refuse(self, sender: bytes, peer: _Peer, problem: str) -> None:
        """Stop reading from this worker, and report the reason."""
        if peer.is_refused:
            return
        peer.is_refused = True
        # Part of it may be the sender's own text.
        why = ascii(problem)[1:-1][:_LONGEST_REASON]
        sentence = (
            f"A message of {peer} cannot be read: {why}. This is a bug in Powertrain (please report it with the rank's "
            "log), or another process uses the keys of the rank's connection."
        )
        if self._refused is None:
            self._rejected(sentence)
        else:
            self._refused(sender, sentence)

    def _answer_over(self, peer: _Peer, route: bytes) -> None:
        """Resend the commands that have not arrived over a new connection."""
        if peer.route != route:
            peer.route = route
            for _, frame in peer.unheard:
                self._socket.send_multipart([route, frame])

    def _flush(self) -> None:
        while self._outbox:
            public, said = self._outbox.popleft()
            peer = self._peers.get(public)
            if peer is None:
                continue
            if isinstance(said, int):
                peer.dealt_with(said)
                self._owed.add(public)
            else:
                self._command(peer, said)
        while self._owed:
            peer = self._peers.get(self._owed.pop())
            if peer is not None and peer.route is not None:
                ((_, frame),) = cut_into_frames(encode(Ack(seq=peer.acknowledged)), 0)
                self._socket.send_multipart([peer.route, frame])

    def _command(self, peer: _Peer, body: bytes) -> None:
        for number, frame in cut_into_frames(body, peer.number + 1):
            peer.number = number
            peer.unheard.append((number, frame))
            if peer.route is not None:
                self._socket.send_multipart([peer.route, frame])


def _sender(frame: zmq.Frame) -> bytes:
    """Return the public key that the frame came with."""
    return str(frame.get("User-Id")).encode()


def gathering_pause(workers: int) -> float:
    """Return seconds for which a hub lets messages of so many workers gather before it looks at them; 0 for not at
    all."""
    pause = min(_GATHER_MOST, workers * _GATHER_EACH)
    return pause if pause >= _GATHER_LEAST else 0.0


def make_room_for_connections(connections: int) -> None:
    """Raise this process's limit on open files, often 1,024 at first, for so many connections, where the system allows
    it.

    Only where it has to be: programs that still use ``select`` can use no file above that number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or connections + _OTHER_FILES <= soft:
        return
    wanted = max(2 * soft, 2 * connections + _OTHER_FILES)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    with contextlib.suppress(ValueError, OSError):  # refused: then connections wait until others end
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _run_now(coroutine: Any) -> None:
    """Run a coroutine that never awaits anything real (the authenticator's are only written that way)."""
    try:
        coroutine.send(None)
    except StopIteration:
        pass
