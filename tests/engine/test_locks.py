"""Locks that tell who lives: of directories that may be removed, and of files that a forked child must not keep."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from powertrain.engine.local import locks
from powertrain.errors import EngineError
from powertrain.storage.files.private_roots import make_private


def test_a_directory_that_is_removed_while_its_lock_is_waited_for_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, removals, flock = tmp_path / "claims", [1, 2, 3], fcntl.flock

    def lock_after_the_last_holder_has_removed_it(descriptor: int, operation: int) -> None:
        if operation == fcntl.LOCK_EX and removals:
            removals.pop()
            directory.rmdir()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", lock_after_the_last_holder_has_removed_it)
    with locks.locked_directory(directory):
        assert not removals
        assert directory.is_dir()


def test_a_directory_that_can_never_be_made_is_refused_in_words() -> None:
    with pytest.raises(EngineError, match=r"/proc/nothing.*cannot be used.*Set XDG_RUNTIME_DIR"):
        make_private(Path("/proc/nothing"))


def test_a_lock_is_refused_while_another_open_file_has_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    one = locks.open_unshared(path, os.O_RDWR | os.O_CREAT)
    other = locks.open_unshared(path, os.O_RDONLY)
    assert locks.try_lock(one)
    assert not locks.try_lock(other)
    locks.let_go(one)
    assert locks.try_lock(other)
    locks.let_go(other)


def test_a_forked_child_has_no_descriptor_of_its_parents_locks(tmp_path: Path) -> None:
    descriptor = locks.open_unshared(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    child = os.fork()
    if child == 0:
        try:
            os.fstat(descriptor)
        except OSError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.fstat(descriptor)
    locks.let_go(descriptor)
