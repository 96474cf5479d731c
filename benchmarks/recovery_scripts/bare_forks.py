"""Lower limit of a restart of two ranks: python bare_forks.py DIRECTORY

A process that has torch loaded and has built one optimizer forks both ranks again, they form a process group, and the
training function runs. The fork is recorded as "forked" of rank 0 and 1; no death has to be detected here, and there is
no checkpoint to load.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from diary import ENTERED, Diary
from torch.nn.parallel import DistributedDataParallel
from workload import new_model, new_optimizer, steps_from, take_step

FORKED = "forked"
WORLD_SIZE = 2


def train_function(directory: Path, rank: int) -> None:
    diary = Diary(directory, rank)
    diary.write(ENTERED)
    model = DistributedDataParallel(new_model())
    optimizer = new_optimizer(model)
    for step in steps_from(1, diary):
        take_step(model, optimizer, diary, step)


def live(directory: Path, rank: int, listener: socket.socket) -> None:
    torch.set_num_threads(1)
    host, port = listener.getsockname()
    server = {"is_master": True, "master_listen_fd": listener.detach()} if rank == 0 else {}
    store = dist.TCPStore(host, port, WORLD_SIZE, wait_for_workers=False, **server)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE)
    train_function(directory, rank)
    dist.destroy_process_group()


directory = Path(sys.argv[1])
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
new_optimizer(torch.nn.Linear(1, 1))
with socket.create_server(("127.0.0.1", 0)) as listener:
    children = []
    for rank in range(WORLD_SIZE):
        Diary(directory, rank).write(FORKED)
        child = os.fork()
        if child == 0:
            try:
                live(directory, rank, listener)
                os._exit(0)
            finally:
                os._exit(1)
        children.append(child)
statuses = [os.waitpid(child, 0)[1] for child in children]
sys.exit(1 if any(statuses) else 0)
