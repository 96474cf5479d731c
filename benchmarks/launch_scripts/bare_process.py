"""The training function in one process, no launcher: python bare_process.py DIRECTORY

Like every script here it writes the seconds until the first optimizer step to DIRECTORY/rank-N. They count from
BENCHMARK_STARTED (time.monotonic()'s clock); without it, from the end of the imports.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

started = float(os.environ.get("BENCHMARK_STARTED", time.monotonic()))
directory = Path(sys.argv[1])

model = torch.nn.Linear(10, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(2):
    loss = model(torch.randn(32, 10)).sum()
    loss.backward()
    optimizer.step()
    if step == 0:
        (directory / "rank-0").write_text(str(time.monotonic() - started))
    optimizer.zero_grad()
print(f"Final loss: {loss.item()}")
