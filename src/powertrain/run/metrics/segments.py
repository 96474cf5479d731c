"""A segment: many points in columns, in one value of storage.

::

    points in columns       an Arrow IPC file, compressed, in batches
    summary                 an Arrow IPC file: a summary of each stretch of rows of each full batch
    hash of the footer      xxh3-128, 16 bytes
    footer                  msgpack: the covered segment numbers, the position of the summary, the hash of each part
    length of the footer    4 bytes
    magic                   8 bytes

The summary (see :mod:`powertrain.run.metrics.summary`) lets a view skip the points. Only the requested columns are
read, also from remote storage, and each part is verified by its hash before it is decoded
(:mod:`powertrain.run.metrics.segment_parts`).

Segments of earlier versions have no hashes, and the earliest were the Arrow file alone, without a summary. They are
still read. Each batch of them is validated, so that damage does not crash a reader; a changed number in them cannot be
detected.

Merging reads and writes one batch after the other, so it takes memory for the result's bytes and one batch, independent
of the number of points. Small batches are combined.
"""

from __future__ import annotations

import contextlib
import io
import struct
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import xxhash

from powertrain.run.metrics.arrays import numpy_of
from powertrain.run.metrics.points import MAX_COLUMNS, conformed, unified
from powertrain.run.metrics.segment_checks import check_batch, check_schema, check_summary
from powertrain.run.metrics.segment_files import SegmentFile, open_segment
from powertrain.run.metrics.segment_parts import CheckedFile, SegmentLayout, layout_of
from powertrain.run.metrics.summary import STRETCH_ROWS, has_numbers, is_metric, summary_of
from powertrain.storage import Storage
from powertrain.storage.sealed import DamagedError

if TYPE_CHECKING:
    import pyarrow as pa

#: Minimum number of points of a full batch, which has a summary; fewer if it has many columns.
BATCH_POINTS = 32_768
_BATCH_CELLS = 1 << 20

_MAGIC = b"PTSEGM1\n"
_TAIL = struct.Struct(f"<I{len(_MAGIC)}s")
_HASH_BYTES = 16
#: Number of last bytes read first to find the footer.
_TAIL_BYTES = 1 << 16
#: Threads that read the batches of a whole segment.
_READING_THREADS = 4
#: Maximum bytes of points that are read by one thread.
_THREADED_FROM_BYTES = 4 << 20
#: The key under which earlier versions kept the numbers a segment covers.
_OLD_COVERS = b"powertrain.covers"


class SegmentFooter(msgspec.Struct, frozen=True, array_like=True):
    """The description of a segment."""

    #: The numbers of the segments merged into it.
    first: int
    last: int
    #: Begin and end of the summary; the points are before it.
    summary_start: int
    summary_end: int
    #: The summarized batches, and the rows per stretch.
    summarized: list[int]
    stretch_rows: int
    #: Metrics with numbers in rows; None if unknown.
    numeric: list[str] | None
    #: The parts of the points and of the summary with their hashes; None in segments of earlier versions.
    points: SegmentLayout | None = None
    stretches: SegmentLayout | None = None


