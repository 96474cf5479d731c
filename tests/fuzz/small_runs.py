"""Two small real runs whose directories hold every kind of file that a run leaves.

``finished`` trained on two ranks to its end: journal, metric segments, telemetry, checkpoints with metadata and a
validation, summary, return value, logs. ``killed`` trained in one process that died: metrics and telemetry are still
in the files that grow, and the lease was never given back.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import powertrain
from powertrain.checkpoint import committed
from powertrain.checkpoint.manifest import Validation
from powertrain.run.metrics import segments, store
from powertrain.storage import open_storage

FINISHED, KILLED = "finished", "killed"
ROWS = 12


def train(config: dict[str, Any]) -> dict[str, Any]:
    """Report some rows with metrics of several types, every fourth with a checkpoint."""
    rank = powertrain.get_context().get_world_rank()
    for row in range(1, ROWS + 1):
        metrics: dict[str, Any] = {
            "loss": 1 / row,
            "count": row,
            "note": f"row {row}",
            "in": {"deep": row / 2},
        }
        if row % 5 == 0:
            metrics["mixed"] = [row, None]
        if row % 4 == 0:
            _report_with_checkpoint(metrics, rank)
        else:
            powertrain.report(metrics)
        if config["dies_at"] == row:
            _wait_for_files(Path(config["path"]))
            os._exit(9)
    print("rank", rank, "has finished")
    return {"rows": ROWS}


def _report_with_checkpoint(metrics: dict[str, Any], rank: int) -> None:
    with powertrain.checkpoint_dir() as directory:
        Path(directory, f"model-{rank}").write_bytes(bytes(range(64)))
        checkpoint = powertrain.Checkpoint.from_directory(directory)
        checkpoint.set_metadata({"rank": rank})
        powertrain.report(metrics, checkpoint=checkpoint)


def _wait_for_files(run: Path) -> None:
    """Until what grows has been written, and a checkpoint is committed."""
    wanted = ("metrics/*.open", "telemetry/*.open", "checkpoints/*/.powertrain-manifest.json")
    deadline = time.monotonic() + 30
    while not all(any(run.glob(pattern)) for pattern in wanted) and time.monotonic() < deadline:
        time.sleep(0.05)


def trainer(root: Path, name: str, workers: int, dies_at: int = 0) -> powertrain.DataParallelTrainer:
    """The trainer of one of the runs."""
    return powertrain.DataParallelTrainer(
        train,
        train_loop_config={"dies_at": dies_at, "path": str(root / name)},
        scaling_config=powertrain.ScalingConfig(num_workers=workers),
        run_config=powertrain.RunConfig(
            name=name,
            storage_path=str(root),
            checkpoint_config=powertrain.CheckpointConfig(
                checkpoint_score_attribute="loss", checkpoint_score_order="min"
            ),
            report=False,  # no reader opens it
        ),
    )


@contextlib.contextmanager
def _small_batches() -> Iterator[None]:
    """So that a few points make several batches, most of them with a summary."""
    before = segments.BATCH_POINTS, store.SEGMENT_POINTS
    segments.BATCH_POINTS, store.SEGMENT_POINTS = 5, 6
    try:
        yield
    finally:
        segments.BATCH_POINTS, store.SEGMENT_POINTS = before


def record(root: Path) -> None:
    """Make both runs below ``root``. In this process, but for the one that dies."""
    with _small_batches():
        trainer(root, FINISHED, workers=2).fit()
    storage = open_storage(root / FINISHED)
    name = committed.committed(storage)[0].name
    committed.record_validation(storage, name, Validation(status="VALIDATED", metrics={"accuracy": 0.5}))
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        trainer(root, KILLED, workers=0, dies_at=9).fit()
        os._exit(1)
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) != 9:
        sys.exit("the run that was to die did not")
    _wait_for_clearing(root / KILLED / ".staging")


def _wait_for_clearing(staging: Path) -> None:
    """Until the process that clears up after the one that died has done so: nothing changes any more then."""
    deadline = time.monotonic() + 30
    while any(staging.glob("*")):
        if time.monotonic() > deadline:
            sys.exit(f"{staging} was not cleared")
        time.sleep(0.05)
