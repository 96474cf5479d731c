"""Training functions whose steps are looked at afterwards. None of them needs torch: reports are their steps."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import story

import powertrain as train


def steps(config: dict[str, Any]) -> None:
    """So many steps of a few milliseconds each."""
    rank = train.get_context().get_world_rank()
    for number in range(config.get("steps", 150)):
        time.sleep(config.get("seconds", 0.002))
        train.report({"number": number})
        if rank == config.get("dies", -1) and number == config.get("at"):
            os.kill(os.getpid(), signal.SIGKILL)


def marked_steps(config: dict[str, Any]) -> int:
    """Steps that the loop marks itself; how many of them were recorded."""
    from powertrain.trace import trace_step
    from powertrain.trace.recording import current

    for number in range(30):
        with trace_step():
            time.sleep(0.001)
        train.report({"number": number})
    recorder = current.current()
    recorder.process_marks()
    return recorder.steps


def until_killed(config: dict[str, Any]) -> None:
    """Steps without end; says when it has made the first thousand."""
    rank, number = train.get_context().get_world_rank(), 0
    while True:
        time.sleep(0.001)
        train.report({"number": number})
        number += 1
        if number == 1000:
            story.tell(f"rank {rank} trains")
