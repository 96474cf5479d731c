"""Every point of every rank, in columns on disk.

A point is one ``report``. Points go three ways in turn:

1. ``add`` encodes them and hands them to the one writer thread.
2. The writer appends them to a spool file, ``metrics/{lease}.open``, as soon as it can: at once when it is
   idle, every :data:`SPOOL_EVERY` seconds under load. From then on they survive the death of the process.
3. When there are enough of them, or they are old enough, the writer makes them a segment,
   ``metrics/{lease}-{segment}.arrow``, durable and in columns, and empties the spool. Small segments are
   merged as they pile up, so that their number grows with the logarithm of the run's length.

A crash can leave points both in the spool and in a segment, or in a segment and in the one it was merged
into. So each piece of the spool says for which segment it is meant, and each segment which numbers it covers;
readers pass over what they have already. The next controller turns a dead one's spool into segments.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import xxhash

from powertrain.errors import StorageError
from powertrain.run.lifecycle import RunState
from powertrain.run.points import (
    MISSING,
    MORE,
    OWN_COLUMNS,
    PointRecord,
    concatenate,
    decode_records,
    encode_records,
    is_json,
    metrics_at,
    path_of_name,
    table_of,
    values_of,
)
from powertrain.storage import Storage

if TYPE_CHECKING:
    import pandas
    import pyarrow as pa

__all__ = ["MetricsStore", "PointRecord", "dataframe", "last_of_rank", "read_table"]

#: A segment is written when this many points or bytes wait for it, or the first has waited this long.
SEGMENT_POINTS = 8192
SEGMENT_BYTES = 8 << 20
SEGMENT_SECONDS = 5.0
#: Under load the writer gathers points this long before it writes them to the spool.
SPOOL_EVERY = 0.02
#: ``add`` waits while this many bytes have not reached a segment: only when storage is stuck or full.
BACKLOG_BYTES = 64 << 20
#: This many segments of one size become one, up to the given number of bytes and cells.
_MERGE_COUNT = 8
_MERGE_BYTES = 32 << 20
_MERGE_CELLS = 16 << 20
#: Records in one piece of the spool.
_PIECE_POINTS = 1024
_RETRY_SECONDS = 1.0

_COVERS = b"powertrain.covers"
#: Before each piece of the spool: its length, the segment it is meant for, its xxh3-64.
_PIECE_HEAD = struct.Struct("<IIQ")
_SEGMENT_KEY = re.compile(r"metrics/(\d+)-(\d+)\.arrow")
_SPOOL_KEY = re.compile(r"metrics/(\d+)\.open")
_logger = logging.getLogger("powertrain")


# --------------------------------------------------------------------------- writing


class MetricsStore:
    """The writing end, for the holder of lease ``lease_number``. ``add`` may be called by any thread."""

    def __init__(self, storage: Storage, lease_number: int) -> None:
        self._segments = _SegmentWriter(storage, lease_number)
        self._spool = _Spool(storage, lease_number)
        #: What storage last refused, in words; "" while all is well.
        self.problem = ""
        self._changed = threading.Condition()
        self._pending: list[bytes] = []
        self._closing = False
        self._closed = threading.Event()
        self._hurry = threading.Event()
        self._bytes = 0
        self._added = self._spooled = 0
        # Only the writer thread touches these: pieces not yet in the spool, and those in it.
        self._unspooled: list[bytes] = []
        self._held: list[bytes] = []
        self._held_points = self._held_bytes = 0
        self._held_since = 0.0
        self._thread = threading.Thread(target=self._write, name="powertrain-metrics", daemon=True)
        self._thread.start()

    def add(self, records: Sequence[PointRecord]) -> None:
        """Keep these points. Returns without waiting for the disk unless :attr:`crowded`."""
        pieces = [
            encode_records(records[start : start + _PIECE_POINTS])
            for start in range(0, len(records), _PIECE_POINTS)
        ]
        with self._changed:
            while self.crowded and not self._closing:
                self._changed.wait()
            if self._closing:
                raise StorageError("These points cannot be kept: the metrics store of the run is closed.")
            self._pending += pieces
            self._added += len(pieces)
            self._bytes += sum(map(len, pieces))
            self._changed.notify_all()

    @property
    def crowded(self) -> bool:
        """True while so much waits for storage that ``add`` would wait too."""
        return self._bytes > BACKLOG_BYTES

    def wait_spooled(self, timeout: float | None = None) -> bool:
        """Wait until every point added before this call survives the death of the process."""
        with self._changed:
            goal = self._added
            return self._changed.wait_for(lambda: self._spooled >= goal, timeout)

    def close(self) -> None:
        """Leave every point in a segment and stop. Again is fine.

        Raises :class:`StorageError` when storage refuses; then the points are in the spool file, for the next
        start of the run, as far as that could be written.
        """
        if self._closed.is_set():
            return
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._hurry.set()
        self._thread.join()
        self._closed.set()
        self._spool.close(keep=bool(self.problem))
        if self.problem:
            raise StorageError(
                f"The metrics of the run could not all be written: {self.problem}. What could be saved is in "
                f"{self._spool.path!r}, and the next start of the run will take it from there."
            )

    # -- the writer thread

    def _write(self) -> None:
        while True:
            pieces, closing = self._next_pieces()
            self._unspooled += pieces
            try:
                self._save(everything=closing)
                self.problem = ""
            except Exception as error:
                self.problem = str(error) or type(error).__name__
                _logger.warning("Metrics could not be written and will be tried again: %s", self.problem)
            if closing:
                return
            self._hurry.wait(_RETRY_SECONDS if self.problem else SPOOL_EVERY)

    def _next_pieces(self) -> tuple[list[bytes], bool]:
        """What has been added, waiting for it until the oldest held point is due for its segment."""
        with self._changed:
            while not (self._pending or self._unspooled or self._closing or self._is_due()):
                due_in = self._held_since + SEGMENT_SECONDS - time.monotonic() if self._held else None
                self._changed.wait(due_in)
            pieces, self._pending = self._pending, []
            return pieces, self._closing

    def _is_due(self) -> bool:
        return bool(self._held) and time.monotonic() - self._held_since >= SEGMENT_SECONDS

    def _save(self, everything: bool) -> None:
        """Spool what is not, and make segments of what is due (of ``everything`` at the end)."""
        while self._unspooled:
            count = self._room_in_segment()
            if count == 0:
                self._make_segment()
                continue
            pieces = self._unspooled[:count]
            self._spool.append(pieces, self._segments.next)
            del self._unspooled[:count]
            self._hold(pieces)
        if self._held and (everything or self._is_due() or not self._room_left()):
            self._make_segment()
        if everything:
            self._segments.recover()
            self._segments.merge_all()

    def _room_left(self) -> bool:
        return self._held_points < SEGMENT_POINTS and self._held_bytes < SEGMENT_BYTES

    def _room_in_segment(self) -> int:
        """How many of the next pieces go into the segment being gathered."""
        points, size, count = self._held_points, self._held_bytes, 0
        for piece in self._unspooled:
            if points >= SEGMENT_POINTS or size >= SEGMENT_BYTES:
                break
            points, size, count = points + _points_in(piece), size + len(piece), count + 1
        return count

    def _hold(self, pieces: list[bytes]) -> None:
        if not self._held:
            self._held_since = time.monotonic()
        self._held += pieces
        self._held_points += sum(map(_points_in, pieces))
        self._held_bytes += sum(map(len, pieces))
        with self._changed:
            self._spooled += len(pieces)
            self._changed.notify_all()

    def _make_segment(self) -> None:
        self._segments.recover()
        self._segments.put([record for piece in self._held for record in decode_records(piece)])
        self._spool.empty()
        freed, self._held = self._held_bytes, []
        self._held_points = self._held_bytes = 0
        with self._changed:
            self._bytes -= freed
            self._changed.notify_all()
        self._segments.merge_small()


def _points_in(piece: bytes) -> int:
    """How many records a piece holds: the length that its msgpack array begins with."""
    first = piece[0]
    if first & 0xF0 == 0x90:
        return first & 0x0F
    return int.from_bytes(piece[1:3] if first == 0xDC else piece[1:5], "big")


class _Spool:
    """The file of points that are in no segment yet. Made by the first ``append``."""

    def __init__(self, storage: Storage, lease: int) -> None:
        path = storage.local_path(f"metrics/{lease:04d}.open")
        if path is None:
            raise StorageError(
                f"Metrics cannot be spooled at {storage.uri!r}: that needs real files. Use a local or "
                "mounted path."
            )
        self.path = str(path)
        self._descriptor = -1
        self._size = 0

    def append(self, pieces: Iterable[bytes], segment: int) -> None:
        """Add pieces meant for ``segment``, whole or not at all."""
        if self._descriptor < 0:
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._descriptor = os.open(self.path, flags, 0o666)
        data = b"".join(
            part
            for piece in pieces
            for part in (_PIECE_HEAD.pack(len(piece), segment, xxhash.xxh3_64_intdigest(piece)), piece)
        )
        try:
            if os.write(self._descriptor, data) < len(data):
                raise OSError(f"only a part of {len(data)} bytes could be written to {self.path!r}")
        except OSError:
            os.ftruncate(self._descriptor, self._size)  # half a piece would hide all that follow
            raise
        self._size += len(data)

    def empty(self) -> None:
        if self._descriptor >= 0:
            os.ftruncate(self._descriptor, 0)
        self._size = 0

    def close(self, keep: bool) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            if not keep:
                os.unlink(self.path)


def _pieces_of_spool(data: bytes) -> list[tuple[int, list[PointRecord]]]:
    """(segment, records) of each whole piece, up to the first that is cut or damaged."""
    pieces, offset = [], 0
    while offset + _PIECE_HEAD.size <= len(data):
        length, segment, digest = _PIECE_HEAD.unpack_from(data, offset)
        piece = data[offset + _PIECE_HEAD.size : offset + _PIECE_HEAD.size + length]
        if len(piece) < length or xxhash.xxh3_64_intdigest(piece) != digest:
            break
        pieces.append((segment, decode_records(piece)))
        offset += _PIECE_HEAD.size + length
    return pieces


class _Written(msgspec.Struct, frozen=True):
    """A segment of this lease: the numbers it covers, how often it was merged, and how large it is."""

    first: int
    last: int
    level: int
    bytes: int
    cells: int


class _SegmentWriter:
    """Writes and merges the segments of one lease, and rescues what earlier leases left in spools."""

    def __init__(self, storage: Storage, lease: int) -> None:
        self._storage, self._lease = storage, lease
        self._written: list[_Written] = []
        self._recovered = False
        #: The number of the next segment.
        self.next = 1

    def put(self, records: Sequence[PointRecord]) -> None:
        self._put_table(table_of(records), self.next, self.next, level=0)
        self.next += 1

    def _put_table(self, table: pa.Table, first: int, last: int, level: int) -> None:
        cells = table.num_rows * table.num_columns
        self._put(_encode_segment(table, first, last), _Written(first, last, level, table.nbytes, cells))

    def _put(self, data: bytes, segment: _Written) -> None:
        self._storage.put(_segment_key(self._lease, segment.first), data)
        self._written = [other for other in self._written if other.first < segment.first]
        self._written.append(msgspec.structs.replace(segment, bytes=max(len(data), segment.bytes)))

    def merge_small(self) -> None:
        """Merge the newest segments while a full set of them has the same level."""
        while True:
            level = self._written[-1].level
            newest = self._written[-_MERGE_COUNT:]
            if len(newest) < _MERGE_COUNT or any(segment.level != level for segment in newest):
                return
            if not _fit_together(newest):
                return
            self._merge(newest, level + 1)

    def merge_all(self) -> None:
        """Merge neighbours as far as they fit together."""
        groups: list[list[_Written]] = []
        for segment in self._written:
            if groups and _fit_together([*groups[-1], segment]):
                groups[-1].append(segment)
            else:
                groups.append([segment])
        done: list[_Written] = []
        for group in groups:
            self._written = list(group)
            if len(group) > 1:
                self._merge(group, group[0].level)
            done += self._written
        self._written = done

    def _merge(self, segments: Sequence[_Written], level: int) -> None:
        keys = [_segment_key(self._lease, segment.first) for segment in segments]
        pieces = [self._storage.get(key) for key in keys]
        first, last = segments[0].first, segments[-1].last
        data = _append_segments(pieces, first, last)
        if data is not None:
            size, cells = sum(s.bytes for s in segments), sum(s.cells for s in segments)
            self._put(data, _Written(first, last, level, size, cells))
        else:
            table = concatenate([_decode_segment(piece)[0] for piece in pieces])
            self._put_table(table, first, last, level)
        for key in keys[1:]:
            self._storage.delete(key)

    def recover(self) -> None:
        """Once: turn spools of earlier leases into segments."""
        if self._recovered:
            return
        for entry in self._storage.list("metrics"):
            match = _SPOOL_KEY.fullmatch(entry.key)
            if match and int(match[1]) < self._lease:
                self._recover_spool(entry.key, int(match[1]))
        self._recovered = True

    def _recover_spool(self, key: str, lease: int) -> None:
        covered = _last_covered(self._storage, lease)
        pieces = [piece for piece in _pieces_of_spool(self._storage.get(key)) if piece[0] > covered]
        for number in sorted({segment for segment, _ in pieces}):
            records = [record for segment, part in pieces if segment == number for record in part]
            data = _encode_segment(table_of(records), number, number)
            self._storage.put(_segment_key(lease, number), data)
        self._storage.delete(key)


def _fit_together(segments: Sequence[_Written]) -> bool:
    fits_bytes = sum(segment.bytes for segment in segments) <= _MERGE_BYTES
    return fits_bytes and sum(segment.cells for segment in segments) <= _MERGE_CELLS


def _segment_key(lease: int, number: int) -> str:
    return f"metrics/{lease:04d}-{number:06d}.arrow"


def _last_covered(storage: Storage, lease: int) -> int:
    """The largest number that the segments of a lease cover."""
    last = 0
    for entry in storage.list("metrics"):
        match = _SEGMENT_KEY.fullmatch(entry.key)
        if match and int(match[1]) == lease:
            with _passing_over_damage(entry.key):
                last = max(last, _decode_segment(storage.get(entry.key))[1])
    return last


# Whole segments use the system's allocator: it gives large pieces back at once, where Arrow's own keeps them.


def _encode_segment(table: pa.Table, first: int, last: int) -> bytes:
    return _write_segment(table.schema, table.to_batches(), first, last)


def _append_segments(pieces: Sequence[bytes], first: int, last: int) -> bytes | None:
    """Segments of the same columns as one, a batch at a time: merging needs memory for one batch, not for all points.

    None where their columns differ.
    """
    import pyarrow as pa

    pool = pa.system_memory_pool()
    readers = [pa.ipc.open_file(pa.BufferReader(piece), memory_pool=pool) for piece in pieces]
    schemas = [reader.schema.remove_metadata() for reader in readers]
    if not all(schema.equals(schemas[0], check_metadata=True) for schema in schemas):
        return None
    batches = (reader.get_batch(i) for reader in readers for i in range(reader.num_record_batches))
    return _write_segment(schemas[0], batches, first, last)


def _write_segment(schema: pa.Schema, batches: Iterable[pa.RecordBatch], first: int, last: int) -> bytes:
    import pyarrow as pa

    schema = schema.with_metadata({_COVERS: msgspec.json.encode([first, last])})
    sink = pa.BufferOutputStream(memory_pool=pa.system_memory_pool())
    compression: Literal["zstd"] | None = "zstd" if pa.Codec.is_available("zstd") else None
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_file(sink, schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def _decode_segment(data: bytes) -> tuple[pa.Table, int]:
    """A segment's points, and the last number that it covers."""
    import pyarrow as pa

    table = pa.ipc.open_file(pa.BufferReader(data), memory_pool=pa.system_memory_pool()).read_all()
    _, last = msgspec.json.decode((table.schema.metadata or {})[_COVERS], type=tuple[int, int])
    return table.replace_schema_metadata(None), last


