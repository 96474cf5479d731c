"""Iterators over a dataset outside a run: one for all rows, or several that share each epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from powertrain.data.arguments import flag, whole
from powertrain.data.consuming import PlanReader
from powertrain.data.iterators.shard_methods import ShardMethods
from powertrain.data.loading.loader import budgets_alone
from powertrain.data.loading.scratch import Scratch
from powertrain.data.plan.plan import Plan
from powertrain.data.plan.prepared import Prepared, prepare_alone
from powertrain.data.splitting import limit_rows
from powertrain.text.loggers import module_logger

if TYPE_CHECKING:
    import pyarrow as pa

logger = module_logger(__name__)
#: More consumers of one dataset than this are not meant.
_MOST_ITERATORS = 4096


class DatasetIterator(ShardMethods):
    """One of the iterators that :meth:`Dataset.streaming_split` returns, or that of :meth:`Dataset.iterator`.

    It has the methods of a :class:`~powertrain.data.DataShard`. It can be pickled: a copy begins at its first epoch.
    """

    def __init__(
        self, prepared: Prepared, number: int, count: int, make_dataset: Callable[[list[pa.Table]], Any]
    ) -> None:
        scratch = Scratch()
        super().__init__(
            prepared,
            rank=number,
            world_size=count,
            cache_directory=scratch.path,
            warn=logger.warning,
            **budgets_alone(prepared, scratch.path, count),
        )
        self._given = (prepared, number, count, make_dataset)
        #: The rows that are shared, also those that ``equal`` leaves out.
        self.plan: Plan = prepared.inspected.plan
        # No other rank waits for this one: a step without rows is left out, and no row comes twice.
        self._reader.open.scratch, self._reader.stays_in_step = scratch, False
        self._reader.is_alone = True
        self._reader.fills_batches = count == 1 and not prepared.inspected.is_exact

    def __reduce__(self) -> tuple[Any, ...]:
        return (DatasetIterator, self._given)

    @property
    def place(self) -> tuple[int, int]:
        """Which of the iterators that share the rows it is, from 0, and how many these are."""
        return self._given[1], self._given[2]

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the shared rows."""
        return self._given[0].fingerprint

    def materialize(self) -> Any:
        """Return the rows of the first epoch that come to this iterator, as a dataset in memory."""
        return self._given[3](self.tables())


def split_iterators(
    reader: PlanReader, n: int, equal: bool, make_dataset: Callable[[list[pa.Table]], Any]
) -> list[DatasetIterator]:
    """Return ``n`` iterators that share the rows of each epoch: see :meth:`Dataset.streaming_split`."""
    n, plan = whole("n", n, 1, _MOST_ITERATORS), reader.plan
    if flag("equal", equal):
        rows = reader.count()
        plan = limit_rows(reader, rows - rows % n)
    prepared = prepare_alone(plan)
    found = [DatasetIterator(prepared, number, n, make_dataset) for number in range(n)]
    for iterator in found:
        iterator.plan = reader.plan
    return found
