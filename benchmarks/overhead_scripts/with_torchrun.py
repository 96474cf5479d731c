"""Bare replicated training: torchrun --standalone --nproc-per-node=N with_torchrun.py DIRECTORY SETTINGS"""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from training import keep, make_model, train

settings = json.loads(sys.argv[2])
torch.set_num_threads(settings["threads"])
if settings["device"] == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if settings["device"] == "cuda" else "gloo")
times = [
    train(DistributedDataParallel(make_model(settings["device"])), {**settings, **size}, lambda *_: None)
    for size in settings["sizes"]
]
keep(times, dist.get_rank(), sys.argv[1])
dist.destroy_process_group()
