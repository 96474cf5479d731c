"""Growth of a process's anonymous memory while it streams 8 GB of shuffled Parquet, two epochs of it.

A generated dataset (random token lists, row groups of 16 MB, nothing compressible) is read in a separate process with
``read_parquet(directory).random_shuffle(seed=0)`` and ``iter_torch_batches(batch_size=1024)``. After its imports the
process samples its own RssAnon every 100 ms: memory without a backing file. The cache of decoded blocks consists of
mapped files, which the kernel reclaims when it needs the memory. Every row must come exactly once per epoch.

The limit is the minimum: one batch, and the buffers in which one row group is decoded.

    python benchmarks/data_memory.py [--quick] [--json FILE] [--check]     (needs 20 GB of disk; --quick: 3 GB)
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from child_process import run_to_end
from harness import (
    Bound,
    Contender,
    MeasurementFailed,
    Outcome,
    Rounds,
    Row,
    conclude,
    interleave,
    parse_options,
    things_left,
    worst,
)

SCRIPTS = Path(__file__).resolve().parent / "data_memory_scripts"
OURS = "Powertrain"
#: The claims of the issue.
DATA_BYTES, QUICK_DATA_BYTES = 8 * 10**9, 10**9
GROWTH_AT_MOST_MB = 512.0

ROW_GROUP_BYTES = 16 * 2**20
BATCH_SIZE = 1024
ROW_BYTES = 8 + 4 * 512
EPOCHS = 2
TIMEOUT_SECONDS = 1800.0
#: Times the data: itself, its decoded blocks, and a little.
DISK_NEEDED = 2.5
#: On disk by convention; where a temporary directory is in memory, the data would take what is measured.
ON_DISK = Path("/var/tmp")


@dataclass(frozen=True)
class Streaming:
    """One process's memory while it streamed."""

    before: int
    samples: tuple[int, ...]
    missed: int
    twice: int
    seconds: tuple[float, ...]
    data_bytes: int
    left_behind: tuple[str, ...]

    @property
    def growth_mb(self) -> float:
        """Growth from the end of the imports to the peak."""
        return max(0.0, (max(self.samples) - self.before) / 1e6)

    @property
    def wrong_rows(self) -> int:
        return self.missed + self.twice

    def speed(self, epoch: int) -> float:
        """MB a second."""
        return self.data_bytes / 1e6 / self.seconds[epoch]


def run_script(script: str, directory: Path, workspace: Path, **settings: int) -> tuple[dict[str, Any], Any]:
    """Runs one of ``data_memory_scripts/`` in a new ``workspace``; returns its figures and how it ended."""
    workspace.mkdir()
    command = (sys.executable, str(SCRIPTS / script), str(directory), json.dumps(settings))
    ended = run_to_end(command, workspace=workspace, timeout=TIMEOUT_SECONDS, grace=5.0)
    told: dict[str, Any] = json.loads(ended.output.splitlines()[-1])
    return told, ended


def measure(data_bytes: int) -> Streaming:
    """Generates the data, streams it, removes it."""
    place = ON_DISK if os.access(ON_DISK, os.W_OK) else Path(tempfile.gettempdir())
    free = shutil.disk_usage(place).free
    if free < DISK_NEEDED * data_bytes:
        raise MeasurementFailed(
            f"{place} has {free / 1e9:.1f} GB left, and data and decoded blocks need up to "
            f"{DISK_NEEDED * data_bytes / 1e9:.1f}. Free some, or use --quick."
        )
    with tempfile.TemporaryDirectory(prefix="ptb-", dir=place) as directory:
        top = Path(directory)
        settings: Mapping[str, int] = {"bytes": data_bytes, "row_group_bytes": ROW_GROUP_BYTES}
        generated, _ = run_script("generate.py", top / "data", top / "generating", **settings)
        settings = {"rows": generated["rows"], "batch_size": BATCH_SIZE, "epochs": EPOCHS}
        told, ended = run_script("stream.py", top / "data", top / "streaming", **settings)
    return Streaming(
        before=told["before"],
        samples=tuple(told["samples"]),
        missed=told["missed"],
        twice=told["twice"],
        seconds=tuple(told["seconds"]),
        data_bytes=generated["rows"] * ROW_BYTES,
        left_behind=ended.left_behind,
    )


def rows_of(rounds: Rounds[Streaming]) -> list[Row]:
    """Memory beside the limit; then what shows that all of the data was read."""
    batch_mb, decoding_mb = BATCH_SIZE * ROW_BYTES / 1e6, 2 * ROW_GROUP_BYTES / 1e6
    limit = f"one batch {batch_mb:.1f} MB + decode buffers of a row group {decoding_mb:.1f} MB"
    growth = rounds.numbers(OURS, lambda one: one.growth_mb)
    rows = [Row("growth of anonymous memory after imports", OURS, "MB", growth, limit=limit)]
    for epoch, what in enumerate(("first epoch", "second epoch")):
        speed = rounds.numbers(OURS, partial(Streaming.speed, epoch=epoch))
        rows.append(Row(f"streamed, {what}", OURS, "MB/s", speed))
    rows.append(Row("rows missed or seen twice", OURS, "", rounds.numbers(OURS, lambda one: one.wrong_rows)))
    return rows


def bounds_of(rounds: Rounds[Streaming], data_bytes: int) -> list[Bound]:
    growth = worst(rounds.numbers(OURS, lambda one: one.growth_mb))
    wrong = worst(rounds.numbers(OURS, lambda one: one.wrong_rows))
    left = worst(rounds.numbers(OURS, lambda one: len(one.left_behind)))
    return [
        Bound(f"MB grown while streaming {data_bytes / 1e9:.0f} GB", growth, at_most=GROWTH_AT_MOST_MB),
        Bound("rows missed or seen twice in two epochs", wrong, at_most=0),
        Bound("processes, files left behind", left, at_most=0),
    ]


def main() -> int:
    """Measure, print, and return the exit code."""
    options = parse_options("How much anonymous memory grows while a large dataset is streamed.")
    data_bytes = QUICK_DATA_BYTES if options.quick else DATA_BYTES
    contenders = [Contender(OURS, ("torch", "powertrain"), partial(measure, data_bytes))]
    rounds = interleave(contenders, 1, warm_up=False)
    outcome = Outcome(
        title=f"Anonymous memory while {data_bytes / 1e9:.0f} GB of Parquet are streamed, {EPOCHS} epochs",
        repetitions=1,
        rows=rows_of(rounds),
        bounds=bounds_of(rounds, data_bytes),
        missing=rounds.missing,
        failures=rounds.failures,
        notes=things_left(rounds),
        samples={OURS: [None if one is None else asdict(one) for one in rounds.measured[OURS]]},
    )
    return conclude(outcome, options)


if __name__ == "__main__":
    raise SystemExit(main())
