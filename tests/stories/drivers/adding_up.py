"""The smallest training with a collective in each step, in JAX and in TensorFlow: workers add up their shares."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import story

import powertrain
from powertrain import Checkpoint

STEPS = 12
#: What all workers together add in a step.
WHOLE = 12.0
#: The step before which a rank comes to grief.
_GRIEF = 5


def train(config: dict[str, Any]) -> dict[str, Any]:
    """Rank ``config["rank"]`` is killed, raises or hangs in the first attempt, while the others are in a collective.

    ``config["waits"]`` has by step what must have been told before it.
    """
    rank, size = (
        powertrain.get_context().get_world_rank(),
        powertrain.get_context().get_world_size(),
    )
    add_up = _COLLECTIVES[config["framework"]]()
    begun, total = load()
    for step in range(begun, STEPS):
        if step == _GRIEF and rank == config["rank"] and powertrain.get_context().get_attempt() == 0:
            come_to_grief(config["grief"])
        if rank == 0:
            story.tell(f"step-{step}")
        story.await_told(*config.get("waits", {}).get(str(step), ()))
        total += add_up(WHOLE / size)
        save(step + 1, total, rank)
    return {"begun": begun, "total": total, "workers": size}


def come_to_grief(kind: str) -> None:
    """End or stop this rank, with what went before committed."""
    assert powertrain.get_all_reported_checkpoints(), "nothing is committed to go on from"
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "raised":
        raise ValueError("there is no more to add")
    time.sleep(1000)


def load() -> tuple[int, float]:
    """The step to begin with, and the sum up to it."""
    checkpoint = powertrain.get_checkpoint()
    if checkpoint is None:
        return 0, 0.0
    with checkpoint.as_directory() as directory, np.load(os.path.join(directory, "sum.npz")) as saved:
        return int(saved["step"]), float(saved["total"])


def save(step: int, total: float, rank: int) -> None:
    with powertrain.checkpoint_dir() as directory:
        saved = None
        if rank == 0:
            np.savez(os.path.join(directory, "sum.npz"), step=step, total=total)
            saved = Checkpoint.from_directory(directory)
        powertrain.report({"step": step, "total": total}, checkpoint=saved)


def _with_jax() -> Callable[[float], float]:
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    by_worker = NamedSharding(Mesh(np.array(jax.devices()), ("workers",)), PartitionSpec("workers"))
    add = jax.jit(lambda shares: shares.sum())

    def add_up(share: float) -> float:
        own = np.full(jax.local_device_count(), share, np.float32)
        return float(add(jax.make_array_from_process_local_data(by_worker, own)))

    return add_up


def _with_tensorflow() -> Callable[[float], float]:
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()

    @tf.function  # type: ignore[untyped-decorator]
    def add(share: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(tf.identity, args=(share,)), axis=None)

    def add_up(share: float) -> float:
        return float(add(tf.constant(share)))

    return add_up


_COLLECTIVES = {"jax": _with_jax, "tensorflow": _with_tensorflow}
