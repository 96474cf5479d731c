"""The limit of report(), copying a dict and appending it: python queue_append.py DIRECTORY SETTINGS

SETTINGS is a JSON object with "count" and "gap_seconds". Like every script here it writes the cost of each call to
DIRECTORY/rank-N.json.
"""

from __future__ import annotations

import json
import os
import sys
import time
from array import array
from collections import deque
from pathlib import Path

settings = json.loads(sys.argv[2])
count, gap = settings["count"], settings["gap_seconds"]
queue: deque[dict[str, float]] = deque(maxlen=10_000)
nanoseconds = array("q", [0]) * count
began = time.monotonic()
for step in range(count):
    early = began + step * gap - time.monotonic()
    if early > 0:
        time.sleep(early)
    metrics = {"loss": 1.0 / (step + 1), "step": step}
    before = time.perf_counter_ns()
    queue.append(dict(metrics))
    nanoseconds[step] = time.perf_counter_ns() - before
sample = {"pid": os.getpid(), "began": began, "ended": time.monotonic(), "nanoseconds": list(nanoseconds)}
Path(sys.argv[1], "rank-0.json").write_text(json.dumps(sample))
