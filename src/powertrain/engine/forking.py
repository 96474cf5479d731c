"""Rules for forking this process safely, and service threads that a fork tolerates.

A forked child has one thread and a copy of every lock, held or not. A :class:`ServiceThread` does its work inside of
:func:`working` and holds nothing while it waits for more. :func:`quiet` pauses all of them: a child forked then finds
each of their locks free and no work half done.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import time
from collections.abc import Iterator

#: Seconds for which threads that are at work are waited for.
_QUIET_TIMEOUT_S = 2.0
#: Looks at the native threads, with this many seconds between. A thread that is ending is still listed for a moment:
#: one whose Python thread has ended, or the one that Arrow's JSON reader starts for each read.
_LOOKS, _LOOK_EVERY_S = 20, 0.001


class ServiceThread(threading.Thread):
    """A thread of Powertrain that may be there when this process is forked: it works inside of :func:`working` only."""


class _Gate:
    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.at_work = 0
        self.is_closed = False


_gate = _Gate()


def _open_gate() -> None:
    """Reset the gate in a forked child, which has none of the threads."""
    global _gate
    _gate = _Gate()


os.register_at_fork(after_in_child=_open_gate)


@contextlib.contextmanager
def working() -> Iterator[None]:
    """Keep this process from being forked for a server. To be entered with no lock held."""
    gate = _gate
    with gate.changed:
        gate.changed.wait_for(lambda: not gate.is_closed)
        gate.at_work += 1
    try:
        yield
    finally:
        with gate.changed:
            gate.at_work -= 1
            gate.changed.notify_all()


@contextlib.contextmanager
def quiet() -> Iterator[str]:
    """Pause all service threads until the block ends; yield "" or the reason why that failed.

    A working thread may depend on another one, so threads may start work until all are idle at once.
    """
    gate = _gate
    with gate.changed:
        gate.is_closed = gate.changed.wait_for(lambda: not gate.at_work, _QUIET_TIMEOUT_S)
    try:
        yield "" if gate.is_closed else "a thread of Powertrain is at work"
    finally:
        with gate.changed:
            gate.is_closed = False
            gate.changed.notify_all()


def why_fork_is_unsafe() -> str:
    """Return the reason why a child forked now could hang or misbehave; "" when a fork is safe.

    A fork is safe with no thread but this one, each :class:`ServiceThread`, and idle threads started by imports that
    handle forks (OpenBLAS) or are never joined (jemalloc); with no open GPU and no Ray.
    """
    if sys.platform != "linux":
        return f"the platform is {sys.platform}"
    this = threading.current_thread()
    others = [thread for thread in threading.enumerate() if thread is not this]
    if this is not threading.main_thread() or not all(isinstance(other, ServiceThread) for other in others):
        return "more than one Python thread is running"
    ray = sys.modules.get("ray")
    if ray is not None and getattr(ray, "is_initialized", bool)():
        return "Ray is connected in this process"
    extra = _count_extra_threads()
    for _ in range(_LOOKS):
        if extra <= 0:
            break
        time.sleep(_LOOK_EVERY_S)
        extra = _count_extra_threads()
    if extra > 0:
        return f"{extra} native thread(s) are running that importing libraries does not start"
    if _gpu_is_open():
        return "a GPU is open in this process"
    return ""


def _count_extra_threads() -> int:
    """Count native threads other than this one, Python's and those started by imports."""
    # The main thread of a forked process keeps the native id of its parent in Python 3.11, among others.
    of_python = {thread.native_id for thread in threading.enumerate()} | {threading.get_native_id()}
    return len(_native_threads() - of_python) - _import_threads()


def _native_threads() -> set[int]:
    """Return the kernel's ids of this process's threads, without those of allocators."""
    found = set()
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/comm") as file:
            if file.read().strip() != "jemalloc_bg_thd":
                found.add(int(task))
    return found


def _import_threads() -> int:
    """Count the threads that the loaded OpenBLAS copies keep: one less than each one's pool.

    A copy ends its threads before a fork, also those of the parent, and starts them anew when it next computes: counted
    on regardless, they would hide as many threads of OpenMP, whose locks a child would wait for forever.
    """
    with open("/proc/self/maps") as maps:
        libraries = {line.split()[-1] for line in maps if "openblas" in line.rsplit("/", 1)[-1]}
    return sum(max(0, _openblas_pool(path) - 1) for path in libraries)


def _openblas_pool(path: str) -> int:
    library = ctypes.CDLL(path)
    with contextlib.suppress(ValueError):  # a build that hides the variable
        if not ctypes.c_int.in_dll(library, "blas_server_avail").value:
            return 1
    for prefix in ("", "scipy_"):
        for suffix in ("", "64_"):
            function = getattr(library, f"{prefix}openblas_get_num_threads{suffix}", None)
            if function is not None:
                return int(function())
    return 1


def _gpu_is_open() -> bool:
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith("/dev/nvidia"):
                return True
    return False
