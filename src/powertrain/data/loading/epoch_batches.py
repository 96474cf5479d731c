"""The batches of an epoch from a position on: as the loader cuts them, or filled up again where rows were left out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from powertrain.data.loading.loader import Cut, Loader, ReadyBatch
from powertrain.data.rows.rows import Rows

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
        pipeline = loader.epoch(start.epoch, start.position, cut)
        return OpenEpoch(pipeline, pipeline)
    raw: Cut[Any] = replace(cut, python_text=False)
    raw = replace(raw, convert=_unchanged)
    pipeline = loader.epoch(start.epoch, start.position, raw)
    return OpenEpoch(_filled(pipeline, cut), pipeline)


def first_batch(epoch: OpenEpoch) -> ReadyBatch[Any] | None:
    """Return the first batch and read no more of the epoch; None where it has no batch."""
    try:
        return next((group[0] for group in epoch.groups if group), None)
    finally:
        epoch.pipeline.close()


def _unchanged(rows: Rows) -> Rows:
    return rows


def _filled(groups: Iterator[list[ReadyBatch[Rows]]], cut: Cut[T]) -> Iterator[list[ReadyBatch[T]]]:
    """Batches of the full size again, where rows were left out or added on the way."""
    from powertrain.data.rows.gather import concat_rows

    size, position = cut.global_batch, 0
    left: list[Rows] = []
    for ready in (ready for group in groups for ready in group):
        left.append(ready.batch)
        position = ready.position
        count = sum(map(len, left))
        if count < size:
            continue
        rows = concat_rows(left)
        starts = range(0, count - size + 1, size)
        yield [_ready(rows.between(start, start + size), cut, position) for start in starts]
        left = [rows.between(len(starts) * size, count)]
    if cut.tail == "partial" and any(map(len, left)):
        yield [_ready(concat_rows(left), cut, position)]


def _ready(rows: Rows, cut: Cut[T], position: int) -> ReadyBatch[T]:
    return ReadyBatch(cut.convert(rows), position, 1.0, len(rows), rows.nbytes)
