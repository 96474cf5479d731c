"""Groupby and sort of 20 million rows: Powertrain beside Ray Data and pandas.

A Parquet file (a key of 1,000,000 values, a float and a row number, 20 row groups or more) is read by a separate
process, which groups it (mean and count of each key) or sorts all rows by key and value and reads them to the end. The
contenders are interleaved. Times are from reading the file on; imports and the start of Ray's cluster are not part of
them. All contenders must find the same rows.

Memory is the growth of a process with its descendants, see ``whole_data_scripts/measured.py``. Powertrain's is bounded
by its own budget: 256 MiB for DuckDB, 256 MiB for reading, and what holds a batch and a block of results on their way.

    python benchmarks/whole_data.py [--quick] [--json FILE] [--check]
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from child_process import run_to_end
from harness import (
    Bound,
    Contender,
    MeasurementFailed,
    Outcome,
    Row,
    conclude,
    interleave,
    median_ratio,
    parse_options,
    worst,
)

SCRIPT = Path(__file__).resolve().parent / "whole_data_scripts" / "measured.py"
ROWS, QUICK_ROWS = 20_000_000, 1_000_000
KEYS_PER_ROW = 20
ROW_GROUP_ROWS = 1_000_000
REPETITIONS, QUICK_REPETITIONS = 3, 1
TIMEOUT_SECONDS = 1200.0
#: On disk by convention; a temporary directory may be in memory, which is measured.
ON_DISK = Path("/var/tmp")
OURS, RAY, PANDAS = "Powertrain", "Ray Data", "pandas"
LIBRARIES = {OURS: "powertrain", RAY: "ray", PANDAS: "pandas"}
OPERATIONS = ("groupby", "sort")
#: The claims: not slower than Ray Data, and memory within the budget, whatever the number of rows.
RATIO_AT_MOST = 1.0
MEMORY_AT_MOST_MB = 1024.0


@dataclass(frozen=True)
class Measured:
    """One operation of one library."""

    seconds: float
    bytes: int
    rows: int
    check: float


def write_rows(file: Path, rows: int) -> None:
    """Write the data, a row group at a time."""
    generator = np.random.default_rng(0)
    schema = pa.schema([("key", pa.int64()), ("value", pa.float64()), ("row", pa.int64())])
    with pyarrow.parquet.ParquetWriter(file, schema) as writer:
        for first in range(0, rows, ROW_GROUP_ROWS):
            count = min(ROW_GROUP_ROWS, rows - first)
            columns = {
                "key": generator.integers(0, max(rows // KEYS_PER_ROW, 1), count),
                "value": generator.random(count),
                "row": np.arange(first, first + count),
            }
            writer.write_table(pa.table(columns, schema=schema), row_group_size=count)


def measure(library: str, operation: str, file: Path) -> Measured:
    """Run one operation in a process of its own."""
    # A short path: Ray puts its sockets below it.
    with tempfile.TemporaryDirectory(prefix="pt-", dir=ON_DISK) as workspace:
        command = [sys.executable, str(SCRIPT), library, operation, str(file)]
        ended = run_to_end(command, workspace=Path(workspace), timeout=TIMEOUT_SECONDS, grace=20.0)
    lines = [line for line in ended.output.splitlines() if line.startswith("MEASURED ")]
    if not lines:
        raise MeasurementFailed(f"{library} {operation} printed no measurement: {ended.output[-2000:]}")
    return Measured(**json.loads(lines[-1].removeprefix("MEASURED ")))


def main() -> int:
    """Measure, print, and return the exit code."""
    options = parse_options("Groupby and sort of 20 million rows beside Ray Data and pandas.")
    rows_of_data = QUICK_ROWS if options.quick else ROWS
    repetitions = QUICK_REPETITIONS if options.quick else REPETITIONS
    rows, bounds, failures, missing, samples = [], [], [], [], {}
    with tempfile.TemporaryDirectory(prefix="pt-whole-", dir=ON_DISK) as directory:
        file = Path(directory) / "rows.parquet"
        write_rows(file, rows_of_data)
        for operation in OPERATIONS:
            contenders = [
                Contender(name, (library,), partial(measure, library, operation, file))
                for name, library in LIBRARIES.items()
            ]
            rounds = interleave(contenders, repetitions, warm_up=False)
            what = f"{operation} of {rows_of_data:,} rows"
            ours = rounds.numbers(OURS, lambda one: one.seconds)
            for name in LIBRARIES:
                seconds = rounds.numbers(name, lambda one: one.seconds)
                ratio = None if name == OURS else median_ratio(ours, seconds)
                rows.append(Row(what, name, "s", seconds, ratio))
            for name in LIBRARIES:
                rows.append(
                    Row(f"{what}, memory", name, "MB", rounds.numbers(name, lambda one: one.bytes / 1e6))
                )
            theirs = rounds.numbers(RAY, lambda one: one.seconds)
            bounds.append(Bound(f"{what}: {OURS} / {RAY}", median_ratio(ours, theirs), at_most=RATIO_AT_MOST))
            memory = worst(rounds.numbers(OURS, lambda one: one.bytes / 1e6))
            bounds.append(Bound(f"{what}: memory of {OURS}, MB", memory, at_most=MEMORY_AT_MOST_MB))
            found = {
                (one.rows, round(one.check, 9)) for each in rounds.measured.values() for one in each if one
            }
            bounds.append(Bound(f"{what}: different results", float(len(found)), at_most=1.0))
            failures += rounds.failures
            missing += [name for name in rounds.missing if name not in missing]
            samples[operation] = {
                name: [one and asdict(one) for one in each] for name, each in rounds.measured.items()
            }
    outcome = Outcome(
        "Whole data", repetitions, rows, bounds, tuple(missing), tuple(failures), samples=samples
    )
    return conclude(outcome, options)


if __name__ == "__main__":
    raise SystemExit(main())
