"""The writer of metrics: spool first, then segments, then merges."""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import msgspec

from powertrain.errors import StorageError
from powertrain.run.metrics.points import PointRecord, decode_records, table_of
from powertrain.run.metrics.reading import SPOOL_KEY, logger, segments_by_lease, warn_of_damage
from powertrain.run.metrics.segments import MetricSegment, encode_segment, merged
from powertrain.run.metrics.spool import Spool, joined, pieces_of, points_in, read_spool
from powertrain.storage import Storage
from powertrain.storage.base import LARGE_RECORD_BYTES_LIMIT
from powertrain.storage.sealed import DamagedError

#: Limits of pending points, bytes and age after which a segment is written.
SEGMENT_POINTS = 8192
SEGMENT_BYTES = 8 << 20
SEGMENT_INTERVAL_S = 5.0
#: Seconds that the writer gathers points under load before it writes them to the spool.
SPOOL_INTERVAL_S = 0.02
#: Bytes not in a segment yet at which ``add`` waits: only if storage is stuck or full.
BACKLOG_BYTES = 64 << 20
#: Number of segments of one size that are merged, up to the given number of bytes and cells.
_MERGE_COUNT = 4
_MERGE_BYTES = 32 << 20
_MERGE_CELLS = 16 << 20
_RETRY_DELAY_S = 1.0


