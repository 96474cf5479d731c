"""Every point of every rank, in columns on disk.

A point is one ``report``. Points go three ways in turn:

1. ``add`` encodes them and hands them to the one writer thread.
2. The writer appends them to a spool file, ``metrics/{lease}.open``, as soon as it can: at once when it is
   idle, every :data:`SPOOL_EVERY` seconds under load. From then on they survive the death of the process.
3. When there are enough of them, or they are old enough, the writer makes them a segment,
   ``metrics/{lease}-{segment}.arrow``, durable and in columns, and empties the spool. Small segments are
   merged as they pile up, into ``metrics/{lease}-{first}-{last}.arrow``, as far as a merge fits into a fixed memory.

A crash can leave points both in the spool and in a segment, or in a segment and in the one it was merged
into. So each piece of the spool says for which segment it is meant, and each segment which numbers it covers;
readers pass over what they have already. The next controller turns a dead one's spool into segments.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from powertrain.errors import StorageError
from powertrain.run.lifecycle import RunState
from powertrain.run.metrics.segments import Footer, Segment, encode_segment, merged
from powertrain.run.metrics.spool import Spool, joined, pieces_of, points_in, read_spool
from powertrain.run.metrics.points import (
    MISSING,
    MORE,
    OWN_COLUMNS,
    PointRecord,
    concatenate,
    decode_records,
    is_json,
    metrics_at,
    path_of_name,
    table_of,
    values_of,
)
from powertrain.storage import Entry, Storage
from powertrain.storage.base import LARGE_RECORD_BYTES_LIMIT
from powertrain.storage.sealed import DamagedError

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
_MERGE_COUNT = 4
_MERGE_BYTES = 32 << 20
_MERGE_CELLS = 16 << 20
_RETRY_SECONDS = 1.0
#: Mounted file systems may go on listing what another machine has deleted; they are read again this long, this often.
STALE_SECONDS = 90.0
_LOOK_AGAIN_SECONDS = 0.01

_SEGMENT_KEY = re.compile(r"metrics/(\d+)-(\d+)(?:-(\d+))?\.arrow")
_SPOOL_KEY = re.compile(r"metrics/(\d+)\.open")
#: What a frame says of each point beside its metrics.
FRAME_COLUMNS = ("rank", "attempt", "training_iteration", "timestamp")
#: A frame of more columns is copied once more, so that pandas has them together.
_COLUMNS_APART_AT_MOST = 64
#: More attempts than any run makes.
_MOST_ATTEMPTS = 1 << 20
#: No row comes so far.
_NEVER = (1 << 63) - 1
_logger = logging.getLogger("powertrain")
_Read = TypeVar("_Read")


# --------------------------------------------------------------------------- writing


class MetricsStore:
    """The writing end, for the holder of lease ``lease_number``. ``add`` may be called by any thread."""

    def __init__(self, storage: Storage, lease_number: int) -> None:
        self._segments = _SegmentWriter(storage, lease_number)
        self._spool = Spool(storage, lease_number)
        #: What storage last refused, in words; "" while all is well.
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
        #: Why putting segments in order failed last.
        self._disorder = ""
        self._thread = threading.Thread(target=self._write, name="powertrain-metrics", daemon=True)
        self._thread.start()

    def add(self, records: Sequence[PointRecord]) -> None:
        """Keep these points. Returns without waiting for the disk unless :attr:`crowded`."""
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
        """True while so much waits for storage that ``add`` would wait too."""
        return self._bytes > BACKLOG_BYTES

    def wait_spooled(self, timeout: float | None = None) -> bool:
        """Wait until every point added before this call survives the death of the process."""
        self._hurry.set()
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

    def abandon(self) -> None:
        """Stop and write nothing more: the directory was removed, and one made anew has files of the same names."""
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
                _logger.warning("Metrics could not be written and will be tried again: %s", self.problem)
            if closing:
                return
            self._hurry.wait(_RETRY_SECONDS if self.problem else SPOOL_EVERY)
            self._hurry.clear()  # whoever closes is seen in _next_pieces as well

    def _next_pieces(self) -> tuple[list[bytes], bool]:
        """What has been added, waiting for it until the oldest held point is due for its segment."""
        with self._changed:
            while not (self._pending or self._unspooled or self._closing or self._is_due()):
                due_in = self._held_since + SEGMENT_SECONDS - time.monotonic() if self._held else None
                self._changed.wait(due_in)
            pieces, self._pending = self._pending, []
            return pieces, self._closing

    def _joined(self, pieces: list[bytes]) -> list[bytes]:
        together = list(joined(pieces, max(1, SEGMENT_POINTS // 8), SEGMENT_BYTES // 8))
        with self._changed:
            self._bytes += sum(map(len, together)) - sum(map(len, pieces))
        return together

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
            self._put_in_order(self._segments.recover, self._segments.merge_all)

    def _room_left(self) -> bool:
        return self._held_points < SEGMENT_POINTS and self._held_bytes < SEGMENT_BYTES

    def _room_in_segment(self) -> int:
        """How many of the next pieces go into the segment being gathered."""
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
        """What makes reading quicker. No point is lost where it fails; it is tried again with the next segment."""
        disorder = ""
        for work in works:
            try:
                work()
            except Exception as error:
                disorder = str(error) or type(error).__name__
        if disorder and disorder != self._disorder:
            _logger.warning("Metrics are written, but their files could not be put in order: %s", disorder)
        self._disorder = disorder


class _Written(msgspec.Struct, frozen=True):
    """A segment of this lease: the numbers it covers, how often it was merged, and how large it is."""

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
    """Writes and merges the segments of one lease, and rescues what earlier leases left in spools."""

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
        """Put one segment in the place of neighbours, which are the newest of ``_written``.

        It has a key of its own: what is stored never changes, so a reader that meets it half-way finds the old ones,
        or the new one, or both, and then knows from their numbers what it has already.
        """
        try:
            data, columns = merged([Segment(self._storage, one.key, one.stored) for one in segments])
        except DamagedError as error:  # it stays as it is, and is not merged again
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
        """A put that failed may be there all the same, and would hide what comes under its numbers later: more points
        of the spool, or a merge of other neighbours. So it is taken back, as far as storage lets us."""
        try:
            self._storage.put(key, data)
        except Exception:
            with contextlib.suppress(Exception):
                self._storage.within(_RETRY_SECONDS).delete(key)
            raise

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
        if content.damage:  # what follows may be mended by a person
            warn_of_damage(key, content.damage)
        else:
            self._storage.delete(key)


def _fit_together(segments: Sequence[_Written]) -> bool:
    """True for neighbours that are small enough together. One between them that is damaged must not be covered."""
    if any(one.last + 1 != other.first for one, other in pairwise(segments)):
        return False
    fits_bytes = sum(segment.bytes for segment in segments) <= _MERGE_BYTES
    return fits_bytes and sum(segment.cells for segment in segments) <= _MERGE_CELLS


def _segment_key(lease: int, first: int, last: int) -> str:
    merged_up_to = f"-{last:06d}" if last > first else ""
    return f"metrics/{lease:04d}-{first:06d}{merged_up_to}.arrow"


def _last_covered(storage: Storage, lease: int) -> int:
    """The largest number that the segments of a lease cover."""
    return max((segment.footer.last for segment in _segments(storage, {}).get(lease, [])), default=0)


# --------------------------------------------------------------------------- reading


def warn_of_damage(key: str, why: object) -> None:
    """Tell the user which file is passed over, and why."""
    _logger.warning("The metrics file %r is damaged and was passed over: %s", key, why)


@contextlib.contextmanager
def passing_over_damage(source: str | Segment) -> Iterator[None]:
    """Warn of a damaged or unreadable file and go on: it must not hide all others. ``source`` is its key or segment."""
    key = source.key if isinstance(source, Segment) else source
    try:
        yield
    except (DamagedError, OSError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        report_damage(source, key, error)


def report_damage(source: str | Segment, key: str, error: Exception) -> None:
    """Warn of damage, of each opened segment once."""
    if isinstance(source, Segment):
        if source.has_been_reported:
            return
        source.has_been_reported = True
    warn_of_damage(key, error)


def intact_batches(
    segment: Segment, columns: Sequence[str] | None = None, numbers: Iterable[int] | None = None
) -> Iterator[pa.RecordBatch]:
    """The batches of a segment that are as they were written, with a warning where others are not."""
    with passing_over_damage(segment):
        for batch in segment.batches_or_damage(columns, numbers):
            if isinstance(batch, DamagedError):
                report_damage(segment, segment.key, batch)
            else:
                yield batch


def consistently(read: Callable[[], _Read]) -> _Read:
    """What ``read`` returns, again from its beginning when a live writer merged segments while it read.

    Raises :class:`StorageError` where storage goes on listing what is not there.
    """
    deadline = time.monotonic() + STALE_SECONDS
    while True:
        try:
            return read()
        except FileNotFoundError as error:  # what was listed is gone; what it was merged into is there
            if time.monotonic() > deadline:
                raise StorageError(
                    f"The metrics of the run cannot be read: storage has listed files for {STALE_SECONDS:g} s that are "
                    f"not there ({error}). Try again once its listings are up to date."
                ) from error
            time.sleep(_LOOK_AGAIN_SECONDS)


def stored_points(storage: Storage) -> list[Segment | pa.Table]:
    """All points, each once, in the order in which they came: segments, and tables of what is in spools.

    Call it in ``consistently``, together with what is then read of the segments.
    """
    return [source for _, source in points_after(storage, {})]


def points_after(storage: Storage, read: Mapping[int, int]) -> list[tuple[int, Segment | pa.Table]]:
    """As :func:`stored_points`, each with its lease, but without segments that a reader is through with.

    Args:
        storage: That of the run.
        read: By lease the last number of the segments that are left out. They are not even opened.
    """
    # Spools first: points move from a spool to a segment, so in this order none is missed.
    spools = _read_spools(storage)
    segments = _segments(storage, read)
    found: list[tuple[int, Segment | pa.Table]] = []
    for lease in sorted(segments.keys() | spools.keys()):
        of_lease = segments.get(lease, [])
        found += [(lease, segment) for segment in of_lease]
        covered = max((segment.footer.last for segment in of_lease), default=read.get(lease, 0))
        records = [r for number, part in spools.get(lease, []) if number > covered for r in part]
        if records:
            found.append((lease, table_of(records)))
    return found


def _segments(storage: Storage, read: Mapping[int, int]) -> dict[int, list[Segment]]:
    """The segments of each lease, without those that were merged into others but not deleted, and without those that
    end at or before the number that ``read`` has of their lease."""
    found: dict[int, list[Segment]] = {}
    covered = dict(read)
    for lease, first, minus_last, entry in _listed_segments(storage):
        last = -minus_last
        if first > covered.get(lease, 0) or (lease not in found and last > covered.get(lease, 0)):
            with passing_over_damage(entry.key):
                segment = Segment(storage, entry.key, entry.size)
                _check_numbers(segment.footer, first, last)
                covered[lease] = segment.footer.last
                found.setdefault(lease, []).append(segment)
    return found


def _check_numbers(footer: Footer, first: int, last: int) -> None:
    """Raise :class:`DamagedError` where a footer covers other numbers than the name of its file, which in the
    earliest versions did not have the last."""
    if footer.first != first or footer.last < first or (footer.points is not None and footer.last != last):
        raise DamagedError(f"it covers {footer.first} to {footer.last}, which its name does not say")


def _listed_segments(storage: Storage) -> list[tuple[int, int, int, Entry]]:
    """(lease, first number, minus last, entry) of all there are, sorted.

    Two listings in a row agree on them. One alone may have neither a merged segment, which came after it had begun,
    nor its parts, which were gone before it ended.
    """
    before, listed = None, _list_segments(storage)
    while listed != before:
        before, listed = listed, _list_segments(storage)
    return listed


def _list_segments(storage: Storage) -> list[tuple[int, int, int, Entry]]:
    listed = []
    for entry in storage.list("metrics"):
        match = _SEGMENT_KEY.fullmatch(entry.key)
        if match:
            lease, first = int(match[1]), int(match[2])
            listed.append((lease, first, -int(match[3] or first), entry))
    return sorted(listed)


def _read_spools(storage: Storage) -> dict[int, list[tuple[int, list[PointRecord]]]]:
    """By lease, what is in spools: for which segment, and which points."""
    spools = {}
    for entry in storage.list("metrics"):
        match = _SPOOL_KEY.fullmatch(entry.key)
        if match:
            # Where it is gone, its points are in a segment by now.
            with contextlib.suppress(FileNotFoundError), passing_over_damage(entry.key):
                content = read_spool(storage.get(entry.key, limit=LARGE_RECORD_BYTES_LIMIT))
                spools[int(match[1])] = content.pieces
                if content.damage:
                    warn_of_damage(entry.key, content.damage)
    return spools


def _tables(storage: Storage) -> list[pa.Table]:
    import pyarrow as pa

    tables = []
    for source in stored_points(storage):
        if not isinstance(source, Segment):
            tables.append(source)
            continue
        try:
            tables.append(source.table())
        except (DamagedError, OSError) as error:
            if isinstance(error, FileNotFoundError):
                raise
            batches = list(intact_batches(source, source.schema.names))
            tables.append(pa.Table.from_batches(batches, source.schema))
            report_damage(source, source.key, error)
    return tables


def read_table(storage: Storage) -> pa.Table:
    """All points of all ranks and attempts, in the order in which they came.

    Columns of whole and fractional numbers together are floats here; other mixed columns are JSON text.
    """
    table = concatenate([table_of([]), *consistently(lambda: _tables(storage))])
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


def dataframe(
    storage: Storage, run_state: RunState, *, rank: int | None = None, abandoned: bool = False
) -> pandas.DataFrame:
    """The points of the run's lineage, sorted by row and rank; of one ``rank``, or of all where none is given.

    Columns are the metrics ("a/b" for nested ones), then ``rank``, ``attempt``, ``training_iteration`` (the
    row) and ``timestamp`` (Unix seconds). A reported metric of one of these four names is shown as
    "reported/…". Solo reports stand outside rows: their ``training_iteration`` is 0, and they are never
    abandoned. With ``abandoned`` the points that a restart went back behind are there too, and a column
    ``abandoned`` tells them apart.
    """
    import pandas as pd

    table = read_table(storage)
    if rank is not None:
        table = _of_rank(table, rank)
    own = (*FRAME_COLUMNS, "abandoned") if abandoned else FRAME_COLUMNS
    columns = _metric_columns(table, own)
    for shown, name in zip(FRAME_COLUMNS, ("rank", "attempt", "row", "at"), strict=True):
        columns[shown] = _series_of(table.column(name))
    attempts, rows = columns["attempt"].to_numpy(), columns["training_iteration"].to_numpy()
    gone = (rows >= first_abandoned_rows(run_state, attempts)) & ~table.column("solo").to_numpy()
    if abandoned:
        columns["abandoned"] = gone
    # Of many columns pandas wants those of one type in one place, and warns users who add another one.
    frame = pd.DataFrame(
        columns, index=pd.RangeIndex(table.num_rows), copy=len(columns) > _COLUMNS_APART_AT_MOST
    )
    return _sorted(frame, None if abandoned else ~gone)


def _of_rank(table: pa.Table, rank: int) -> pa.Table:
    """The points of one rank, without the metrics that only other ranks have reported."""
    import pyarrow as pa
    import pyarrow.compute as pc

    own = table.filter(pc.equal(table.column("rank"), pa.scalar(rank)))
    foreign = [
        name
        for name in own.column_names
        if name not in OWN_COLUMNS
        and own.column(name).null_count == own.num_rows
        and table.column(name).null_count < table.num_rows
    ]
    return own.drop_columns(foreign) if foreign else own


def _sorted(frame: pandas.DataFrame, kept: Any) -> pandas.DataFrame:
    """The ``kept`` lines by row and rank, of equal ones the first first. What is in order is not copied."""
    import numpy as np

    rows, ranks = frame["training_iteration"].to_numpy(), frame["rank"].to_numpy()
    chosen = np.arange(len(frame)) if kept is None else np.flatnonzero(kept)
    rows, ranks = rows[chosen], ranks[chosen]
    later = (rows[1:] > rows[:-1]) | ((rows[1:] == rows[:-1]) & (ranks[1:] >= ranks[:-1]))
    if later.all():
        return frame if len(chosen) == len(frame) else frame.take(chosen).reset_index(drop=True)
    return frame.take(chosen[np.lexsort((ranks, rows))]).reset_index(drop=True)


def first_abandoned_rows(run_state: RunState, attempts: Any) -> Any:
    """For each of the attempts (a numpy array) the row from which on its points are not ``run_state.is_live``."""
    import numpy as np

    # From the newest attempt on nothing is abandoned.
    newest = max((branch.attempt for branch in run_state.branches), default=0)
    highest = min(int(attempts.max(initial=0)), newest)
    if highest > _MOST_ATTEMPTS:
        raise StorageError(
            f"The journal of the run has an attempt with the number {newest}, which cannot be: it was changed. "
            "Restore journal/ from a copy."
        )
    of_attempt = [_first_abandoned_row(run_state, attempt) for attempt in range(highest + 1)]
    within = attempts if int(attempts.max(initial=0)) <= highest else np.minimum(attempts, highest)
    try:
        return np.array(of_attempt, np.int64)[within]
    except IndexError:
        raise StorageError(
            f"The metrics of the run have an attempt with the number {int(attempts.min())}, which cannot be: they were "
            "changed. Restore metrics/ from a copy."
        ) from None


def _first_abandoned_row(run_state: RunState, attempt: int) -> int:
    return min((b.first_row for b in run_state.branches if b.attempt > attempt), default=_NEVER)


def _metric_columns(table: pa.Table, own: Sequence[str]) -> dict[str, Any]:
    import pandas as pd

    columns: dict[str, Any] = {}
    names = [name for name in table.column_names if name not in OWN_COLUMNS]
    for name, shown in shown_names(names, own).items():
        column, field = table.column(name), table.schema.field(name)
        if is_json(field):
            values = [None if value is MISSING else value for value in values_of(column, field)]
            columns[shown] = pd.Series(values, dtype=object)
        else:
            columns[shown] = _series_of(column)
    return columns


def _series_of(column: pa.ChunkedArray[Any]) -> pandas.Series[Any]:
    """The column in memory of its own, which users may change: of one chunk pandas would get Arrow's, which is not."""
    series = column.to_pandas()
    return series.copy() if column.num_chunks == 1 else series


