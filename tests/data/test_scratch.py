"""Directories of a process's own time: none is left, and none that lives is swept."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.other_user import OtherUser

from powertrain.data.loading import scratch

MAKES_MANY = """
import os, sys
from powertrain.data.loading.scratch import Scratch
for _ in range(300):
    made = Scratch()
    open(os.path.join(made.path, "file"), "w").close()
    assert os.path.exists(os.path.join(made.path, "file"))
    made.close()
"""
IS_KILLED = """
import os, signal
from powertrain.data.loading.scratch import Scratch
made = Scratch()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path))
        yield tmp_path


def test_processes_that_make_and_sweep_at_once_do_not_disturb_each_other(root: Path) -> None:
    programs = [subprocess.Popen([sys.executable, "-c", MAKES_MANY]) for _ in range(3)]
    assert [program.wait() for program in programs] == [0, 0, 0]
    assert list(root.iterdir()) == []


def test_what_a_killed_process_leaves_is_removed_by_the_next(root: Path) -> None:
    subprocess.run([sys.executable, "-c", IS_KILLED], check=False)
    [left] = scratch.scratch_root().iterdir()
    made = scratch.Scratch()
    assert not left.exists()
    assert os.path.isdir(made.path)
    made.close()
    assert list(root.iterdir()) == []


def test_a_run_that_is_dead_is_swept_and_one_that_lives_is_not(root: Path) -> None:
    place = scratch.scratch_root()
    alive, dead, start = f"powertrain-{'a' * 24}", f"powertrain-{'b' * 24}", "0" * 24
    lives = scratch.make_owned(str(place / alive / start))
    os.close(scratch.make_owned(str(place / dead / start)))
    scratch.sweep(place)
    assert [entry.name for entry in place.iterdir()] == [alive]
    os.close(lives)


@pytest.mark.parametrize("name", ["thesis", "powertrain-thesis", "123-thesis"])
def test_a_directory_with_another_name_is_not_swept_whatever_is_in_it(tmp_path: Path, name: str) -> None:
    """In a ``cache_dir`` of the user's own choice: a file ``owner.lock`` does not make a directory ours."""
    os.close(scratch.make_owned(str(tmp_path / name)))
    (tmp_path / name / "chapter").write_text("private")
    scratch.sweep(tmp_path)
    assert (tmp_path / name / "chapter").read_text() == "private"


def make_lock(directory: str) -> None:
    Path(directory, "owner.lock").touch(mode=0o666)


def test_a_lock_that_another_user_made_does_not_have_a_directory_swept(
    tmp_path: Path, shared_directory: Path, other_user: OtherUser
) -> None:
    directory = shared_directory / f"1-{'a' * 12}"
    directory.mkdir()
    directory.chmod(0o777)
    (directory / "chapter").write_text("private")
    other_user.run(make_lock, str(directory))
    scratch.sweep(shared_directory)
    assert (directory / "chapter").read_text() == "private"
