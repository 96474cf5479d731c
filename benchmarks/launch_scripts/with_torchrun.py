"""Under torchrun: torchrun --standalone --nproc-per-node=N with_torchrun.py DIRECTORY"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

started = float(os.environ.get("BENCHMARK_STARTED", time.monotonic()))
directory = Path(sys.argv[1])

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(10, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(2):
    loss = model(torch.randn(32, 10)).sum()
    loss.backward()
    optimizer.step()
    if step == 0:
        (directory / f"rank-{dist.get_rank()}").write_text(str(time.monotonic() - started))
    optimizer.zero_grad()
if dist.get_rank() == 0:
    print(f"Final loss: {loss.item()}")
dist.destroy_process_group()
