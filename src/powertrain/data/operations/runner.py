"""Apply a sequence of operations to rows, on threads or in processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from powertrain.data.operations.calls import FunctionFailed, Setting
from powertrain.data.operations.decode import DecodeImages
from powertrain.data.operations.operation import Applied, Operation
from powertrain.data.operations.stages import OperationStage, Threads
from powertrain.data.plan.order import Ints
from powertrain.data.rows.rows import Rows
from powertrain.errors import DataError


class Runner:
    """Applies operations to rows, one after the other. Used by several threads at once.

    ``name_row`` gives the location of a row, for messages. ``local_world_size`` ranks share the processes of a node;
    ``threads`` is the number of threads that decode images. Threads and processes start when needed.
    """

    def __init__(
        self,
        operations: Sequence[Operation],
        *,
        seed: int,
        name_row: Callable[[int], str],
        local_world_size: int = 1,
        threads: int = 1,
    ) -> None:
        self._seed, self._name_row = seed, name_row
        self._threads = Threads(threads)
        self._stages = [
            OperationStage(operation, position, max(1, operation.concurrency // max(1, local_world_size)))
            for position, operation in enumerate(operations)
        ]

    @property
    def processes(self) -> int:
        """Largest number of its own processes that work at once."""
        return max((stage.processes for stage in self._stages), default=0)

    @property
    def keeps_threads_busy(self) -> bool:
        """True where all work is spread over its threads already: calls from several threads would not help."""
        return all(isinstance(stage.operation, DecodeImages) for stage in self._stages)

    @property
    def does_anything(self) -> bool:
        """False where rows are not changed."""
        return bool(self._stages)

    @property
    def batch_size(self) -> int | None:
        """Rows must be given in whole chunks of this many: see ``EpochOrder.chunk``; None for any rows."""
        sizes = [s.operation.batch_size for s in self._stages if s.operation.batch_size is not None]
        return max(sizes, default=None)

    @property
    def seconds(self) -> list[tuple[str, float]]:
        """Name of each operation, and its seconds so far, over all threads."""
        return [(stage.operation.name, stage.seconds) for stage in self._stages]

    def run(self, rows: Rows, epoch: int) -> Applied:
        """Return ``rows`` after all operations. Raises :class:`DataError`.

        Where no row is left the remaining operations are skipped, and the columns are those up to there.
        """
        count = len(rows)
        origin: Ints | None = None
        for stage in self._stages:
            if len(rows) == 0:
                break
            setting = Setting(self._seed, epoch, stage.position, over=self._threads.map)
            applied = self._blamed(stage, rows, setting)
            rows = applied.rows
            if applied.counts is not None:
                origin = np.repeat(np.arange(count) if origin is None else origin, applied.counts)
        if origin is None:
            return Applied(rows)
        counts = np.bincount(origin, minlength=count).astype(np.int64)
        return Applied(rows, None if (counts == 1).all() else counts)

    def close(self) -> None:
        """End processes and threads. Calls that are under way raise :class:`DataError`."""
        for stage in self._stages:
            stage.close()
        self._threads.close()

    def _blamed(self, stage: OperationStage, rows: Rows, setting: Setting) -> Applied:
        from powertrain.data.operations.pool import PoolClosed

        try:
            return stage.run(rows, setting)
        except FunctionFailed as failure:
            cause = failure.error or failure.__cause__
            if failure.error is not None and failure.error.__traceback__ is None:
                # It came from another process, and its traceback with it, as text.
                failure.error.__cause__ = failure.__cause__
            raise DataError(failure.sentence(stage.operation.name, self._name_row)) from cause
        except PoolClosed as error:
            raise DataError(
                f"{stage.operation.name} was given up: the data that it works for was closed."
            ) from error
