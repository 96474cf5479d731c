"""The control protocol of a live run, for other processes of the same user on the same machine.

A live run has ``control.json`` (which run it is) and ``control.sock`` in its runtime directory, both
for this user only. A request is one line of JSON. The reply is any number of lines, of which only the last is an
:class:`Answer`. Several clients are served at a time, each by a thread that only waits for the controller's replies.

A run of another version replies to an unknown request with an error message, and ignores unknown fields of a known one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Union

import msgspec

from powertrain.storage.files.descriptors import open_directory, open_file
from powertrain.text.redaction import has_secrets, strip_secrets
from powertrain.wire.values import ProcessStack, Where

_CARD, _SOCKET = "control.json", "control.sock"
#: Seconds for a request to arrive; for the controller to send the next part; for the client to receive it.
_REQUEST_TIMEOUT_S = 10.0
_HANDLER_TIMEOUT_S = 20.0
_SEND_TIMEOUT_S = 30.0
#: Seconds that the end of a run waits for clients that are still being served.
_EXIT_TIMEOUT_S = 2.0
#: Bytes of a request, and of one line of a reply: the stacks of a rank and all its processes.
_REQUEST_LIMIT = 1 << 16
_REPLY_LIMIT = 1 << 27
_CARD_LIMIT = 1 << 20
#: pid, uid and gid of a socket's other end.
_PEER = struct.Struct("iII")
#: Clients that are served at the same time.
_MAX_CLIENTS = 16


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of a run."""

    name: str
    path: str
    pid: int
    #: The directory of this machine that holds its growing files, ``journal/`` and ``logs/``; "" where that is unknown.
    files: str = ""
    #: Of its lease: which of all starts of the run it is.
    lease: int = 0
    #: True where the run's address has credentials, which are not in ``path``.
    has_credentials: bool = False


def card_of(name: str, path: str, files: str, lease: int) -> Card:
    """Return the card of a run of this process. Credentials in its address stay in the process."""
    return Card(
        name=name,
        path=strip_secrets(path),
        pid=os.getpid(),
        files=files,
        lease=lease,
        has_credentials=has_secrets(path),
    )


# --------------------------------------------------------------------------- requests


class ResizeRequest(msgspec.Struct, frozen=True, kw_only=True, tag="resize"):
    """Continue with so many workers."""

    workers: int


