"""Rows of several batches as one batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from powertrain.data.operations.calls import call_collate
from powertrain.data.rows.formats import to_arrow, to_numpy, to_pandas
from powertrain.data.rows.rows import Rows


def collate(rows: Rows, collate_fn: Callable[[Any], Any]) -> Any:
    """Call the user's ``collate_fn`` with a batch in the format of its class: see
    :mod:`powertrain.data.collate_fn`. A plain function gets a dict of numpy arrays."""
    from powertrain.data import collate_fn as classes

    if isinstance(collate_fn, classes.RowsCollateFn):
        return collate_fn.collate_rows(rows)
    if isinstance(collate_fn, classes.ArrowBatchCollateFn):
        return call_collate(collate_fn, to_arrow(rows))
    if isinstance(collate_fn, classes.PandasBatchCollateFn):
        return call_collate(collate_fn, to_pandas(rows))
    return call_collate(collate_fn, to_numpy(rows))
