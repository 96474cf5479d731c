"""Ray Data's compute strategies, which are numbers of processes here."""

from __future__ import annotations

import math
from typing import Any

from powertrain.data.arguments import optional_whole, shown
from powertrain.errors import DataError

MOST_PROCESSES = 4096


class TaskPoolStrategy:
    """Runs a function in tasks, as Ray Data calls it: on the reading threads, or in ``size`` processes.

    Example::

        dataset.map(prepare, compute=TaskPoolStrategy(size=4))
    """

    def __init__(self, size: int | None = None) -> None:
        self.size = optional_whole("TaskPoolStrategy(size)", size, 1, MOST_PROCESSES)

    def __repr__(self) -> str:
        return f"TaskPoolStrategy(size={self.size})"

    @property
    def processes(self) -> int:
        """The number of processes; 0 for threads."""
        return self.size or 0


class ActorPoolStrategy:
    """Runs a function, or a class that is constructed once in each, in a pool of processes.

    The pool has ``size`` processes, or ``max_size``, or ``min_size`` where that is not limited: idle processes cost
    little, so the pool does not grow and shrink.

    Example::

        dataset.map_batches(Model, compute=ActorPoolStrategy(size=2))
    """

    def __init__(
        self,
        *,
        size: int | None = None,
        min_size: int | None = None,
        max_size: int | None = None,
        initial_size: int | None = None,
        max_tasks_in_flight_per_actor: int | None = None,
        max_concurrent_calls_per_actor: int | None = None,
        enable_true_multi_threading: bool | None = None,
    ) -> None:
        if size is not None and (min_size, max_size, initial_size) != (None, None, None):
            raise DataError(
                f"ActorPoolStrategy(size={shown(size)}) has min_size, max_size or initial_size beside it. Give size, "
                "or the others."
            )
        self.size = optional_whole("ActorPoolStrategy(size)", size, 1, MOST_PROCESSES)
        self.min_size = optional_whole("ActorPoolStrategy(min_size)", min_size, 1, MOST_PROCESSES)
        # Ray's own way to say "without limit".
        given = None if isinstance(max_size, float) and math.isinf(max_size) else max_size
        self.max_size = optional_whole("ActorPoolStrategy(max_size)", given, 1, MOST_PROCESSES)
        self.initial_size = optional_whole("ActorPoolStrategy(initial_size)", initial_size, 1, MOST_PROCESSES)
        if self.min_size and self.max_size and self.min_size > self.max_size:
            raise DataError(
                f"ActorPoolStrategy(min_size={self.min_size}, max_size={self.max_size}) is a pool that cannot be. Give "
                "a min_size of at most max_size."
            )
        self.max_tasks_in_flight_per_actor = max_tasks_in_flight_per_actor
        self.max_concurrent_calls_per_actor = max_concurrent_calls_per_actor
        self.enable_true_multi_threading = bool(enable_true_multi_threading)

    def __repr__(self) -> str:
        return f"ActorPoolStrategy({self.processes} processes)"

    @property
    def processes(self) -> int:
        """The number of processes."""
        return self.size or self.max_size or self.initial_size or self.min_size or 1


def processes_of(method: str, concurrency: Any, compute: Any) -> int:
    """Return the number of processes that ``concurrency`` and ``compute`` of a method stand for; 0 for threads.

    Ray's ranges ``(min, max)`` and ``(min, max, initial)`` stand for the largest number.
    """
    if isinstance(concurrency, (tuple, list)):
        if len(concurrency) not in (2, 3):
            raise DataError(
                f"{method}(): concurrency={shown(concurrency)} is not a range. Give a number of processes, or "
                "(fewest, most)."
            )
        sizes = [optional_whole("concurrency", size, 1, MOST_PROCESSES) or 1 for size in concurrency]
        wanted = sizes[1]
    else:
        wanted = optional_whole("concurrency", concurrency, 0, MOST_PROCESSES) or 0
    if compute is None:
        return wanted
    if isinstance(compute, str) and compute in ("tasks", "actors"):
        return wanted or (1 if compute == "actors" else 0)
    if not isinstance(compute, (TaskPoolStrategy, ActorPoolStrategy)):
        raise DataError(
            f"{method}(): compute={shown(compute)} is not a strategy. Give "
            "powertrain.data.ActorPoolStrategy(size=4), TaskPoolStrategy(size=4), or concurrency=4."
        )
    if concurrency is not None:
        raise DataError(
            f"{method}() got compute={compute!r} and concurrency={shown(concurrency)}. Leave one of them out."
        )
    return compute.processes
