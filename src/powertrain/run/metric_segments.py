"""A segment: many points in columns, in one value of storage.

::

    points in columns       an Arrow IPC file, compressed, in batches
    summary                 an Arrow IPC file: what is known of each stretch of rows of each full batch
    footer                  msgpack: which segments' numbers it covers, where the summary is
    length of the footer    4 bytes
    magic                   8 bytes

The summary (see :mod:`powertrain.run.metric_summary`) lets a view pass over the points. Only the columns that are
asked for are read, also where storage is across a network. Segments of earlier versions were the Arrow file alone;
they are read as segments without a summary.

Merging reads and writes one batch after the other, so it takes memory for the result's bytes and one batch, however
many points there are. Small batches grow together on the way.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from powertrain.run.metric_summary import STRETCH_ROWS, has_numbers, is_metric, summary_of
from powertrain.run.points import MAX_COLUMNS, conformed, unified
from powertrain.storage import Storage
from powertrain.storage.addresses import OBJECT_STORES, parse

if TYPE_CHECKING:
    import pyarrow as pa

#: A batch is full, and has a summary, from so many points on, fewer where it has many columns.
BATCH_POINTS = 32_768
_BATCH_CELLS = 1 << 20

_MAGIC = b"PTSEGM1\n"
_TAIL = struct.Struct(f"<I{len(_MAGIC)}s")
#: The footer is looked for in so many last bytes at first.
_TAIL_BYTES = 1 << 16
#: Where earlier versions said which numbers a segment covers.
_OLD_COVERS = b"powertrain.covers"


class Footer(msgspec.Struct, frozen=True, array_like=True):
    """What a segment says of itself."""

    #: The numbers of the segments that went into it.
    first: int
    last: int
    #: Where the summary begins and ends; the points are before it.
    summary_start: int
    summary_end: int
    #: The batches that the summary is of, and the stretches' rows.
    summarized: list[int]
    stretch_rows: int
    #: Metrics with numbers in rows; None where nobody has looked.
    numeric: list[str] | None


class Segment:
    """One stored segment. Its points are read when they are asked for, from a file that is opened each time."""

    def __init__(self, storage: Storage, key: str, size: int) -> None:
        """Reads the footer. Raises ``FileNotFoundError`` where the key is gone."""
        self._storage, self.key, self._size = storage, key, size
        with self._file() as file:
            self.footer = _read_footer(file, size)
            reader = _reader(file, 0, self.footer.summary_start)
            self.schema: pa.Schema = reader.schema.remove_metadata()
            self.batch_count: int = reader.num_record_batches

    @property
    def summarized(self) -> frozenset[int]:
        """The batches whose stretches :meth:`summary` tells."""
        usable = self.footer.stretch_rows == STRETCH_ROWS
        return frozenset(self.footer.summarized) if usable else frozenset()

    def table(self) -> pa.Table:
        """All points."""
        with self._file(whole=True) as file:
            table: pa.Table = _reader(file, 0, self.footer.summary_start).read_all()
        return table.replace_schema_metadata(None)

    def batch(self, number: int, columns: Sequence[str] | None = None) -> pa.RecordBatch:
        """One batch, with those of these columns that there are; with all where none are named."""
        (batch,) = self.batches(columns, [number])
        return batch

    def batches(
        self, columns: Sequence[str] | None = None, numbers: Iterable[int] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """As :meth:`batch`, one after the other, all where no numbers are given."""
        with self._file(whole=columns is None and numbers is None) as file:
            threads = columns is not None  # merging, which reads all, has time and not much memory
            reader = _reader(file, 0, self.footer.summary_start, columns, threads)
            for number in range(self.batch_count) if numbers is None else numbers:
                yield reader.get_batch(number).replace_schema_metadata(None)

    def summary(self, columns: Sequence[str]) -> pa.Table:
        """The stretches of the batches that are :attr:`summarized`, with those of the columns that there are."""
        with self._file() as file:
            reader = _reader(file, self.footer.summary_start, self.footer.summary_end, columns)
            table: pa.Table = reader.read_all()
        return table

    def _file(self, whole: bool = False) -> AbstractContextManager[pa.NativeFile]:
        return _opened(self._storage, self.key, self._size, whole)


@contextlib.contextmanager
def _opened(storage: Storage, key: str, size: int, whole: bool) -> Iterator[pa.NativeFile]:
    """The value under ``key`` for reading at any place. Unless all of it is wanted (``whole``), only what is read is
    fetched, where storage can do so."""
    import pyarrow as pa

    path = storage.local_path(key)
    try:
        if path is not None:
            name: Any = os.fsencode(path)  # any bytes may be in it, and str only takes those that are text
            file: pa.NativeFile = pa.OSFile(name, "rb")
        elif not whole and storage.uri.partition("://")[0] in OBJECT_STORES and _is_ours(storage):
            from powertrain.data.sources.object_files import open_object

            file = pa.PythonFile(open_object(parse(storage.uri).child(key).uri, size), "r")
        else:
            file = pa.BufferReader(storage.get(key))
        with file:
            yield file
    except OSError as error:
        if error.errno == errno.ESTALE:  # a file of a network that another machine has deleted
            raise FileNotFoundError(errno.ENOENT, "no such key", key) from error
        raise


def _is_ours(storage: Storage) -> bool:
    """False where the storage is on somebody's own file system, whose addresses mean what it likes."""
    return getattr(storage, "filesystem", None) is None


