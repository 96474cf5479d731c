"""Directories of a process's own time: none is left, and none that lives is swept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from powertrain.data import scratch

MAKES_MANY = """
import os, sys
from powertrain.data.scratch import Scratch
for _ in range(300):
    made = Scratch()
    open(os.path.join(made.path, "file"), "w").close()
    assert os.path.exists(os.path.join(made.path, "file"))
    made.close()
"""
IS_KILLED = """
import os, signal
from powertrain.data.scratch import Scratch
made = Scratch()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
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
    lives = scratch.make_owned(str(place / "powertrain-a" / "start"))
    os.close(scratch.make_owned(str(place / "powertrain-b" / "start")))
    scratch.sweep(place)
    assert [entry.name for entry in place.iterdir()] == ["powertrain-a"]
    os.close(lives)
