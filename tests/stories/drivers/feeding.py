"""Training functions that read a dataset and report which rows they got, in each of the usual ways to write the loop.

``kills`` has (attempt, step of that attempt) at which rank 1 dies; ``until_size`` lists by attempt, the last for all
later ones, a row and a number of workers: from that row on, steps are slow while there are not so many. The rows of
each step are written to a file of the rank, with the number of the report that they belong to: a message would die with
the rank that is killed.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import story
import torch
import torch.distributed as dist

import powertrain
from powertrain import Checkpoint
from powertrain.torch import prepare_data_loader
from powertrain.worker.session import current

_SLOW_STEP_S = 3.0


class Steps:
    """What all the loops do after each batch, and what they keep."""

    def __init__(self, config: dict[str, Any]) -> None:
        context = powertrain.get_context()
        self.rank, self.attempt = context.get_world_rank(), context.get_attempt()
        self.config = config
        self.made = 0

    def step(self, shard: Any, batch: Any, **more: Any) -> dict[str, Any]:
        """Train on a batch, in effect: all ranks meet, and the one to die does."""
        self.made += 1
        dist.all_reduce(torch.ones(1))  # from here on every rank has made its report of the step before
        if self.rank == 1 and [self.attempt, self.made] in self.config["kills"]:
            os.kill(os.getpid(), signal.SIGKILL)
        sizes = self.config.get("until_size", [(float("inf"), 0)])
        slow_from, workers = sizes[min(self.attempt, len(sizes) - 1)]
        if current("feeding").row >= slow_from and dist.get_world_size() != workers:
            time.sleep(_SLOW_STEP_S)
        elif not story.told(self.config.get("pace_until", "never")):
            time.sleep(self.config.get("pace", 0.0))
        ids = (batch["id"] if isinstance(batch, dict) else batch).tolist() if shard.weight > 0 else []
        line = {"row": current("feeding").row + 1, "ids": ids, **more}
        with open(story.directory() / f"fed-{self.attempt}-{self.rank}.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")
        return {"rows": len(ids), **more}

    def checkpoint(self, **state: Any) -> Checkpoint | None:
        """A checkpoint of these values, from rank 0."""
        if self.rank != 0:
            return None
        directory = powertrain.checkpoint_dir()
        torch.save(state, Path(directory, "state.pt"))
        return Checkpoint.from_directory(directory)


def restored() -> dict[str, Any]:
    """What :meth:`Steps.checkpoint` has kept."""
    checkpoint = powertrain.get_checkpoint()
    if checkpoint is None:
        return {}
    with checkpoint.as_directory() as directory:
        state: dict[str, Any] = torch.load(Path(directory, "state.pt"))
        return state


def counts_epochs_by_the_shard(config: dict[str, Any]) -> None:
    """``shard.epochs(n)``; saves every few steps."""
    steps = Steps(config)
    restored()
    shard = powertrain.get_dataset_shard("train")
    for epoch in shard.epochs(config["epochs"]):
        for batch in shard.iter_torch_batches(global_batch_size=config["batch"]):
            metrics = steps.step(shard, batch, epoch=epoch)
            save = steps.made % config["every"] == 0
            powertrain.report(metrics, checkpoint=steps.checkpoint(epoch=epoch) if save else None)


def saves_at_epoch_ends(config: dict[str, Any]) -> None:
    """seeds/001: starts at the epoch after the saved one; a new iterable for each epoch."""
    steps = Steps(config)
    start = restored().get("epoch", -1) + 1
    shard = powertrain.get_dataset_shard("train")
    for epoch in range(start, config["epochs"]):
        for batch in shard.iter_torch_batches(batch_size=config["batch"]):
            powertrain.report(steps.step(shard, batch, epoch=shard.epoch))
        powertrain.report({}, checkpoint=steps.checkpoint(epoch=epoch))


def repeats_the_saved_epoch(config: dict[str, Any]) -> None:
    """seeds/004: starts at the saved epoch again, and saves only every second one, at its end."""
    steps = Steps(config)
    start = restored().get("epoch", 0)
    shard = powertrain.get_dataset_shard("train")
    for epoch in range(start, config["epochs"]):
        for batch in shard.iter_torch_batches(batch_size=config["batch"]):
            powertrain.report(steps.step(shard, batch, epoch=shard.epoch))
        if epoch % 2 == 0:
            powertrain.report({}, checkpoint=steps.checkpoint(epoch=epoch))


def one_loader_for_all_epochs(config: dict[str, Any]) -> None:
    """seeds/003: the iterable is made once; saves within epochs and goes on in the same one."""
    steps = Steps(config)
    start = restored().get("epoch", 0)
    shard = powertrain.get_dataset_shard("train")
    loader = shard.iter_torch_batches(batch_size=config["batch"])
    for epoch in range(start, config["epochs"]):
        for batch in loader:
            metrics = steps.step(shard, batch, epoch=epoch)
            save = steps.made % config["every"] == 0
            powertrain.report(metrics, checkpoint=steps.checkpoint(epoch=epoch) if save else None)


def keeps_the_position_by_hand(config: dict[str, Any]) -> None:
    """seeds/003: ``state_dict()`` in the checkpoint, ``get_dataset_shard(name, state_dict=...)`` afterwards."""
    steps = Steps(config)
    saved = restored()
    shard = powertrain.get_dataset_shard("train", state_dict=saved.get("position"))
    loader: Any = shard.iter_torch_batches(batch_size=config["batch"])
    for epoch in range(saved.get("epoch", 0), config["epochs"]):
        for batch in loader:
            metrics = steps.step(shard, batch, epoch=epoch)
            checkpoint = None
            if steps.made % config["every"] == 0:
                checkpoint = steps.checkpoint(epoch=epoch, position=loader.state_dict())
            powertrain.report(metrics, checkpoint=checkpoint)


def breaks_off_each_epoch(config: dict[str, Any]) -> None:
    """seeds/000: so many steps of each epoch, then the next one."""
    steps = Steps(config)
    start = restored().get("epoch", -1) + 1
    shard = powertrain.get_dataset_shard("train")
    for epoch in range(start, config["epochs"]):
        for step, batch in enumerate(shard.iter_torch_batches(batch_size=config["batch"])):
            if step >= config["steps"]:
                break
            powertrain.report(steps.step(shard, batch, epoch=shard.epoch))
        powertrain.report({}, checkpoint=steps.checkpoint(epoch=epoch))


def registers_its_state(config: dict[str, Any]) -> None:
    """The run saves by itself, with every few reports and when it is resized."""
    steps = Steps(config)
    clock = {"step": 0}
    powertrain.register_state(clock=clock)
    clock.update((powertrain.load_state() or {}).get("clock", {}))
    shard = powertrain.get_dataset_shard("train")
    for epoch in shard.epochs(config["epochs"]):
        for batch in shard.iter_torch_batches(global_batch_size=config["batch"]):
            clock["step"] += 1
            if steps.rank == 0:
                story.tell(f"step-{clock['step']}")
            powertrain.report(steps.step(shard, batch, epoch=epoch))


def reads_a_torch_loader(config: dict[str, Any]) -> None:
    """A plain DataLoader behind ``prepare_data_loader``, with processes of its own."""
    steps = Steps(config)
    restored()
    dataset: Any = torch.arange(config["rows"])
    plain: Any = torch.utils.data.DataLoader(
        dataset, batch_size=config["batch"], shuffle=True, num_workers=1, persistent_workers=True
    )
    loader: Any = prepare_data_loader(plain)
    for epoch in loader.epochs(config["epochs"]):
        for batch in loader:
            metrics = steps.step(loader, batch, epoch=epoch)
            save = steps.made % config["every"] == 0
            powertrain.report(metrics, checkpoint=steps.checkpoint(epoch=epoch) if save else None)


def never_asks_for_its_checkpoint(config: dict[str, Any]) -> None:
    steps = Steps(config)
    shard = powertrain.get_dataset_shard("train")
    for batch in shard.iter_torch_batches(batch_size=config["batch"]):
        metrics = steps.step(shard, batch, epoch=shard.epoch)
        powertrain.report(metrics, checkpoint=steps.checkpoint(epoch=0))


def evaluates_between(config: dict[str, Any]) -> None:
    """Two datasets: one split, one whole on every rank, read within the other's epoch."""
    steps = Steps(config)
    restored()
    shard, held_out = powertrain.get_dataset_shard("train"), powertrain.get_dataset_shard("eval")
    for epoch in shard.epochs(config["epochs"]):
        for batch in shard.iter_torch_batches(global_batch_size=config["batch"]):
            metrics = steps.step(shard, batch, epoch=epoch)
            checkpoint = None
            if steps.made % config["every"] == 0:
                evaluated = [i for b in held_out.iter_torch_batches(batch_size=7) for i in b["id"].tolist()]
                metrics["evaluated"] = sorted(evaluated)
                checkpoint = steps.checkpoint(epoch=epoch)
            powertrain.report(metrics, checkpoint=checkpoint)


def raises_in_a_map(row: dict[str, Any]) -> dict[str, Any]:
    if row["id"] == 33:
        raise KeyError("no such label")  # the line that is to be named
    return row


def reads_until_it_fails(config: dict[str, Any]) -> None:
    shard = powertrain.get_dataset_shard("train")
    for batch in shard.iter_torch_batches(batch_size=4):
        dist.all_reduce(torch.ones(1))
        powertrain.report({"ids": batch["id"].tolist()})


def looks_at_a_batch_first(config: dict[str, Any]) -> None:
    """Builds its model by the shape of a first batch, before the loop over epochs."""
    restored()
    shard = powertrain.get_dataset_shard("train")
    ahead = shard.peek(global_batch_size=config["batch"])
    first = next(iter(shard.iter_torch_batches(global_batch_size=config["batch"])))
    assert ahead["id"].tolist() == first["id"].tolist()
    counts_epochs_by_the_shard(config)
