"""Memory does not grow with the data. The full claim, 8 GB within 512 MB, is benchmarks/data_memory.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "benchmarks" / "data_memory_scripts"
DATA_BYTES, ROW_GROUP_BYTES = 300 * 10**6, 4 * 2**20
#: Below what the data takes, and well above what batches and decoding take with as many threads as are ever used.
GROWTH_AT_MOST = 256 * 10**6


def run_script(name: str, data: Path, scratch: Path, **settings: int) -> dict[str, Any]:
    """What one of the benchmark's programs tells. Its temporary files go to ``scratch``."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TMPDIR": str(scratch)}
    ended = subprocess.run(
        [sys.executable, str(SCRIPTS / name), str(data), json.dumps(settings)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=100,
    )
    told: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return told


def test_anonymous_memory_stays_bounded_while_two_shuffled_epochs_are_streamed(tmp_path: Path) -> None:
    data, scratch = tmp_path / "data", tmp_path / "scratch"
    scratch.mkdir()
    made = run_script("generate.py", data, scratch, bytes=DATA_BYTES, row_group_bytes=ROW_GROUP_BYTES)
    assert sum(file.stat().st_size for file in data.iterdir()) > DATA_BYTES

    told = run_script("stream.py", data, scratch, rows=made["rows"], batch_size=1024, epochs=2)

    grown = max(told["samples"]) - told["before"]
    assert grown < GROWTH_AT_MOST, f"{grown / 1e6:.0f} MB for {DATA_BYTES / 1e6:.0f} MB of data"
    assert (told["missed"], told["twice"]) == (0, 0)
    assert not list(scratch.iterdir())
