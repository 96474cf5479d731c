"""Training functions of the stories. Each is an ordinary function that a user could have written."""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import story

import powertrain as train
from powertrain import Checkpoint


def rank() -> int:
    return train.get_context().get_world_rank()


@contextlib.contextmanager
def saved(epoch: int) -> Iterator[Checkpoint]:
    """A checkpoint with a file of this rank's own that says which epoch is done."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, f"rank-{rank()}").write_text(str(epoch))
        yield Checkpoint.from_directory(directory)


def restored_epoch() -> int:
    """The first epoch that is still to do."""
    checkpoint = train.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as directory:
        return int(Path(directory, f"rank-{rank()}").read_text()) + 1


def improve(config: dict[str, Any]) -> dict[str, Any]:
    """The good case: a small model, a report and a checkpoint per epoch, a return value."""
    import torch

    model = train.torch.prepare_model(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=config.get("lr", 0.1))
    print(f"hello from rank {rank()}")
    for epoch in range(restored_epoch(), 3):
        loss = model(torch.ones(8, 4)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with saved(epoch) as checkpoint:
            train.report({"epoch": epoch, "rank_plus_epoch": rank() + epoch}, checkpoint)
    return {"rank": rank(), "world_size": train.get_context().get_world_size()}


def count_to_three() -> str:
    for step in range(1, 4):
        train.report({"step": step})
    return "counted"


def raise_beside_a_collective() -> None:
    """Rank 0 waits in an all_reduce that rank 1 never joins, because it fails first."""
    import torch
    import torch.distributed as dist

    train.report({"step": 1}, barrier=True)
    if train.get_context().get_world_size() > 1 and rank() == 0:
        story.tell("rank 0 is at the collective")
        dist.all_reduce(torch.ones(1))
        return
    if rank() == 1:
        story.await_told("rank 0 is at the collective")
    raise ValueError("shard 7 is empty")  # the line that must be named


def end_by(how: str) -> None:
    """One rank ends in a way no Python code can report."""
    if how == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "segfault":
        ctypes.string_at(0)
    elif how == "sys.exit(3)":
        sys.exit(3)
    elif how == "MemoryError":
        soft = 4 << 30
        resource.setrlimit(resource.RLIMIT_AS, (soft, soft))
        bytearray(64 << 30)


def die(config: dict[str, Any]) -> None:
    """Rank 1 (inline: the only one) ends badly; the others wait for it."""
    train.report({"step": 1}, barrier=True)
    if rank() == train.get_context().get_world_size() - 1:
        end_by(config["how"])
    train.collective.barrier()


def fill_memory(config: dict[str, Any]) -> None:
    """Rank 1 moves into a memory cgroup and takes more than it allows."""
    train.report({"step": 1}, barrier=True)
    if rank() == 1:
        Path(config["cgroup"], "cgroup.procs").write_text(str(os.getpid()))
        hoard = []
        while True:
            hoard.append(b"x" * (4 << 20))
    train.collective.barrier()


def recover(config: dict[str, Any]) -> str:
    """Five epochs with a checkpoint at the second; the last rank fails after the third, in the first attempt only."""
    first = restored_epoch()
    context = train.get_context()
    for epoch in range(first, 5):
        if epoch == 1:
            with saved(epoch) as checkpoint:
                train.report({"epoch": epoch}, checkpoint, barrier=True)
        else:
            train.report({"epoch": epoch}, barrier=True)
        if epoch == 2 and context.get_attempt() == 0 and rank() == context.get_world_size() - 1:
            if config["how"] == "raise":
                raise RuntimeError("the first attempt fails")
            end_by(config["how"])
    return f"attempt {context.get_attempt()} began at epoch {first}"


def save_when_asked() -> str:
    """Trains for ever, saves when the run asks for it, and returns at once where a checkpoint is there."""
    if train.get_checkpoint() is not None:
        train.report({"resumed": restored_epoch()})
        return "resumed"
    for epoch in range(1_000_000):
        if train.should_checkpoint():
            with saved(epoch) as checkpoint:
                train.report({"epoch": epoch, "saved": True}, checkpoint)
        if epoch == 3:
            story.tell(f"rank {rank()} trains")
        time.sleep(0.001)
    return "never"


def never_at_a_boundary() -> None:
    """Saves once, then works on without a report until it is killed; a resumed one returns at once."""
    if train.get_checkpoint() is not None:
        train.report({"resumed": restored_epoch()})
        return
    with saved(0) as checkpoint:
        train.report({"epoch": 0}, checkpoint, checkpoint_upload_mode="SYNC")
    story.tell(f"rank {rank()} trains", str(os.getpid()))
    while True:
        time.sleep(0.05)


def multiply() -> float:
    """Work that hangs in a child forked from a process whose thread pools are up."""
    import torch

    torch.set_num_threads(2)
    total = torch.ones(512, 512).mm(torch.ones(512, 512)).sum().item()
    train.report({"total": total})
    return float(total)


def meet_the_others() -> dict[str, Any]:
    context = train.get_context()
    train.collective.barrier()
    received = train.collective.broadcast_from_rank_zero({"from": rank(), "at": [1, 2]})
    if rank() == 1:
        story.tell("rank 1 comes to row 1")
    train.report({"step": 1}, barrier=True)
    rows_met = story.told("rank 1 comes to row 1") or context.get_world_size() == 1
    train.report({"only": rank()}, solo=True)
    train.report({"step": 2})
    return {"received": received, "rows_met": rows_met}


def one_rank_reports() -> None:
    """Rank 1 never reports; rank 0 waits until the run has gone on without it."""
    if rank() == 0:
        with saved(0) as checkpoint:
            train.report({"step": 1}, checkpoint, barrier=True)
        story.tell("rank 0 went on")
    story.await_told("rank 0 went on")


def report_oddities() -> None:
    import numpy
    import torch

    train.report(
        {
            "nan": math.nan,
            "infinity": math.inf,
            "numpy": numpy.float32(0.5),
            "tensor": torch.tensor(2),
            "nested": {"a": 1},
        }
    )


def report_until_stopped() -> str:
    step = 0
    while True:
        step += 1
        train.report({"step": step}, barrier=True)


def reduce_until_stopped() -> None:
    """Ranks that depend on each other in every step, and reports that wait for no other rank."""
    import torch
    import torch.distributed as dist

    step = 0
    while True:
        step += 1
        dist.all_reduce(torch.ones(1))
        train.report({"step": step})


def go_on_from_elsewhere() -> int:
    return restored_epoch()


def describe_place() -> dict[str, Any]:
    context = train.get_context()
    print("to the log")
    return {"cwd": os.getcwd(), "launch_dir": context.launch_dir, "hook": os.environ.get("STORY_HOOK")}


def compare_places() -> None:
    """Tell what the context says of each rank, beside what its launcher says."""
    context = train.get_context()
    told = {
        "RANK": context.get_world_rank(),
        "WORLD_SIZE": context.get_world_size(),
        "LOCAL_RANK": context.get_local_rank(),
        "LOCAL_WORLD_SIZE": context.get_local_world_size(),
        "GROUP_RANK": context.get_node_rank(),
    }
    launcher = {name: int(os.environ[name]) for name in told}
    story.tell(f"place-{context.get_world_rank()}", json.dumps({"told": told, "launcher": launcher}))
