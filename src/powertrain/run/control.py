"""Talking to a run that is under way, from another process of the same user on the same machine.

A run that can be talked to has ``control.json`` (which run it is) and ``control.sock`` in its runtime directory, both
for this user only. A question is one line of JSON, and so is the answer.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

_CARD, _SOCKET = "control.json", "control.sock"
#: Seconds for a question to come, and for its answer.
_PATIENCE = 10.0
_LINE_LIMIT = 1 << 16


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """Which run it is."""

    name: str
    path: str
    pid: int


class Resize(msgspec.Struct, frozen=True, kw_only=True, tag="resize"):
    """Go on with so many workers."""

    workers: int


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What will come of it; ``ok`` is False when nothing will."""

    ok: bool
    message: str


#: Asks the run; the answer comes by calling the second argument, from any thread.
Ask = Callable[[Resize, Callable[[str, bool], None]], None]


@contextlib.contextmanager
def listening(directory: str | Path, card: Card, ask: Ask) -> Iterator[None]:
    """Answer questions to this run for as long as the block lasts. Afterwards nothing of it is left."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        address = Path(directory, _SOCKET)
        door.bind(str(address))
        os.chmod(address, 0o600)
        door.listen()
        descriptor = os.open(Path(directory, _CARD), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(card))
        visitors: list[socket.socket] = []
        thread = threading.Thread(
            target=_serve, args=(door, visitors, ask), name="powertrain-control", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            Path(directory, _CARD).unlink(missing_ok=True)
            for connection in (door, *visitors):
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)  # wakes the thread
            thread.join(_PATIENCE)
            address.unlink(missing_ok=True)


def _serve(door: socket.socket, visitors: list[socket.socket], ask: Ask) -> None:
    while True:
        try:
            visitor, _ = door.accept()
        except OSError:
            return
        visitors[:] = [visitor]
        with visitor, contextlib.suppress(OSError):
            visitor.settimeout(_PATIENCE)
            visitor.sendall(msgspec.json.encode(_answer(_line(visitor), ask)) + b"\n")


def _answer(line: bytes, ask: Ask) -> Answer:
    try:
        question = msgspec.json.decode(line, type=Resize)
    except msgspec.DecodeError as error:
        return Answer(ok=False, message=f"The run does not understand the question ({error}).")
    answered = threading.Event()
    answers: list[Answer] = []

    def take(message: str, ok: bool) -> None:
        answers.append(Answer(ok=ok, message=message))
        answered.set()

    ask(question, take)
    if answered.wait(_PATIENCE):
        return answers[0]
    return Answer(ok=False, message=f"The run did not answer within {_PATIENCE:g} s.")


def _line(connection: socket.socket) -> bytes:
    line = b""
    while not line.endswith(b"\n") and len(line) < _LINE_LIMIT:
        piece = connection.recv(4096)
        if not piece:
            break
        line += piece
    return line


def find(root: Path, path: str) -> Path | None:
    """The runtime directory below ``root`` of the live run at ``path``; ``None`` where there is none."""
    for found in sorted(root.glob(f"*/{_CARD}")):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            if msgspec.json.decode(found.read_bytes(), type=Card).path == path:
                return found.parent
    return None


def ask_run(directory: Path, question: Resize) -> Answer:
    """Put a question to the run whose runtime directory this is; raises ``OSError`` when it does not listen."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(2 * _PATIENCE)
        connection.connect(str(directory / _SOCKET))
        connection.sendall(msgspec.json.encode(question) + b"\n")
        return msgspec.json.decode(_line(connection), type=Answer)
