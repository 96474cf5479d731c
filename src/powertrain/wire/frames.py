"""Messages as frames, and back."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from powertrain.errors import WireError
from powertrain.wire import limits
from powertrain.wire.envelope import Envelope, FromController
from powertrain.wire.from_node import ProcessOutput
from powertrain.wire.from_worker import Executed, Noted, Outcome, Stacks, Telemetry, Validated
from powertrain.wire.values import ErrorReport, Point

if TYPE_CHECKING:
    from powertrain.wire.envelope import FromWorker


#: Before each frame: 1 where its message ends with it, else 0; and its number, from 1; 0 for an acknowledgement.
HEADER = struct.Struct(">BQ")


def _no_extension(code: int, _: memoryview) -> Any:
    """Refuse msgpack extensions: no message has any, and its text form could not hold one."""
    raise msgspec.ValidationError(f"it has a msgpack extension of type {code}")


encode = msgspec.msgpack.Encoder().encode
_decode_envelope = msgspec.msgpack.Decoder(Envelope, ext_hook=_no_extension).decode
decode_command: Callable[[bytes | bytearray | memoryview], FromController] = msgspec.msgpack.Decoder(
    FromController
).decode


def cut_into_frames(body: bytes, first: int) -> Iterator[tuple[int, bytes]]:
    """Cut an encoded message into frames, numbered from ``first``."""
    view = memoryview(body)
    for number, start in enumerate(range(0, len(body), limits.FRAME_LIMIT), first):
        end = start + limits.FRAME_LIMIT
        yield number, b"".join((HEADER.pack(end >= len(body), number), view[start:end]))


def frame_count(body: bytes) -> int:
    return -(-len(body) // limits.FRAME_LIMIT)


def read_frame(frame: memoryview) -> tuple[int, bool, memoryview]:
    """Return a frame's number, True where it is its message's last, and its payload; raises :class:`WireError`."""
    if len(frame) < HEADER.size:
        raise WireError(f"it is {len(frame)} bytes long, which is less than the header of a frame")
    ends, number = HEADER.unpack_from(frame)
    if ends > 1:
        raise WireError("it does not begin with the header of a frame")
    return number, bool(ends), frame[HEADER.size :]


def read_envelope(body: bytearray | memoryview) -> Envelope:
    """Raises :class:`WireError` for anything that is not one."""
    try:
        return _decode_envelope(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, MemoryError) as error:
        raise WireError(f"it is not an envelope ({error or type(error).__name__})") from error


class Gathering:
    """The frames of one message, which come in order, until the last is there."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = bytearray()
        #: Number of the first frame; 0 before it has come.
        self.first = 0

    def add(self, number: int, ends: bool, piece: memoryview) -> bytearray | memoryview | None:
        """Return the whole message once it has ended, else None. Forgets all of it and raises :class:`WireError` where
        it is too long."""
        if ends and not self.first:
            return piece
        size = len(self._held) + len(piece)
        if size > self._limit:
            self._forget()
            raise WireError(
                f"with {size:,} bytes it is longer than the {self._limit:,} that a message may have"
            )
        self.first = self.first or number
        self._held += piece
        return self._forget() if ends else None

    def _forget(self) -> bytearray:
        held, self._held, self.first = self._held, bytearray(), 0
        return held


def shortened(message: FromWorker, size: str) -> list[FromWorker]:
    """Return replacements for a message that is too large: the message without its large part, and a note about it.

    Raises :class:`WireError` where the rank would wait for a reply to the omitted part."""
    most = f"more than the {amount(limits.MESSAGE_LIMIT)} that a message to the run may have"
    if isinstance(message, Outcome) and message.value:
        words = (
            f"The training function returned a value of {size}, {most}; Result.return_value will be None. Report it as "
            "a checkpoint, or write it to a file and return the path."
        )
        return [Noted(message=words), msgspec.structs.replace(message, value=b"")]
    if isinstance(message, Executed) and message.value:
        words = f"The function that was called in this rank returned a value of {size}, {most}."
        error = ErrorReport(type="WireError", message=words, traceback="")
        return [msgspec.structs.replace(message, value=b"", error=error)]
    if isinstance(message, Point) and message.metrics:
        words = (
            f"The metrics of row {message.row} come to {size}, {most}; they were left out. Report large data as the "
            "files of a checkpoint."
        )
        return [Noted(message=words), msgspec.structs.replace(message, metrics={}, originals={})]
    if isinstance(message, Validated) and message.metrics:
        words = f"The validation function returned metrics of {size}, {most}."
        error = ErrorReport(type="WireError", message=words, traceback="")
        return [msgspec.structs.replace(message, metrics={}, error=error)]
    if isinstance(message, (Stacks, Telemetry, ProcessOutput)):
        return [
            Noted(
                message=f"A message to the run ({type(message).__name__}) came to {size}, {most}; it was left out."
            )
        ]
    raise WireError(
        f"A message of this process to the run ({type(message).__name__}) comes to {size}, {most}. Pass large data "
        "by files."
    )


class TooLarge(Exception):
    """Raised for a value above a limit; ``size`` is its size as text."""

    def __init__(self, size: str) -> None:
        super().__init__(size)
        self.size = size


def encoded(value: Any, limit: int) -> bytes:
    """Encode ``value`` in msgpack, after converting unsupported parts: lone surrogates, very large integers.

    Raises :class:`TooLarge` for more than ``limit`` bytes."""
    try:
        body = encode(value)
    except msgspec.EncodeError:
        raise TooLarge("more than 4 GiB") from None  # of one string, which msgpack cannot write
    except (UnicodeEncodeError, OverflowError):
        body = encode(_plain(msgspec.to_builtins(value, builtin_types=(bytes,))))
    if len(body) > limit:
        raise TooLarge(amount(len(body)))
    return body


def amount(size: int) -> str:
    return f"{size / 2**30:.3g} GiB" if size >= 2**30 else f"{size / 2**20:.3g} MiB"


def encode_messages(messages: list[FromWorker]) -> bytes:
    """Return messages for a file of this process's own."""
    return encoded(messages, sys.maxsize)


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return str(value)
    if isinstance(value, dict):
        return {_plain(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    return value
