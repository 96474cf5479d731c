"""Estimates of the open files, processes and threads a run needs, compared with the limits of a machine. Pure.

:mod:`powertrain.engine.system_limits` reads the machine's limits. The numbers below were counted on runs of 2 to 32
workers; they are lower bounds, so that no feasible run is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

#: Open files of the driver, without and for each worker: its output, its log and its connection.
_DRIVER_FILES, _DRIVER_FILES_PER_WORKER = 32, 3
#: Open files of a worker, and of each process group connection to another worker.
_WORKER_FILES, _WORKER_FILES_PER_PEER = 24, 2
#: Threads and processes (the system counts both) of the driver, its server and its uploader; and of a worker, without
#: and with a process group.
_OWN_TASKS, _WORKER_TASKS, _CONNECTED_WORKER_TASKS = 20, 4, 7

Kind = Literal["driver_files", "worker_files", "tasks", "workers"]
_WORDS: dict[str, str] = {
    "driver_files": "{amount:,} open files in this process",
    "worker_files": "{amount:,} open files in each worker",
    "tasks": "{amount:,} processes and threads",
    "workers": "{amount:,} worker processes",
}


@dataclass(frozen=True)
class Need:
    """Lower bounds of a run's needs."""

    driver_files: int
    worker_files: int
    tasks: int
    workers: int


@dataclass(frozen=True)
class Limit:
    """A limit: its amount, the amount in use, its name and the remedy that raises it."""

    kind: Kind
    amount: int
    name: str
    remedy: str
    used: int = 0

    @property
    def free(self) -> int:
        return max(0, self.amount - self.used)


def need_of(workers: int, *, connected: bool, starts_processes: bool) -> Need:
    """Return the needs of a run.

    Args:
        workers: The number of workers.
        connected: True when each worker is connected with all others, by a process group of torch.
        starts_processes: True when the workers are processes that are started on this machine.
    """
    peers = workers if connected and starts_processes else 0
    each = _CONNECTED_WORKER_TASKS if connected else _WORKER_TASKS
    return Need(
        driver_files=_DRIVER_FILES + _DRIVER_FILES_PER_WORKER * workers,
        worker_files=_WORKER_FILES + _WORKER_FILES_PER_PEER * peers if starts_processes else 0,
        tasks=_OWN_TASKS + each * workers if starts_processes else 0,
        workers=workers if starts_processes else 0,
    )


def exceeded(need: Need, limits: Iterable[Limit]) -> Limit | None:
    """Return the first limit below the needs."""
    return next((limit for limit in limits if getattr(need, limit.kind) > limit.free), None)


def most_workers(limits: Iterable[Limit], at_most: int, *, connected: bool, starts_processes: bool) -> int:
    """Return the largest number of workers, up to ``at_most``, that the limits allow; 0 where not even one fits."""
    limits, low, high = list(limits), 0, at_most
    while low < high:
        middle = (low + high + 1) // 2
        need = need_of(middle, connected=connected, starts_processes=starts_processes)
        low, high = (low, middle - 1) if exceeded(need, limits) else (middle, high)
    return low


def problem(
    setting: str, workers: int, limits: Iterable[Limit], *, connected: bool, starts_processes: bool
) -> str:
    """Return the reason why this machine cannot hold a run, in two sentences; "" where it can.

    Args:
        setting: The user's setting, such as ``"ScalingConfig(num_workers=8)"``.
        workers: The largest number of workers.
        limits: The machine's limits.
        connected: See :func:`need_of`.
        starts_processes: See :func:`need_of`.
    """
    limits = list(limits)
    need = need_of(workers, connected=connected, starts_processes=starts_processes)
    limit = exceeded(need, limits)
    if limit is None:
        return ""
    fit = most_workers(limits, workers, connected=connected, starts_processes=starts_processes)
    amount = _WORDS[limit.kind].format(amount=getattr(need, limit.kind))
    in_use = f", of which {limit.used:,} are in use" if limit.used else ""
    fewer = f", or ask for at most {fit:,} worker(s)" if fit else ""
    allowed = f"{limit.name} allows {limit.amount:,}{in_use}"
    return f"{setting} needs at least {amount}, and {allowed}. {limit.remedy}{fewer}."
