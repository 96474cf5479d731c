"""The traced training loop: steps of a chosen length, each timed."""

from __future__ import annotations

import statistics
import time
from array import array
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

#: Steps at the start of a block that are not counted: caches are cold after switching.
SETTLING_STEPS = 5
_WIDTH = 64
#: Nanoseconds that a multiplication takes at least. On a busy machine a step with more of them may seem no longer, and
#: their number would have no limit.
_LEAST_NS = 1_000.0


class Model(nn.Module):
    """Several layers, one of which multiplies matrices to reach the chosen step time."""

    def __init__(self, device: str, is_small: bool) -> None:
        super().__init__()
        self.layers: nn.Module = nn.Linear(_WIDTH, 1)
        if not is_small:
            self.layers = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, 1))
        size = 96 if device == "cpu" else 1024
        self.register_buffer("matrix", torch.eye(size))
        self.multiplications = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for _ in range(self.multiplications):
                torch.mm(self.matrix, self.matrix)
        result: torch.Tensor = self.layers(x)
        return result


class Training:
    """A common loop over a common loader, without tracing code."""

    def __init__(self, device: str = "cpu", is_small: bool = False) -> None:
        """Create the loop. A small one has minimal steps, so that a late one is soon made up for."""
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.device = device
        self.model = Model(device, is_small).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self._criterion = nn.MSELoss()
        batches = [(torch.randn(16, _WIDTH), torch.randn(16, 1)) for _ in range(64)]
        self._loader: Any = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]

    def make_step_take(self, seconds: float) -> None:
        """Choose the number of multiplications so that a step takes about ``seconds``."""
        self.model.multiplications = 1
        self.run(50)
        short = _quick(self.run(200))
        self.model.multiplications = 21
        # A part of a few multiplications overlaps with other work, so that more of them take longer than expected.
        for _ in range(3):
            each = max((_quick(self.run(100)) - short) / (self.model.multiplications - 1), _LEAST_NS)
            self.model.multiplications = 2 + max(0, round((seconds * 1e9 - short) / each))

    def run(
        self,
        count: int,
        mark: Callable[[Any], AbstractContextManager[Any]] | None = None,
        seconds_each: float = 0.0,
    ) -> list[int]:
        """Makes ``count`` steps, each within ``mark(model)``; the nanoseconds of each, from the end of the one before.

        With ``seconds_each`` a step begins no earlier than that after the one before; a late one is followed at once.
        """
        mark = mark or (lambda model: nullcontext())
        taken = array("q")
        began = before = time.perf_counter_ns()
        while len(taken) < count:
            for x, y in self._loader:
                with mark(self.model):
                    self._step(x, y)
                now = time.perf_counter_ns()
                taken.append(now - before)
                before = now
                if len(taken) == count:
                    break
                due = began + int(len(taken) * seconds_each * 1e9)
                while before < due:
                    before = time.perf_counter_ns()
        return list(taken)

    def _step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        x, y = x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._criterion(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        if self.device != "cpu":
            loss.item()  # as in a loop that logs: otherwise only the kernel launches would be timed


def _quick(taken: list[int]) -> float:
    """Return the first quartile: other load on the machine makes steps longer, and never shorter."""
    return statistics.quantiles(taken, n=4)[0]


def alternate(
    training: Training, blocks: int, steps: int, traced: Callable[[bool], Callable[[Any], Any] | None]
) -> list[tuple[list[int], list[int]]]:
    """``blocks`` pairs of blocks, (not traced, traced), their order turning with each pair. ``traced(is_on)`` switches
    and says what steps are to be marked with."""
    pairs = []
    for number in range(blocks):
        pair: dict[bool, list[int]] = {}
        for is_on in (False, True) if number % 2 else (True, False):
            mark = traced(is_on)
            pair[is_on] = training.run(SETTLING_STEPS + steps, mark)[SETTLING_STEPS:]
        pairs.append((pair[False], pair[True]))
    traced(False)
    return pairs
