"""The same loop with torch's profiler in its code: python with_torch.py SETTINGS

It profiles some steps each time a request file appears, and writes their trace within the loop, as its guide has it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from steps import make_model, train


def main() -> None:
    settings = json.loads(sys.argv[1])
    directory = Path(settings["directory"])
    profiler: torch.profiler.profile | None = None
    left = 0

    def before_step(number: int) -> None:
        nonlocal profiler, left
        if profiler is not None and left == 0:
            profiler.stop()
            profiler.export_chrome_trace(str(directory / f"{number}.trace.json.gz"))
            profiler = None
            (directory / "request").rename(directory / "answer")
        elif profiler is None and (directory / "request").exists():
            profiler = torch.profiler.profile(with_stack=True, record_shapes=True)
            profiler.start()
            left = settings["profiled"]
        left -= 1

    torch.set_num_threads(1)
    train(make_model(settings["device"]), settings, before_step)


if __name__ == "__main__":
    main()
