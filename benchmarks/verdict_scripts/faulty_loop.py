"""The training loop with injected faults: a common loop and loader, with DDP for several ranks.

It is independent of the tracer; differences between tracers are in :class:`Tools`.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from scenarios import BACKWARD, FORWARD, OPTIMIZER, Scenario
from torch import nn
from torch.utils.data import DataLoader, Dataset

_WIDTH, _ROWS = 256, 64
#: Size and number of matrix multiplications. Small ones on a GPU, so that ranks which share it take turns.
_DEVICE_WORK, _HOST_WORK = (1024, 300), (512, 10)
#: Noise: seconds of a hiccup, and the shares of steps with a hiccup and with a change of memory.
_HICCUP, _HICCUPS, _MOVES = 0.06, 0.01, 0.08
_MIB = 2**20


def _nothing(step: int, loss: torch.Tensor, model: nn.Module) -> None:
    pass


@dataclass(frozen=True)
class Tools:
    """The interface of a tracer: marking a step, wrapping a model, and work after a step."""

    wrap: Callable[[nn.Module], nn.Module]
    mark: Callable[[nn.Module], AbstractContextManager[Any]] = lambda model: nullcontext()
    after_step: Callable[[int, torch.Tensor, nn.Module], None] = _nothing
    save: Callable[[int, str], None] = lambda step, directory: None


class Rank:
    """This rank in a run of its scenario, with its injected delays."""

    def __init__(self, scenario: Scenario, rank: int, ranks: int, slowness: float = 1.0) -> None:
        self.scenario, self.rank, self.ranks, self.step = scenario, rank, ranks, 0
        self._slowness = slowness
        self._random = random.Random(1000 + rank)
        self._kept: list[torch.Tensor] = []
        self._moving = torch.ones(1)

    def wait(self, seconds: float, where: str) -> None:
        """Wait for the rest of a phase of ``seconds`` on this rank in this step, beyond its computation."""
        usual = seconds * self._slowness if self.scenario.waits else 0.0
        time.sleep(usual * self.scenario.jitter(self._random) + self.lost(where))

    def lost(self, where: str) -> float:
        """Return the seconds that this rank loses in a phase of this step."""
        return self.scenario.pause(where, self.step, self.rank, self.ranks)

    def use_memory(self) -> None:
        """Allocate the memory that a step leaks, or holds for a moment."""
        scenario = self.scenario
        if scenario.noise:
            if self._random.random() < _HICCUPS:
                time.sleep(_HICCUP)
            if self._random.random() < _MOVES:
                self._moving = torch.ones(self._random.randrange(1, 48) * _MIB // 4)
        if not scenario.takes_memory(self.rank, self.ranks):
            return
        if scenario.leak:
            self._keep(scenario.leak)
        if scenario.jump and self.step == int(scenario.jump_at * scenario.steps):
            self._keep(scenario.jump)

    def _keep(self, mebibytes: float) -> None:
        self._kept.append(torch.ones(int(mebibytes * _MIB) // 4, device=self.scenario.device))


class _Slow(torch.autograd.Function):
    """An identity function with delays in forward and backward."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, rank: Rank) -> torch.Tensor:
        context.rank = rank
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        context.rank.wait(BACKWARD, "backward")
        return gradient, None


class Model(nn.Module):
    """A small perceptron with the phase durations of the scenario."""

    def __init__(self, rank: Rank) -> None:
        super().__init__()
        self._rank = rank
        scenario = rank.scenario
        self.first = nn.Linear(_WIDTH, _WIDTH)
        self.last = nn.Linear(_WIDTH, 8)
        size, self._times = _HOST_WORK if scenario.device == "cpu" else _DEVICE_WORK
        # No buffers: DDP would exchange them in forward, where ranks would then synchronize.
        self._matrix = torch.eye(1 if scenario.waits else size, device=scenario.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(x))
        if not self._rank.scenario.waits:
            self._work()
        self._rank.wait(FORWARD, "forward")
        hidden = _Slow.apply(hidden, self._rank)  # type: ignore[no-untyped-call]
        result: torch.Tensor = self.last(hidden)
        return result

    def _work(self) -> None:
        with torch.no_grad():
            for _ in range(self._times):
                torch.mm(self._matrix, self._matrix)


def _optimizer(model: nn.Module, rank: Rank) -> torch.optim.Optimizer:
    """Return an SGD optimizer with a delay."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    optimizer.register_step_post_hook(lambda *_: rank.wait(OPTIMIZER, "optimizer"))
    return optimizer


class _Batches(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """One batch per step, made on demand or by the loader's workers."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._ballast = torch.ones(rank.scenario.batch * _MIB // 4) if rank.scenario.batch else torch.ones(1)
        if rank.scenario.pinned:
            self._ballast = self._ballast.pin_memory()

    def __len__(self) -> int:
        return self._rank.scenario.steps

    def __getitem__(self, step: int) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        time.sleep(self._rank.scenario.pause("fetch", step, self._rank.rank, self._rank.ranks))
        batch = torch.randn(_ROWS, _WIDTH), torch.randint(0, 8, (_ROWS,))
        x, y = (part.pin_memory() for part in batch) if self._rank.scenario.pinned else batch
        return x, y, self._ballast


def train(rank: Rank, tools: Tools, loader_workers: int = 0) -> None:
    """Make all steps of the scenario. The process group exists already."""
    scenario = rank.scenario
    torch.set_num_threads(max(1, scenario.threads_per_core * (os.cpu_count() or 1)))
    torch.manual_seed(0)
    model = tools.wrap(Model(rank).to(scenario.device))
    optimizer = _optimizer(model, rank)
    loader: Any = DataLoader(_Batches(rank), batch_size=None, num_workers=loader_workers)
    with tempfile.TemporaryDirectory() as directory:
        if scenario.checkpoint:
            torch.save(torch.zeros(scenario.checkpoint[0] * _MIB // 4), f"{directory}/state-{rank.rank}.pt")
        for step, batch in enumerate(loader):
            rank.step = step
            with tools.mark(model):
                loss = _train_step(rank, model, optimizer, batch)
            rank.use_memory()
            pause_between_steps(rank)
            tools.after_step(step, loss, model)
            if scenario.checkpoint and step % scenario.checkpoint[1] == 0:
                tools.save(step, directory)


def _train_step(rank: Rank, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    device = rank.scenario.device
    x, y, ballast = batch
    if device != "cpu":
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        if rank.scenario.batch:
            ballast.to(device, non_blocking=True)
    optimizer.zero_grad(set_to_none=True)
    output = model.forward(x) if rank.scenario.calls_forward else model(x)
    loss = loss_function(rank, output, y)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss


def loss_function(rank: Rank, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    time.sleep(rank.lost("loss"))
    return nn.functional.cross_entropy(output, y)


def pause_between_steps(rank: Rank) -> None:
    time.sleep(rank.lost("outside"))
