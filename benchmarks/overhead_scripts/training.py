"""The loop that both sides of ``overhead.py`` train: a replicated model, with steps of chosen durations."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

LAYERS, WIDTH = 4, 512
WARM_UP = 40


def make_model(device: str) -> torch.nn.Module:
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    return torch.nn.Sequential(*layers).to(device)


def train(
    model: torch.nn.Module, settings: dict[str, Any], after_step: Callable[[int, Any], None]
) -> list[float]:
    """Train, and return the seconds of each step after warm-up, with all that the loop does in it."""
    device, steps = settings["device"], settings["steps"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = torch.randn(settings["rows"], WIDTH, device=device)
    times = []
    for step in range(-WARM_UP, steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
        after_step(step + WARM_UP, (model, optimizer, loss))
        if step >= 0:
            times.append(time.perf_counter() - began)
    return times


def keep(times: list[list[float]], rank: int, directory: str) -> None:
    """Write the times of each size of step."""
    Path(directory, f"rank-{rank}.json").write_text(json.dumps(times))


def rows_for(seconds: float, device: str) -> int:
    """Return the rows of a batch with which a step of one process takes about so many seconds."""
    settings = {"device": device, "steps": 20}
    rows = 64
    while True:
        times = sorted(train(make_model(device), {**settings, "rows": rows}, lambda *_: None))
        if times[len(times) // 2] >= seconds / 2:
            return max(1, round(rows * seconds / times[len(times) // 2]))
        rows *= 2
