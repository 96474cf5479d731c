"""Every row of a source, block by block, as its contract promises them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cloudpickle

from powertrain.data.dataset import Dataset
from powertrain.data.sources.base import Source


def everything(found: Source, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """The rows, read after a journey to another process; counts and types are those of the inspection."""
    facts = found.inspect()
    found = cloudpickle.loads(cloudpickle.dumps(found))
    rows = []
    for block, known in enumerate(facts.blocks):
        batches = list(found.read(block, columns))
        assert sum(batch.num_rows for batch in batches) == known.rows
        if columns is None:
            assert all(batch.schema.equals(facts.schema) for batch in batches)
        rows += [row for batch in batches for row in batch.to_pylist()]
    return rows


def source_of(dataset: Dataset) -> Source:
    (part,) = dataset.plan.parts
    return part.source


def fingerprint(dataset: Dataset) -> str:
    return dataset.plan.inspected().fingerprint


def ids_of_ranks(dataset: Dataset, ranks: int, column: str) -> list[Any]:
    """The values of a column over all ranks of one epoch."""
    shards = dataset.streaming_split(ranks, equal=False)
    try:
        return [row[column] for shard in shards for row in shard.iter_rows()]
    finally:
        for shard in shards:
            shard.close()
