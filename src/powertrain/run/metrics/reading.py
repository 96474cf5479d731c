"""Read the points of a run back from its segments and spools."""

from __future__ import annotations

import contextlib
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from powertrain.errors import StorageError
from powertrain.run.lifecycle import RunState
from powertrain.run.metrics.arrays import numpy_of
from powertrain.run.metrics.points import (
    MISSING,
    MORE,
    OWN_COLUMNS,
    PointRecord,
    concatenate,
    is_json,
    metrics_at,
    path_of_name,
    table_of,
    values_of,
)
from powertrain.run.metrics.segments import MetricSegment, SegmentFooter
from powertrain.run.metrics.spool import read_spool
from powertrain.storage import Entry, Storage
from powertrain.storage.base import LARGE_RECORD_BYTES_LIMIT
from powertrain.storage.sealed import DamagedError
from powertrain.text.loggers import module_logger

if TYPE_CHECKING:
    import pandas
    import pyarrow as pa

#: Timeout and interval of retries: a mounted file system may still list files that another machine has deleted.
STALE_TIMEOUT_S = 90.0
_POLL_INTERVAL_S = 0.01

_SEGMENT_KEY = re.compile(r"metrics/(\d+)-(\d+)(?:-(\d+))?\.arrow")
SPOOL_KEY = re.compile(r"metrics/(\d+)\.open")
#: Columns of a frame beside the metrics.
FRAME_COLUMNS = ("rank", "attempt", "training_iteration", "timestamp")
#: A frame with more columns is copied once more, to defragment it for pandas.
_COLUMNS_APART_AT_MOST = 64
#: Maximum attempt: more than any run has.
_MOST_ATTEMPTS = 1 << 20
#: A row beyond any run's.
_NEVER = (1 << 63) - 1
logger = module_logger(__name__)
_Read = TypeVar("_Read")


def warn_of_damage(key: str, why: object) -> None:
    """Warn of a file that is skipped, with the reason."""
    logger.warning("The metrics file %r is damaged and was passed over: %s", key, why)


