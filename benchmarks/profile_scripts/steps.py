"""The loop that ``profile_cost.py`` profiles: steps of a replicated model until a file says that it is enough."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parent.parent / "overhead_scripts"))

from training import WIDTH, make_model

#: Files in the directory of a measurement: it trains; it shall end; begin and seconds of each step.
TRAINS, ENOUGH, STEPS = "trains", "enough", "steps.json"
WARM_UP = 50


def train(model: torch.nn.Module, settings: dict[str, Any], before_step: Callable[[int], None]) -> None:
    """Train until it is enough; keep when each step began and how long it took."""
    directory, device = Path(settings["directory"]), settings["device"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = torch.randn(settings["rows"], WIDTH, device=device)
    steps: list[tuple[float, float]] = []
    number = 0
    while not (directory / ENOUGH).exists():
        began = time.monotonic()
        before_step(number)
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
        steps.append((began, time.monotonic() - began))
        number += 1
        if number == WARM_UP:
            (directory / TRAINS).touch()
    (directory / STEPS).write_text(json.dumps(steps[WARM_UP:]))


__all__ = ["ENOUGH", "STEPS", "TRAINS", "WARM_UP", "make_model", "train"]
