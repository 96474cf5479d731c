"""Frames between a worker and the process that streams a Ray dataset to it."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from powertrain.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa


EPOCH, SCHEMA = b"E", b"S"
ROWS, END, FAILED = b"R", b"D", b"F"
#: Approximate bytes of a frame of rows.
_FRAME_BYTES = 4 * 2**20
_HEAD = struct.Struct("<cQ")
#: Seconds to wait for the feed: it is opened before the rank starts, on the same machine.
_CONNECT_TIMEOUT_S = 30.0


def send_frame(connection: socket.socket, kind: bytes, content: Any = b"") -> None:
    """Send one whole frame. Raises ``OSError`` when the other side has closed."""
    content = memoryview(content)
    connection.sendall(_HEAD.pack(kind, content.nbytes))
    connection.sendall(content)


def send_table(connection: socket.socket, table: pa.Table) -> None:
    """Send the rows of a table, in as many frames as needed; none for a table without rows."""
    rows = max(1, int(table.num_rows * _FRAME_BYTES / max(table.nbytes, 1)))
    for start in range(0, table.num_rows, rows):
        send_frame(connection, ROWS, _as_stream(table.slice(start, rows)))


def send_schema(connection: socket.socket, schema: pa.Schema) -> None:
    """Send the columns, without rows."""
    send_frame(connection, ROWS, _as_stream(schema.empty_table()))


def _as_stream(table: pa.Table) -> pa.Buffer:
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


class FeedRequest:
    """One connection to a feed, and the tables received over it."""

    def __init__(self, name: str, address: str, kind: bytes) -> None:
        self._name = name
        self._connection = _connected(name, address)
        self._connection.sendall(kind)

    def tables(self) -> Iterator[pa.Table]:
        """Yield the feed's tables until its end, in Arrow's plain types. Raises :class:`DataError`."""
        from powertrain.data.sources.plain import plain_table

        while True:
            kind, content = self._frame()
            if kind == END:
                return
            if kind == FAILED:
                raise DataError(f"The Ray dataset {self._name!r} cannot be read. {bytes(content).decode()}")
            yield plain_table(_opened(content))

    def hang_up(self) -> None:
        """Close the connection and wake the waiting thread. Idempotent; may be called by any thread."""
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other side closed first
        self._connection.close()

    def _frame(self) -> tuple[bytes, memoryview]:
        kind, size = _HEAD.unpack(self._exactly(_HEAD.size))
        return kind, self._exactly(size)

    def _exactly(self, size: int) -> memoryview:
        content = memoryview(bytearray(size))
        at = 0
        while at < size:
            try:
                received = self._connection.recv_into(content[at:])
            except OSError:
                received = 0  # closed by either side, which makes no difference to the waiting thread
            if received == 0:
                raise DataError(
                    f"The process that reads the Ray dataset {self._name!r} for this rank has ended in mid-epoch. Its "
                    "node is lost, or Ray has ended it; the log of its actor tells. The run's next attempt begins the "
                    "epoch again."
                )
            at += received
        return content


def _opened(content: memoryview) -> pa.Table:
    import pyarrow as pa

    return pa.ipc.open_stream(pa.py_buffer(content)).read_all()


def _connected(name: str, address: str) -> socket.socket:
    """Return a connection to the feed at ``address``. Raises :class:`DataError` where it cannot be made."""
    deadline = time.monotonic() + _CONNECT_TIMEOUT_S
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(address)
            return connection
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError) as error:
            connection.close()
            if time.monotonic() > deadline:
                raise DataError(
                    f"Nobody gives the rows of the Ray dataset {name!r}: no process listens at {address} "
                    f"({error.strerror}). The actor that holds this rank's slot has ended; its log tells why."
                ) from error
        time.sleep(0.05)
