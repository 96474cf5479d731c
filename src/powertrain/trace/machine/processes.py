"""Kernel data of a process: its state, its tracer, and its signals.

Without /proc, every function returns its safe value.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

#: States in which a process handles no signal, by psutil's names.
CANNOT_ANSWER = frozenset({"stopped", "tracing-stop", "disk-sleep", "zombie", "dead", "gone"})


def state(pid: int) -> str:
    """Return the kernel's state of ``pid``'s first thread: "running", "sleeping", …; "gone" for none."""
    import psutil

    try:
        return str(psutil.Process(pid).status())
    except psutil.Error:
        return "gone"


def name(pid: int) -> str:
    """Return the command's name; "" for a process that is gone."""
    import psutil

    try:
        return str(psutil.Process(pid).name())
    except psutil.Error:
        return ""


def children(pid: int) -> Iterator[int]:
    """Return the direct children of ``pid``."""
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children") as file:
                yield from map(int, file.read().split())


def descendants(pid: int) -> list[int]:
    """Return all descendants of ``pid``, parents before children."""
    found: list[int] = []
    front = list(children(pid))
    while front:
        found += front
        front = [grandchild for child in front for grandchild in children(child)]
    return found


def age(pid: int) -> float:
    """Return the seconds since the process was started; 0 if it is gone."""
    import psutil

    try:
        return max(0.0, time.time() - psutil.Process(pid).create_time())
    except psutil.Error:
        return 0.0


def is_traced(pid: int) -> bool:
    """Return whether a debugger traces the process. A py-spy that only reads does not count."""
    tracer = int(status(pid).get("TracerPid", "0"))
    return tracer > 0 and name(tracer) != "py-spy"


def catches(pid: int, number: int) -> bool:
    """Return whether the process has its own handler for the signal; without one the signal may end it."""
    return _has(status(pid), "SigCgt", number)


def has_open(pid: int, path: str) -> bool:
    """Return whether the process has this file open."""
    path = os.path.realpath(path)
    try:
        return any(_link(f"/proc/{pid}/fd/{entry}") == path for entry in os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return False


def threads(pid: int) -> list[int]:
    """Return the kernel ids of the process's threads, the first one first and the others by age (ids mostly grow)."""
    try:
        found = sorted(int(entry) for entry in os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return []
    return sorted(found, key=lambda thread: thread != pid)


def runs(pid: int, thread: int) -> bool:
    """Return whether the thread is on a processor, or waits for one."""
    return status(pid, thread).get("State", "").startswith("R")


def blocks(pid: int, thread: int, number: int) -> bool:
    """Return whether the thread blocks the signal, as it does inside the signal's own handler."""
    return _has(status(pid, thread), "SigBlk", number)


def signal_phase(pid: int, thread: int, number: int) -> str:
    """Return "pending" for a signal that the thread is yet to handle, "handling" while its handler runs; else "".

    From one read: between two, a signal that is delivered would be seen neither pending nor blocked. A handler blocks
    its own signal only; a thread that blocks the neighbouring signal too has blocked all of them on purpose.
    """
    fields = status(pid, thread)
    if _has(fields, "SigBlk", number):
        return "" if _has(fields, "SigBlk", number - 1) else "handling"
    return "pending" if _has(fields, "SigPnd", number) or _has(fields, "ShdPnd", number) else ""


def status(pid: int, thread: int = 0) -> dict[str, str]:
    """Return the fields of /proc/PID/status, or of one thread's; empty if it is gone."""
    path = f"/proc/{pid}/task/{thread}/status" if thread else f"/proc/{pid}/status"
    try:
        with open(path, encoding="utf-8", errors="replace") as lines:
            pairs = (line.partition(":") for line in lines)
            return {key: value.strip() for key, _, value in pairs}
    except OSError:
        return {}


def _has(fields: dict[str, str], mask: str, number: int) -> bool:
    return number > 0 and bool(int(fields.get(mask, "0"), 16) >> (number - 1) & 1)


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
