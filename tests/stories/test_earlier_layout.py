"""A run directory written before the package layout: this version resumes, shows, diagnoses and plots it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import powertrain.data
from powertrain import Result
from powertrain.storage import open_storage, signed
from powertrain.torch import TorchTrainer

KEPT = Path(__file__).resolve().parent.parent / "values" / "earlier_layout" / "run"


def double(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "y": batch["x"] * 2}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A copy of the run, with the trainer signed as if this user had written it."""
    path = Path(shutil.copytree(KEPT, tmp_path / "runs" / "earlier"))
    storage = open_storage(path)
    signed.put(storage, signed.sign(storage, "trainer.pickle", (path / "trainer.pickle").read_bytes()))
    return path


def command_line(*arguments: str) -> str:
    command = [sys.executable, "-c", "from powertrain.cli.main import main; main()", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_is_shown_diagnosed_and_plotted(path: Path, tmp_path: Path) -> None:
    shown = command_line("show", str(path))
    assert "earlier" in shown
    assert "checkpoint_000003" in shown
    assert json.loads(command_line("show", str(path), "--json"))["state"] == "failed"
    assert command_line("diagnose", str(path)).strip()
    result = Result.from_path(path)
    assert result.metrics is not None
    assert sorted(result.metrics_dataframe["training_iteration"]) == [1, 2, 3, 4]
    result.plot().savefig(tmp_path / "loss.png")
    assert (tmp_path / "loss.png").stat().st_size > 0


def test_it_is_resumed_where_it_was_with_the_function_that_it_kept(path: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"x": list(range(24))}), rows)
    trainer = TorchTrainer.restore(
        path,
        train_loop_config={"epochs": 2},
        datasets={"train": powertrain.data.read_parquet(rows).map_batches(double)},
    )
    result = trainer.fit()
    assert result.error is None
    assert result.path == str(path)
    # 24 rows are 3 steps of 2 ranks with 4 rows each, twice; three of the six were committed before.
    assert result.metrics_dataframe["training_iteration"].tolist()[-1] == 6
    assert result.checkpoint is not None
    assert Path(result.checkpoint.path).name == "checkpoint_000006"
