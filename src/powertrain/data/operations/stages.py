"""One operation and its executor: the calling threads, or processes of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from powertrain.data.operations.calls import FunctionFailed, Setting, error_text
from powertrain.data.operations.operation import Applied, RowPiece
from powertrain.data.operations.returned import quoted
from powertrain.data.plan.order import Ints
from powertrain.data.rows.rows import Rows
from powertrain.errors import DataError, TrainFunctionError

if TYPE_CHECKING:
    from powertrain.data.operations.operation import Apply, Operation
    from powertrain.data.operations.pool import ProcessPool


class OperationStage:
    """One operation and its executor: the calling threads, or a pool of processes."""

    def __init__(self, operation: Operation, position: int, processes: int) -> None:
        self.operation, self.position = operation, position
        self.seconds = 0.0
        self.processes = processes if operation.concurrency else 0
        self._beginning = threading.Lock()
        self._apply: Apply | None = None
        self._pool: ProcessPool | None = None
        self._closed = False

    def run(self, rows: Rows, setting: Setting) -> Applied:
        started = time.perf_counter()
        pieces = _pieces(rows, self.operation.batch_size, self.processes)
        done = self._in_processes(pieces, setting) if self.processes else self._here(pieces, setting)
        applied = _joined(pieces, done)
        taken = time.perf_counter() - started
        with self._beginning:
            self.seconds += taken
        return applied

    def close(self) -> None:
        """End its processes, and start no more."""
        with self._beginning:
            self._closed = True
        if self._pool is not None:
            self._pool.close()

    def _here(self, pieces: list[RowPiece], setting: Setting) -> list[Applied]:
        with self._beginning:
            if self._apply is None:
                self._apply = self.operation.begin()
            apply = self._apply
        return [apply(piece, setting) for piece in pieces]

    def _in_processes(self, pieces: list[RowPiece], setting: Setting) -> list[Applied]:
        from powertrain.data.operations.pool import PoolClosed, ProcessDied

        there = Setting(setting.seed, setting.epoch, setting.position, own_process=True)
        try:
            return self._started_pool().map((piece, there) for piece in pieces)
        except (FunctionFailed, PoolClosed, DataError):
            raise
        except ProcessDied as death:
            problem = f"a process that ran it {death}"
            if death.task is None:
                raise FunctionFailed(problem) from None
            numbers = pieces[death.task].rows.numbers
            raise FunctionFailed(problem, int(numbers[0]), len(numbers)) from None
        except Exception as error:
            # Of the pool itself, since errors of functions are FunctionFailed.
            problem = f"its processes could not be started, or rows not be sent to or from them: {error_text(error)}"
            raise FunctionFailed(problem, error=error) from error

    def _started_pool(self) -> ProcessPool:
        import cloudpickle

        from powertrain.data.operations.pool import PoolClosed, ProcessPool
        from powertrain.functions import pickle_function

        with self._beginning:
            if self._closed:
                raise PoolClosed("The pool is closed.")
            if self._pool is None:
                fn = getattr(self.operation, "fn", type(self.operation))
                try:
                    pickled = pickle_function(fn, self.operation, "The function of a dataset,")
                except TrainFunctionError as error:
                    raise DataError(str(error).replace("the workers", "processes of its own", 1)) from error
                self._pool = ProcessPool(cloudpickle.dumps(_InProcess(pickled)), self.processes)
            return self._pool


class _InProcess:
    """Makes the work function of one process of a pool."""

    def __init__(self, pickled: bytes) -> None:
        self._pickled = pickled

    def __call__(self) -> Callable[[tuple[RowPiece, Setting]], Applied]:
        """Return the work function; raise :class:`FunctionFailed` where the user's modules cannot be loaded."""
        import cloudpickle

        from powertrain.data.operations.pool import picklable_error

        try:
            _, operation = cloudpickle.loads(self._pickled)
        except Exception as error:
            problem = f"it cannot be loaded in a process of its own: {error_text(error)}"
            raise FunctionFailed(problem, error=picklable_error(error)) from error
        with _sendable_failures():
            apply = operation.begin()
        return lambda task: _in_process(apply, *task)


def _in_process(apply: Apply, piece: RowPiece, setting: Setting) -> Applied:
    with _sendable_failures():
        return apply(piece, setting)


@contextmanager
def _sendable_failures() -> Iterator[None]:
    """Make failures of the user's function picklable, whatever it raised."""
    from powertrain.data.operations.pool import picklable_error

    try:
        yield
    except FunctionFailed as failed:
        if failed.error is None:
            raise
        error = picklable_error(failed.error)
        raise FunctionFailed(
            failed.problem, failed.number, failed.rows, failed.file, failed.line, error
        ) from failed.error


class Threads:
    """A few threads, started on first use."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._starting = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None

    def map(self, function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        """Return ``[function(item) for item in items]``."""
        items = list(items)
        if self._count < 2 or len(items) < 2:
            return [function(item) for item in items]
        with self._starting:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(self._count, thread_name_prefix="powertrain-images")
        return list(self._executor.map(function, items))

    def close(self) -> None:
        with self._starting:
            if self._executor is not None:
                self._executor.shutdown(wait=True, cancel_futures=True)
            self._executor, self._count = None, 1


def _pieces(rows: Rows, batch_size: int | None, processes: int) -> list[RowPiece]:
    """Return the pieces that an operation gets at once: its batches, or for independent rows one per process."""
    copies = _copies(rows.numbers)
    size = batch_size or -(-len(rows) // max(1, processes))
    if size >= len(rows):
        return [RowPiece(rows, copies)]
    cuts = [slice(start, start + size) for start in range(0, len(rows), size)]
    return [RowPiece(_cut(rows, cut), None if copies is None else copies[cut]) for cut in cuts]


def _cut(rows: Rows, cut: slice) -> Rows:
    """Return some rows, without copying them."""
    columns = {name: column[cut] for name, column in rows.columns.items()}
    return replace(rows, columns=columns, numbers=rows.numbers[cut])


def _copies(numbers: Ints) -> Ints | None:
    """Return for each row the number of directly preceding rows of the same number; None where all are 0."""
    again = numbers[1:] == numbers[:-1]
    if not again.any():
        return None
    places = np.arange(len(numbers))
    firsts = np.where(np.concatenate([[False], again]), 0, places)
    return np.asarray(places - np.maximum.accumulate(firsts), np.int64)


def _joined(pieces: list[RowPiece], done: list[Applied]) -> Applied:
    """Return the result of all pieces, in order."""
    from powertrain.data.rows.gather import concat_rows

    if len(done) == 1:
        return done[0]
    full = [(piece, applied.rows) for piece, applied in zip(pieces, done, strict=True) if len(applied.rows)]
    for piece, rows in full[1:]:
        if rows.columns.keys() != full[0][1].columns.keys():
            numbers = piece.rows.numbers
            raise FunctionFailed(
                f"it returned the columns {quoted(rows.columns)}, but {quoted(full[0][1].columns)} for the rows "
                "before",
                int(numbers[0]),
                len(numbers),
            )
    rows = concat_rows([rows for _, rows in full]) if full else done[0].rows
    if all(applied.counts is None for applied in done):
        return Applied(rows)
    counts = [
        np.ones(len(piece.rows), np.int64) if applied.counts is None else applied.counts
        for piece, applied in zip(pieces, done, strict=True)
    ]
    return Applied(rows, np.concatenate(counts))
