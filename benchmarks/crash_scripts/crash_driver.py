"""The run that benchmarks/crash_matrix.py kills: an ordinary script with identifiable checkpoints.

    python benchmarks/crash_scripts/crash_driver.py STORAGE [--workers 2] [--rows 5] [--mebibytes 3] [--dies RANK]

Every rank saves in every row, and every line of every file names its row, rank and file name. Restarted with the same
storage the script resumes from the newest checkpoint, after it has read all of it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import powertrain
from powertrain import (
    Checkpoint,
    CheckpointConfig,
    DataParallelTrainer,
    RunConfig,
    ScalingConfig,
    UserCallback,
)
from powertrain.run.events import Committed
from powertrain.testing import faults

NAME = "run"
KEPT = 2
#: The row after whose report a rank kills itself, if requested.
DIES_AFTER_ROW = 2
#: Timeout for a commit; a checkpoint lost by a fault never arrives.
_COMMITTED_WITHIN = 3.0


# --------------------------------------------------------------------------- content that can be known again


def files_of(row: int, rank: int, mebibytes: float) -> dict[str, bytes]:
    """Return the files of a rank in a row. Ranks have one name in common: the lowest rank's file is kept."""
    sizes = {
        f"rank-{rank}/state.txt": 300,
        f"rank-{rank}/deep/er/weights.bin": round(mebibytes * 2**20 / (1 + rank)),
        "shared.txt": 100,
    }
    return {name: _content(row, rank, name, size) for name, size in sizes.items()}


def _content(row: int, rank: int, name: str, size: int) -> bytes:
    line = f"row {row} rank {rank} {name}\n".encode()
    return (line * (size // len(line) + 1))[:size]


def wrong_in(directory: Path, row: int, workers: int, mebibytes: float) -> list[str]:
    """Return one sentence for each file of the checkpoint of ``row`` that differs from the saved content."""
    expected: dict[str, bytes] = {}
    for rank in reversed(range(max(1, workers))):
        expected |= files_of(row, rank, mebibytes)
    wrong = []
    for name, content in expected.items():
        file = directory / name
        if not file.is_file():
            wrong.append(f"{name} of row {row} is missing")
        elif file.read_bytes() != content:
            wrong.append(f"{name} of row {row} has other content, beginning with {file.read_bytes()[:40]!r}")
    return wrong


# --------------------------------------------------------------------------- the training function


def save_every_row(config: dict[str, Any]) -> None:
    """Resume from the newest checkpoint, and save in every remaining row."""
    context = powertrain.get_context()
    rank, workers = context.get_world_rank(), context.get_world_size()
    start = _restored(rank, workers, config["mebibytes"])
    faults.note(f"rank {rank} goes on after row {start}")
    for row in range(start + 1, config["rows"] + 1):
        faults.note(f"row {row} begins")
        with _directory(row, rank) as directory:
            for name, content in files_of(row, rank, config["mebibytes"]).items():
                Path(directory, name).parent.mkdir(parents=True, exist_ok=True)
                Path(directory, name).write_bytes(content)
            _report(row, Checkpoint(directory))
        if row == DIES_AFTER_ROW and start == 0 and config["dies"] is not None:
            _one_dies(Path(config["storage"]).parent, rank, workers, config["dies"])
        if config["paced"]:
            # The checkpoint that a run resumed from may be kept as long as it runs.
            _await_settled(Path(context.get_trial_dir(), "checkpoints"), row, row - KEPT if start == 0 else 0)


def _restored(rank: int, workers: int, mebibytes: float) -> int:
    """Return the row of the checkpoint to resume from, after verifying its content; 0 for none."""
    checkpoint = powertrain.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as directory:
        row = int(Path(directory, f"rank-{rank}", "state.txt").read_text().split()[1])
        wrong = wrong_in(Path(directory), row, workers, mebibytes)
    if wrong:
        raise RuntimeError(f"The checkpoint to go on from is not what was saved: {'; '.join(wrong)}.")
    return row


@contextlib.contextmanager
def _directory(row: int, rank: int) -> Iterator[str]:
    """Return a directory to save in: one rank uses Powertrain's, the other a temporary one."""
    if hasattr(powertrain, "checkpoint_dir") and (row + rank) % 2:
        yield powertrain.checkpoint_dir()
    else:
        with tempfile.TemporaryDirectory() as directory:
            yield directory


def _report(row: int, checkpoint: Checkpoint) -> None:
    """Report a row; odd rows wait for the commit if this version supports it."""
    modes = getattr(powertrain, "CheckpointUploadMode", None)
    if modes is None or row % 2 == 0:
        powertrain.report({"row": row}, checkpoint)
    else:
        powertrain.report({"row": row}, checkpoint, checkpoint_upload_mode=modes.SYNC)
        faults.note(f"committed {row}")


def _one_dies(place: Path, rank: int, workers: int, victim: int) -> None:
    """Kill one rank after all reports have returned; the others stop working."""
    (place / f"returned-{rank}").touch()
    while not all((place / f"returned-{other}").exists() for other in range(workers)):
        time.sleep(0.001)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def _await_settled(checkpoints: Path, row: int, gone: int) -> None:
    """Wait until ``row`` is committed and the checkpoint of row ``gone`` is deleted: saves are not to overlap."""
    deadline = time.monotonic() + _COMMITTED_WITHIN
    while time.monotonic() < deadline:
        committed = any(checkpoints.glob(f"checkpoint_{row:06d}*/.powertrain-manifest.json"))
        if committed and not any(checkpoints.glob(f"checkpoint_{gone:06d}*")):
            return
        time.sleep(0.005)


# --------------------------------------------------------------------------- the script


class Announcer(UserCallback):
    """Callback that records each announced commit."""

    def on_event(self, run_context: Any, event: Any) -> None:
        if isinstance(event, Committed):
            faults.note(f"committed {event.row}")


def fit(
    storage: Path, *, workers: int, rows: int, mebibytes: float, dies: int | None = None, paced: bool = True
) -> None:
    """Train to the last row, resuming from the storage."""
    DataParallelTrainer(
        save_every_row,
        train_loop_config={
            "rows": rows,
            "mebibytes": mebibytes,
            "dies": dies,
            "paced": paced,
            "storage": str(storage),
        },
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            name=NAME,
            storage_path=str(storage),
            checkpoint_config=CheckpointConfig(num_to_keep=KEPT),
            callbacks=[Announcer()],
        ),
    ).fit()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Saves in every row; goes on where it was killed.")
    parser.add_argument("storage", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rows", type=int, default=5)
    parser.add_argument("--mebibytes", type=float, default=3.0)
    parser.add_argument("--dies", type=int, metavar="RANK", help=f"kills itself after row {DIES_AFTER_ROW}")
    given = parser.parse_args()
    fit(given.storage, workers=given.workers, rows=given.rows, mebibytes=given.mebibytes, dies=given.dies)


if __name__ == "__main__":
    main()
