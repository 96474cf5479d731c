"""Curves: one metric of one rank in pixels, each with its smallest, largest and last value.

A pixel is a range of rows. All metrics of a rank have the same pixels, so that their curves can be drawn one below the
other. Points that a restart abandoned are omitted, and so are solo reports, which have no row. Runs can be read while
they write.

Long runs are not read point by point: full batches of segments have a summary of their stretches
(:mod:`powertrain.run.metrics.summary`), and pixels are made as wide as whole stretches. The points themselves are read
where there is no summary yet (the newest ones), where a restart cuts a stretch in two, and where pixels are narrower
than stretches. The result is the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from powertrain.errors import StorageError
from powertrain.run.lifecycle import RunState
from powertrain.run.metrics.arrays import array_of_numpy, floats_of, numpy_of
from powertrain.run.metrics.points import MISSING, MORE, name_of_path, values_of
from powertrain.run.metrics.reading import (
    consistently,
    first_abandoned_rows,
    intact_batches,
    passing_over_damage,
    shown_names,
    stored_points,
)
from powertrain.run.metrics.segments import MetricSegment
from powertrain.run.metrics.summary import (
    PLACE,
    STRETCH_ROWS,
    Numbers,
    has_numbers,
    is_metric,
    numbers_at,
    numbers_in_more,
)
from powertrain.storage import Storage

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

    Array = NDArray[Any]

#: Maximum row: more than any run has; their pixels still fit into 64 bits.
_LARGEST_ROW = 1 << 61
#: The first and the last row that 64 bits can hold.
_EVERY_ROW = (-(1 << 63), (1 << 63) - 1)

__all__ = ["Curve", "curve", "curves", "metric_names", "times_of_rows"]


@dataclass(frozen=True)
class Curve:
    """A metric in pixels. The arrays have one entry per pixel with a value, in the order of rows.

    NaN is a value of ``last``; ``low`` and ``high`` ignore it and are NaN only if a pixel has nothing else.
    Infinities are kept. Values that are not numbers (text, booleans, None) count as not reported.
    """

    #: The first row of each pixel.
    rows: NDArray[np.int64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    last: NDArray[np.float64]
    #: Number of values in the pixels.
    points: int


def metric_names(storage: Storage, run_state: RunState) -> list[str]:
    """Return the names of numeric metrics as in the data frame, in order of first appearance.

    Metrics that only an abandoned attempt reported are included; their curves are empty. Metrics without a column of
    their own because a segment has too many (:data:`powertrain.run.metrics.points.MORE`) are not included; they do have
    curves.
    """
    return consistently(lambda: _metric_names_now(storage))


def curve(
    storage: Storage,
    run_state: RunState,
    name: str,
    *,
    pixels: int = 1000,
    rank: int = 0,
    rows: tuple[int, int] | None = None,
) -> Curve:
    """Return the metric ``name`` of ``rank`` in at most ``pixels`` pixels; empty if it has none.

    "timestamp" is the time of the reports. With ``rows``, only the rows from the first to the last of the two are read.
    """
    return curves(storage, run_state, [(name, rank)], pixels=pixels, rows=rows)[0]


def curves(
    storage: Storage,
    run_state: RunState,
    wanted: Sequence[tuple[str, int]],
    *,
    pixels: int = 1000,
    rows: tuple[int, int] | None = None,
) -> list[Curve]:
    """Return the curve of each (metric, rank), as :func:`curve` does, with one look at the stored points for all."""
    if pixels < 1:
        raise ValueError(f"A curve cannot have {pixels} pixels: it needs at least one.")

    def read() -> list[Curve]:
        sources = stored_points(storage)
        return [
            _curve_now(sources, run_state, name, pixels, rank, rows or _EVERY_ROW) for name, rank in wanted
        ]

    return consistently(read)


def times_of_rows(storage: Storage, run_state: RunState, rows: Iterable[int]) -> dict[int, float]:
    """Return when rank 0 reported these rows, in Unix seconds. Rows that it has no point of are left out."""

    def read() -> dict[int, float]:
        sources = stored_points(storage)
        found = {row: _curve_now(sources, run_state, "timestamp", 1, 0, (row, row)).last for row in set(rows)}
        return {row: float(times[-1]) for row, times in found.items() if len(times)}

    return consistently(read)


# --------------------------------------------------------------------------- names


def _metric_names_now(storage: Storage) -> list[str]:
    sources = stored_points(storage)
    shown = shown_names(_column_names(sources))
    numeric: dict[str, None] = {}
    for source in sources:
        known = source.footer.numeric if isinstance(source, MetricSegment) else None
        numeric.update(dict.fromkeys(_look_for_numbers(source) if known is None else known))
    return [shown[name] for name in shown if name in numeric]


def _column_names(sources: Iterable[MetricSegment | pa.Table]) -> list[str]:
    """Return the columns of all metrics, in order of first appearance."""
    return list(dict.fromkeys(name for source in sources for name in filter(is_metric, source.schema.names)))


def _look_for_numbers(source: MetricSegment | pa.Table) -> Iterator[str]:
    """Return the metrics with numbers in rows, from data without such a footer."""
    for name in filter(is_metric, source.schema.names):
        field = source.schema.field(name)
        if any(
            has_numbers(batch.column(name), field, numpy_of(batch.column("solo")))
            for batch in _batches(source, ["solo", name])
        ):
            yield name


def _batches(
    source: MetricSegment | pa.Table, columns: list[str], numbers: Iterable[int] | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield batches with the existing ones of these columns; of a segment only those of these numbers."""
    if isinstance(source, MetricSegment):
        yield from intact_batches(source, columns, numbers)
    else:
        yield from source.select([name for name in columns if name in source.column_names]).to_batches()


