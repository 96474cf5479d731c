"""Our tracing, switched on and off by turns, then at a steady pace: python with_powertrain.py DIRECTORY SETTINGS"""

from __future__ import annotations

import json
import mmap
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from training import Training, alternate

from powertrain.trace.recording import patch_choice, patches, phases, ring
from powertrain.trace.recording.recorder import Recorder


class Draining:
    """A side thread that takes the steps out of the ring once a second, as a worker's does."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._is_over = recorder, threading.Event()
        self.steps: list[int] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over.wait(1.0):
            self._take()

    def _take(self, final: bool = False) -> None:
        after = self.steps[-1] + 1 if self.steps else 0
        data = self._recorder.drain(after, final)[1]
        records = range(0, len(data), phases.RECORD_SIZE)
        self.steps += [phases.unpack_from(data, at).step for at in records]

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()
        self._take(final=True)


def make_recorder(path: Path) -> Recorder:
    with path.open("w+b") as file:
        file.truncate(ring.ring_size())
        return Recorder(mmap.mmap(file.fileno(), 0))


def by_turns(directory: Path, settings: dict[str, Any]) -> dict[str, Any]:
    training = Training(settings["device"])
    training.make_step_take(settings["step_seconds"])
    recorder = make_recorder(directory / "turns")

    def traced(is_on: bool) -> None:
        patches.uninstall()
        if is_on:
            patches.install(recorder, patch_choice.choose())

    draining = Draining(recorder)
    pairs = alternate(training, settings["blocks"], settings["steps"], traced)
    recorder.flush()
    draining.close()
    return {"pairs": pairs, "recorded": len(draining.steps)}


def at_pace(directory: Path, settings: dict[str, Any]) -> dict[str, Any]:
    count = round(settings["pace"] * settings["pace_seconds"])
    if not count:
        return {}
    training = Training(is_small=True)
    training.run(200)
    recorder = make_recorder(directory / "pace")
    patches.install(recorder, patch_choice.choose())
    draining = Draining(recorder)
    began = time.monotonic()
    training.run(count, seconds_each=1 / settings["pace"])
    ended = time.monotonic()
    recorder.flush()
    draining.close()
    patches.uninstall()
    return {"made": count, "kept": len(set(draining.steps)), "seconds": ended - began}


directory, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
answer = {"turns": by_turns(directory, settings), "pace": at_pace(directory, settings)}
if settings["device"] != "cpu":
    answer["device"] = torch.cuda.get_device_name()
(directory / "answer.json").write_text(json.dumps(answer))
