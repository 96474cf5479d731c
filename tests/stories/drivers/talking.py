"""A training function that prints, for stories of people who read along."""

from __future__ import annotations

import os
import signal

import story

import powertrain as train


def talk() -> None:
    """Every rank prints its attempt; rank 1 dies in the first, once the test lets it go on."""
    context = train.get_context()
    rank, attempt = context.get_world_rank(), context.get_attempt()
    print(f"rank {rank} is in attempt {attempt}", flush=True)
    train.report({"attempt": attempt}, barrier=True)  # so that its row is closed before a rank has spoken
    if attempt == 0:
        story.tell(f"rank {rank} has spoken")
        story.await_told("go on")
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        story.await_told("never")
    print("the last word, without an end of its line", end="", flush=True)
