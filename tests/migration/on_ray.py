"""Runs programs of this folder as they are written, on Ray itself: ``python -m tests.migration.on_ray [PROGRAM...]``.

What a program asserts here is what Ray does. Without names all programs are run.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.migration import running

_TIMEOUT_S = 600.0
_CPUS = 8


def run_on_ray(name: str, address: str) -> running.Ended:
    """Run one program, unchanged, as a driver of the Ray cluster at ``address``."""
    with tempfile.TemporaryDirectory(prefix="on-ray-") as directory:
        environment = {"RAY_ADDRESS": address, "HOME": directory}
        return running.run(running.read(name), Path(directory), _TIMEOUT_S, environment)


def main(names: list[str]) -> int:
    """Run the programs one after the other; return how many of them failed."""
    # Without it Ray writes a token into the home directory, and programs with another one cannot connect.
    os.environ["RAY_AUTH_MODE"] = "disabled"
    import ray

    failed = 0
    # A cluster of its own: others on this machine are neither joined nor made known to this one.
    files = tempfile.mkdtemp(prefix="pt-on-ray-")
    try:
        context: Any = ray.init(
            "local", num_cpus=_CPUS, include_dashboard=False, log_to_driver=False, _temp_dir=files
        )
        for name in names or running.names():
            ended = run_on_ray(name, context.address_info["gcs_address"])
            failed += ended.code != 0
            print(f"{'ok' if ended.code == 0 else 'FAILED':7} {ended.seconds:6.1f} s  {name}", flush=True)
            if ended.code != 0:
                print(ended.output[-4000:], flush=True)
    finally:
        ray.shutdown()
        shutil.rmtree(files, ignore_errors=True)  # its processes may still write there while they exit
    return failed


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
