"""Training functions whose steps are looked at afterwards. Most of them do without torch: reports are their steps."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import story

import powertrain as train


def steps(config: dict[str, Any]) -> None:
    """So many steps of a few milliseconds each."""
    rank = train.get_context().get_world_rank()
    for number in range(config.get("steps", 150)):
        time.sleep(config.get("seconds", 0.002))
        train.report({"number": number})
        if "dies" in config and number == config["at"]:
            story.tell(f"rank {rank} has recorded")
        if rank == config.get("dies", -1) and number == config.get("at"):
            story.await_told("rank 0 has recorded")
            os.kill(os.getpid(), signal.SIGKILL)


def replicated_steps(config: dict[str, Any]) -> float:
    """Steps of a model on all ranks; the floating-point operations of one of them on one rank."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from powertrain.torch import prepare_model

    model = prepare_model(torch.nn.Linear(64, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        model(torch.ones(16, 64)).sum().backward()
        optimizer.step()
    with FlopCounterMode(display=False) as counter:
        model(torch.ones(16, 64)).sum().backward()
    train.report({"done": 1})
    return float(counter.get_total_flops())


def marked_steps(config: dict[str, Any]) -> int:
    """Steps that the loop marks itself; how many of them were recorded."""
    from powertrain.trace import trace_step
    from powertrain.trace.recording import current

    for number in range(30):
        with trace_step():
            time.sleep(0.001)
        train.report({"number": number})
    recorder = current.current()
    recorder.process_marks()
    return recorder.steps


def until_killed(config: dict[str, Any]) -> None:
    """Steps without end; says when it has made the first thousand."""
    rank, number = train.get_context().get_world_rank(), 0
    while True:
        time.sleep(0.001)
        train.report({"number": number})
        number += 1
        if number == 1000:
            story.tell(f"rank {rank} trains")


def until_told() -> None:
    """Trains until a file says that it is enough."""
    import torch

    from powertrain.collective import broadcast_from_rank_zero
    from powertrain.torch import prepare_model

    model = prepare_model(
        torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = 0
    while not broadcast_from_rank_zero(story.told("enough")):
        loss = loss_of(model, torch.randn(256, 64))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step == 3:
            story.tell(f"rank {train.get_context().get_world_rank()} trains")
    train.report({"steps": step})


def some_torch_steps() -> None:
    """A dozen steps of torch."""
    import torch

    model = torch.nn.Linear(64, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(12):
        loss_of(model, torch.randn(16, 64)).backward()
        optimizer.step()


def loss_of(model, batch):  # type: ignore[no-untyped-def]
    return model(batch).square().mean()
