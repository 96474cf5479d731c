"""Every point of some ranks as lines of CSV, with missing values and NaN told apart."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from powertrain.run.lifecycle import RunState
from powertrain.run.metrics import reading
from powertrain.run.metrics.points import MISSING, MORE, OWN_COLUMNS, values_of
from powertrain.storage import Storage
from powertrain.text.printable import escape_controls

if TYPE_CHECKING:
    import pyarrow as pa

#: Columns before the metrics, and their names in the table of points.
_FIRST = {"training_iteration": "row", "rank": "rank", "attempt": "attempt", "timestamp": "at"}
#: Lines that are turned into text at a time.
_LINES_AT_ONCE = 10_000


def csv_lines(
    storage: Storage, state: RunState, metrics: Sequence[str], ranks: Sequence[int] | None
) -> Iterator[str]:
    """Yield the points of a run as CSV, many lines at a time, the first with the names.

    Points that a restart abandoned are left out. A value that was not reported is empty; NaN is "nan".

    Args:
        storage: The run's directory.
        state: Its state, which tells abandoned points.
        metrics: Names of metrics; none for all.
        ranks: Ranks; None for all.
    """
    table = _chosen(reading.read_table(storage), state, ranks)
    shown = reading.shown_names([name for name in table.column_names if name not in OWN_COLUMNS])
    is_whole = not metrics or not set(metrics) <= set(
        shown.values()
    )  # the others are in the column of further ones
    names = {
        name: text
        for name, text in shown.items()
        if not metrics or text in metrics or (name == MORE and is_whole)
    }
    yield _as_text([[*_FIRST, *map(escape_controls, names.values())]])
    for start in range(0, table.num_rows, _LINES_AT_ONCE):
        part = table.slice(start, _LINES_AT_ONCE)
        columns = [part.column(name).to_pylist() for name in _FIRST.values()]
        columns += [list(values_of(part.column(name), part.schema.field(name))) for name in names]
        yield _as_text([[_cell(value) for value in line] for line in zip(*columns, strict=True)])


def _chosen(table: pa.Table, state: RunState, ranks: Sequence[int] | None) -> pa.Table:
    """Return the points of the run's lineage and of these ranks, by row and rank."""
    import numpy as np

    attempts, rows, of = (table.column(name).to_numpy() for name in ("attempt", "row", "rank"))
    kept = (rows < reading.first_abandoned_rows(state, attempts)) | table.column("solo").to_numpy()
    if ranks is not None:
        kept &= np.isin(of, list(ranks))
    chosen = np.flatnonzero(kept)
    return table.take(chosen[np.lexsort((of[chosen], rows[chosen]))])


def _cell(value: Any) -> Any:
    if value is None or value is MISSING:
        return ""
    return value if isinstance(value, (int, float)) else escape_controls(str(value))


def _as_text(lines: list[list[Any]]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(lines)
    return buffer.getvalue()