# --------------------------------------------------------------------------- reading


@contextlib.contextmanager
def _passing_over_damage(key: str) -> Iterator[None]:
    """One damaged file must not hide all others; the user is told which it is."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowInvalid, pa.ArrowSerializationError, KeyError, msgspec.MsgspecError, OSError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        _logger.warning("The metrics file %r is damaged and was passed over: %s", key, error)


def _tables(storage: Storage) -> list[pa.Table]:
    """All points, each once, in the order in which they came."""
    while True:
        try:
            return _tables_now(storage)
        except FileNotFoundError:
            continue  # a live writer merged segments while we read: what we listed is gone, look again


def _tables_now(storage: Storage) -> list[pa.Table]:
    # Spools first: points move from a spool to a segment, so in this order none is missed.
    spools = _read_spools(storage)
    found: dict[int, list[pa.Table]] = {lease: [] for lease in spools}
    covered: dict[int, int] = {}
    for entry in storage.list("metrics"):
        match = _SEGMENT_KEY.fullmatch(entry.key)
        if not match or int(match[2]) <= covered.get(int(match[1]), 0):
            continue
        lease = int(match[1])
        with _passing_over_damage(entry.key):
            table, covered[lease] = _decode_segment(storage.get(entry.key))
            found.setdefault(lease, []).append(table)
    for lease, pieces in spools.items():
        records = [r for segment, part in pieces if segment > covered.get(lease, 0) for r in part]
        if records:
            found[lease].append(table_of(records))
    return [table for lease in sorted(found) for table in found[lease]]


def _read_spools(storage: Storage) -> dict[int, list[tuple[int, list[PointRecord]]]]:
    spools = {}
    for entry in storage.list("metrics"):
        if match := _SPOOL_KEY.fullmatch(entry.key):
            spools[int(match[1])] = _pieces_of_spool(storage.get(entry.key))
    return spools


def read_table(storage: Storage) -> pa.Table:
    """All points of all ranks and attempts, in the order in which they came.

    Columns of whole and fractional numbers together are floats here; other mixed columns are JSON text.
    """
    table = concatenate([table_of([]), *_tables(storage)])
    for index, field in enumerate(table.schema):
        if is_json(field) and field.name != MORE:
            table = _with_plain_numbers(table, index, field)
    return table


def _with_plain_numbers(table: pa.Table, index: int, field: pa.Field[Any]) -> pa.Table:
    import pyarrow as pa

    values = [None if value is MISSING else value for value in values_of(table.column(index), field)]
    if not set(map(type, values)) <= {int, float, type(None)}:
        return table
    numbers = [None if value is None else float(value) for value in values]
    return table.set_column(index, pa.field(field.name, pa.float64()), pa.array(numbers, pa.float64()))


def dataframe(storage: Storage, run_state: RunState, *, abandoned: bool = False) -> pandas.DataFrame:
    """The points of the run's lineage, sorted by row and rank.

    Columns are the metrics ("a/b" for nested ones), then ``rank``, ``attempt``, ``training_iteration`` (the
    row) and ``timestamp`` (Unix seconds). A reported metric of one of these four names is shown as
    "reported/…". Solo reports stand outside rows: their ``training_iteration`` is 0, and they are never
    abandoned. With ``abandoned`` the points that a restart went back behind are there too, and a column
    ``abandoned`` tells them apart.
    """
    table = read_table(storage)
    own = ("rank", "attempt", "training_iteration", "timestamp", *(("abandoned",) if abandoned else ()))
    frame = _metric_columns(table, own)
    frame["rank"] = table.column("rank").to_pandas()
    frame["attempt"] = table.column("attempt").to_pandas()
    frame["training_iteration"] = table.column("row").to_pandas()
    frame["timestamp"] = table.column("at").to_pandas()
    first_abandoned = frame["attempt"].map(lambda attempt: _first_abandoned_row(run_state, attempt))
    gone = (frame["training_iteration"] >= first_abandoned) & ~table.column("solo").to_pandas()
    if abandoned:
        frame["abandoned"] = gone.astype(bool)
    else:
        frame = frame[~gone.astype(bool)]
    return frame.sort_values(["training_iteration", "rank"], kind="stable", ignore_index=True)


def _first_abandoned_row(run_state: RunState, attempt: int) -> float:
    """The row from which on an attempt's points are not ``run_state.is_live``."""
    return min((b.first_row for b in run_state.branches if b.attempt > attempt), default=math.inf)


