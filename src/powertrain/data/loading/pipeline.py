"""Work that is done ahead on threads and returned in order."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar, Union

from powertrain.errors import DataError

P = TypeVar("P")
R = TypeVar("R")


class _Failed:
    def __init__(self, error: BaseException) -> None:
        self.error = error


def do(work: Callable[[P], R], task: P) -> R:
    """Do one piece of work. A StopIteration from within it is not the end of the tasks, so it is raised as an error."""
    try:
        return work(task)
    except StopIteration as error:
        raise DataError(
            "A function that makes batches raised StopIteration, which would end the epoch although rows are left. Let "
            "it return a value, or raise another error."
        ) from error


class _Shared(Generic[P, R]):
    """The state shared with the threads, apart from the pipeline, so that it can be dropped while they wait."""

    def __init__(self, tasks: Iterator[P], work: Callable[[P], R], depth: int) -> None:
        self.tasks, self.work, self.depth = tasks, work, depth
        self.changed = threading.Condition()
        self.planning = threading.Lock()
        self.results: dict[int, Union[R, _Failed]] = {}
        self.begun = self.given = 0
        #: Number of tasks, once that is known.
        self.end: int | None = None
        self.closed = False

    def has_room(self) -> bool:
        return self.closed or self.end is not None or self.begun - self.given < self.depth

    def run(self) -> None:
        """Take tasks and store their results until there are no more; the main function of each thread."""
        while (taken := self._take()) is not None:
            number, task = taken
            result: Union[R, _Failed]
            try:
                result = do(self.work, task)
            except BaseException as error:
                result = _Failed(error)
            self._put(number, result)
            # No reference to a task may outlive it in a thread that waits for the next.
            del taken, task, result

    def _take(self) -> tuple[int, P] | None:
        with self.planning:  # tasks are made one after the other, and numbered in that order
            with self.changed:
                self.changed.wait_for(self.has_room)
                if self.closed or self.end is not None:
                    return None
            try:
                task = next(self.tasks, None)
            except BaseException as error:
                self._put(self.begun, _Failed(error))
                task = None
                with self.changed:
                    self.begun += 1
            with self.changed:
                if task is None:
                    self.end = self.begun
                    self.changed.notify_all()
                    return None
                self.begun += 1
                return self.begun - 1, task

    def _put(self, number: int, result: Union[R, _Failed]) -> None:
        with self.changed:
            if not self.closed:
                self.results[number] = result
            self.changed.notify_all()

    def get(self) -> R:
        with self.changed:
            self.changed.wait_for(lambda: self.closed or self.given in self.results or self.given == self.end)
            if self.closed or self.given == self.end:
                raise StopIteration
            result = self.results.pop(self.given)
            self.given += 1
            self.changed.notify_all()
        if isinstance(result, _Failed):
            self.close()
            raise result.error
        return result

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.results.clear()
            self.changed.notify_all()


class Pipeline(Generic[P, R]):
    """Iterates over ``work(task)`` for each task, in order, with at most ``depth`` of them begun and not yet consumed.

    Tasks are drawn on the threads too, one at a time. Without threads the work is done on request. An error of a task
    is raised in place of its result. Threads end after the last result, by :meth:`close`, or when the pipeline is
    dropped.
    """

    def __init__(self, tasks: Iterator[P], work: Callable[[P], R], *, threads: int, depth: int) -> None:
        self._alone = (tasks, work) if threads < 1 or depth < 1 else None
        self._shared = _Shared(tasks, work, depth)
        self._threads = [
            threading.Thread(target=self._shared.run, name=f"powertrain-data-{number}", daemon=True)
            for number in range(0 if self._alone else threads)
        ]
        self._finalizer = weakref.finalize(self, self._shared.close)
        for thread in self._threads:
            thread.start()

    def __iter__(self) -> Iterator[R]:
        return self

    def __next__(self) -> R:
        if self._alone is not None:
            tasks, work = self._alone
            return do(work, next(tasks))
        return self._shared.get()

    def close(self) -> None:
        """End the iteration; the threads end after their current task."""
        self._alone = (iter(()), self._shared.work) if self._alone else None
        self._finalizer()
        if threading.current_thread() not in self._threads:
            for thread in self._threads:
                thread.join(timeout=10.0)
