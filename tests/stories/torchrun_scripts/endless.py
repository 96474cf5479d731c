"""Average gradients until a signal comes; then save, and end.

The first argument is a directory: ``trains-RANK`` appears there when a rank has begun to train, ``saved-RANK`` when it
has been asked to end. With ``sigterm`` as the second argument there is a handler for that signal.
"""

import pathlib
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

place = pathlib.Path(sys.argv[1])
dist.init_process_group("gloo")
rank = dist.get_rank()
is_over = False


def save(*_):
    global is_over
    is_over = True
    (place / f"saved-{rank}").write_text("by SIGTERM")


if "sigterm" in sys.argv:
    signal.signal(signal.SIGTERM, save)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
try:
    while not is_over:
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        (place / f"trains-{rank}").touch()
        time.sleep(0.01 * rank)  # so that rank 0 is usually within a collective
except KeyboardInterrupt:
    (place / f"saved-{rank}").write_text("by KeyboardInterrupt")
    raise
