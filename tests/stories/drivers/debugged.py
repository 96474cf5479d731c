"""``python debugged.py``: a launching process with a terminal, which plays one scene after another as the test asks.

Scene N is named by the file ``play-N``, and what came of it is told in ``outcome-N``. All are played by one process, so
that what ranks are forked from is there from the first one on.
"""

# ruff: noqa: T100 (breakpoints are what the scenes are about)
from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import story

import powertrain
from powertrain import DataParallelTrainer, FailureConfig, ScalingConfig

ENGINE = os.environ["STORY_ENGINE"]


def rank() -> int:
    return powertrain.get_context().get_world_rank()


def nothing() -> None:
    powertrain.report({})


def rank_1_stops() -> int:
    """The other rank waits for it at a barrier."""
    number = 40 + rank()
    if rank() == 1:
        breakpoint()
        number += 100
        print(f"rank 1 has made it {number}", flush=True)
    powertrain.collective.barrier()
    powertrain.report({"number": number})
    return number


def rank_1_stops_and_rank_0_prints() -> None:
    if rank() == 1:
        breakpoint()
    else:
        story.await_told("rank 1 has stopped")
        print("rank 0 is there", flush=True)
        story.tell("rank 0 has printed")
    powertrain.collective.barrier()


def both_stop() -> None:
    number = 40 + rank()
    breakpoint()
    powertrain.report({"number": number})


def both_stop_before_they_meet() -> None:
    breakpoint()
    powertrain.collective.barrier()
    powertrain.report({"met": 1})


def rank_1_fails() -> None:
    """Rank 0 waits for it, and fails because of it."""
    if rank() == 1:
        divide(7)
    powertrain.collective.barrier()


def divide(numerator: int) -> float:
    divisor = numerator - 7
    return numerator / divisor


def stops_in_another_way() -> None:
    import pdb

    if rank() == 1:
        pdb.set_trace()
    powertrain.collective.barrier()


def stops_alone() -> None:
    number = 40
    breakpoint()
    number += 1
    powertrain.report({"number": number})


def stops_and_repeats_alone() -> None:
    breakpoint()
    while True:
        powertrain.report({"number": 41})


def fails_alone() -> None:
    divide(7)


#: Scenes with options of their own.
OPTIONS: dict[str, dict[str, Any]] = {
    "rank_1_fails": {"post_mortem": True},
    "fails_alone": {"post_mortem": True},
    "rank_1_stops_for_long": {"failure_config": FailureConfig(hang_timeout_s=1.0)},
}


def play(scene: str, number: int) -> None:
    loop: Callable[..., Any] = globals()[scene.replace("_for_long", "")]
    alone = scene.endswith("_alone")
    trainer = DataParallelTrainer(
        loop,
        scaling_config=ScalingConfig(num_workers=0) if alone else story.scaling(ENGINE),
        run_config=story.run_config(f"{scene}-{number}", **OPTIONS.get(scene, {})),
    )
    story.tell(f"outcome-{number}", json.dumps(story.outcome_of(trainer.fit)))


def play_all() -> None:
    if ENGINE == "local":
        play("nothing", 0)
    number = 1
    while True:
        while not story.told(f"play-{number}"):
            time.sleep(0.005)
        scene = (story.directory() / f"play-{number}").read_text()
        if scene == "end":
            return
        play(scene, number)
        number += 1


if __name__ == "__main__":
    sys.modules["torch"] = None  # type: ignore[assignment]  # these play as where it is not installed
    play_all()