class MetricsStore:
    """The writer, for the holder of lease ``lease_number``. ``add`` may be called by any thread."""

    def __init__(self, storage: Storage, lease_number: int) -> None:
        self._segments = _SegmentWriter(storage, lease_number)
        self._spool = Spool(storage, lease_number)
        #: The last error of storage; "" for none.
        self.problem = ""
        self._changed = threading.Condition()
        self._pending: list[bytes] = []
        self._closing = self._is_abandoned = False
        self._closed = threading.Event()
        self._hurry = threading.Event()
        self._bytes = 0
        self._added = self._spooled = 0
        # Only the writer thread touches these: pieces not yet in the spool, and those in it.
        self._unspooled: list[bytes] = []
        self._held: list[bytes] = []
        self._held_points = self._held_bytes = 0
        self._held_since = 0.0
        #: The last error of merging or removing segments.
        self._disorder = ""
        self._thread = threading.Thread(target=self._write, name="powertrain-metrics", daemon=True)
        self._thread.start()

    def add(self, records: Sequence[PointRecord]) -> None:
        """Add points. Returns without waiting for the disk unless :attr:`crowded`."""
        pieces = pieces_of(records)
        with self._changed:
            while self.crowded and not self._closing:
                self._changed.wait()
            if self._closing:
                raise StorageError("These points cannot be kept: the metrics store of the run is closed.")
            self._pending += pieces
            self._added += len(records)
            self._bytes += sum(map(len, pieces))
            self._changed.notify_all()

    @property
    def crowded(self) -> bool:
        """Return whether so much is pending for storage that ``add`` would wait."""
        return self._bytes > BACKLOG_BYTES

    def wait_spooled(self, timeout: float | None = None) -> bool:
        """Wait until every point added before this call is in the spool and survives the death of the process."""
        self._hurry.set()
        with self._changed:
            goal = self._added
            return self._changed.wait_for(lambda: self._spooled >= goal, timeout)

    def close(self) -> None:
        """Write every point to a segment and stop. Idempotent.

        Raises :class:`StorageError` if storage fails; then the points are in the spool file, for the next start of the
        run, as far as that could be written.
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

    def abandon(self) -> None:
        """Stop without writing: the directory was removed, and a new one has files of the same names."""
        if self._closed.is_set():
            return
        with self._changed:
            self._closing = self._is_abandoned = True
            self._changed.notify_all()
        self._hurry.set()
        self._thread.join()
        self._closed.set()
        self._spool.close(keep=True)

    # -- the writer thread

    def _write(self) -> None:
        while True:
            pieces, closing = self._next_pieces()
            if self._is_abandoned:
                return
            self._unspooled += self._joined(pieces)
            try:
                self._save(everything=closing)
                self.problem = ""
            except Exception as error:
                self.problem = str(error) or type(error).__name__
                logger.warning("Metrics could not be written and will be tried again: %s", self.problem)
            if closing:
                return
            self._hurry.wait(_RETRY_DELAY_S if self.problem else SPOOL_INTERVAL_S)
            self._hurry.clear()  # _next_pieces also detects a close

    def _next_pieces(self) -> tuple[list[bytes], bool]:
        """Return added pieces, waiting for them until the oldest held point is due for its segment."""
        with self._changed:
            while not (self._pending or self._unspooled or self._closing or self._is_due()):
                due_in = self._held_since + SEGMENT_INTERVAL_S - time.monotonic() if self._held else None
                self._changed.wait(due_in)
            pieces, self._pending = self._pending, []
            return pieces, self._closing

    def _joined(self, pieces: list[bytes]) -> list[bytes]:
        together = list(joined(pieces, max(1, SEGMENT_POINTS // 8), SEGMENT_BYTES // 8))
        with self._changed:
            self._bytes += sum(map(len, together)) - sum(map(len, pieces))
        return together

    def _is_due(self) -> bool:
        return bool(self._held) and time.monotonic() - self._held_since >= SEGMENT_INTERVAL_S

    def _save(self, everything: bool) -> None:
        """Spool new pieces, and write due segments (of ``everything`` at the end)."""
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
            self._put_in_order(self._segments.recover, self._segments.merge_all)

    def _room_left(self) -> bool:
        return self._held_points < SEGMENT_POINTS and self._held_bytes < SEGMENT_BYTES

    def _room_in_segment(self) -> int:
        """Return the number of next pieces that fit into the pending segment."""
        points, size, count = self._held_points, self._held_bytes, 0
        for piece in self._unspooled:
            if points >= SEGMENT_POINTS or size >= SEGMENT_BYTES:
                break
            points, size, count = points + points_in(piece), size + len(piece), count + 1
        return count

    def _hold(self, pieces: list[bytes]) -> None:
        if not self._held:
            self._held_since = time.monotonic()
        points = sum(map(points_in, pieces))
        self._held += pieces
        self._held_points += points
        self._held_bytes += sum(map(len, pieces))
        with self._changed:
            self._spooled += points
            self._changed.notify_all()

    def _make_segment(self) -> None:
        self._segments.put([record for piece in self._held for record in decode_records(piece)])
        self._spool.empty()
        freed, self._held = self._held_bytes, []
        self._held_points = self._held_bytes = 0
        with self._changed:
            self._bytes -= freed
            self._changed.notify_all()
        self._put_in_order(self._segments.recover, self._segments.merge_small)

    def _put_in_order(self, *works: Callable[[], None]) -> None:
        """Run optional work that makes reading faster.

        No point is lost if it fails; it is retried with the next segment.
        """
        disorder = ""
        for work in works:
            try:
                work()
            except Exception as error:
                disorder = str(error) or type(error).__name__
        if disorder and disorder != self._disorder:
            logger.warning("Metrics are written, but their files could not be put in order: %s", disorder)
        self._disorder = disorder


class _Written(msgspec.Struct, frozen=True):
    """A segment of this lease: the numbers it covers, its merge level, and its size."""

    key: str
    first: int
    last: int
    level: int
    #: Bytes in storage, and those of its columns in memory.
    stored: int
    bytes: int
    points: int
    cells: int


class _SegmentWriter:
    """Writer of the segments of one lease: merges them, and recovers spools of earlier leases."""

    def __init__(self, storage: Storage, lease: int) -> None:
        self._storage, self._lease = storage, lease
        self._written: list[_Written] = []
        self._recovered = False
        #: The number of the next segment.
        self.next = 1

    def put(self, records: Sequence[PointRecord]) -> None:
        table, number = table_of(records), self.next
        key = _segment_key(self._lease, number, number)
        data = encode_segment(table.to_batches(), table.schema, number, number)
        self._put_or_leave_nothing(key, data)
        points, cells = table.num_rows, table.num_rows * table.num_columns
        self._written.append(_Written(key, number, number, 0, len(data), table.nbytes, points, cells))
        self.next += 1

    def merge_small(self) -> None:
        """Merge the newest segments while a full set of them has the same level."""
        while self._written:
            level = self._written[-1].level
            newest = self._written[-_MERGE_COUNT:]
            if len(newest) < _MERGE_COUNT or any(segment.level != level for segment in newest):
                return
            if not _fit_together(newest):
                return
            self._merge(newest, level + 1)

    def merge_all(self) -> None:
        """Merge adjacent segments within the size limits."""
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
        """Replace adjacent segments, the newest of ``_written``, with one.

        It has a new key: stored files never change, so a concurrent reader finds the old ones, or the new one, or both,
        and detects duplicates by their numbers.
        """
        try:
            data, columns = merged([MetricSegment(self._storage, one.key, one.stored) for one in segments])
        except DamagedError as error:  # it stays unchanged, and is not merged again
            warn_of_damage(error.key, error)
            self._written = [one for one in self._written if one.key != error.key]
            return
        first, last = segments[0].first, segments[-1].last
        points = sum(one.points for one in segments)
        size = max(len(data), sum(one.bytes for one in segments))
        key = _segment_key(self._lease, first, last)
        self._put_or_leave_nothing(key, data)
        self._written[-len(segments) :] = [
            _Written(key, first, last, level, len(data), size, points, points * columns)
        ]
        for one in segments:
            self._storage.delete(one.key)

    def _put_or_leave_nothing(self, key: str, data: bytes) -> None:
        """Store a segment, and delete it if that failed.

        It may be stored all the same, and would hide later segments of its numbers: more points of the spool, or a
        merge of other segments.
        """
        try:
            self._storage.put(key, data)
        except Exception:
            with contextlib.suppress(Exception):
                self._storage.within(_RETRY_DELAY_S).delete(key)
            raise

    def recover(self) -> None:
        """Turn spools of earlier leases into segments, once."""
        if self._recovered:
            return
        for entry in self._storage.list("metrics"):
            match = SPOOL_KEY.fullmatch(entry.key)
            if match and int(match[1]) < self._lease:
                self._recover_spool(entry.key, int(match[1]))
        self._recovered = True

    def _recover_spool(self, key: str, lease: int) -> None:
        covered = _last_covered(self._storage, lease)
        try:
            content = read_spool(self._storage.get(key, limit=LARGE_RECORD_BYTES_LIMIT))
        except OSError as error:
            if error.errno != errno.EFBIG:
                raise
            warn_of_damage(key, error.strerror)
            return
        pieces = [piece for piece in content.pieces if piece[0] > covered]
        for number in sorted({segment for segment, _ in pieces}):
            records = [record for segment, part in pieces if segment == number for record in part]
            table = table_of(records)
            data = encode_segment(table.to_batches(), table.schema, number, number)
            self._storage.put(_segment_key(lease, number, number), data)
        if content.damage:  # the rest may be repaired by hand
            warn_of_damage(key, content.damage)
        else:
            self._storage.delete(key)


def _fit_together(segments: Sequence[_Written]) -> bool:
    """Return whether adjacent segments are small enough together. A damaged one between them must not be covered."""
    if any(one.last + 1 != other.first for one, other in pairwise(segments)):
        return False
    fits_bytes = sum(segment.bytes for segment in segments) <= _MERGE_BYTES
    return fits_bytes and sum(segment.cells for segment in segments) <= _MERGE_CELLS


def _segment_key(lease: int, first: int, last: int) -> str:
    merged_up_to = f"-{last:06d}" if last > first else ""
    return f"metrics/{lease:04d}-{first:06d}{merged_up_to}.arrow"


def _last_covered(storage: Storage, lease: int) -> int:
    """Return the largest number that the segments of a lease cover."""
    return max((segment.footer.last for segment in segments_by_lease(storage, {}).get(lease, [])), default=0)