def _reader(
    file: pa.NativeFile, start: int, end: int, columns: Sequence[str] | None = None, threads: bool = True
) -> pa.RecordBatchFileReader:
    """The Arrow file that lies from ``start`` to ``end``, reading those of ``columns`` that it has."""
    import pyarrow as pa

    # Arrow's own allocator keeps large pieces; the system's gives them back at once.
    pool = pa.system_memory_pool()
    part: Any = file
    if start:
        file.seek(start)
        part = pa.BufferReader(file.read_buffer(end - start))
    offset = None if start else end
    options = pa.ipc.IpcReadOptions(use_threads=threads)
    reader = pa.ipc.open_file(part, footer_offset=offset, options=options, memory_pool=pool)
    if columns is None:
        return reader
    schema = reader.schema
    indices = sorted(schema.get_field_index(name) for name in {*columns} & {*schema.names})
    options = pa.ipc.IpcReadOptions(use_threads=threads, included_fields=indices)
    return pa.ipc.open_file(part, footer_offset=offset, options=options, memory_pool=pool)


def _read_footer(file: pa.NativeFile, size: int) -> Footer:
    import pyarrow as pa

    start = max(0, size - _TAIL_BYTES)
    file.seek(start)
    tail = file.read(size - start)
    length, magic = _TAIL.unpack(tail[-_TAIL.size :]) if len(tail) >= _TAIL.size else (0, b"")
    if magic != _MAGIC:
        schema = pa.ipc.open_file(file).schema
        first, last = msgspec.json.decode((schema.metadata or {})[_OLD_COVERS], type=tuple[int, int])
        return Footer(first, last, size, size, [], 0, None)
    if length + _TAIL.size > len(tail):
        file.seek(size - length - _TAIL.size)
        tail = file.read(length + _TAIL.size)
    return msgspec.msgpack.decode(tail[-_TAIL.size - length : -_TAIL.size], type=Footer)


# --------------------------------------------------------------------------- writing


def encode_segment(batches: Iterable[pa.RecordBatch], schema: pa.Schema, first: int, last: int) -> bytes:
    """Batches of one schema as a segment that covers the numbers from ``first`` to ``last``."""
    import pyarrow as pa

    sink = io.BytesIO()
    summaries: dict[int, pa.Table] = {}
    numeric: set[str] = set()
    with pa.ipc.new_file(sink, schema, options=_options()) as writer:
        for number, batch in enumerate(batches):
            writer.write_batch(batch)
            if batch.num_rows >= full_batch(len(schema)):
                summaries[number] = summary_of(batch, number)
                numeric |= {*summaries[number].column_names}
            else:
                numeric |= _numeric_of(batch, numeric)
    start = sink.tell()
    if summaries:
        _write_summary(sink, list(summaries.values()))
    in_order = [name for name in schema.names if name in numeric and is_metric(name)]
    footer = msgspec.msgpack.encode(
        Footer(first, last, start, sink.tell(), list(summaries), STRETCH_ROWS, in_order)
    )
    sink.write(footer + _TAIL.pack(len(footer), _MAGIC))
    return sink.getvalue()


def full_batch(columns: int) -> int:
    """From how many points on a batch of so many columns is full."""
    return max(1, min(BATCH_POINTS, _BATCH_CELLS // columns))


def _numeric_of(batch: pa.RecordBatch, known: set[str]) -> set[str]:
    """Metrics with numbers in rows, but those that are known already."""
    solo: Any = batch.column("solo").to_numpy(zero_copy_only=False)
    return {
        field.name
        for field, column in zip(batch.schema, batch.columns, strict=True)
        if is_metric(field.name) and field.name not in known and has_numbers(column, field, solo)
    }


def _write_summary(sink: io.BytesIO, summaries: list[pa.Table]) -> None:
    """After the points, as a file whose offsets begin where it does."""
    import pyarrow as pa

    table = pa.concat_tables(summaries, promote_options="default").combine_chunks()
    own = io.BytesIO()
    with pa.ipc.new_file(own, table.schema, options=_options()) as writer:
        writer.write_table(table)
    sink.write(own.getbuffer())


def _options() -> pa.ipc.IpcWriteOptions:
    import pyarrow as pa

    compression: Literal["zstd"] | None = "zstd" if pa.Codec.is_available("zstd") else None
    # Each of Arrow's threads would keep memory of its own in a process that writes a few megabytes a minute.
    return pa.ipc.IpcWriteOptions(compression=compression, use_threads=False)


def merged(segments: Sequence[Segment]) -> tuple[bytes, int]:
    """Neighbours as one segment, the points in the same order, and how many columns it has."""
    schema = unified([segment.schema for segment in segments], most=MAX_COLUMNS)
    batches = (conformed(batch, schema) for segment in segments for batch in segment.batches())
    first, last = segments[0].footer.first, segments[-1].footer.last
    data = encode_segment(_grown_together(batches, full_batch(len(schema))), schema, first, last)
    return data, len(schema)


def _grown_together(batches: Iterable[pa.RecordBatch], points: int) -> Iterator[pa.RecordBatch]:
    """The same points in batches of at least so many points, but for the last."""
    waiting: list[pa.RecordBatch] = []
    for batch in batches:
        waiting.append(batch)
        if sum(one.num_rows for one in waiting) >= points:
            yield _as_one(waiting)
            waiting = []
    if waiting:
        yield _as_one(waiting)


def _as_one(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    import pyarrow as pa

    if len(batches) == 1:
        return batches[0]
    table = pa.Table.from_batches(batches).combine_chunks(memory_pool=pa.system_memory_pool())
    (batch,) = table.to_batches()
    return batch
