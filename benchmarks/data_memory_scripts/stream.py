"""Streams a generated dataset and watches its own memory: python stream.py DIRECTORY SETTINGS

SETTINGS is a JSON object with "rows", "batch_size" and "epochs". Prints one line of JSON: anonymous memory after the
imports and every 100 ms from then on, rows missed or seen twice, seconds of each epoch.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from powertrain.data import read_parquet

PERIOD_SECONDS = 0.1


def anonymous_bytes() -> int:
    """Memory of this process that is not backed by a file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon: this needs Linux 4.5 or later.")


class Sampler:
    """Sampler of this process's anonymous memory, every 100 ms on a separate thread."""

    def __init__(self) -> None:
        self.samples: list[int] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(PERIOD_SECONDS):
            self.samples.append(anonymous_bytes())

    def end(self) -> list[int]:
        self._ended.set()
        self._thread.join()
        return [*self.samples, anonymous_bytes()]


def stream(directory: str, rows: int, batch_size: int, epochs: int) -> dict[str, Any]:
    seen = np.zeros(rows, np.uint8)
    seen.fill(1)  # touched, so that it is no growth later
    before = anonymous_bytes()
    sampler = Sampler()
    dataset = read_parquet(directory).random_shuffle(seed=0)
    batches = dataset.iter_torch_batches(batch_size=batch_size)
    seconds, missed, twice = [], 0, 0
    for _ in range(epochs):
        seen.fill(0)
        began = time.monotonic()
        for batch in batches:
            assert batch["tokens"].dtype == torch.int32
            seen[batch["id"].numpy()] += 1
        seconds.append(time.monotonic() - began)
        missed += int((seen == 0).sum())
        twice += int((seen > 1).sum())
    samples = sampler.end()
    return {"before": before, "samples": samples, "missed": missed, "twice": twice, "seconds": seconds}


if __name__ == "__main__":
    print(json.dumps(stream(sys.argv[1], **json.loads(sys.argv[2]))))
