"""Start and stop of simulated-worker processes, and progress messages to the benchmark."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from crowd import Crowd

from powertrain.wire.keys import ConnectionInfo

#: Timeout for expected messages, in seconds.
PATIENCE = 120.0


def start_crowds(
    connections: Mapping[int, ConnectionInfo], reports: int, crowds: int, gathers: bool
) -> list[subprocess.Popen[str]]:
    """Start processes for all ranks but the last, and one more for the last alone."""
    last = max(connections)
    shares = [[rank for rank in connections if rank != last][n::crowds] for n in range(crowds)]
    command = [sys.executable, str(Path(__file__).with_name("crowd.py"))]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(crowds + 1)
    ]
    for process, share in zip(processes, [*shares, [last]], strict=True):
        told = msgspec.json.encode(
            Crowd(0, len(connections), reports, gathers, {rank: connections[rank] for rank in share})
        ).decode()
        assert process.stdin is not None
        process.stdin.write(f"{len(told)}\n{told}")
        process.stdin.flush()
    return processes


def end_crowds(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def tell(**facts: Any) -> None:
    """Print one line for the benchmark."""
    print(json.dumps(facts), flush=True)


def tell_phase(name: str) -> None:
    tell(phase=name, at=time.monotonic(), threads=_thread_seconds())


def _thread_seconds() -> dict[str, float]:
    """Return the CPU seconds of each thread of this process; non-Python threads by their native name."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    seconds: dict[str, float] = {}
    tick = os.sysconf("SC_CLK_TCK")
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has ended meanwhile
            title, _, rest = (task / "stat").read_text().rpartition(")")
            fields = rest.split()
            name = names.get(int(task.name), title.partition("(")[2])
            seconds[name] = seconds.get(name, 0.0) + (int(fields[11]) + int(fields[12])) / tick
    return seconds