class MetricSegment:
    """One stored segment. Its points are read on request, from a file that is opened each time or :meth:`held_open`.

    All methods raise :class:`DamagedError` if the file is damaged, ``FileNotFoundError`` if it is gone, and another
    ``OSError`` if it cannot be read.
    """

    def __init__(self, storage: Storage, key: str, size: int) -> None:
        """Read the footer and the schema."""
        self._storage, self.key, self._size = storage, key, size
        #: True once a reader has warned of damage in it.
        self.has_been_reported = False
        self._held: SegmentFile | None = None
        with _finding_damage(key), self._file() as file:
            self.footer = _read_footer(file)
            _check_footer(self.footer, size)
            self._points, self._stretches = self._checked_files()
            if self._points is not None:
                schema, self.batch_count = self._points.schema(file), self._points.batch_count
            else:
                reader = _unchecked_reader(file, 0, self.footer.summary_start)
                schema, self.batch_count = reader.schema, reader.num_record_batches
            self.schema: pa.Schema = schema.remove_metadata()
            check_schema(self.schema)

    def _checked_files(self) -> tuple[CheckedFile | None, CheckedFile | None]:
        footer = self.footer
        points = stretches = None
        if footer.points is not None:
            points = CheckedFile(footer.points, 0, footer.summary_start)
        if footer.stretches is not None:
            stretches = CheckedFile(footer.stretches, footer.summary_start, footer.summary_end)
        return points, stretches

    @property
    def summarized(self) -> frozenset[int]:
        """Return the batches whose stretches are in :meth:`summary`."""
        usable = self.footer.stretch_rows == STRETCH_ROWS
        return frozenset(self.footer.summarized) if usable else frozenset()

    def table(self) -> pa.Table:
        """Read all points."""
        import pyarrow as pa

        if self._points is None or self.batch_count < 2:
            return pa.Table.from_batches(self.batches(self.schema.names), self.schema)
        # Arrow decodes large columns of a batch in parallel; reading whole batches in parallel gains more.
        threads = min(_READING_THREADS, self.batch_count)
        with self._file(whole=True) as file, ThreadPoolExecutor(threads) as pool:
            read = partial(self._read_batch, file)
            return pa.Table.from_batches(list(pool.map(read, range(self.batch_count))), self.schema)

    def _read_batch(self, file: SegmentFile, number: int) -> pa.RecordBatch:
        assert self._points is not None
        with _finding_damage(self.key):
            batch = self._points.batch(file, number, threads=False)
            check_batch(batch, is_hashed=True)
        return batch.replace_schema_metadata(None)

    def batch(self, number: int, columns: Sequence[str] | None = None) -> pa.RecordBatch:
        """Read one batch, with the existing ones of these columns; with all if none are named."""
        (batch,) = self.batches(columns, [number])
        return batch

    def batches(
        self, columns: Sequence[str] | None = None, numbers: Iterable[int] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield batches as :meth:`batch` does; all if no numbers are given."""
        for batch in self.batches_or_damage(columns, numbers):
            if isinstance(batch, DamagedError):
                raise batch
            yield batch

    def batches_or_damage(
        self, columns: Sequence[str] | None = None, numbers: Iterable[int] | None = None
    ) -> Iterator[pa.RecordBatch | DamagedError]:
        """Yield :meth:`batches`, with the error in place of a damaged one."""
        # Merging, which reads all, has time but little memory. Arrow's threads stay alive, and a script with native
        # threads cannot be forked by its next fit(): a small segment is not worth that.
        threads = columns is not None and self.footer.summary_start >= _THREADED_FROM_BYTES
        is_whole = numbers is None and (columns is None or {*columns} >= {*self.schema.names})
        with self._file(is_whole) as file:
            unchecked = None
            if self._points is None:
                with _finding_damage(self.key):
                    end = self.footer.summary_start
                    unchecked = _unchecked_reader(file, 0, end, columns, threads)
            for number in range(self.batch_count) if numbers is None else numbers:
                try:
                    with _finding_damage(self.key):
                        if unchecked is None:
                            assert self._points is not None
                            batch = self._points.batch(file, number, columns, threads)
                        else:
                            batch = unchecked.get_batch(number)
                        check_batch(batch, is_hashed=unchecked is None)
                except DamagedError as error:
                    yield error
                else:
                    yield batch.replace_schema_metadata(None)

    def summary(self, columns: Sequence[str]) -> pa.Table:
        """Read the stretches of the :attr:`summarized` batches, with the existing ones of the columns."""
        import pyarrow as pa

        with self._file() as file, _finding_damage(self.key):
            if self._stretches is not None:
                table = pa.Table.from_batches([self._stretches.batch(file, 0, columns)])
            else:
                reader = _unchecked_reader(file, self.footer.summary_start, self.footer.summary_end, columns)
                table = reader.read_all()
            check_summary(table, columns, self.batch_count)
        return table

    @contextlib.contextmanager
    def held_open(self) -> Iterator[None]:
        """Open its file once for all reads inside the block, by one thread."""
        with self._file() as self._held:
            try:
                yield
            finally:
                self._held = None

    def _file(self, whole: bool = False) -> contextlib.AbstractContextManager[SegmentFile]:
        if self._held is not None:
            return contextlib.nullcontext(self._held)
        return open_segment(self._storage, self.key, self._size, whole)


@contextlib.contextmanager
def _finding_damage(key: str) -> Iterator[None]:
    """Turn errors of decoding into a :class:`DamagedError` of the segment ``key``."""
    try:
        yield
    except DamagedError as error:
        error.key = key
        raise
    except OSError:
        raise
    except (
        Exception
    ) as error:  # Arrow's errors are Python's own: ValueError, KeyError, TypeError, MemoryError
        raise DamagedError(" ".join(str(error).split()) or type(error).__name__, key) from error


def _unchecked_reader(
    file: SegmentFile, start: int, end: int, columns: Sequence[str] | None = None, threads: bool = True
) -> pa.RecordBatchFileReader:
    """Return the Arrow file without hashes from ``start`` to ``end``, reading the existing ones of ``columns``."""
    import pyarrow as pa

    # Arrow's allocator keeps large blocks; the system's frees them immediately.
    pool = pa.system_memory_pool()
    part: Any = pa.BufferReader(file.read(start, end)) if start else pa.PythonFile(file.raw, "r")
    offset = None if start else end
    options = pa.ipc.IpcReadOptions(use_threads=threads)
    reader = pa.ipc.open_file(part, footer_offset=offset, options=options, memory_pool=pool)
    if columns is None:
        return reader
    schema = reader.schema
    indices = sorted(schema.get_field_index(name) for name in {*columns} & {*schema.names})
    options = pa.ipc.IpcReadOptions(use_threads=threads, included_fields=indices)
    return pa.ipc.open_file(part, footer_offset=offset, options=options, memory_pool=pool)


def _read_footer(file: SegmentFile) -> SegmentFooter:
    """Read the footer and verify its hash, if it has one."""
    import pyarrow as pa

    size = file.size
    tail = file.read(max(0, size - _TAIL_BYTES), size)
    length, magic = _TAIL.unpack(tail[-_TAIL.size :]) if len(tail) >= _TAIL.size else (0, b"")
    if magic != _MAGIC:
        schema = pa.ipc.open_file(pa.PythonFile(file.raw, "r")).schema
        first, last = msgspec.json.decode((schema.metadata or {})[_OLD_COVERS], type=tuple[int, int])
        return SegmentFooter(first, last, size, size, [], 0, None)
    start = size - _TAIL.size - length
    if start < _HASH_BYTES:
        raise DamagedError("its footer is longer than the file")
    if start - _HASH_BYTES < size - len(tail):
        tail = file.read(start - _HASH_BYTES, size)
    encoded = tail[-_TAIL.size - length : -_TAIL.size]
    expected = tail[-_TAIL.size - length - _HASH_BYTES : -_TAIL.size - length]
    is_whole = xxhash.xxh3_128_digest(encoded) == expected
    footer = msgspec.msgpack.decode(encoded, type=SegmentFooter)
    if footer.points is not None and not is_whole:
        raise DamagedError("its footer is not as it was written")
    return footer


def _check_footer(footer: SegmentFooter, size: int) -> None:
    """Raise :class:`DamagedError` for a footer that is not valid for a file of this size."""
    if not 0 < footer.summary_start <= footer.summary_end <= size:
        raise DamagedError("its footer names parts that lie outside of it")
    if footer.points is not None and footer.summarized and footer.stretches is None:
        raise DamagedError("its footer names a summary without hashes")


# --------------------------------------------------------------------------- writing


def encode_segment(batches: Iterable[pa.RecordBatch], schema: pa.Schema, first: int, last: int) -> bytes:
    """Encode batches of one schema as a segment that covers the numbers from ``first`` to ``last``."""
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
    with sink.getbuffer() as written:
        points = layout_of(written, schema)
    stretches = _write_summary(sink, list(summaries.values())) if summaries else None
    in_order = [name for name in schema.names if name in numeric and is_metric(name)]
    summarized = list(summaries)
    footer = msgspec.msgpack.encode(
        SegmentFooter(first, last, start, sink.tell(), summarized, STRETCH_ROWS, in_order, points, stretches)
    )
    sink.write(xxhash.xxh3_128_digest(footer) + footer + _TAIL.pack(len(footer), _MAGIC))
    return sink.getvalue()


def full_batch(columns: int) -> int:
    """Return the number of points of a full batch with this many columns."""
    return max(1, min(BATCH_POINTS, _BATCH_CELLS // columns))


def _numeric_of(batch: pa.RecordBatch, known: set[str]) -> set[str]:
    """Return metrics with numbers in rows, except those that are known already."""
    solo = numpy_of(batch.column("solo"))
    return {
        field.name
        for field, column in zip(batch.schema, batch.columns, strict=True)
        if is_metric(field.name) and field.name not in known and has_numbers(column, field, solo)
    }


def _write_summary(sink: io.BytesIO, summaries: list[pa.Table]) -> SegmentLayout:
    """Append the summary as one batch of a file with relative offsets; return its parts."""
    import pyarrow as pa

    table = pa.concat_tables(summaries, promote_options="default").combine_chunks()
    own = io.BytesIO()
    with pa.ipc.new_file(own, table.schema, options=_options()) as writer:
        writer.write_table(table)
    with own.getbuffer() as written:
        sink.write(written)
        return layout_of(written, table.schema)


def _options() -> pa.ipc.IpcWriteOptions:
    import pyarrow as pa

    compression: Literal["zstd"] | None = "zstd" if pa.Codec.is_available("zstd") else None
    # Each of Arrow's threads would hold its own memory, in a process that writes a few megabytes a minute.
    return pa.ipc.IpcWriteOptions(compression=compression, use_threads=False)


def merged(segments: Sequence[MetricSegment]) -> tuple[bytes, int]:
    """Merge adjacent segments, the points in the same order; return the segment and its number of columns."""
    schema = unified([segment.schema for segment in segments], most=MAX_COLUMNS)
    batches = (conformed(batch, schema) for segment in segments for batch in segment.batches())
    first, last = segments[0].footer.first, segments[-1].footer.last
    data = encode_segment(_grown_together(batches, full_batch(len(schema))), schema, first, last)
    return data, len(schema)


def _grown_together(batches: Iterable[pa.RecordBatch], points: int) -> Iterator[pa.RecordBatch]:
    """Yield the same points in batches of at least this many points, except the last."""
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
