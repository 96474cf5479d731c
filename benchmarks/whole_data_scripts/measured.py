"""One operation on a Parquet file by one library, in a process of its own: prints its seconds and memory as JSON.

``python measured.py LIBRARY OPERATION FILE``: the libraries are powertrain, ray and pandas, the operations groupby (the
mean and the number of rows of each key) and sort (all rows by two columns, read to the end). Imports and, for Ray, the
start of the cluster are not timed. Memory is the growth of all processes of the library over that before the
operation, sampled every 50 ms: anonymous memory and, for Ray, what its object store holds in shared memory.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

SAMPLE_INTERVAL_S = 0.05


def memory_now() -> int:
    """Return the anonymous and shared memory of this process and all its descendants."""
    total = 0
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
        except OSError:
            continue
        fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        total += sum(int(fields.get(name, "0 kB").split()[0]) for name in ("RssAnon", "RssShmem"))
    return total * 1024


class Sampler:
    """The greatest memory while a block runs."""

    def __enter__(self) -> Sampler:
        self.before = self.most = memory_now()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._ended.wait(SAMPLE_INTERVAL_S):
            self.most = max(self.most, memory_now())

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()


def with_powertrain(operation: str, file: str) -> Callable[[], tuple[int, float]]:
    import powertrain.data
    from powertrain.data.aggregate import Count, Mean

    def groupby() -> tuple[int, float]:
        found = powertrain.data.read_parquet(file).groupby("key").aggregate(Mean("value"), Count())
        frame = found.to_pandas()
        return len(frame), float(frame["count()"].sum())

    def sort() -> tuple[int, float]:
        rows, first = 0, 0.0
        ordered = powertrain.data.read_parquet(file).sort(["key", "value"])
        for batch in ordered.iter_batches(batch_size=65536, batch_format="pyarrow"):
            first = first if rows else float(batch["value"][0].as_py())
            rows += batch.num_rows
        return rows, first

    return {"groupby": groupby, "sort": sort}[operation]


def with_ray(operation: str, file: str) -> Callable[[], tuple[int, float]]:
    import ray
    import ray.data
    from ray.data.aggregate import Count, Mean

    ray.init("local", include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    ray.data.DataContext.get_current().enable_progress_bars = False

    def groupby() -> tuple[int, float]:
        frame = ray.data.read_parquet(file).groupby("key").aggregate(Mean("value"), Count()).to_pandas()
        return len(frame), float(frame["count()"].sum())

    def sort() -> tuple[int, float]:
        rows, first = 0, 0.0
        ordered = ray.data.read_parquet(file).sort(["key", "value"])
        for batch in ordered.iter_batches(batch_size=65536, batch_format="pyarrow"):
            first = first if rows else float(batch["value"][0].as_py())
            rows += batch.num_rows
        return rows, first

    return {"groupby": groupby, "sort": sort}[operation]


def with_pandas(operation: str, file: str) -> Callable[[], tuple[int, float]]:
    import pandas as pd

    def groupby() -> tuple[int, float]:
        frame = pd.read_parquet(file).groupby("key")["value"].agg(["mean", "count"])
        return len(frame), float(frame["count"].sum())

    def sort() -> tuple[int, float]:
        frame = pd.read_parquet(file).sort_values(["key", "value"])
        return len(frame), float(frame["value"].iloc[0])

    return {"groupby": groupby, "sort": sort}[operation]


def main(library: str, operation: str, file: str) -> None:
    """Measure once and print the result."""
    prepare: Any = {"powertrain": with_powertrain, "ray": with_ray, "pandas": with_pandas}[library]
    run = prepare(operation, file)
    with Sampler() as memory:
        began = time.perf_counter()
        rows, check = run()
        seconds = time.perf_counter() - began
    found = {"seconds": seconds, "bytes": memory.most - memory.before, "rows": rows, "check": check}
    print("MEASURED " + json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
