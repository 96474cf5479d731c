"""Write down what this process got from its launcher, and how it was started."""

import json
import multiprocessing
import os
import pickle
import random
import sys

import beside
import torch
import torch.distributed as dist


class Item:
    """Must be found by its name in this script, also by a spawned process."""

    def __init__(self, value):
        self.value = value


def increase(item):
    return Item(item.value + 1)


def is_told(name):
    return name.startswith(("TORCHELASTIC_", "MASTER_", "ROLE_", "GROUP_", "LOCAL_")) or name in (
        "RANK",
        "WORLD_SIZE",
        "OMP_NUM_THREADS",
    )


def main():
    target = sys.argv[1]
    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        spawned = pool.map(increase, [Item(1)])[0].value
    described = {
        "environment": {name: value for name, value in os.environ.items() if is_told(name)},
        "argv": sys.argv,
        "path": sys.path,
        "file": __file__,
        "name": __name__,
        "beside": beside.__file__,
        "total": total.item(),
        "spawned": spawned,
        "pickled": type(pickle.loads(pickle.dumps(Item(1)))) is Item,
        "threads": torch.get_num_threads(),
        "directory": os.getcwd(),
        "random": [random.random(), torch.rand(1).item()],
    }
    with open(f"{target}-{dist.get_rank()}.json", "w") as file:
        json.dump(described, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
