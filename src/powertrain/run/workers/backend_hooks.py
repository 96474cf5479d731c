"""A backend's hooks, run on a thread of their own: they wait for workers, and workers may die."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from powertrain.backend import BackendConfig, Worker, WorkerMetadata
from powertrain.run.workers.attempt import Attempt, Member
from powertrain.run.workers.worker_group import RemoteWorkers
from powertrain.wire.hub import Hub


@dataclass(frozen=True)
class HookDone:
    """The end of the hooks of one kind ("start" or "shutdown"), with their error."""

    attempt: int
    hook: str
    seconds: float
    error: BaseException | None = None


def group_of(attempt: Attempt, hub: Hub) -> RemoteWorkers:
    """Return the attempt's workers as hooks see them; those that have ended answer no call."""
    group = RemoteWorkers(
        [_worker(member) for member in attempt.members],
        lambda rank, call: hub.send(attempt.members[rank].key, call),
    )
    for member in attempt.members:
        if member.exited:
            group.gone(member.rank, "has ended")
    return group


def run(config: BackendConfig, attempt: Attempt, hook: str, done: Callable[[HookDone], None]) -> None:
    """Start the hooks on a thread; ``done`` is called on it when they have ended."""
    threading.Thread(
        target=_run, args=(config, attempt, hook, done), name=f"powertrain-hook-{hook}", daemon=True
    ).start()


def _run(config: BackendConfig, attempt: Attempt, hook: str, done: Callable[[HookDone], None]) -> None:
    began, problem = time.monotonic(), None
    try:
        backend = attempt.backend = attempt.backend or config.backend_cls()
        if hook == "start":
            backend.on_start(attempt.group, config)
            backend.on_training_start(attempt.group, config)
        else:
            backend.on_shutdown(attempt.group, config)
    except BaseException as error:
        problem = error
    done(HookDone(attempt.number, hook, time.monotonic() - began, problem))


def _worker(member: Member) -> Worker:
    slot = member.placement.slot
    return Worker(
        member.rank,
        WorkerMetadata(
            node_id=slot.node_id, node_ip=slot.address, hostname=slot.host, pid=member.pid, gpu_ids=slot.gpus
        ),
    )
