"""Train for five steps; then rank 1 does nothing any more, in the first attempt only."""

import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(10):
    if step == 5 and dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        time.sleep(3600)
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
print("rank", dist.get_rank(), "made all steps")
