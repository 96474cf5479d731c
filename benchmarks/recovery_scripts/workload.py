"""The training that every launcher runs: a small model, steps of about 20 ms, a checkpoint every 20 steps.

A step waits instead of computing, so that two cores are enough for two ranks; the all-reduce is real.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from diary import STEPPED, Diary

STEP_SECONDS = 0.02
CHECKPOINT_EVERY = 20
#: Maximum training time, in case the benchmark itself has died.
LAST_STEP = 20_000


def new_model() -> torch.nn.Module:
    """Return a model, the same on every rank and attempt."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))


def new_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def steps_from(first: int, diary: Diary) -> Iterator[int]:
    """Yield the step numbers until the benchmark requests the end; all ranks end at the same one."""
    for step in range(first, LAST_STEP + 1):
        enough = torch.tensor([diary.asks_to_stop()], dtype=torch.int32)
        dist.all_reduce(enough, op=dist.ReduceOp.MAX)
        if enough.item():
            return
        yield step


def take_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, diary: Diary, step: int) -> None:
    """Take one optimizer step of about :data:`STEP_SECONDS`, recorded in the diary."""
    loss = model(torch.randn(32, 64)).square().mean()
    time.sleep(STEP_SECONDS)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    diary.write(STEPPED, step)


def save(file: str | Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write the state after ``step`` atomically to ``file``."""
    unfinished = f"{file}.unfinished"
    state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    torch.save(state, unfinished)
    os.replace(unfinished, file)


def load(file: str | Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Restore the state of :func:`save`; return its step."""
    state = torch.load(file, weights_only=True)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])
