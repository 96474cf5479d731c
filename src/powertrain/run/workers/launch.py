"""One rank's process: what it is told, where its output goes, where it works. Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from powertrain.engine.base import ProcessSpec
from powertrain.run.spec import RunSpec
from powertrain.run.workers.attempt import Attempt
from powertrain.run.workers.placement import Placement, environment
from powertrain.wire.keys import Door
from powertrain.worker.main import ENTRY, WorkerSpec
from powertrain.worker.place import Place
from powertrain.worker.tracing import TraceSettings


def process_of(
    spec: RunSpec, attempt: Attempt, placement: Placement, door: Door, start: Start
) -> ProcessSpec:
    """The process of one rank."""
    worker = WorkerSpec(
        door=door,
        place=_place(spec, attempt, placement, start),
        function=spec.function,
        sources=dict(spec.sources),
        device=placement.device,
        seed=spec.seed,
        storage=start.storage,
        sync_timeout=spec.sync_timeout,
        datasets=spec.datasets,
        trace=_trace(spec, attempt, placement, start),
        post_mortem=spec.post_mortem,
    )
    return ProcessSpec(
        entry=ENTRY,
        payload=msgspec.msgpack.encode(worker),
        env=environment(placement, attempt.world_size, spec.env),
        log_path=log_path(spec, f"attempt-{attempt.number}", f"rank-{placement.rank:05d}.log"),
        cwd=spec.working_dir,
        title=f"rank {placement.rank}",
        shielded=True,
        stacks=worker.place.stacks,
        rank=placement.rank,
        world_size=attempt.world_size,
        attempt=attempt.number,
        mark=worker.place.mark,
        ring=worker.trace.ring if worker.trace is not None else "",
        staging=worker.place.staging,
        feeds=worker.place.data_feeds,
    )


@dataclass(frozen=True)
class Start:
    """What an attempt starts from."""

    #: Path or address of the checkpoint to go on from; "" for none. With the pickled filesystem it is on, if any.
    checkpoint: str = ""
    filesystem: bytes = b""
    #: The controller's own.
    host: str = ""
    #: Names that checkpoints of the run were given and that are taken.
    names: Sequence[str] = ()
    #: The run's storage, pickled.
    storage: bytes = b""
    #: By dataset where the checkpoint left it, if that is of this run.
    data_positions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    #: By dataset how many batches were drawn without an optimizer step between them before it, at most.
    data_gaps: Mapping[str, int] = field(default_factory=dict)


def log_path(spec: RunSpec, *parts: str) -> str:
    """The file that holds a process's output."""
    return os.path.join(spec.logs or os.path.join(spec.path, "logs"), *parts)


def mark_path(spec: RunSpec, attempt: int, rank: int) -> str:
    """The file in which a rank marks how far it has come."""
    return os.path.join(spec.runtime_dir, "marks", f"{attempt}-{rank}")


def stacks_path(spec: RunSpec, attempt: int, rank: int) -> str:
    """The file on its own node to which a rank writes what it is doing, when it is asked by a signal."""
    return os.path.join(spec.runtime_dir, "stacks", f"{attempt}-{rank}")


def ring_path(spec: RunSpec, attempt: int, rank: int) -> str:
    """The file on its own node in which a rank keeps its newest steps."""
    return os.path.join(spec.runtime_dir, "steps", f"{attempt}-{rank}")


def staging_root(spec: RunSpec) -> str:
    """Where shares of checkpoints wait."""
    return spec.staging or os.path.join(spec.runtime_dir, "staging")


def scratch_directory(runtime_dir: str) -> str:
    """The scratch directory that the ranks of a node share, on their own node."""
    return os.path.join(runtime_dir, "scratch")


def _has_runtime_directory(placement: Placement, start: Start) -> bool:
    """The run's is on the controller's machine; elsewhere only an engine that knows nodes makes one."""
    return placement.slot.local or placement.slot.host == start.host or bool(placement.slot.node)


def _trace(spec: RunSpec, attempt: Attempt, placement: Placement, start: Start) -> TraceSettings | None:
    if spec.trace is None or not _has_runtime_directory(placement, start):
        return spec.trace
    return msgspec.structs.replace(spec.trace, ring=ring_path(spec, attempt.number, placement.rank))


def _place(spec: RunSpec, attempt: Attempt, placement: Placement, start: Start) -> Place:
    is_here = _has_runtime_directory(placement, start)
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
        checkpoint=start.checkpoint,
        checkpoint_filesystem=start.filesystem,
        run_filesystem=spec.filesystem,
        checkpoint_tag=spec.checkpoint_tag,
        checkpoint_names=list(start.names),
        checkpoint_frequency=spec.checkpoints.checkpoint_frequency or 0,
        staging=staging_root(spec),
        staging_bytes=spec.checkpoints.staging_bytes or 0,
        segments=spec.segments,
        working_dir=spec.working_dir,
        scratch=spec.working_dir if spec.working_dir == scratch_directory(spec.runtime_dir) else "",
        outputs=list(spec.outputs),
        mark=mark_path(spec, attempt.number, placement.rank) if is_here else "",
        stacks=stacks_path(spec, attempt.number, placement.rank) if is_here else "",
        validates=spec.validation is not None,
        report_barrier=spec.report_barrier,
        data_cache=spec.data_cache,
        data_cache_bytes=-1 if spec.data.cache_bytes is None else spec.data.cache_bytes,
        data_memory_bytes=spec.data.memory_bytes,
        data_seed=spec.data_seed,
        data_fingerprints=dict(spec.data_fingerprints),
        data_positions={name: dict(state) for name, state in start.data_positions.items()},
        on_data_change=spec.data.on_change,
        data_resume=spec.data.resume,
        data_gaps=dict(start.data_gaps),
        data_feeds={
            name: os.path.join(spec.runtime_dir, "feeds", f"{attempt.number}-{placement.rank}-{number}")
            for number, name in enumerate(spec.data_streams)
        },
        data_feeds_whole=list(spec.data_streams_whole),
        metadata=dict(spec.metadata),
        sweep=spec.sweep,
        trial_id=spec.trial_id,
        resources=dict(spec.resources),
    )
