"""The process of one rank: its spec, output and directories. Pure."""

from __future__ import annotations

import os
from dataclasses import dataclass

import msgspec

from powertrain.engine.base import ProcessSpec
from powertrain.run.spec import RunSpec
from powertrain.run.workers.attempt import Attempt
from powertrain.run.workers.placement import Placement, environment
from powertrain.wire.keys import ConnectionInfo
from powertrain.worker.main import ENTRY, WorkerSpec
from powertrain.worker.place import AttemptStart, Place, RankFiles
from powertrain.worker.tracing import TraceSettings


def process_of(
    spec: RunSpec, attempt: Attempt, placement: Placement, connection: ConnectionInfo, origin: AttemptOrigin
) -> ProcessSpec:
    """Return the process of one rank."""
    worker = WorkerSpec(
        connection=connection,
        place=_place(spec, attempt, placement, origin),
        function=spec.function,
        sources=dict(spec.sources),
        device=placement.device,
        seed=spec.seed,
        storage=origin.storage,
        sync_timeout=spec.sync_timeout,
        datasets=spec.datasets,
        trace=_trace(spec, attempt, placement, origin),
        post_mortem=spec.post_mortem,
    )
    return ProcessSpec(
        entry=ENTRY,
        payload=msgspec.msgpack.encode(worker),
        env=environment(placement, attempt.world_size, spec.env),
        log_path=log_path(spec, f"attempt-{attempt.number}", f"rank-{placement.rank:05d}.log"),
        cwd=spec.directories.working,
        title=f"rank {placement.rank}",
        shielded=True,
        stacks=worker.place.files.stacks,
        rank=placement.rank,
        world_size=attempt.world_size,
        attempt=attempt.number,
        mark=worker.place.files.mark,
        ring=worker.trace.ring if worker.trace is not None else "",
        staging=worker.place.saving.staging,
        feeds=worker.place.files.feeds,
    )


@dataclass(frozen=True)
class AttemptOrigin:
    """The origin of an attempt: its starting point, and the controller's host and pickled storage."""

    start: AttemptStart
    host: str = ""
    storage: bytes = b""


def log_path(spec: RunSpec, *parts: str) -> str:
    """Return the file of a process's output."""
    return os.path.join(spec.directories.logs or os.path.join(spec.run.path, "logs"), *parts)


def mark_path(spec: RunSpec, attempt: int, rank: int) -> str:
    """Return the file in which a rank keeps its newest reports."""
    return os.path.join(spec.directories.runtime, "marks", f"{attempt}-{rank}")


def stacks_path(spec: RunSpec, attempt: int, rank: int) -> str:
    """Return the file on its own node to which a rank writes its stacks on a signal."""
    return os.path.join(spec.directories.runtime, "stacks", f"{attempt}-{rank}")


def ring_path(spec: RunSpec, attempt: int, rank: int) -> str:
    """Return the file on its own node in which a rank keeps its newest steps."""
    return os.path.join(spec.directories.runtime, "steps", f"{attempt}-{rank}")


def staging_root(spec: RunSpec) -> str:
    """Return the staging area for shares of checkpoints."""
    return spec.saving.staging or os.path.join(spec.directories.runtime, "staging")


def scratch_directory(runtime_dir: str) -> str:
    """Return the scratch directory that the ranks of a node share, on their own node."""
    return os.path.join(runtime_dir, "scratch")


def _has_runtime_directory(placement: Placement, origin: AttemptOrigin) -> bool:
    """Return True where the run's runtime directory exists: on the controller's machine, or made by an engine that
    knows nodes."""
    return placement.slot.local or placement.slot.host == origin.host or bool(placement.slot.node)


def _trace(
    spec: RunSpec, attempt: Attempt, placement: Placement, origin: AttemptOrigin
) -> TraceSettings | None:
    if spec.trace is None or not _has_runtime_directory(placement, origin):
        return spec.trace
    return msgspec.structs.replace(spec.trace, ring=ring_path(spec, attempt.number, placement.rank))


def _place(spec: RunSpec, attempt: Attempt, placement: Placement, origin: AttemptOrigin) -> Place:
    return Place(
        rank=placement.rank,
        world_size=attempt.world_size,
        local_rank=placement.local_rank,
        local_world_size=placement.local_world_size,
        node_rank=placement.node_rank,
        attempt=attempt.number,
        first_row=attempt.first_row,
        report_barrier=spec.report_barrier,
        judges_reports=spec.stop is not None,
        run=spec.run,
        saving=msgspec.structs.replace(spec.saving, staging=staging_root(spec)),
        data=spec.data,
        start=origin.start,
        files=_files(spec, attempt, placement, origin),
    )


def _files(spec: RunSpec, attempt: Attempt, placement: Placement, origin: AttemptOrigin) -> RankFiles:
    is_here = _has_runtime_directory(placement, origin)
    runtime, working = spec.directories.runtime, spec.directories.working
    return RankFiles(
        working_dir=working,
        scratch=working if working == scratch_directory(runtime) else "",
        outputs=list(spec.directories.outputs),
        mark=mark_path(spec, attempt.number, placement.rank) if is_here else "",
        stacks=stacks_path(spec, attempt.number, placement.rank) if is_here else "",
        feeds={
            name: os.path.join(runtime, "feeds", f"{attempt.number}-{placement.rank}-{number}")
            for number, name in enumerate(spec.data.streams)
        },
    )
