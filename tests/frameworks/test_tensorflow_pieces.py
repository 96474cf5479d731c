"""Keras callbacks, checkpoints and tensors of a shard, in a process that TensorFlow may change."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.mark.skipif(
    find_spec("tensorflow") is None or find_spec("tf_keras") is None,
    reason="tensorflow and tf-keras are not installed: make test-frameworks, or pip install tensorflow tf-keras",
)
def test_callbacks_checkpoints_and_tensors_hold_what_they_promise(tmp_path: Path) -> None:
    program = Path(__file__).with_name("keras_pieces.py")
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path)], capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stdout + done.stderr
