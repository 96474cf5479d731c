"""The same loop traced by TraceML as its documentation says, started by ``traceml run``.

Scenario and steps are passed by environment variables, because the launcher consumes the arguments.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import faulty_loop
import torch
import torch.distributed as dist
import traceml_ai as traceml
from scenarios import BY_NAME


def save(step: int, directory: str) -> None:
    """Save a durable copy of the state, like a report of Powertrain."""
    shutil.copytree(directory, Path(os.environ["SAVED"], str(dist.get_rank())), dirs_exist_ok=True)


def wrap(model: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.parallel.DistributedDataParallel(model)


traceml.init(mode="auto")
dist.init_process_group("gloo")
scenario = BY_NAME[os.environ["SCENARIO"]]
if scenario.device != "cpu":
    torch.cuda.set_device(0)
rank = faulty_loop.Rank(scenario, dist.get_rank(), dist.get_world_size())
tools = faulty_loop.Tools(wrap=wrap, mark=traceml.trace_step, save=save)
faulty_loop.train(rank, tools, int(os.environ["LOADER_WORKERS"]) or scenario.loader_workers)
dist.destroy_process_group()
