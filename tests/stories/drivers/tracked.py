"""Loops and trackers of the stories about trackers."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import story

import powertrain
from powertrain import Checkpoint, DataParallelTrainer
from powertrain.trackers import TrackedPoint, TrackedRun, Tracker, TrackerSession


class Diary(Tracker):
    """A tracker of a user: a line for each opening and each point, and a file whose presence means that it is down."""

    name = "diary"

    def open(self, run: TrackedRun) -> TrackerSession:
        return DiarySession(run)


class DiarySession(TrackerSession):
    def __init__(self, run: TrackedRun) -> None:
        self._refuse_if_down()
        self._path = story.directory() / "diary"
        self.id, self.last_step = f"diary-{run.key}", 0
        if self._path.exists():
            steps = [
                line.split()[1] for line in self._path.read_text().splitlines() if line.startswith("point")
            ]
            self.last_step = max(map(int, steps), default=0)
        self._write(f"opened {self.id} {run.params.get('steps')}")

    def log(self, points: Sequence[TrackedPoint]) -> None:
        self._refuse_if_down()
        self._write(*(f"point {point.step} {point.numbers['loss']!r}" for point in points))

    def finish(self, ending: Any) -> None:
        self._write(f"ended {ending.state}")

    def _write(self, *lines: str) -> None:
        with self._path.open("a") as file:
            file.write("".join(f"{line}\n" for line in lines))
            file.flush()
            os.fsync(file.fileno())

    def _refuse_if_down(self) -> None:
        if story.told("diary-is-down"):
            story.tell("diary-refused")
            raise ConnectionError("the diary is closed")


def resumable(config: dict[str, Any]) -> None:
    """Report steps, with a checkpoint after every tenth. At two of them ranks tell that they have come, and wait."""
    first = 1
    checkpoint = powertrain.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as directory:
            first = int(Path(directory, "step").read_text()) + 1
    rank = powertrain.get_context().get_world_rank()
    for step in range(first, config["steps"] + 1):
        metrics = {"loss": 1 / step}
        if step % 10 == 0:
            with powertrain.checkpoint_dir() as directory:
                if rank == 0:
                    Path(directory, "step").write_text(str(step))
                powertrain.report(metrics, checkpoint=Checkpoint.from_directory(directory))
        else:
            powertrain.report(metrics)
        if step in (config["halt_at"], config["then_at"]):
            story.tell(f"halted-{rank}")
            _await(f"go-on-from-{step}")


def _await(name: str) -> None:
    """Wait until this word was sent; longer than stories do, because a server may have to start."""
    deadline = time.monotonic() + 900
    while not story.told(name):
        if time.monotonic() > deadline:
            raise TimeoutError(name)
        time.sleep(0.01)


def trainer(
    name: str, trackers: Sequence[Any], steps: int = 100, halt_at: int = 0, then_at: int = 0, **options: Any
) -> Any:
    return DataParallelTrainer(
        resumable,
        train_loop_config={"steps": steps, "halt_at": halt_at, "then_at": then_at},
        scaling_config=story.scaling(os.environ.get("STORY_ENGINE", "local")),
        run_config=story.run_config(name, trackers=trackers, tracker_timeout_s=300.0, **options),
    )


def until_killed() -> dict[str, Any]:
    """The first start halts at step 55; the next goes on to the end."""
    return story.outcome_of(trainer("tracked", ["csv", "tensorboard", Diary()], halt_at=55).fit)
