"""Limits of this machine for a process and its user: open files, processes and threads.

Limits are read lazily, and an unreadable limit counts as unlimited.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

from powertrain.engine.limits import Limit, need_of, problem
from powertrain.engine.resources import BOUNDLESS
from powertrain.errors import ResourceError

_CGROUPS = Path("/sys/fs/cgroup")
_PROC = Path("/proc")


def check_limits(setting: str, workers: int, *, connected: bool, starts_processes: bool) -> None:
    """Raise :class:`ResourceError` where a limit of this machine does not allow a run with so many workers.

    Args:
        setting: The user's setting, such as ``"ScalingConfig(num_workers=8)"``.
        workers: The largest number of workers.
        connected: True when each worker is connected with all others, by a process group of torch.
        starts_processes: True when the workers are processes that are started on this machine.
    """
    tasks = need_of(workers, connected=connected, starts_processes=starts_processes).tasks
    limits = list(read_limits(tasks))
    if text := problem(setting, workers, limits, connected=connected, starts_processes=starts_processes):
        raise ResourceError(text)


def read_limits(tasks: int) -> Iterator[Limit]:
    """Yield the limits that apply to a run with ``tasks`` processes and threads."""
    yield Limit(
        "workers",
        BOUNDLESS,
        "one machine",
        "Use ScalingConfig(engine='ray') with a cluster of several machines",
    )
    yield from _file_limits()
    if tasks:
        yield from _user_limit(tasks)
        yield from _cgroup_limits()
        yield from _kernel_limits()


def _file_limits() -> Iterator[Limit]:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # the soft one is raised to it where that is needed
    if hard == resource.RLIM_INFINITY:
        return
    name = "the hard limit for open files (RLIMIT_NOFILE, 'ulimit -Hn')"
    remedy = "Raise it in /etc/security/limits.conf (nofile), with 'docker run --ulimit nofile=...' or LimitNOFILE="
    yield Limit("driver_files", hard, name, remedy)
    yield Limit("worker_files", hard, name, remedy)


def _user_limit(tasks: int) -> Iterator[Limit]:
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if soft == resource.RLIM_INFINITY or os.getuid() == 0:  # root is exempt
        return
    # Counting looks at every process of the machine: only where it may matter.
    used = _tasks_of_user(os.getuid()) if 2 * tasks > soft else 0
    yield Limit(
        "tasks",
        soft,
        "the limit for processes of one user (RLIMIT_NPROC, 'ulimit -u')",
        "Raise it with 'ulimit -u' or in /etc/security/limits.conf (nproc)",
        used,
    )


def _tasks_of_user(uid: int) -> int:
    count = 0
    for entry in os.listdir(_PROC):
        if entry.isdigit():
            with contextlib.suppress(OSError):  # it is gone
                if os.stat(_PROC / entry).st_uid == uid:
                    count += len(os.listdir(_PROC / entry / "task"))
    return count


def _cgroup_limits() -> Iterator[Limit]:
    """Yield the limit of each control group that this process is in."""
    for group in _groups():
        amount, used = _number(group / "pids.max"), _number(group / "pids.current")
        if amount is not None:
            yield Limit(
                "tasks",
                amount,
                f"the control group's limit for processes ({group}/pids.max)",
                "Raise it with 'docker run --pids-limit', the pod's podPidsLimit or systemd's TasksMax=",
                used or 0,
            )


def _groups() -> Iterator[Path]:
    """Yield the directories of the groups that count processes, the innermost first."""
    try:
        lines = (_PROC / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "pids" not in controllers.split(","):
            continue
        root = _CGROUPS / "pids" if controllers else _CGROUPS
        below = Path(path.lstrip("/"))
        yield from (root / part for part in (below, *below.parents))


def _kernel_limits() -> Iterator[Limit]:
    used = _all_tasks()
    for name in ("pid_max", "threads-max"):
        amount = _number(_PROC / "sys" / "kernel" / name)
        if amount is not None:
            yield Limit(
                "tasks",
                amount,
                f"the machine (kernel.{name})",
                f"Raise it with 'sysctl -w kernel.{name}=...'",
                used,
            )


def _all_tasks() -> int:
    """Count the processes and threads of the machine: the fourth field of /proc/loadavg is "running/all"."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int((_PROC / "loadavg").read_text().split()[3].partition("/")[2])
    return 0


def _number(path: Path) -> int | None:
    """Return the number in a file; None where it is missing or "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
