"""One worker process seen from outside: its kill scope, its output, its exit decoded."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Iterator

from powertrain.engine.base import Inspection
from powertrain.trace.machine import processes
from powertrain.trace.stacks import stacks


def oom_kills() -> int:
    """Return the number of processes killed by the OOM killer since boot; 0 where the kernel does not count them."""
    try:
        with open("/proc/vmstat", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    except (OSError, ValueError):
        pass
    return 0


def kill_scope(pid: int) -> None:
    """Send SIGKILL to a worker, its process group, and its descendants that left the group.

    Python's resource trackers are spared: each exits when all its clients are gone, and removes their leftover shared
    memory and semaphores.
    """
    below = processes.descendants(pid)
    trackers = set(filter(is_resource_tracker, below))
    if not trackers:
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGKILL)
    kill_all([pid, *(process for process in below if process not in trackers)])


def is_resource_tracker(pid: int) -> bool:
    """Return True for the process by which ``multiprocessing`` cleans up after processes that were killed."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"multiprocessing.resource_tracker" in file.read()
    except OSError:
        return False


def kill_all(pids: Iterable[int]) -> None:
    """Send SIGKILL to each process; ignore those that are gone."""
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def kill_marked(variable: str, value: str) -> None:
    """Send SIGKILL to every process that was started with ``variable=value`` in its environment, until none is left.

    For processes whose parent is gone: nothing else leads to one that has left its parent's group as well. A process
    that was forked and never called ``exec`` has its parent's first environment, and is not found.
    """
    mark = f"{variable}={value}".encode()
    tried: set[int] = set()
    while found := set(_pids_with(mark)) - tried:  # a process that survives SIGKILL hangs in the kernel
        kill_all(found)
        tried |= found


def _pids_with(mark: bytes) -> Iterator[int]:
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/environ", "rb") as file:
                if mark in file.read().split(b"\0"):
                    yield int(entry)


def inspection(pid: int, title: str, dump: str, with_stacks: bool) -> Inspection:
    """Return the state of a process of this machine as seen from outside; pid 0 stands for one that is gone.

    ``title`` and ``dump`` are the title and the stack file of its ``ProcessSpec``. The stacks include the processes
    that it has started; this process itself is not inspected from outside.
    """
    state = processes.state(pid) if pid else "gone"
    if state == "gone":
        return Inspection(pid=pid, state=state)
    debugged = processes.is_traced(pid)
    if not with_stacks:
        return Inspection(pid=pid, state=state, debugged=debugged)
    if pid == os.getpid():
        debugged |= stacks.own_debugged(stacks.main_frame())
        itself = stacks.own_process(title)
    else:
        itself = stacks.stacks_of(pid, title, dump)
    below = stacks.children_stacks(pid, title, dump)
    return Inspection(pid=pid, state=state, processes=(itself, *below), debugged=debugged)
