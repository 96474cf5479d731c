"""The scripts in ``examples`` run as their own documentation says, with ``--smoke``, in an empty directory."""

from __future__ import annotations

import math
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import powertrain
from powertrain.result.result import Result
from powertrain.run import events as ev
from powertrain.run.record import journal
from powertrain.storage import open_storage

EXAMPLES = Path(__file__).parents[2] / "examples"
#: Scripts. Packages are in engines/, and have tests of their own.
SCRIPTS = [path for path in EXAMPLES.rglob("*.py") if "engines" not in path.parts]
#: Ends an example that hangs.
_PATIENCE = 280.0

pytestmark = pytest.mark.slow


def run_smoke(name: str, directory: Path, *options: str) -> str:
    """Run an example; returns what it printed. Its runs are kept in ``runs`` of ``directory``."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "RAY_ADDRESS"))}
    done = subprocess.run(
        [
            *(sys.executable, str(EXAMPLES / f"{name}.py"), "--smoke"),
            *("--storage-path", str(directory / "runs"), *options),
        ],
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_image_classification(tmp_path: Path) -> None:
    said = run_smoke("digits", tmp_path)
    assert re.search(r"^test accuracy: \d+\.\d\d%$", said, re.MULTILINE), said
    assert Result.from_path(tmp_path / "runs" / "digits").checkpoint is not None


def held_out_loss_of_checkpoint(run: Path, texts: Path) -> float:
    """The loss on the held-out prose of the newest checkpoint of a run of ``language_model.py``, in this process."""
    example = runpy.run_path(str(EXAMPLES / "language_model.py"))
    checkpoint = Result.from_path(run).checkpoint
    assert checkpoint is not None
    model = example["Transformer"](width=32, layers=2, heads=4, length=32)
    powertrain.load_state(checkpoint, model=model)
    (batch,) = powertrain.data.read_parquet(str(texts / "held_out")).iter_torch_batches(batch_size=32)
    with torch.no_grad():
        return float(model(batch["tokens"]))


def test_a_language_model_is_fine_tuned_from_the_weights_of_another_run(tmp_path: Path) -> None:
    said = run_smoke("language_model", tmp_path)
    assert "after 20 steps of fine-tuning" in said
    before, after = (
        held_out_loss_of_checkpoint(tmp_path / "runs" / name, tmp_path / "text")
        for name in ("language-model-pretrained", "language-model")
    )
    table = Result.from_path(tmp_path / "runs" / "language-model").metrics_dataframe
    assert table is not None
    assert sorted(table["step"]) == list(range(21)), "each step once"
    rows = table.set_index("step")
    assert rows["held_out_loss"][0] == pytest.approx(before, rel=1e-5), "the pre-trained weights"
    assert rows["held_out_loss"][20] == pytest.approx(after, rel=1e-5)
    untrained = math.log(256)
    assert max(before, rows["loss"][1]) < untrained - 1
    assert after < before - 0.1

    facts = list(journal.read(open_storage(tmp_path / "runs" / "language-model")))
    (failed,) = (fact for fact in facts if isinstance(fact, ev.Failed))
    assert failed.failures[0].kind == "signal"
    result = Result.from_path(tmp_path / "runs" / "language-model")
    assert (result.state, result.metrics and result.metrics["step"]) == ("finished", 20)


def test_the_trainer_of_transformers_goes_on_after_a_rank_was_killed(tmp_path: Path) -> None:
    said = run_smoke("transformers_trainer", tmp_path)
    assert "after 32 steps" in said
    assert "resuming at step 20" in said
    assert re.search(r"^'return sum\(numbers\)' is (code|a comment)$", said, re.MULTILINE), said
    table = Result.from_path(tmp_path / "runs" / "transformers-trainer").metrics_dataframe
    assert table is not None
    assert list(table["step"]) == [5, 10, 15, 20, 25, 30, 32], "each save once"


def test_a_text_classifier_with_lightning(tmp_path: Path) -> None:
    said = run_smoke("ray/lightning_text_classifier", tmp_path, "--name", "topics")
    assert "diagnosis of topics" in said
    result = Result.from_path(tmp_path / "runs" / "topics")
    assert (result.state, result.metrics and result.metrics["step"]) == ("finished", 60)


def test_the_smallest_traced_training(tmp_path: Path) -> None:
    said = run_smoke("ray/torchtrainer_minimal", tmp_path, "--name", "points")
    assert "diagnosis of points" in said
    result = Result.from_path(tmp_path / "runs" / "points")
    assert (result.state, result.metrics and result.metrics["steps"]) == ("finished", 60)


def test_boosted_trees(tmp_path: Path) -> None:
    said = run_smoke("xgboost_digits", tmp_path)
    assert float(said.split("test accuracy: ")[1].split("%")[0]) > 90


def test_a_sweep_with_optuna(tmp_path: Path) -> None:
    said = run_smoke("optuna_sweep", tmp_path)
    assert re.search(r"^best accuracy \d+\.\d\d% with \{", said, re.MULTILINE), said


def test_an_elastic_run_outlives_a_notice(tmp_path: Path) -> None:
    said = run_smoke("elastic_spot", tmp_path)
    assert "after 60 steps" in said
    facts = list(journal.read(open_storage(tmp_path / "runs" / "elastic-spot")))
    assert any(isinstance(fact, ev.Notified) and fact.ranks == (1,) for fact in facts)
    table = Result.from_path(tmp_path / "runs" / "elastic-spot").metrics_dataframe
    assert table is not None
    assert sorted(table["step"]) == list(range(1, 61)), "each step once"


@pytest.mark.parametrize("path", sorted(SCRIPTS), ids=lambda path: path.stem)
def test_the_table_has_a_line_for_each_example(path: Path) -> None:
    assert f"({path.relative_to(EXAMPLES).as_posix()})" in (EXAMPLES / "README.md").read_text("utf-8")
