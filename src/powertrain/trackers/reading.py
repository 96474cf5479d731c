"""New points of a run's rank 0, read page by page from its directory while others write there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from powertrain.run.metrics.points import MISSING, MORE, OWN_COLUMNS, values_of
from powertrain.run.metrics.reading import consistently, intact_batches, points_after, shown_names
from powertrain.run.metrics.segments import MetricSegment
from powertrain.storage import Storage
from powertrain.trackers.base import TrackedPoint

if TYPE_CHECKING:
    import pyarrow as pa


class ReadPosition(NamedTuple):
    """The position of a reader: the newest attempt, and its last row. Rows of earlier attempts are not read again."""

    attempt: int = -1
    row: int = 0


class StoredPoint(NamedTuple):
    """One report of rank 0, and the attempt that made it."""

    attempt: int
    point: TrackedPoint


class Page(NamedTuple):
    """Points that follow a position, in the order in which they came."""

    points: list[StoredPoint]
    #: True if the page was full, so that more may follow at once.
    is_full: bool
    #: By lease the last segment of which all points are in this page or before it.
    read: Mapping[int, int]


class PointReader:
    """Reads the points after a position. The cost of each read is that of the new points.

    Reports with ``solo=True`` stand outside of rows and are left out.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        #: By lease the last segment that need not be opened again.
        self._read: Mapping[int, int] = {}

    def page(self, after: ReadPosition, limit: int) -> Page:
        """Read up to ``limit`` points that follow ``after``."""
        return consistently(lambda: self._page_now(after, limit))

    def advance(self, page: Page) -> None:
        """Take note that the points of a page have been dealt with, so that their segments are not opened again."""
        self._read = page.read

    def count(self, after: ReadPosition) -> int:
        """Return how many points follow ``after``."""
        return consistently(lambda: sum(len(found) for _, found in self._found(after, OWN_COLUMNS)))

    def _page_now(self, after: ReadPosition, limit: int) -> Page:
        points: list[StoredPoint] = []
        read = dict(self._read)
        for lease, source in points_after(self._storage, self._read):
            for batch in _batches(source, after, None):
                for stored in _points_of(batch):
                    if len(points) == limit:
                        return Page(points, True, read)
                    points.append(stored)
            if isinstance(source, MetricSegment):
                read[lease] = source.footer.last
        return Page(points, False, read)

    def _found(self, after: ReadPosition, columns: tuple[str, ...]) -> Iterator[tuple[int, pa.RecordBatch]]:
        for lease, source in points_after(self._storage, self._read):
            for batch in _batches(source, after, columns):
                yield lease, batch


def _batches(
    source: MetricSegment | pa.Table, after: ReadPosition, columns: tuple[str, ...] | None
) -> Iterator[pa.RecordBatch]:
    """The wanted points of a source, with these columns or all. Of a segment that has none, only our own are read."""
    if not isinstance(source, MetricSegment):
        for batch in source.to_batches():
            yield _wanted(batch, after)
        return
    for number in range(source.batch_count):
        for own in intact_batches(source, OWN_COLUMNS, [number]):
            if not len(_wanted(own, after)):
                continue
            if columns is not None:
                yield _wanted(own, after)
            else:
                for batch in intact_batches(source, source.schema.names, [number]):
                    yield _wanted(batch, after)


def _wanted(batch: pa.RecordBatch, after: ReadPosition) -> pa.RecordBatch:
    import numpy as np
    import pyarrow as pa

    rank, attempt, row, solo = (
        batch.column(name).to_numpy(zero_copy_only=False) for name in ("rank", "attempt", "row", "solo")
    )
    follows = (attempt > after.attempt) | ((attempt == after.attempt) & (row > after.row))
    mask = np.asarray((rank == 0) & ~solo & follows, dtype=bool)
    return batch.filter(pa.array(mask))


def _points_of(batch: pa.RecordBatch) -> Iterator[StoredPoint]:
    names = [name for name in batch.schema.names if name not in OWN_COLUMNS]
    shown = shown_names([name for name in names if name != MORE], ())
    columns = {name: values_of(batch.column(name), batch.schema.field(name)) for name in names}
    more = columns.pop(MORE, [])
    own: tuple[list[Any], ...] = tuple(batch.column(name).to_pylist() for name in ("attempt", "row", "at"))
    for index, (attempt, row, at) in enumerate(zip(*own, strict=True)):
        metrics = {
            shown[name]: values[index] for name, values in columns.items() if values[index] is not MISSING
        }
        if more and more[index] is not MISSING:
            metrics.update({shown_names([name], ())[name]: value for name, value in more[index].items()})
        yield StoredPoint(attempt, TrackedPoint(row, at, metrics))
