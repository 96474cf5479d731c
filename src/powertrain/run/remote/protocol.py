"""Talking to a run that is under way, from another process of the same user on the same machine.

A run that can be talked to has ``control.json`` (which run it is) and ``control.sock`` in its runtime directory, both
for this user only. A question is one line of JSON. The reply is any number of lines, of which only the last is an
:class:`Answer`. Several may ask at a time: each has a thread, which only waits for what the controller says.

A run of another version answers a question that it does not know in words, and passes over what it does not know of
one that it does.
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
#: Seconds for a question to come; for the controller to say something more; for whoever asks to hear it.
_ASK_WITHIN = 10.0
_SAY_WITHIN = 20.0
_HEAR_WITHIN = 30.0
#: Seconds that the end of a run leaves to those who are still being answered.
_LEAVE_WITHIN = 2.0
#: Bytes of a question, and of one line of a reply: the stacks of a rank and all its processes.
_QUESTION_LIMIT = 1 << 16
_REPLY_LIMIT = 1 << 27
_CARD_LIMIT = 1 << 20
#: pid, uid and gid of a socket's other end.
_PEER = struct.Struct("iII")
#: How many may ask at the same time.
_VISITORS = 16


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """Which run it is."""

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


# --------------------------------------------------------------------------- questions


class ResizeRequest(msgspec.Struct, frozen=True, kw_only=True, tag="resize"):
    """Go on with so many workers."""

    workers: int


class StopRequest(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """End at the next boundary; at once with ``now``, or ``within`` so many seconds (0: however long it takes)."""

    #: Who asks, for the journal.
    by: str
    now: bool = False
    within: float = 0.0


class LookAround(msgspec.Struct, frozen=True, kw_only=True, tag="look_around"):
    """Say what every thread of these ranks is doing; of all ranks where none is named."""

    ranks: tuple[int, ...] = ()


class Describe(msgspec.Struct, frozen=True, kw_only=True, tag="describe"):
    """Say how far the run has come, and what it waits for."""


Question = Union[ResizeRequest, StopRequest, LookAround, Describe]

# --------------------------------------------------------------------------- replies


class RankSeen(msgspec.Struct, frozen=True, kw_only=True, tag="rank_seen"):
    """What one rank is doing: its own process first. ``where`` is the user's line, where one is known."""

    rank: int
    processes: list[ProcessStack]
    where: Where | None = None
    #: What it waits for on the run's own wire, as its last beat said.
    awaits: str = ""
    #: The last row that it has reported; 0 for none.
    row: int = 0
    #: True while a debugger holds it.
    debugged: bool = False


class Description(msgspec.Struct, frozen=True, kw_only=True, tag="description"):
    """How a run stands at this moment."""

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


class Answer(msgspec.Struct, frozen=True, kw_only=True, tag="answer"):
    """The last of a reply: what will come of it; ``ok`` is False when nothing will."""

    ok: bool
    message: str = ""


Part = Union[RankSeen, Description]
Reply = Union[Part, Answer]


class Visitor:
    """Somebody who has asked. Any thread may speak to it; it hears all that was said before its answer."""

    def __init__(self) -> None:
        self._said: queue.SimpleQueue[Reply] = queue.SimpleQueue()

    def tell(self, part: Part) -> None:
        """A part of the reply."""
        self._said.put(part)

    def answer(self, message: str, ok: bool = True) -> None:
        """The last word. What is said after it is not heard."""
        self._said.put(Answer(ok=ok, message=message))

    def replies(self) -> Iterator[Reply]:
        """All that is said, to the answer."""
        while True:
            try:
                reply = self._said.get(timeout=_SAY_WITHIN)
            except queue.Empty:
                reply = Answer(ok=False, message=f"The run did not answer within {_SAY_WITHIN:g} s.")
            yield reply
            if isinstance(reply, Answer):
                return


#: Hands a question to the run, which speaks to the visitor from whatever thread it likes.
Ask = Callable[[Question, Visitor], None]

# --------------------------------------------------------------------------- the run's side


@contextlib.contextmanager
def listening(directory: str | Path, card: Card, ask: Ask) -> Iterator[None]:
    """Answer questions to this run for as long as the block lasts. Afterwards nothing of it is left."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        address = Path(directory, _SOCKET)
        door.bind(str(address))
        os.chmod(address, 0o600)
        door.listen()
        descriptor = os.open(
            Path(directory, _CARD), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600
        )
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(card))
        reception = _Reception(door, ask)
        try:
            yield
        finally:
            Path(directory, _CARD).unlink(missing_ok=True)
            reception.close()
            address.unlink(missing_ok=True)


class _Reception:
    """Lets visitors in, each on a thread of its own."""

    def __init__(self, door: socket.socket, ask: Ask) -> None:
        self._door, self._ask = door, ask
        self._guard = threading.Lock()
        self._inside: dict[threading.Thread, tuple[socket.socket, Visitor]] = {}
        self._thread = threading.Thread(target=self._let_in, name="powertrain-control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Nobody comes in any more, and those who wait for a word get their last."""
        with contextlib.suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join(_ASK_WITHIN)
        with self._guard:
            inside = dict(self._inside)
        for connection, visitor in inside.values():
            visitor.answer("The run has ended.", False)
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RD)  # who has not asked yet is too late
        deadline = time.monotonic() + _LEAVE_WITHIN
        for thread, (connection, _) in inside.items():
            thread.join(max(0.0, deadline - time.monotonic()))
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # who does not listen is not waited for
            thread.join()

    def _let_in(self) -> None:
        while True:
            try:
                connection, _ = self._door.accept()
            except OSError:
                return
            if not _is_own_peer(connection):
                connection.close()
                continue
            with self._guard:
                is_full = len(self._inside) >= _VISITORS
                if not is_full:
                    visitor = Visitor()
                    thread = threading.Thread(
                        target=self._attend,
                        args=(connection, visitor),
                        name="powertrain-visitor",
                        daemon=True,
                    )
                    self._inside[thread] = connection, visitor
                    thread.start()
            if is_full:
                _turn_away(connection)

    def _attend(self, connection: socket.socket, visitor: Visitor) -> None:
        try:
            with connection, contextlib.suppress(OSError):
                connection.settimeout(_ASK_WITHIN)
                question = _question_of(_line(connection, _QUESTION_LIMIT))
                if isinstance(question, Answer):
                    visitor.answer(question.message, question.ok)
                else:
                    self._ask(question, visitor)
                connection.settimeout(_HEAR_WITHIN)
                for reply in visitor.replies():
                    connection.sendall(msgspec.json.encode(reply) + b"\n")
        finally:
            with self._guard:
                self._inside.pop(threading.current_thread(), None)


def _turn_away(connection: socket.socket) -> None:
    with connection, contextlib.suppress(OSError):
        connection.settimeout(_ASK_WITHIN)
        answer = Answer(ok=False, message=f"{_VISITORS} others are asking the run already. Try again soon.")
        connection.sendall(msgspec.json.encode(answer) + b"\n")


def _question_of(line: bytes) -> Question | Answer:
    """What is asked, or what to say where nothing can be made of it."""
    try:
        question: Question = msgspec.json.decode(line, type=Question)
        return question
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        message = f"The run does not understand the question ({error}). It may be of another version."
        return Answer(ok=False, message=message)


def _line(connection: socket.socket, limit: int, rest: bytearray | None = None) -> bytes:
    """The next line, without its end; what came after it is left in ``rest``. b"" for none within ``limit`` bytes."""
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


# --------------------------------------------------------------------------- the other side


class LiveRun(msgspec.Struct, frozen=True):
    """A run under way on this machine: who it is, and the runtime directory in which it listens."""

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


def ask_run(
    directory: Path, question: Question, within: float = _SAY_WITHIN + _ASK_WITHIN
) -> Iterator[Reply]:
    """Put a question to the run whose runtime directory this is, and hear what it says; the last is an answer.

    Raises ``OSError`` when it does not listen, says nothing for ``within`` seconds, or hangs up before its answer.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(within)
        connection.connect(str(directory / _SOCKET))
        if not _is_own_peer(connection):
            raise PermissionError(errno.EPERM, "the process that listens there belongs to another user")
        # A run with too many clients replies and closes the connection without reading; the reply can be read.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(msgspec.json.encode(question) + b"\n")
        rest = bytearray()
        while line := _line(connection, _REPLY_LIMIT, rest):
            reply = _reply_of(line)
            yield reply
            if isinstance(reply, Answer):
                return
    raise ConnectionError("it hung up before it had answered")


def _reply_of(line: bytes) -> Reply:
    try:
        reply: Reply = msgspec.json.decode(line, type=Reply)
        return reply
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Answer(ok=False, message=f"The run, which may be of another version, says: {line[:500]!r}.")
