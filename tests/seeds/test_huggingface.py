"""The Hugging Face blocks of seeds/001 and 004, written anew. Seeds/000 and 002 have none.

Models come from a directory in place of the hub.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from powertrain import Result

pytest.importorskip("transformers")

SCRIPTS = Path(__file__).parent / "scripts"


def run(script: str, directory: Path) -> Result:
    """Start the script as a user does, in an empty directory, and open the run that it has made."""
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / script)], capture_output=True, text=True, timeout=240, cwd=directory
    )
    assert done.returncode == 0, done.stdout + done.stderr
    path = next(line.partition(": ")[2] for line in done.stdout.splitlines() if line.startswith("Path: "))
    return Result.from_path(path)


@pytest.mark.timeout(300)
def test_a_prepared_trainer_reports_its_epochs_with_their_checkpoints(tmp_path: Path) -> None:
    """seeds/001: prepare_trainer and RayTrainReportCallback."""
    from transformers import AutoModelForCausalLM

    result = run("transformers_prepared.py", tmp_path)
    frame = result.dataframe(ranks="all")
    assert sorted(zip(frame["rank"], frame["step"], strict=True)) == [(0, 4), (0, 8), (1, 4), (1, 8)]
    assert result.metrics is not None
    assert {"loss", "eval_loss", "epoch", "learning_rate"} <= set(result.metrics)
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as directory:
        found = {path.name for path in Path(directory, "checkpoint").iterdir()}
        assert {
            "model.safetensors",
            "optimizer.pt",
            "trainer_state.json",
            "rng_state_0.pth",
            "rng_state_1.pth",
        } <= found
        AutoModelForCausalLM.from_pretrained(Path(directory, "checkpoint"))


@pytest.mark.timeout(300)
def test_a_function_trains_under_transformers_trainer_without_anything_prepared(tmp_path: Path) -> None:
    """seeds/004: TransformersTrainer from powertrain.huggingface, and a plain trainer.train()."""
    result = run("transformers_plain.py", tmp_path)
    assert result.metrics is not None
    assert result.metrics["step"] == 6
    assert result.checkpoint is not None
    assert Path(result.checkpoint.path, "checkpoint", "trainer_state.json").is_file()
