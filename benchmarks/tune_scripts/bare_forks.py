"""The limit: a bare fork for each trial, 2 at a time, that ends at once: python bare_forks.py DIRECTORY TRIALS

The process has torch loaded, as a warm server has.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch  # noqa: F401

if __name__ == "__main__":
    count = int(sys.argv[2])
    began, running = time.monotonic(), 0
    for number in range(count):
        if running == 2:
            os.wait()
            running -= 1
        if os.fork() == 0:
            losses = [number / (step + 1) for step in range(5)]
            os._exit(0 if losses else 1)
        running += 1
    while running:
        os.wait()
        running -= 1
    print(json.dumps({"seconds": time.monotonic() - began}))
