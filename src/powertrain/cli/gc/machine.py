"""Leftovers of killed runs on this machine: runtime directories with their sockets, shared memory, data caches."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from powertrain.cli.gc.leftovers import Kind, Leftover, measure
from powertrain.data.loading import scratch
from powertrain.engine.local import runtime_directories
from powertrain.storage.files.private_roots import runtime_root, shared_memory_root

_NO_PROCESS = "no process holds it"


def find_on_machine() -> list[Leftover]:
    """Return the directories of this user's dead processes."""
    found = [
        Leftover(kind, str(path), measure(path)[0], _NO_PROCESS)
        for kind, root in _roots()
        for path in runtime_directories.find_abandoned(root)
    ]
    found += [Leftover("data cache", str(path), measure(path)[0], _NO_PROCESS) for path in _data_caches()]
    return found


def delete_on_machine() -> None:
    """Delete the directories of this user's dead processes."""
    for _, root in _roots():
        runtime_directories.remove_abandoned(root)
    scratch.sweep(scratch.scratch_root())


def _roots() -> Iterator[tuple[Kind, Path]]:
    yield "runtime directory", runtime_root()
    memory = shared_memory_root()
    if memory is not None:
        yield "shared memory", memory


def _data_caches() -> Iterator[Path]:
    """Yield the directories of decoded data whose owner is dead: the lock of the file in them is free."""
    root = scratch.scratch_root()
    for lock in sorted([*root.glob("*-*/owner.lock"), *root.glob("powertrain-*/*/owner.lock")]):
        with contextlib.suppress(OSError):
            descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(descriptor).st_uid == os.geteuid():
                    yield lock.parent
            finally:
                os.close(descriptor)