@contextlib.contextmanager
def passing_over_damage(source: str | MetricSegment) -> Iterator[None]:
    """Warn of a damaged or unreadable file and continue, so that it does not hide all others.

    ``source`` is its key or segment.
    """
    key = source.key if isinstance(source, MetricSegment) else source
    try:
        yield
    except (DamagedError, OSError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        report_damage(source, key, error)


def report_damage(source: str | MetricSegment, key: str, error: Exception) -> None:
    """Warn of damage, once for each opened segment."""
    if isinstance(source, MetricSegment):
        if source.has_been_reported:
            return
        source.has_been_reported = True
    warn_of_damage(key, error)


def intact_batches(
    segment: MetricSegment, columns: Sequence[str] | None = None, numbers: Iterable[int] | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the intact batches of a segment, with a warning if others are damaged."""
    with passing_over_damage(segment):
        for batch in segment.batches_or_damage(columns, numbers):
            if isinstance(batch, DamagedError):
                report_damage(segment, segment.key, batch)
            else:
                yield batch


def consistently(read: Callable[[], _Read]) -> _Read:
    """Return the result of ``read``, repeated when a live writer merged segments while it read.

    Raises :class:`StorageError` if storage keeps listing files that do not exist.
    """
    deadline = time.monotonic() + STALE_TIMEOUT_S
    while True:
        try:
            return read()
        except FileNotFoundError as error:  # the listed segment is gone, and the merged one exists
            if time.monotonic() > deadline:
                raise StorageError(
                    f"The metrics of the run cannot be read: storage has listed files for {STALE_TIMEOUT_S:g} s that "
                    f"are not there ({error}). Try again once its listings are up to date."
                ) from error
            time.sleep(_POLL_INTERVAL_S)


def stored_points(storage: Storage) -> list[MetricSegment | pa.Table]:
    """Return all points without duplicates, in order of arrival: segments, and tables of the spools' points.

    Call it within ``consistently``, together with the reads of its segments.
    """
    return [source for _, source in points_after(storage, {})]


def points_after(storage: Storage, read: Mapping[int, int]) -> list[tuple[int, MetricSegment | pa.Table]]:
    """Return :func:`stored_points`, each with its lease, but without segments that a reader has finished.

    Args:
        storage: The run's storage.
        read: The last number of the segments to omit, by lease. They are not opened.
    """
    # Spools first: points move from a spool to a segment, so in this order none is missed.
    spools = _read_spools(storage)
    segments = segments_by_lease(storage, read)
    found: list[tuple[int, MetricSegment | pa.Table]] = []
    for lease in sorted(segments.keys() | spools.keys()):
        of_lease = segments.get(lease, [])
        found += [(lease, segment) for segment in of_lease]
        covered = max((segment.footer.last for segment in of_lease), default=read.get(lease, 0))
        records = [r for number, part in spools.get(lease, []) if number > covered for r in part]
        if records:
            found.append((lease, table_of(records)))
    return found


def segments_by_lease(storage: Storage, read: Mapping[int, int]) -> dict[int, list[MetricSegment]]:
    """Return the segments of each lease, without merged but undeleted ones.

    Segments that end at or before the number in ``read`` for their lease are omitted.
    """
    found: dict[int, list[MetricSegment]] = {}
    covered = dict(read)
    for lease, first, minus_last, entry in _listed_segments(storage):
        last = -minus_last
        if first > covered.get(lease, 0) or (lease not in found and last > covered.get(lease, 0)):
            with passing_over_damage(entry.key):
                segment = MetricSegment(storage, entry.key, entry.size)
                _check_numbers(segment.footer, first, last)
                covered[lease] = segment.footer.last
                found.setdefault(lease, []).append(segment)
    return found


def _check_numbers(footer: SegmentFooter, first: int, last: int) -> None:
    """Raise :class:`DamagedError` if a footer covers other numbers than its file name.

    The file names of the earliest versions did not include the last number.
    """
    if footer.first != first or footer.last < first or (footer.points is not None and footer.last != last):
        raise DamagedError(f"it covers {footer.first} to {footer.last}, which its name does not say")


def _listed_segments(storage: Storage) -> list[tuple[int, int, int, Entry]]:
    """Return (lease, first number, minus last, entry) of all segments, sorted.

    Two successive listings must agree. A single one may contain neither a merged segment, created after it began, nor
    its parts, deleted before it ended.
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
    """Return the content of spools by lease: the target segments, and the points."""
    spools = {}
    for entry in storage.list("metrics"):
        match = SPOOL_KEY.fullmatch(entry.key)
        if match:
            # If it is gone, its points are in a segment by now.
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
        if not isinstance(source, MetricSegment):
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
    """Return all points of all ranks and attempts, in order of arrival.

    Columns with both integers and floats are floats here; other mixed columns are JSON text.
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
    """Return the points of the run's lineage, sorted by row and rank; of one ``rank``, or of all.

    Columns are the metrics ("a/b" for nested ones), then ``rank``, ``attempt``, ``training_iteration`` (the
    row) and ``timestamp`` (Unix seconds). A reported metric of one of these four names is shown as
    "reported/…". Solo reports have no row: their ``training_iteration`` is 0, and they are never
    abandoned. With ``abandoned``, points that a restart abandoned are included, marked by a column ``abandoned``.
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
    # pandas expects columns of one type in one block, and warns users who add another column otherwise.
    frame = pd.DataFrame(
        columns, index=pd.RangeIndex(table.num_rows), copy=len(columns) > _COLUMNS_APART_AT_MOST
    )
    return _sorted(frame, None if abandoned else ~gone)


def _of_rank(table: pa.Table, rank: int) -> pa.Table:
    """Return the points of one rank, without metrics that only other ranks have reported."""
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
    """Return the ``kept`` lines sorted stably by row and rank, without a copy if already sorted."""
    import numpy as np

    rows, ranks = frame["training_iteration"].to_numpy(), frame["rank"].to_numpy()
    chosen = np.arange(len(frame)) if kept is None else np.flatnonzero(kept)
    rows, ranks = rows[chosen], ranks[chosen]
    later = (rows[1:] > rows[:-1]) | ((rows[1:] == rows[:-1]) & (ranks[1:] >= ranks[:-1]))
    if later.all():
        return frame if len(chosen) == len(frame) else frame.take(chosen).reset_index(drop=True)
    return frame.take(chosen[np.lexsort((ranks, rows))]).reset_index(drop=True)


def first_abandoned_rows(run_state: RunState, attempts: Any) -> Any:
    """Return, for each attempt (a numpy array), the row from which its points are not ``run_state.is_live``."""
    import numpy as np

    # Nothing of the newest attempt is abandoned.
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
    """Return the column in its own memory, which users may change: for one chunk pandas would use Arrow's,
    read-only.
    """
    series = column.to_pandas()
    return series.copy() if column.num_chunks == 1 else series


def shown_names(names: Sequence[str], own: Sequence[str] = FRAME_COLUMNS) -> dict[str, str]:
    """Return the name of each column in a frame with ``own`` columns.

    Names are the keys joined by "/", unless that would be ambiguous.
    """
    plain = {}
    for name in names:
        shown = "more metrics" if name == MORE else "/".join(path_of_name(name))
        plain[name] = f"reported/{shown}" if shown in own else shown
    count = Counter(plain.values())
    return {name: shown if count[shown] == 1 or shown == name else name for name, shown in plain.items()}


def last_of_rank(storage: Storage, run_state: RunState, rank: int = 0) -> dict[str, Any] | None:
    """Return the last report of a rank in the run's lineage; a solo report only if there is no other.

    None if the rank never reported; ``{}`` is a report without a value.
    """
    return consistently(lambda: _last_of_rank_now(storage, run_state, rank))


def _last_of_rank_now(storage: Storage, run_state: RunState, rank: int) -> dict[str, Any] | None:
    last_solo: dict[str, Any] | None = None
    for source in reversed(stored_points(storage)):
        for own, read_whole in _batches_newest_first(source):
            with passing_over_damage(source if isinstance(source, MetricSegment) else "spool"):
                row, solo = _last_places(own, run_state, rank)
                if row is not None:
                    return metrics_at(read_whole(), row)
                if solo is not None and last_solo is None:
                    last_solo = metrics_at(read_whole(), solo)
    return last_solo


def _last_places(batch: pa.RecordBatch, run_state: RunState, rank: int) -> tuple[int | None, int | None]:
    """Return the positions of the rank's last live report and last solo report in a batch."""
    import numpy as np

    ranks, attempts, rows, solo = (
        numpy_of(batch.column(name)) for name in ("rank", "attempt", "row", "solo")
    )
    own = ranks == rank
    live = np.flatnonzero(own & ~solo & (rows < first_abandoned_rows(run_state, attempts)))
    alone = np.flatnonzero(own & solo)
    return (int(live[-1]) if len(live) else None), (int(alone[-1]) if len(alone) else None)


def _batches_newest_first(
    source: MetricSegment | pa.Table,
) -> Iterator[tuple[pa.RecordBatch, Callable[[], pa.RecordBatch]]]:
    """Yield the reserved columns of each batch, with a function that reads all of its columns."""
    if isinstance(source, MetricSegment):
        for number in reversed(range(source.batch_count)):
            for own in intact_batches(source, OWN_COLUMNS, [number]):
                yield own, partial(source.batch, number)
    else:
        for batch in reversed(source.to_batches()):
            yield batch, partial(_same, batch)


def _same(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch
