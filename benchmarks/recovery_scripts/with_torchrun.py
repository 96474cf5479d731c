"""Under torchrun: torchrun --standalone --nproc-per-node=2 --max-restarts=N with_torchrun.py DIRECTORY

With a snapshot that every start looks for, as torchrun's documentation asks of a script that is to be restarted.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as dist
from diary import ENTERED, Diary
from torch.nn.parallel import DistributedDataParallel
from workload import CHECKPOINT_EVERY, load, new_model, new_optimizer, save, steps_from, take_step


def train_function(directory: Path) -> None:
    diary = Diary(directory, dist.get_rank())
    diary.write(ENTERED)
    model = DistributedDataParallel(new_model())
    optimizer = new_optimizer(model)
    snapshot = directory / "snapshot.pt"
    done = load(snapshot, model, optimizer) if snapshot.exists() else 0
    for step in steps_from(done + 1, diary):
        take_step(model, optimizer, diary, step)
        if step % CHECKPOINT_EVERY == 0 and dist.get_rank() == 0:
            save(snapshot, model, optimizer, step)


dist.init_process_group("gloo")
train_function(Path(sys.argv[1]))
dist.destroy_process_group()
