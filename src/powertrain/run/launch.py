"""One rank's process: what it is told, where its output goes, where it works. Pure."""

from __future__ import annotations

import os

import msgspec

from powertrain.engine.base import ProcessSpec
from powertrain.run.attempt import Attempt
from powertrain.run.placement import Placement, environment
from powertrain.run.spec import RunSpec
from powertrain.wire import Door
from powertrain.worker.context import Place
from powertrain.worker.main import ENTRY, WorkerSpec


def process_of(
    spec: RunSpec, attempt: Attempt, placement: Placement, door: Door, checkpoint: str
) -> ProcessSpec:
    """The process of one rank; ``checkpoint`` is the path it goes on from, "" for none."""
    worker = WorkerSpec(
        door=door,
        place=_place(spec, attempt, placement, checkpoint),
        function=spec.function,
        sources=dict(spec.sources),
        device=placement.device,
        seed=spec.seed,
    )
    return ProcessSpec(
        entry=ENTRY,
        payload=msgspec.msgpack.encode(worker),
        env=environment(placement, attempt.world_size, spec.env),
        log_path=log_path(spec.path, attempt.number, placement.rank),
        cwd=spec.working_dir or os.path.join(spec.runtime_dir, f"rank-{placement.rank}"),
        title=f"rank {placement.rank}",
    )


def log_path(run_path: str, attempt: int, rank: int) -> str:
    """The file that holds a rank's output of one attempt."""
    return os.path.join(run_path, "logs", f"attempt-{attempt}", f"rank-{rank:05d}.log")


def _place(spec: RunSpec, attempt: Attempt, placement: Placement, checkpoint: str) -> Place:
    return Place(
        rank=placement.rank,
        world_size=attempt.world_size,
        local_rank=placement.local_rank,
        local_world_size=placement.local_world_size,
        node_rank=placement.node_rank,
        attempt=attempt.number,
        first_row=attempt.first_row,
        run_name=spec.name,
        run_path=spec.path,
        storage_path=spec.storage_path,
        launch_dir=spec.launch_dir,
        checkpoint=checkpoint,
        metadata=dict(spec.metadata),
        resources=dict(spec.resources),
    )