class StopRequest(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """End at the next boundary; at once with ``now``, or ``within`` so many seconds (0: however long it takes)."""

    #: The client's name, for the journal.
    by: str
    now: bool = False
    within: float = 0.0


class LookAround(msgspec.Struct, frozen=True, kw_only=True, tag="look_around"):
    """Return the stacks of every thread of these ranks; of all ranks where none is named."""

    ranks: tuple[int, ...] = ()


class ProfileSteps(msgspec.Struct, frozen=True, kw_only=True, tag="profile"):
    """Profile the next steps of these ranks, and keep the traces in the run's directory."""

    ranks: tuple[int, ...] = (0,)
    steps: int = 3
    #: Also record allocations.
    memory: bool = False
    #: Seconds to wait for them.
    within: float = 120.0


class Describe(msgspec.Struct, frozen=True, kw_only=True, tag="describe"):
    """Return the progress of the run, and what it waits for."""


Request = Union[ResizeRequest, StopRequest, LookAround, ProfileSteps, Describe]

# --------------------------------------------------------------------------- replies


class RankSeen(msgspec.Struct, frozen=True, kw_only=True, tag="rank_seen"):
    """The stacks of one rank: its own process first. ``where`` is the user's line, where one is known."""

    rank: int
    processes: list[ProcessStack]
    where: Where | None = None
    #: Its wait on the run's own wire, from its last heartbeat.
    awaits: str = ""
    #: The last row that it has reported; 0 for none.
    row: int = 0
    #: True while a debugger holds it.
    debugged: bool = False


class RankProfiled(msgspec.Struct, frozen=True, kw_only=True, tag="rank_profiled"):
    """The profile of one rank: its key in the run's directory, or the reason why there is none in ``error``."""

    rank: int
    key: str = ""
    error: str = ""


class StillWaiting(msgspec.Struct, frozen=True, kw_only=True, tag="still_waiting"):
    """The request is being served; these ranks are still to come."""

    ranks: list[int]
    seconds: float = 0.0


class Description(msgspec.Struct, frozen=True, kw_only=True, tag="description"):
    """The state of a run at this moment."""

    state: str
    reason: str = ""
    attempt: int = 0
    workers: int = 0
    #: The last row that all ranks have reported, and seconds since; 0 and -1 before the first.
    row: int = 0
    row_age: float = -1.0
    #: Ranks that the row after it still waits for.
    awaited: list[int] = []
    #: The newest committed checkpoint, "" for none; and what is reported and not in storage yet, since so many seconds.
    checkpoint: str = ""
    uploads: int = 0
    upload_bytes: int = 0
    upload_age: float = 0.0
    #: Ranks that a debugger holds.
    debugged: list[int] = []
    #: How far rank 0 has read its data: "train: epoch 3, 45 %"; "" where nothing is known.
    data: str = ""


class Answer(msgspec.Struct, frozen=True, kw_only=True, tag="answer"):
    """The last line of a reply: the effect of the request; ``ok`` is False when it has none."""

    ok: bool
    message: str = ""


Part = Union[RankSeen, RankProfiled, StillWaiting, Description]
Reply = Union[Part, Answer]


class ControlClient:
    """The client of one request. Replies may be sent from any thread; those after the answer are dropped."""

    def __init__(self) -> None:
        self._replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()

    def send_part(self, part: Part) -> None:
        """Send a part of the reply."""
        self._replies.put(part)

    def answer(self, message: str, ok: bool = True) -> None:
        """Send the last line of the reply."""
        self._replies.put(Answer(ok=ok, message=message))

    def replies(self) -> Iterator[Reply]:
        """Yield the replies, up to and including the answer."""
        while True:
            try:
                reply = self._replies.get(timeout=_HANDLER_TIMEOUT_S)
            except queue.Empty:
                reply = Answer(ok=False, message=f"The run did not answer within {_HANDLER_TIMEOUT_S:g} s.")
            yield reply
            if isinstance(reply, Answer):
                return


#: Passes a request to the run, which replies to the client from any thread.
RequestHandler = Callable[[Request, ControlClient], None]

# --------------------------------------------------------------------------- the run's side


@contextlib.contextmanager
def listening(directory: str | Path, card: Card, handle: RequestHandler) -> Iterator[None]:
    """Serve requests to this run for as long as the block lasts. Removes its files afterwards."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        address = Path(directory, _SOCKET)
        listener.bind(str(address))
        os.chmod(address, 0o600)
        listener.listen()
        descriptor = os.open(
            Path(directory, _CARD), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600
        )
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(card))
        server = _ControlServer(listener, handle)
        try:
            yield
        finally:
            Path(directory, _CARD).unlink(missing_ok=True)
            server.close()
            address.unlink(missing_ok=True)


class _ControlServer:
    """Accepts clients and serves each on a thread of its own."""

    def __init__(self, listener: socket.socket, handle: RequestHandler) -> None:
        self._listener, self._handle = listener, handle
        self._guard = threading.Lock()
        self._clients: dict[threading.Thread, tuple[socket.socket, ControlClient]] = {}
        self._thread = threading.Thread(target=self._accept, name="powertrain-control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop accepting clients, and answer those that still wait."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join(_REQUEST_TIMEOUT_S)
        with self._guard:
            clients = dict(self._clients)
        for connection, client in clients.values():
            client.answer("The run has ended.", False)
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RD)  # a client that has not sent its request is too late
        deadline = time.monotonic() + _EXIT_TIMEOUT_S
        for thread, (connection, _) in clients.items():
            thread.join(max(0.0, deadline - time.monotonic()))
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # a client that does not read is not waited for
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            if not _is_own_peer(connection):
                connection.close()
                continue
            with self._guard:
                is_full = len(self._clients) >= _MAX_CLIENTS
                if not is_full:
                    client = ControlClient()
                    thread = threading.Thread(
                        target=self._serve,
                        args=(connection, client),
                        name="powertrain-client",
                        daemon=True,
                    )
                    self._clients[thread] = connection, client
                    thread.start()
            if is_full:
                _refuse(connection)

    def _serve(self, connection: socket.socket, client: ControlClient) -> None:
        try:
            with connection, contextlib.suppress(OSError):
                connection.settimeout(_REQUEST_TIMEOUT_S)
                request = _decode_request(_line(connection, _REQUEST_LIMIT))
                if isinstance(request, Answer):
                    client.answer(request.message, request.ok)
                else:
                    self._handle(request, client)
                connection.settimeout(_SEND_TIMEOUT_S)
                for reply in client.replies():
                    connection.sendall(msgspec.json.encode(reply) + b"\n")
        finally:
            with self._guard:
                self._clients.pop(threading.current_thread(), None)


def _refuse(connection: socket.socket) -> None:
    with connection, contextlib.suppress(OSError):
        connection.settimeout(_REQUEST_TIMEOUT_S)
        answer = Answer(
            ok=False, message=f"{_MAX_CLIENTS} other requests to the run are open. Try again soon."
        )
        connection.sendall(msgspec.json.encode(answer) + b"\n")


def _decode_request(line: bytes) -> Request | Answer:
    """Return the request, or the answer for a line that is not one."""
    try:
        request: Request = msgspec.json.decode(line, type=Request)
        return request
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        message = f"The run does not understand the request ({error}). It may be of another version."
        return Answer(ok=False, message=message)


def _line(connection: socket.socket, limit: int, rest: bytearray | None = None) -> bytes:
    """Return the next line, without its end; later bytes are left in ``rest``. b"" for none within ``limit`` bytes."""
    rest = bytearray() if rest is None else rest
    searched = 0
    while (end := rest.find(b"\n", searched)) < 0:
        searched = len(rest)
        piece = connection.recv(1 << 16) if searched <= limit else b""
        if not piece:
            return b""
        rest += piece
    line = bytes(rest[:end])
    del rest[: end + 1]
    return line


# --------------------------------------------------------------------------- the client's side


class LiveRun(msgspec.Struct, frozen=True):
    """A live run on this machine: its identity, and the runtime directory in which it listens."""

    card: Card
    directory: Path


def live_runs(*roots: Path) -> list[LiveRun]:
    """Return the runs of this user that listen below ``roots``, without those of processes that were killed.

    Cards that another user has put there, and sockets that a process of another user listens on, do not count.
    """
    found = []
    for path in sorted(path for root in roots for path in root.glob(f"*/{_CARD}")):
        with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
            card = msgspec.json.decode(_read_own(path), type=Card)
            if _listens(path.parent):
                found.append(LiveRun(card, path.parent))
    return found


def _read_own(path: Path) -> bytes:
    """Return the content of a card in a directory of this user; raises ``OSError`` for any other."""
    with open_directory(path.parent.parent, [path.parent.name]) as directory:
        descriptor = open_file(directory, path.name, str(path), os.O_RDONLY)
        with os.fdopen(descriptor, "rb") as file:
            if {os.fstat(directory).st_uid, os.fstat(descriptor).st_uid} != {os.geteuid()}:
                raise PermissionError(errno.EPERM, "belongs to another user", str(path))
            return file.read(_CARD_LIMIT)


def _listens(directory: Path) -> bool:
    """Return True when a process of this user is behind the socket. The socket of a dead process refuses."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(1.0)
        try:
            connection.connect(str(directory / _SOCKET))
        except (TimeoutError, BlockingIOError):
            return True  # it is there, and busy
        except OSError:
            return False
        return _is_own_peer(connection)


def _is_own_peer(connection: socket.socket) -> bool:
    """Return True when the process at the other end runs as this user; True where the system does not say."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return bool(_PEER.unpack(credentials)[1] == os.geteuid())


def send_request(
    directory: Path, request: Request, within: float = _HANDLER_TIMEOUT_S + _REQUEST_TIMEOUT_S
) -> Iterator[Reply]:
    """Send a request to the run with this runtime directory, and yield its replies; the last is an answer.

    Raises ``OSError`` when it does not listen, sends nothing for ``within`` seconds, or disconnects before its answer.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(within)
        connection.connect(str(directory / _SOCKET))
        if not _is_own_peer(connection):
            raise PermissionError(errno.EPERM, "the process that listens there belongs to another user")
        # A run with too many clients replies and closes the connection without reading; the reply can be read.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(msgspec.json.encode(request) + b"\n")
        rest = bytearray()
        while line := _line(connection, _REPLY_LIMIT, rest):
            reply = _decode_reply(line)
            yield reply
            if isinstance(reply, Answer):
                return
    raise ConnectionError("it closed the connection before it had replied")


def _decode_reply(line: bytes) -> Reply:
    try:
        reply: Reply = msgspec.json.decode(line, type=Reply)
        return reply
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Answer(ok=False, message=f"The run, which may be of another version, says: {line[:500]!r}.")