# --------------------------------------------------------------------------- curves


class _Stretches(NamedTuple):
    """Parts of a rank's live rows, each with the values of one metric. A point is a part of one row."""

    first: Array
    last_row: Array
    low: Array
    high: Array
    last: Array
    points: Array


def _curve_now(
    sources: Sequence[MetricSegment | pa.Table],
    run_state: RunState,
    name: str,
    pixels: int,
    rank: int,
    rows: tuple[int, int],
) -> Curve:
    column = _column_of(sources, name)
    looking = _Looking(run_state, column, rank, rows)
    found = _end_to_end(looking.at(source) for source in sources)
    width = _pixel_width(found, pixels)
    has_stretches = bool((found.first != found.last_row).any())
    if has_stretches and (width % STRETCH_ROWS or _overlap(found)):
        looking = _Looking(run_state, column, rank, rows, only_points=True)
        found = _end_to_end(looking.at(source) for source in sources)
    return _in_pixels(found, width)


def _column_of(sources: Iterable[MetricSegment | pa.Table], name: str) -> str:
    """Return the column that the data frame calls ``name``."""
    if name == "timestamp":
        return "at"
    for column, shown in shown_names(_column_names(sources)).items():
        if shown == name:
            return column
    found = (leaf for leaf in _leaves_beyond(sources) if shown_names([leaf])[leaf] == name)
    return next(found, name_of_path([name]))


def _leaves_beyond(sources: Iterable[MetricSegment | pa.Table]) -> Iterator[str]:
    """Return the distinct metrics without a column of their own, by the names they would have as columns."""
    seen: set[str] = set()
    for source in sources:
        if MORE not in source.schema.names:
            continue
        field = source.schema.field(MORE)
        for batch in _batches(source, [MORE]):
            for point in values_of(batch.column(MORE), field):
                new = [] if point is MISSING else [leaf for leaf in point if leaf not in seen]
                seen.update(new)
                yield from new


@dataclass(frozen=True)
class _Looking:
    """One query over all sources."""

    run_state: RunState
    column: str
    rank: int
    #: The first and the last row that are read.
    rows: tuple[int, int]
    only_points: bool = False

    def at(self, source: MetricSegment | pa.Table) -> _Stretches:
        """Return the matching stretches of a source, from its summary if that is sufficient."""
        if not isinstance(source, MetricSegment) or not source.summarized:
            return self._points(source)
        has_more = MORE in source.schema.names  # JSON text, which has no summary
        reads_points = self.only_points or has_more
        if reads_points and self.rows == _EVERY_ROW:
            return self._points(source)
        with passing_over_damage(source), source.held_open():
            unsummarized = {*range(source.batch_count)} - source.summarized
            if reads_points:
                return self._points(source, sorted(unsummarized | self._batches_in_range(source)))
            summarized, cut = self._summarized(source)
            return _end_to_end([summarized, self._points(source, sorted(unsummarized | cut))])
        return _end_to_end([])

    def _batches_in_range(self, segment: MetricSegment) -> set[int]:
        """Return the summarized batches that have rows of the range."""
        summary = segment.summary([PLACE])
        first, last, batch = (_part(summary, PLACE, part) for part in ("first", "last", "batch"))
        return set(batch[(last >= self.rows[0]) & (first <= self.rows[1])].tolist())

    def _summarized(self, segment: MetricSegment) -> tuple[_Stretches, set[int]]:
        """Return the stretches of summarized batches, and the batches that a restart or the range cuts."""
        import numpy as np

        summary = segment.summary([PLACE, self.column])
        place = {part: _part(summary, PLACE, part) for part in ("batch", "attempt", "rank", "first", "last")}
        abandoned = first_abandoned_rows(self.run_state, place["attempt"])
        begin, end = self.rows
        live = (place["rank"] == self.rank) & (place["first"] < abandoned)
        live &= (place["last"] >= begin) & (place["first"] <= end)
        is_cut = (place["last"] >= abandoned) | (place["first"] < begin) | (place["last"] > end)
        cut = np.unique(place["batch"][live & is_cut])
        chosen = np.flatnonzero(live & ~np.isin(place["batch"], cut))
        first, last = place["first"][chosen], place["last"][chosen]
        if self.column not in summary.column_names:
            return _without_values(first, last), set(cut.tolist())
        parts = (_part(summary, self.column, part)[chosen] for part in ("low", "high", "last", "count"))
        low, high, newest, count = parts
        return _Stretches(first, last, low, high, newest, np.nan_to_num(count)), set(cut.tolist())

    def _points(self, source: MetricSegment | pa.Table, numbers: list[int] | None = None) -> _Stretches:
        """Return the points themselves, of these batches or of all."""
        columns = ["rank", "attempt", "row", "solo", self.column, MORE]
        return _end_to_end(map(self._points_of_batch, _batches(source, columns, numbers)))

    def _points_of_batch(self, batch: pa.RecordBatch) -> _Stretches:
        import numpy as np

        rank, attempt, row, solo = (
            numpy_of(batch.column(name)) for name in ("rank", "attempt", "row", "solo")
        )
        begin, end = self.rows
        chosen = np.flatnonzero((rank == self.rank) & ~solo & (row >= begin) & (row <= end))
        chosen = chosen[row[chosen] < first_abandoned_rows(self.run_state, attempt[chosen])]
        rows = row[chosen]
        numbers = self._numbers(batch, chosen) if len(chosen) else None
        if numbers is None:
            return _without_values(rows, rows)
        values = np.where(numbers.present, numbers.values, np.nan)
        return _Stretches(rows, rows, values, values, values, numbers.present.astype(np.int64))

    def _numbers(self, batch: pa.RecordBatch, chosen: Array) -> Numbers | None:
        """Return the numbers of the metric at these positions, of its column and of those beyond the columns."""
        import numpy as np

        schema, found = batch.schema, None
        if self.column in schema.names:
            found = numbers_at(batch.column(self.column), schema.field(self.column), chosen)
        if MORE not in schema.names:
            return found
        rest = batch.column(MORE).take(array_of_numpy(chosen))
        beyond = numbers_in_more(rest, schema.field(MORE), self.column)
        if found is None:
            return beyond
        values = np.where(beyond.present, beyond.values, found.values)
        return Numbers(values, beyond.present | found.present)


def _part(summary: pa.Table, column: str, part: str) -> Array:
    """Return one field of a summary's column; NaN if a batch has no values of this metric."""
    import numpy as np

    structs: list[Any] = summary.column(column).chunks
    chunks = [floats_of(struct.flatten()[struct.type.get_field_index(part)]) for struct in structs]
    return np.concatenate(chunks) if chunks else np.empty(0, np.int64)


def _without_values(first: Array, last: Array) -> _Stretches:
    import numpy as np

    nothing = np.full(len(first), np.nan)
    return _Stretches(first, last, nothing, nothing, nothing, np.zeros(len(first), np.int64))


def _end_to_end(parts: Iterable[_Stretches]) -> _Stretches:
    """Return all stretches concatenated by row, and within a row in order of arrival."""
    import numpy as np

    nothing = _without_values(*[np.empty(0, np.int64)] * 2)
    columns = [np.concatenate(column) for column in zip(nothing, *parts, strict=True)]
    order = np.argsort(columns[0], kind="stable")
    return _Stretches(*(column[order] for column in columns))


def _overlap(found: _Stretches) -> bool:
    """Return whether points are out of order, so that stretches do not show which was last."""
    import numpy as np

    reached = np.maximum.accumulate(found.last_row)[:-1]
    is_stretch = found.first != found.last_row
    return bool(((found.first[1:] <= reached) & (is_stretch[1:] | is_stretch[:-1])).any())


def _pixel_width(found: _Stretches, pixels: int) -> int:
    """Return the width of a pixel in rows, for at most this many pixels; whole stretches if it is that wide."""
    if not len(found.first):
        return STRETCH_ROWS
    first, last = int(found.first[0]), int(found.last_row.max())
    if first < 0 or last > _LARGEST_ROW:
        raise StorageError(
            f"The metrics of the run have the rows {first} to {last}, which cannot be: they were changed. Restore "
            "metrics/ from a copy."
        )
    width = -(-(last - first + 1) // pixels)
    while True:
        if width > STRETCH_ROWS:
            width = -(-width // STRETCH_ROWS) * STRETCH_ROWS
        if last // width - first // width < pixels:
            return width
        width += 1


def _in_pixels(found: _Stretches, width: int) -> Curve:
    """Reduce stretches to pixels, which begin at multiples of their width, the first at the first row."""
    import numpy as np

    begin = found.first[:1]
    found = _Stretches(*(column[found.points > 0] for column in found))
    if not len(found.first):
        nothing = np.empty(0)
        return Curve(np.empty(0, np.int64), nothing, nothing, nothing, 0)
    pixel = found.first // width
    starts = np.flatnonzero(np.diff(pixel, prepend=-1))
    ends = np.append(starts[1:], len(pixel)) - 1
    return Curve(
        rows=np.maximum(pixel[starts] * width, begin),
        low=np.fmin.reduceat(found.low, starts),
        high=np.fmax.reduceat(found.high, starts),
        last=found.last[ends],
        points=int(found.points.sum()),
    )
