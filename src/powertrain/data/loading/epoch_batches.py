"""The batches of an epoch from a position on: as the loader cuts them, or filled up again where rows were left out."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from powertrain.data.loading.loader import Cut, Loader, ReadyBatch
from powertrain.data.rows.rows import Rows
from powertrain.errors import DataError

if TYPE_CHECKING:
    from powertrain.data.loading.pipeline import Pipeline
    from powertrain.data.plan.position import Position

T = TypeVar("T")


class OpenEpoch(NamedTuple):
    """An epoch being read."""

    #: The batches, some at a time.
    groups: Iterator[list[ReadyBatch[Any]]]
    #: What makes them: to be closed.
    pipeline: Pipeline[Any, list[ReadyBatch[Any]]]


def open_epoch(loader: Loader, start: Position, cut: Cut[Any], fills: bool) -> OpenEpoch:
    """Begin to read at ``start``. ``fills`` makes batches full again whose rows a function has left out."""
    if not fills:
        if start.skip:
            raise DataError(
                f"The position {start.as_dict()} was saved between rows that a function has made of one step, which "
                "only reading alone can continue: in a run every step is read as a whole. Save the position at the end "
                "of an epoch, or call materialize() before."
            )
        pipeline = loader.epoch(start.epoch, start.position, cut)
        return OpenEpoch(pipeline, pipeline)
    # Rows consumed in mid-step are counted in the order that steps of that size have.
    raw: Cut[Any] = replace(cut, python_text=False, global_batch=start.step or cut.global_batch)
    raw = replace(raw, convert=_unchanged)
    pipeline = loader.epoch(start.epoch, start.position, raw)
    return OpenEpoch(
        _filled(pipeline, cut, _Progress(start.position, raw.global_batch), start.skip), pipeline
    )


def first_batch(epoch: OpenEpoch) -> ReadyBatch[Any] | None:
    """Return the first batch and read no more of the epoch; None where it has no batch."""
    try:
        return next((group[0] for group in epoch.groups if group), None)
    finally:
        epoch.pipeline.close()


def _unchanged(rows: Rows) -> Rows:
    return rows


class _Progress:
    """The position in an epoch by the rows that its steps have made and that were handed out."""

    def __init__(self, position: int, step: int) -> None:
        self._step = step
        #: End of the newest step.
        self._end = position
        #: (start, rows not handed out) of the steps that have such rows; rows handed out of the first.
        self._steps: deque[tuple[int, int]] = deque()
        self._used = 0

    def add(self, end: int, rows: int) -> None:
        """Note a step that ends at ``end`` and has made ``rows`` rows."""
        if rows:
            self._steps.append((self._end, rows))
        self._end = end

    def hand_out(self, rows: int) -> tuple[int, int, int]:
        """Return position, rows to skip and step size once so many more rows are handed out."""
        while self._steps and rows >= self._steps[0][1]:
            rows -= self._steps.popleft()[1]
            self._used = 0
        if not self._steps:
            return self._end, 0, 0
        start, left = self._steps[0]
        self._steps[0] = (start, left - rows)
        self._used += rows
        return start, self._used, self._step if self._used else 0


def _filled(
    groups: Iterator[list[ReadyBatch[Rows]]], cut: Cut[T], progress: _Progress, skip: int
) -> Iterator[list[ReadyBatch[T]]]:
    """Batches of the full size again, where rows were left out or added on the way; without the first ``skip``."""
    from powertrain.data.rows.gather import concat_rows

    size = cut.global_batch
    left: list[Rows] = []
    for ready in (ready for group in groups for ready in group):
        made = ready.batch
        progress.add(ready.position, len(made))
        if skip:
            skipped = min(skip, len(made))
            progress.hand_out(skipped)
            skip, made = skip - skipped, made.between(skipped, len(made))
        left.append(made)
        count = sum(map(len, left))
        if count < size:
            continue
        rows = concat_rows(left)
        starts = range(0, count - size + 1, size)
        yield [_ready(rows.between(start, start + size), cut, progress) for start in starts]
        left = [rows.between(len(starts) * size, count)]
    if cut.tail == "partial" and any(map(len, left)):
        yield [_ready(concat_rows(left), cut, progress)]


def _ready(rows: Rows, cut: Cut[T], progress: _Progress) -> ReadyBatch[T]:
    position, skip, step = progress.hand_out(len(rows))
    return ReadyBatch(cut.convert(rows), position, 1.0, len(rows), rows.nbytes, skip, step)
