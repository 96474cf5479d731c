"""Waiting for a change in a directory: reported at once, also a process's end, and woken by hand."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from powertrain.engine.local import directory_watch
from powertrain.engine.local.directory_watch import DirectoryWatch

PATIENCE = 20.0
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="inotify is Linux's")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "watched"
    made.mkdir()
    return made


@pytest.fixture
def watch(directory: Path) -> Iterator[DirectoryWatch]:
    made = DirectoryWatch(directory)
    yield made
    made.close()


def told(watch: DirectoryWatch, seconds: float = PATIENCE) -> bool:
    """Whether the wait ends before its time."""
    began = time.monotonic()
    watch.wait(seconds)
    return time.monotonic() - began < seconds


def descriptors() -> set[int]:
    """Those of this process, but for the one by which they are listed."""
    return {int(entry) for entry in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{entry}")}


def test_files_that_come_change_and_go_are_reported(watch: DirectoryWatch, directory: Path) -> None:
    watch.arm()
    descriptor = os.open(directory / "file", os.O_RDWR | os.O_CREAT)
    assert told(watch)
    os.pwrite(descriptor, b"x", 0)
    assert told(watch)
    (directory / "file").unlink()
    assert told(watch)
    os.close(descriptor)


def test_processes_that_only_read_are_not_reported(watch: DirectoryWatch, directory: Path) -> None:
    (directory / "file").write_text("x")
    watch.arm()
    (directory / "file").read_text()
    os.listdir(directory)
    assert not told(watch, 0.05)


def test_the_file_of_a_killed_process_is_reported(watch: DirectoryWatch, directory: Path) -> None:
    script = f"import os, time; os.open({str(directory / 'theirs')!r}, os.O_RDWR | os.O_CREAT); print(flush=True); "
    with subprocess.Popen(
        [sys.executable, "-c", script + "time.sleep(60)"], stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        watch.arm()
        holder.kill()
        assert watch.wait(PATIENCE) == {"theirs"}


def test_a_directory_that_goes_and_comes_again_is_watched_on(watch: DirectoryWatch, directory: Path) -> None:
    watch.arm()
    directory.rmdir()
    assert told(watch)
    watch.arm()
    (directory.parent / "neighbour").mkdir()
    assert not told(watch, 0.05)
    directory.mkdir()
    assert told(watch)
    watch.arm()
    (directory / "file").touch()
    assert told(watch)
    assert watch.problem == ""


def test_a_wait_is_ended_by_hand_before_it_begins_and_while_it_lasts(watch: DirectoryWatch) -> None:
    watch.wake()
    assert told(watch)
    waker = threading.Timer(0.02, watch.wake)
    waker.start()
    assert told(watch)
    waker.join()
    assert not told(watch, 0.05), "once for each time"


def test_it_can_be_woken_more_often_than_it_wakes(watch: DirectoryWatch) -> None:
    for _ in range(100_000):
        watch.wake()
    assert told(watch)


def test_a_forked_child_has_none_of_its_descriptors(directory: Path) -> None:
    before = descriptors()
    watch = DirectoryWatch(directory)
    watch.arm()
    opened = descriptors() - before
    assert len(opened) == 3
    child = os.fork()
    if child == 0:
        os._exit(len(opened & descriptors()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    watch.close()
    assert descriptors() == before


def test_a_system_that_gives_no_inotify_is_reported_as_a_problem_and_waits_still_end(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(directory_watch, "_open_inotify", refuse)
    watch = DirectoryWatch(directory)
    watch.arm()
    assert watch.problem == "Too many open files"
    assert watch.wait(0.01) == set()
    watch.wake()
    assert told(watch)
    watch.close()
