"""A training function that ends in every way a run can end, and what its result says, in words that can be compared."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
import story
from pyarrow.fs import FileSystem

import powertrain
from powertrain.checkpoint import Checkpoint
from powertrain.result.result import Result

#: What is called with arguments rather than read.
METHODS = {"from_path", "get_best_checkpoint", "open_return_value", "plot"}


def end_as(config: dict[str, Any]) -> dict[str, Any] | None:
    """Reads, reports and saves three times; then it returns, fails, is preempted, or goes on until it is stopped."""
    rank = powertrain.get_context().get_world_rank()
    shard = powertrain.get_dataset_shard("train")
    for step, _ in enumerate(shard.iter_batches(batch_size=2), start=1):
        values = {
            "loss": math.nan if step == 2 else 1 / step,
            "n": {"step": step, "rank": rank},
            "note": "<b>",
        }
        with powertrain.checkpoint_dir() as directory:
            Path(directory, f"rank-{rank}").write_text(str(step))
            powertrain.report(values, checkpoint=Checkpoint.from_directory(directory), barrier=True)
    if config["how"] == "finished":
        return {"rank": rank, "path": Path("somewhere")}
    if config["how"] == "failed":
        if rank == 1:
            raise ValueError("shard 7 is empty")
        return {"rank": rank}
    if config["how"] == "preempted" and rank == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    story.tell(f"rank {rank} goes on")
    while True:
        powertrain.report({"steps": 1}, barrier=True)


def said_by(result: Result) -> dict[str, str]:
    """Every public attribute, and what a notebook shows, as text."""
    names = {name for name in (*dir(Result), *vars(result)) if not name.startswith("_")} - METHODS
    names.remove("config")  # it is the script's own: a run does not keep it
    said = {name: _in_words(getattr(result, name)) for name in sorted(names)}
    said["the best"] = repr(result.get_best_checkpoint("loss", "min"))
    said["repr"] = repr(result)
    said["html"] = result._repr_html_()
    return said


def _in_words(value: Any) -> str:
    if isinstance(value, powertrain.TrainingFailedError):
        failures = {
            rank: msgspec.to_builtins(failed.failure) for rank, failed in value.worker_failures.items()
        }
        return f"{value}\n{failures}"
    if hasattr(value, "to_csv"):
        return str(value.to_csv())
    if isinstance(value, FileSystem):
        return str(value.type_name)
    return repr(value)


if __name__ == "__main__":
    print(json.dumps([said_by(Result.from_path(path)) for path in sys.argv[1:]]))
