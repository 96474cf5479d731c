"""Training functions for stories about nodes: they go on until they are told "enough", and tell how they fare.

Each rank tells its process, its place and what it was forked from, by attempt and rank, and after each report how many
it has made.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import story

import powertrain
from powertrain import Checkpoint


def tell_place() -> tuple[int, int]:
    """Say where this rank is; returns its rank and the attempt."""
    context = powertrain.get_context()
    rank, attempt = context.get_world_rank(), context.get_attempt()
    place = {
        "pid": os.getpid(),
        "server": os.getppid(),
        "host": os.uname().nodename,
        "node_rank": context.get_node_rank(),
        "local_rank": context.get_local_rank(),
        "local_world_size": context.get_local_world_size(),
    }
    story.tell(f"place-{attempt}-{rank}", json.dumps(place))
    return rank, attempt


def tells_its_place(config: dict[str, Any]) -> None:
    """One report, and the end."""
    tell_place()
    powertrain.report({"step": 1})


def fails_at_its_place(config: dict[str, Any]) -> None:
    """An error of the user's, once both ranks have recorded their place."""
    tell_place()
    story.await_told("place-0-0", "place-0-1")
    raise ValueError("no good")


def reports_until_told(config: dict[str, Any]) -> None:
    """Every report has a share of every rank. Ranks do not wait for each other."""
    rank, attempt = tell_place()
    step = _restored(rank)
    while not story.told("enough"):
        time.sleep(config["pace"])
        step += 1
        with powertrain.checkpoint_dir() as directory:
            Path(directory, f"rank-{rank}").write_text(str(step))
            powertrain.report({"step": step}, checkpoint=Checkpoint.from_directory(directory))
        story.tell(f"steps-{attempt}-{rank}", str(step))


def _restored(rank: int) -> int:
    """The step of this rank's share; 0 for a rank that was not there."""
    checkpoint = powertrain.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as directory:
        saved = Path(directory, f"rank-{rank}")
        return int(saved.read_text()) if saved.exists() else 0


def counts_until_told(config: dict[str, Any]) -> None:
    """Registers what it keeps, so that the run saves it by itself."""
    rank, attempt = tell_place()
    clock = {"step": 0}
    powertrain.register_state(clock=clock)
    clock.update((powertrain.load_state() or {}).get("clock", {}))
    while not story.told("enough"):
        time.sleep(config["pace"])
        clock["step"] += 1
        powertrain.report({"step": clock["step"]})
        story.tell(f"steps-{attempt}-{rank}", str(clock["step"]))


def reads_until_told(config: dict[str, Any]) -> None:
    """``feeding.registers_its_state``, slowly until it is told "enough", then to the end of its epochs."""
    import feeding

    tell_place()
    feeding.registers_its_state({**config, "pace": 0.5, "pace_until": "enough"})


def reads_its_rows(config: dict[str, Any]) -> None:
    """Each rank reports the rows of two epochs, batch by batch."""
    tell_place()
    shard = powertrain.get_dataset_shard("train")
    for epoch in range(2):
        for batch in shard.iter_batches(batch_size=4, batch_format="numpy"):
            powertrain.report({"epoch": epoch, "ids": ",".join(map(str, batch["id"].tolist()))})


def imports_a_module_of_the_launch_directory(config: dict[str, Any]) -> None:
    """All ranks meet; each reports from where its module came, with a share of its own."""
    import torch
    import torch.distributed as dist
    import users_module

    rank, _ = tell_place()
    total = torch.ones(1)
    dist.all_reduce(total)
    with powertrain.checkpoint_dir() as directory:
        Path(directory, f"rank-{rank}").write_text(users_module.GREETING)
        powertrain.report(
            {"ranks": int(total), "module": users_module.__file__, "cwd": os.getcwd()},
            checkpoint=Checkpoint.from_directory(directory),
        )