def _metric_columns(table: pa.Table, own: Sequence[str]) -> pandas.DataFrame:
    import pandas as pd

    columns: dict[str, Any] = {}
    names = [name for name in table.column_names if name not in OWN_COLUMNS]
    for name, shown in _shown_names(names, own).items():
        column, field = table.column(name), table.schema.field(name)
        if is_json(field):
            values = [None if value is MISSING else value for value in values_of(column, field)]
            columns[shown] = pd.Series(values, dtype=object)
        else:
            columns[shown] = column.to_pandas()
    return pd.DataFrame(columns, index=pd.RangeIndex(table.num_rows))


def _shown_names(names: Sequence[str], own: Sequence[str]) -> dict[str, str]:
    """What each column is called in a frame: its keys with "/" between, unless that could mean another one."""
    plain = {}
    for name in names:
        shown = "more metrics" if name == MORE else "/".join(path_of_name(name))
        plain[name] = f"reported/{shown}" if shown in own else shown
    count = Counter(plain.values())
    return {name: shown if count[shown] == 1 or shown == name else name for name, shown in plain.items()}


def last_of_rank(storage: Storage, run_state: RunState, rank: int = 0) -> dict[str, Any]:
    """Exactly what a rank reported last in the run's lineage; a solo report only where there is no other.

    Empty when the rank never reported.
    """
    while True:
        try:
            return _last_of_rank_now(storage, run_state, rank)
        except FileNotFoundError:
            continue  # as in _tables


