"""End rank 1 in the way that the first argument names, while rank 0 waits for it."""

import os
import signal
import sys

import torch
import torch.distributed as dist


def end(how):
    if how == "raise":
        raise ValueError("shard 7 is empty")
    if how == "exit":
        sys.exit(3)
    if how == "message":
        sys.exit("no data today")
    if how == "exit at once":
        os._exit(4)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


dist.init_process_group("gloo")
if dist.get_rank() == 1:
    end(sys.argv[1])
dist.all_reduce(torch.ones(1))
dist.barrier()
print("rank", dist.get_rank(), "ends well")
sys.stdout.flush()
if sys.argv[1] == "good exit at once":
    os._exit(0)
