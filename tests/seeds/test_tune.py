"""The sweeps of seeds/001 and 004, written anew with a model that trains in milliseconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"


def run_script(name: str, storage: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / name), str(storage)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_trainer_with_a_nested_space_is_swept_with_asha(tmp_path: Path) -> None:
    """seeds/001: metric and mode in TuneConfig, the space below "train_loop_config"."""
    said = run_script("tune_nested.py", tmp_path)
    assert "trials: 10" in said
    assert "stopped early: True" in said
    assert "epochs: 3" in said


def test_a_trainer_with_a_flat_space_is_swept_with_asha(tmp_path: Path) -> None:
    """seeds/004: metric and mode in the scheduler, the space is the configuration itself."""
    said = run_script("tune_flat.py", tmp_path)
    assert "trials: 20" in said
    assert "Best: {'lr': " in said
    assert "'batch_size': " in said