def _last_of_rank_now(storage: Storage, run_state: RunState, rank: int) -> dict[str, Any]:
    last_solo: dict[str, Any] | None = None
    for table in _tables_newest_first(storage):
        own: dict[str, list[Any]] = {name: table.column(name).to_pylist() for name in OWN_COLUMNS}
        for index in range(table.num_rows - 1, -1, -1):
            if own["rank"][index] != rank:
                continue
            if own["solo"][index]:
                last_solo = metrics_at(table, index) if last_solo is None else last_solo
            elif run_state.is_live(own["attempt"][index], own["row"][index]):
                return metrics_at(table, index)
    return last_solo or {}


def _tables_newest_first(storage: Storage) -> Iterator[pa.Table]:
    """All points, one segment in memory at a time; some may come twice, the second time as older."""
    spools = _read_spools(storage)
    segments = [match for entry in storage.list("metrics") if (match := _SEGMENT_KEY.fullmatch(entry.key))]
    for lease in sorted({int(match[1]) for match in segments} | spools.keys(), reverse=True):
        records = [record for _, part in spools.get(lease, []) for record in part]
        if records:
            yield table_of(records)
        for match in reversed(segments):
            if int(match[1]) == lease:
                with _passing_over_damage(match[0]):
                    yield _decode_segment(storage.get(match[0]))[0]
