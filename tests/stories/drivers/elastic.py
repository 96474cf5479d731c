"""Training functions that change their number of workers, or are asked to leave, while they train."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import story
import torch
import torch.distributed as dist

import powertrain
from powertrain import Checkpoint
from powertrain.torch import prepare_model

#: Samples of each optimizer step: no world size from 3 to 9 divides it.
GLOBAL_BATCH = 10
FEATURES = 4
#: Seconds for a step of a run that waits for another size.
_SLOW = 0.5


def batch_of(step: int, start: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples of the step's global batch: a function of the step and the sample's place in it, and of nothing else."""
    index = torch.arange(start, start + size, dtype=torch.float64) + 1000.0 * step
    inputs = torch.stack([torch.sin(index * (k + 1)) for k in range(FEATURES)], dim=1)
    return inputs, torch.cos(index).unsqueeze(1)


def new_model() -> torch.nn.Linear:
    model = torch.nn.Linear(FEATURES, 1, dtype=torch.float64)
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.zero_()
    return model


def losses_of_one_process(steps: int) -> list[float]:
    """What a single process gets that sees each global batch whole."""
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(steps):
        inputs, targets = batch_of(step, 0, GLOBAL_BATCH)
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def linear_regression(config: dict[str, Any]) -> None:
    """Trains on the same global batches at any world size. ``kills`` has steps at which rank 1 dies, each of them once;
    ``waits`` has by step what must have been told before it; from step ``until_size[0]`` on it is slow until there are
    ``until_size[1]`` workers. Once it is told "enough" it no longer keeps its pace."""
    context = powertrain.get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    slow_from, wanted_size = config.get("until_size", (config["steps"], size))
    model = prepare_model(new_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    clock = {"step": 0}
    saves_itself = config["saves"] == "registered"
    if saves_itself:
        powertrain.register_state(model=model, optimizer=optimizer, clock=clock)
        clock.update((powertrain.load_state() or {}).get("clock", {}))
    else:
        clock["step"] = _restore(model, optimizer)
    plan = context.batch_plan(GLOBAL_BATCH, max_micro_batch=config.get("micro"))
    while clock["step"] < config["steps"]:
        step = clock["step"]
        if rank == 1 and step in config["kills"] and not story.told(f"killed-{step}"):
            story.tell(f"killed-{step}")
            os.kill(os.getpid(), signal.SIGKILL)
        story.await_told(*config.get("waits", {}).get(str(step), ()))
        total = _train_step(model, optimizer, plan, step)
        if not story.told("enough"):
            time.sleep(_SLOW if step >= slow_from and size != wanted_size else config["pace"])
        clock["step"] = step + 1
        metrics = {"step": step, "loss": total / GLOBAL_BATCH, "samples": plan.samples}
        if rank == 0:
            story.tell(f"step-{step}")
        save = step % config["every"] == config["every"] - 1
        by_hand = save and rank == 0 and not saves_itself
        with _saved(model, optimizer, clock) if by_hand else contextlib.nullcontext() as checkpoint:
            if save and saves_itself:
                checkpoint = powertrain.save_state()
            powertrain.report(metrics, checkpoint=checkpoint)


def _train_step(model: Any, optimizer: Any, plan: Any, step: int) -> float:
    """One optimizer step; returns the summed loss over the whole global batch."""
    optimizer.zero_grad()
    total = torch.zeros(1, dtype=torch.float64)
    for micro in plan:
        inputs, targets = batch_of(step, micro.start, micro.size)
        with contextlib.nullcontext() if micro.is_last else model.no_sync():
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            (loss * micro.loss_scale).backward()
        total += loss.detach() * micro.samples
    optimizer.step()
    dist.all_reduce(total)
    return float(total)


@contextlib.contextmanager
def _saved(model: Any, optimizer: Any, clock: dict[str, int]) -> Any:
    with tempfile.TemporaryDirectory() as directory:
        state = {
            "model": model.module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "step": clock["step"],
        }
        torch.save(state, Path(directory, "state.pt"))
        yield Checkpoint.from_directory(directory)


def _restore(model: Any, optimizer: Any) -> int:
    checkpoint = powertrain.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as directory:
        state = torch.load(Path(directory, "state.pt"))
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def until_told(config: dict[str, Any]) -> None:
    """Steps until it is asked to leave, or until what ``until`` names is told; every rank tells its process, and after
    each step how many it has made."""
    context = powertrain.get_context()
    rank = context.get_world_rank()
    state = {"steps": 0}
    if config["saves"] == "registered":
        powertrain.register_state(state=state)
    checkpoint = powertrain.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as directory:
            saved = Path(directory, "steps")
            state["steps"] = int(saved.read_text()) if saved.exists() else 0
    story.tell(f"pid-{rank}-{context.get_attempt()}", str(os.getpid()))
    for _ in range(config.get("steps", 100_000)):
        go_on = torch.tensor([float(not story.told(config.get("until", "never")))])
        dist.all_reduce(go_on)
        if go_on < context.get_world_size():
            return
        time.sleep(0.005)
        state["steps"] += 1
        story.tell(f"steps-{rank}", str(state["steps"]))
        metrics = {"steps": state["steps"]}
        if _is_to_save(config["saves"]):
            _report_steps(metrics, state["steps"])
        else:
            powertrain.report(metrics)


def _is_to_save(idiom: str) -> bool:
    if idiom == "asks":
        return powertrain.should_checkpoint()
    return idiom == "ray's idiom" and powertrain.get_preemption_info() is not None


def _report_steps(metrics: dict[str, Any], steps: int) -> None:
    with powertrain.checkpoint_dir() as directory:
        Path(directory, "steps").write_text(str(steps))
        powertrain.report(metrics, checkpoint=Checkpoint.from_directory(directory))


def loader_until_told() -> None:
    """As ``until_told``, fed by a process of a DataLoader's."""
    from torch.utils.data import DataLoader

    from powertrain.torch import prepare_data_loader

    rank = powertrain.get_context().get_world_rank()
    numbers: Any = range(1_000_000)
    loader = prepare_data_loader(DataLoader(numbers, batch_size=1, num_workers=1))
    for steps, batch in enumerate(loader, start=1):
        dist.all_reduce(batch)
        time.sleep(0.005)
        story.tell(f"steps-{rank}", str(steps))
        if powertrain.should_checkpoint():
            _report_steps({"steps": steps}, steps)
        else:
            powertrain.report({"steps": steps})


def count_workers() -> int:
    return powertrain.get_context().get_world_size()
