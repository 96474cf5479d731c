"""Feeds one rank with the rows of a Ray dataset, from a Ray process on the rank's node.

The rank is forked from a clean process and never connects to Ray. So the actor that holds its slot reads for it and
sends the rows over a Unix socket, by the protocol of :mod:`powertrain.data.ray.shard`.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Generator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from powertrain.data.ray.protocol import END, EPOCH, FAILED, SCHEMA, send_frame, send_schema, send_table
from powertrain.data.ray.shard import refuse_ray_only_types
from powertrain.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

#: The kernel's limit for the path of a socket.
_MOST_PATH_BYTES = 107
#: Seconds that the thread of a feed is given to end; it may be waiting for Ray, which cannot be interrupted.
_CLOSE_TIMEOUT_S = 5.0


def iterators_of(dataset: Any, node_ids: Sequence[str], *, split: bool = True) -> list[Any]:
    """Return one iterator over a ``ray.data.Dataset`` for each rank: the i-th for the rank on the node ``node_ids[i]``.

    With ``split`` each gets its own part, all of equally many rows, read near its node; otherwise each gets all rows.
    Called in a process that is in Ray, once per attempt. They can be sent to actors.
    """
    if not split:
        return [dataset.iterator() for _ in node_ids]
    return list(dataset.streaming_split(len(node_ids), equal=True, locality_hints=list(node_ids)))


def end(iterators: Sequence[Any]) -> None:
    """End the iterators of :func:`iterators_of` once the attempt is over, with Ray's pending work and waiting readers.

    Called in a process that is in Ray. A feed that waits for ranks which will never come is woken by it.
    """
    import ray

    from powertrain.engine.ray.client import without_joining

    shared = {iterator._coord_actor for iterator in iterators if hasattr(iterator, "_coord_actor")}
    with without_joining():
        for coordinator in shared:
            ray.kill(coordinator)


class Feed:
    """Serves one ``ray.data.DataIterator`` to one rank, epoch by epoch, on a thread of its own."""

    def __init__(self, iterator: Any, socket_path: str) -> None:
        """Listens at ``socket_path``, which must not exist, from now on until :meth:`close`."""
        if len(os.fsencode(socket_path)) > _MOST_PATH_BYTES:
            raise DataError(
                f"The path {socket_path!r} for the rows of a Ray dataset has more than {_MOST_PATH_BYTES} bytes, which "
                "is all that a socket can have. Set TMPDIR or XDG_RUNTIME_DIR of the nodes to a shorter directory."
            )
        self._iterator, self._path = iterator, socket_path
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(socket_path)
        os.chmod(socket_path, 0o600)
        self._listener.listen()
        self._changing = threading.Lock()
        self._connection: socket.socket | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="powertrain-feed", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hang up, and stop listening. Returns when the thread has ended, or soon. May be called again."""
        with self._changing:
            self._closed = True
            _shut(self._listener)
            if self._connection is not None:
                _shut(self._connection)
        self._thread.join(_CLOSE_TIMEOUT_S)
        self._listener.close()
        try:
            os.unlink(self._path)
        except FileNotFoundError:
            pass  # closed before

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            with connection:
                with self._changing:
                    if self._closed:
                        return
                    self._connection = connection
                try:
                    self._answer(connection)
                except OSError:
                    pass  # the rank has left this epoch, and may begin another
                finally:
                    with self._changing:
                        self._connection = None

    def _answer(self, connection: socket.socket) -> None:
        command = connection.recv(1)
        if command == EPOCH:
            self._send_epoch(connection)
        elif command == SCHEMA:
            self._send_columns(connection)

    def _send_epoch(self, connection: socket.socket) -> None:
        """Send one epoch. Raises ``OSError`` when the rank has disconnected; the other ranks' epoch continues."""
        try:
            batches: Generator[pa.Table, None, None] = iter(
                self._iterator.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1)
            )
        except Exception as error:
            send_frame(connection, FAILED, _encode_error(error))
            return
        with closing(batches):
            try:
                self._send_all(connection, batches)
            except OSError:
                self._leave(batches)
                raise

    def _send_all(self, connection: socket.socket, batches: Generator[pa.Table, None, None]) -> None:
        while True:
            try:  # Ray or the user's functions may raise anything, even errors like a socket's
                table = next(batches, None)
                if table is not None:
                    refuse_ray_only_types(table.schema)
            except Exception as error:
                send_frame(connection, FAILED, _encode_error(error))
                return
            if table is None:
                send_frame(connection, END)
                return
            send_table(connection, table)

    def _leave(self, batches: Generator[pa.Table, None, None]) -> None:
        """Drain the rest of the epoch, so that the other ranks can finish theirs.

        Unfetched rows fill the memory that Ray allows an epoch, and the other parts of the split would wait for ever.
        So the rest is fetched and dropped. Ray is notified first: once every rank has left it ends the epoch.
        """
        parts = getattr(self._iterator, "world_size", None)
        if parts is None or parts() < 2:
            return
        try:
            self._iterator._on_iteration_end(None)
            for _ in batches:
                if self._closed:
                    return
        except Exception:
            pass  # Ray has ended the epoch, or it failed, which its remaining readers report

    def _send_columns(self, connection: socket.socket) -> None:
        try:
            schema = _arrow_schema(self._iterator.schema())
            refuse_ray_only_types(schema)
        except Exception as error:
            send_frame(connection, FAILED, _encode_error(error))
        else:
            send_schema(connection, schema)


def _arrow_schema(schema: Any) -> pa.Schema:
    """Convert the result of ``ray.data.DataIterator.schema()`` to an Arrow schema; without columns where there is no
    row."""
    import pyarrow as pa

    if schema is None:
        return pa.schema([])
    return pa.schema(list(zip(schema.names, schema.types, strict=True)))


def _encode_error(error: Exception) -> bytes:
    from powertrain.data.ray.errors import ray_error_message

    return ray_error_message(error).encode("utf-8", "replace")


def _shut(listener_or_connection: socket.socket) -> None:
    """Wake a thread that waits on it."""
    try:
        listener_or_connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # the peer is gone
