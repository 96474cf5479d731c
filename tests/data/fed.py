"""A rank's shard that is fed by an iterator, as by one of Ray's datasets."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from powertrain.data.ray.shard import StreamedShard

Opened = Callable[..., StreamedShard]


class FakeIterator:
    """What a ``ray.data.DataIterator`` is to a feed. ``parts`` is how many share its epochs; None for an own one."""

    def __init__(self, *tables: pa.Table | Exception, parts: int | None = None) -> None:
        self._tables = tables
        self.epochs = self.fetched = self.closed = self.told = 0
        self.over = threading.Event()
        if parts is not None:
            self.world_size = lambda: parts

    def iter_batches(self, **options: Any) -> Iterator[pa.Table]:
        assert options["batch_format"] == "pyarrow"
        assert options["batch_size"] is None
        self.epochs += 1
        try:
            for table in self._tables:
                if isinstance(table, Exception):
                    raise table
                self.fetched += 1
                yield table
        finally:
            self.closed += 1
            self.over.set()

    def schema(self) -> Any:
        table = self._tables[0]
        if isinstance(table, Exception):
            raise table
        return table.schema

    def _on_iteration_end(self, executor: None) -> None:
        self.told += 1


def numbers(*sizes: int) -> list[pa.Table]:
    """Tables of these sizes, with the column "id" counted over all of them."""
    ends = np.cumsum([0, *sizes])
    return [pa.table({"id": pa.array(np.arange(start, end))}) for start, end in itertools.pairwise(ends)]
