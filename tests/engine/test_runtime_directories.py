"""Directories for sockets and scratch: private, removed when no process holds them, and never before."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from powertrain.engine.local import runtime_directories
from powertrain.storage.files import private_roots

#: A number that no process has, because the kernel gives out smaller ones only.
NO_PROCESS = 1 << 23
MAKE = (
    "from powertrain.engine.local import engine, runtime_directories; "
    "print(runtime_directories.make_runtime_directory('other'), flush=True); "
)


@pytest.fixture(autouse=True)
def root(tmp_path: Path) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:  # undone before the check for what the test left
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
        yield tmp_path / "powertrain"


def make_elsewhere(then: str) -> str:
    made = subprocess.run([sys.executable, "-c", MAKE + then], stdout=subprocess.PIPE, text=True, check=False)
    return made.stdout.strip()


def test_a_link_in_place_of_the_root_is_passed_over_and_what_it_points_to_left_alone(
    root: Path, tmp_path: Path
) -> None:
    precious = tmp_path / "victim" / "backup-1-x"
    precious.mkdir(parents=True)
    precious.parent.chmod(0o755)
    root.symlink_to(precious.parent)
    mine = runtime_directories.make_runtime_directory("mine")
    try:
        assert not mine.is_relative_to(precious.parent)
        assert mine.parent == private_roots.runtime_root()
        assert mine.parent.stat().st_mode & 0o777 == 0o700
    finally:
        runtime_directories.remove_runtime_directory(mine)
    assert precious.is_dir()
    assert precious.parent.stat().st_mode & 0o777 == 0o755


def test_a_directory_in_use_stays_where_its_process_cannot_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: NO_PROCESS)  # as it looks from another container
        mine = runtime_directories.make_runtime_directory("mine")
    try:
        assert make_elsewhere("")
        assert mine.is_dir()
    finally:
        runtime_directories.remove_runtime_directory(mine)
    assert not mine.exists()


def test_a_directory_that_no_process_holds_is_swept(root: Path) -> None:
    abandoned = Path(make_elsewhere("import os; os._exit(1)"))
    assert abandoned.parent == root
    assert abandoned.is_dir()
    mine = runtime_directories.make_runtime_directory("mine")
    try:
        assert not abandoned.exists()
    finally:
        runtime_directories.remove_runtime_directory(mine)


def test_the_claim_of_a_process_that_was_killed_is_swept(root: Path) -> None:
    make_elsewhere(
        "from powertrain.engine.base import SlotShape; from powertrain.engine.local import ledger; "
        "from powertrain.engine import resources; import os; "
        "shape, machine = SlotShape(explicit=True), resources.Machine(cpus=2); "
        "wanted = ledger.SlotRequest('a', 'a', 'a', 'here', machine, 1, shape); "
        "engine._ledger.claim(wanted, print, print); os.kill(os.getpid(), 9)"
    )
    assert len(list((root / "claims").iterdir())) == 1
    runtime_directories.remove_runtime_directory(runtime_directories.make_runtime_directory("mine"))
    assert list(root.iterdir()) == []


def test_a_forked_child_does_not_hold_up_the_removal() -> None:
    script = """if True:
        import os, time
        from powertrain.engine.local import runtime_directories
        directory = runtime_directories.make_runtime_directory("mine")
        with runtime_directories.removed_at_the_end(directory):
            child = os.fork()
            if child == 0:
                time.sleep(10)
                os._exit(0)
        print(os.waitpid(child, os.WNOHANG)[0] == 0, directory.exists(), flush=True)
        os.kill(child, 9)
        os.waitpid(child, 0)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"], "the child lives, the directory is gone"
