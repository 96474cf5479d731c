"""A program as it is written, on Ray itself: what the programs assert is what Ray does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")


def test_a_program_runs_unchanged_on_a_cluster_of_its_own() -> None:
    """Ray Train leaves actors behind that no other test should meet, so it gets a cluster that ends with it."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.migration.on_ray", "checkpoints/metadata"],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=115,
    )
    assert done.returncode == 0, done.stdout