def shown_names(names: Sequence[str], own: Sequence[str] = FRAME_COLUMNS) -> dict[str, str]:
    """What each column is called in a frame that has ``own`` columns beside them: its keys with "/" between, unless
    that could mean another one."""
    plain = {}
    for name in names:
        shown = "more metrics" if name == MORE else "/".join(path_of_name(name))
        plain[name] = f"reported/{shown}" if shown in own else shown
    count = Counter(plain.values())
    return {name: shown if count[shown] == 1 or shown == name else name for name, shown in plain.items()}


def last_of_rank(storage: Storage, run_state: RunState, rank: int = 0) -> dict[str, Any] | None:
    """Exactly what a rank reported last in the run's lineage; a solo report only where there is no other.

    None when the rank never reported; ``{}`` is a report without a value.
    """
    return consistently(lambda: _last_of_rank_now(storage, run_state, rank))


def _last_of_rank_now(storage: Storage, run_state: RunState, rank: int) -> dict[str, Any] | None:
    last_solo: dict[str, Any] | None = None
    for source in reversed(stored_points(storage)):
        for own, read_whole in _batches_newest_first(source):
            with passing_over_damage(source if isinstance(source, Segment) else "spool"):
                row, solo = _last_places(own, run_state, rank)
                if row is not None:
                    return metrics_at(read_whole(), row)
                if solo is not None and last_solo is None:
                    last_solo = metrics_at(read_whole(), solo)
    return last_solo


def _last_places(batch: pa.RecordBatch, run_state: RunState, rank: int) -> tuple[int | None, int | None]:
    """Where in a batch the rank's last live report and its last solo report are."""
    import numpy as np

    ranks, attempts, rows, solo = (
        batch.column(name).to_numpy(zero_copy_only=False) for name in ("rank", "attempt", "row", "solo")
    )
    own = ranks == rank
    live = np.flatnonzero(own & ~solo & (rows < first_abandoned_rows(run_state, attempts)))
    alone = np.flatnonzero(own & solo)
    return (int(live[-1]) if len(live) else None), (int(alone[-1]) if len(alone) else None)


def _batches_newest_first(
    source: Segment | pa.Table,
) -> Iterator[tuple[pa.RecordBatch, Callable[[], pa.RecordBatch]]]:
    """Our own columns of each batch, one at a time, with how to read all of its columns."""
    if isinstance(source, Segment):
        for number in reversed(range(source.batch_count)):
            for own in intact_batches(source, OWN_COLUMNS, [number]):
                yield own, partial(source.batch, number)
    else:
        for batch in reversed(source.to_batches()):
            yield batch, partial(_same, batch)


def _same(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch
