"""All workers of one attempt, as a backend's hooks see them: functions go out, values come back."""

from __future__ import annotations

import itertools
import pickle
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import cloudpickle

from powertrain.backend import Worker
from powertrain.errors import EngineError
from powertrain.wire.from_controller import Execute
from powertrain.wire.from_worker import Executed
from powertrain.wire.values import ErrorReport


class WorkerCallError(EngineError):
    """A function that a backend ran in a worker failed; with its ``rank`` and the ``report`` of the error."""

    def __init__(self, rank: int, report: ErrorReport) -> None:
        super().__init__(f"{report.type} in rank {rank}: {report.message}")
        self.rank, self.report = rank, report


class RemoteWorkers:
    """Implements :class:`powertrain.backend.WorkerGroup`. Called on the hooks' thread, replies come on the
    controller's."""

    def __init__(self, workers: Sequence[Worker], send: Callable[[int, Execute], None]) -> None:
        self._workers = list(workers)
        self._send = send
        self._lock = threading.Lock()
        self._calls = itertools.count(1)
        self._open: dict[int, tuple[int, Future[Any]]] = {}
        self._gone: dict[int, str] = {}

    @property
    def workers(self) -> Sequence[Worker]:
        return self._workers

    def __len__(self) -> int:
        return len(self._workers)

    def execute(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        return [future.result() for future in self.execute_async(fn, *args, **kwargs)]

    def execute_async(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Future[Any]]:
        function = cloudpickle.dumps((fn, args, kwargs))
        return [self._call(rank, function) for rank in range(len(self))]

    def execute_single(self, rank: int, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.execute_single_async(rank, fn, *args, **kwargs).result()

    def execute_single_async(
        self, rank: int, fn: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Future[Any]:
        return self._call(rank, cloudpickle.dumps((fn, args, kwargs)))

    def answered(self, rank: int, message: Executed) -> None:
        """Handle the reply of a worker."""
        with self._lock:
            entry = self._open.pop(message.call, None)
        if entry is None or entry[0] != rank:
            return
        if message.error is not None:
            entry[1].set_exception(WorkerCallError(rank, message.error))
        else:
            entry[1].set_result(_Lazy(message.value))

    def gone(self, rank: int, why: str) -> None:
        """Fail the open and later calls of a worker that is gone."""
        with self._lock:
            self._gone[rank] = why
            lost = [call for call, (owner, _) in self._open.items() if owner == rank]
            futures = [self._open.pop(call)[1] for call in lost]
        for future in futures:
            future.set_exception(EngineError(f"rank {rank} {why}"))

    def _call(self, rank: int, function: bytes) -> Future[Any]:
        future: _CallFuture = _CallFuture()
        with self._lock:
            if rank in self._gone:
                future.set_exception(EngineError(f"rank {rank} {self._gone[rank]}"))
                return future
            call = next(self._calls)
            self._open[call] = (rank, future)
        self._send(rank, Execute(call=call, function=function))
        return future


class _Lazy:
    """A pickled value that is opened by its reader, never by the controller."""

    def __init__(self, pickled: bytes) -> None:
        self._pickled = pickled

    def open(self) -> Any:
        return pickle.loads(self._pickled)


class _CallFuture(Future[Any]):
    """A future whose value is unpickled in the caller's thread."""

    def result(self, timeout: float | None = None) -> Any:
        value = super().result(timeout)
        return value.open() if isinstance(value, _Lazy) else value
