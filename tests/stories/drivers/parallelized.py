"""Training functions over a mesh of ranks: tensor parallel, and as a pipeline."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import story
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import powertrain

#: Rows of each optimizer step.
GLOBAL_BATCH = 8
WIDTH = 6
LAYERS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, dtype=torch.float64)
        self.down = nn.Linear(2 * WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = rows + self.down(torch.tanh(self.up(rows)))
        return result


class Net(nn.Module):
    """Layers by number. A stage of a pipeline has some of them, under the names that they have in the whole."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.ModuleDict({str(number): Block() for number in range(LAYERS)})

    def stage(self, number: int, stages: int) -> Net:
        """Delete all layers but those of this stage."""
        for layer in range(LAYERS):
            if layer * stages // LAYERS != number:
                del self.layers[str(layer)]
        return self

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            rows = layer(rows)
        return rows


def batch_of(step: int, part: int = 0, parts: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of a step that belong to one of so many data parallel ranks."""
    generator = torch.Generator().manual_seed(step)
    rows = torch.rand(GLOBAL_BATCH, 2 * WIDTH, dtype=torch.float64, generator=generator).chunk(parts)[part]
    return rows[:, :WIDTH], rows[:, WIDTH:]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def net_of_one_process(steps: int) -> Net:
    """What a single process gets that trains on the whole batches."""
    model = Net()
    optimizer = optimizer_of(model)
    for step in range(steps):
        rows, targets = batch_of(step)
        nn.functional.mse_loss(model(rows), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def tensor_parallel(config: dict[str, Any]) -> None:
    """Layers cut over the mesh's second dimension, batches and the cut layers over its first."""
    mesh = init_device_mesh("cpu", config["mesh"], mesh_dim_names=("dp", "tp"))
    plan = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
    model = parallelize_module(Net(), mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])

    def train(step: int) -> float:
        rows, targets = batch_of(step, mesh.get_local_rank("dp"), mesh["dp"].size())
        loss = nn.functional.mse_loss(model(rows), targets)
        loss.backward()
        return loss.item()

    _train(config, model, train)


def pipeline(config: dict[str, Any]) -> None:
    """Stages over the mesh's second dimension, replicas of each over its first."""
    mesh = init_device_mesh("cpu", config["mesh"], mesh_dim_names=("dp", "pp"))
    model = Net().stage(mesh.get_local_rank("pp"), mesh["pp"].size())
    gradients = _pipelined(model, mesh, mesh["pp"])

    def train(step: int) -> float:
        loss = gradients(step)
        # DistributedDataParallel cannot count the micro-batches of torch's schedules.
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, group=mesh.get_group("dp"))
            parameter.grad.div_(mesh["dp"].size())
        return loss

    _train(config, model, train)


def tensor_parallel_pipeline(config: dict[str, Any]) -> None:
    """Stages over the mesh's first dimension, each of them cut over its second."""
    mesh = init_device_mesh("cpu", config["mesh"], mesh_dim_names=("pp", "tp"))
    model = Net().stage(mesh.get_local_rank("pp"), mesh["pp"].size())
    plan = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    _train(config, model, _pipelined(model, mesh, mesh["pp"]))


def _pipelined(model: nn.Module, mesh: DeviceMesh, stages: DeviceMesh) -> Callable[[int], float]:
    """What makes the gradients of a step, as one stage of the pipeline."""
    number, count = stages.get_local_rank(), stages.size()
    stage = PipelineStage(model, number, count, torch.device("cpu"), group=stages.get_group())
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=nn.functional.mse_loss)
    replicas = mesh["dp"] if "dp" in (mesh.mesh_dim_names or ()) else None

    def train(step: int) -> float:
        part, parts = (replicas.get_local_rank(), replicas.size()) if replicas is not None else (0, 1)
        rows, targets = batch_of(step, part, parts)
        losses: list[torch.Tensor] = []
        if count == 1:
            schedule.step(rows, target=targets, losses=losses)
        elif number == 0:
            schedule.step(rows)
        elif number == count - 1:
            schedule.step(target=targets, losses=losses)
        else:
            schedule.step()
        return torch.stack(losses).mean().item() if losses else 0.0

    return train


def _train(config: dict[str, Any], model: nn.Module, train: Callable[[int], float]) -> None:
    """Save with each step. In a run that ``kills``, rank 1 dies once, when it has done three steps."""
    optimizer = optimizer_of(model)
    saved = powertrain.load_state(model=model, optimizer=optimizer)
    rank = powertrain.get_context().get_world_rank()
    for step in range(saved["step"] + 1 if saved else 0, config["steps"]):
        if config.get("kills") and rank == 1 and step == 3 and not story.told("killed"):
            story.tell("killed")
            os.kill(os.getpid(), signal.SIGKILL)
        loss = train(step)
        optimizer.step()
        optimizer.zero_grad()
        state = powertrain.save_state(model=model, optimizer=optimizer, step=step)
        powertrain.report({"step": step, "loss": loss, "resumed": bool(saved)}, checkpoint=state)
