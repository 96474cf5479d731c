"""Write the runs that the dashboard is asked for: ``python make_runs.py DIRECTORY SETTINGS`` (see dashboard.py)."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from powertrain.diagnosis import final
from powertrain.diagnosis.tables.samples import SAMPLE
from powertrain.diagnosis.tables.steps import RECORD
from powertrain.run import events as ev
from powertrain.run.metrics.points import PointRecord
from powertrain.run.metrics.store import MetricsStore
from powertrain.run.record.journal import Journal
from powertrain.storage import Storage, open_storage
from powertrain.trace.recording import phases
from powertrain.trace.store import SAMPLES, STEPS, PartFrame, TelemetryStore

ROOT, SETTINGS = Path(sys.argv[1]), json.loads(sys.argv[2])
BEGAN = time.time() - 100_000
STEPS_OF_RANK, SAMPLES_OF_RANK = 300, 60


def write_journal(storage: Storage, name: str, ranks: int, rows: int) -> None:
    """Write the facts of a run that has finished."""
    journal = Journal(storage, 1)
    for fact in (
        ev.RunStarted(time=BEGAN, name=name, lease=1, host="node", pid=1, version="0", engine="local"),
        ev.AttemptStarted(time=BEGAN + 1, attempt=0, world_size=ranks, first_row=1, hosts=("node",) * ranks),
        ev.TrainingStarted(time=BEGAN + 5, attempt=0),
        ev.Ended(time=BEGAN + 9000, state="finished", reason="", rows=rows, seconds=9000.0),
    ):
        journal.append(fact)
    journal.close()


def points(count: int, ranks: int) -> Iterator[list[PointRecord]]:
    """Yield points in order of arrival, 64 of a rank together: a noisy loss and two more metrics."""
    random = np.random.default_rng(1)
    for start in range(0, count // ranks, 64):
        rows = range(start + 1, min(start + 64, count // ranks) + 1)
        for rank in range(ranks):
            noise = random.standard_normal(len(rows)).tolist()
            yield [
                PointRecord(
                    rank, 0, row, BEGAN + row * 0.01, False,
                    {"loss": 4.0 / row**0.5 + 0.1 * one, "accuracy": 1 - 1 / row, "lr": 0.1 * 0.999 ** (row // 1000)},
                )
                for row, one in zip(rows, noise, strict=True)
            ]  # fmt: skip


def write_metrics(storage: Storage, count: int, ranks: int) -> None:
    """Write so many points of all ranks together."""
    store = MetricsStore(storage, 1)
    for number, part in enumerate(points(count, ranks), 1):
        store.add(part)
        if number % 2048 == 0:
            store.wait_spooled()
    store.close()


def write_steps(storage: Storage, ranks: int) -> None:
    """Write steps and samples of each rank; the last one is late in all of them."""
    random = np.random.default_rng(2)
    telemetry = TelemetryStore(storage, 1)
    for rank in range(ranks):
        if rank and rank % 256 == 0:  # it drops what it cannot write in time
            telemetry.close()
            telemetry = TelemetryStore(storage, 1 + rank // 256)
        table = np.zeros(STEPS_OF_RANK, RECORD)
        table["step"] = np.arange(STEPS_OF_RANK)
        table["phases"][:, phases.FORWARD] = 0.2 + 0.01 * random.random(STEPS_OF_RANK)
        table["phases"][:, phases.BACKWARD] = 0.4
        table["phases"][:, phases.COLLECTIVE if rank < ranks - 1 else phases.INPUT] = 0.1
        total = table["phases"].sum(axis=1, dtype=np.float64)
        table["start"] = BEGAN + 5 + np.cumsum(total) - total
        telemetry.add(PartFrame(0, rank, STEPS, table.tobytes()))
        sampled = np.zeros(SAMPLES_OF_RANK, SAMPLE)
        sampled["time"] = BEGAN + 5 + np.arange(SAMPLES_OF_RANK) * 3.0
        sampled["cpu"], sampled["rss"], sampled["gpu_busy"] = 1.0 + rank % 3, 4000.0, 0.9
        telemetry.add(PartFrame(0, rank, SAMPLES, sampled.tobytes()))
        if telemetry.dropped:
            raise SystemExit(f"steps up to rank {rank} were not kept")
    telemetry.close()


def write_run(root: Path, name: str, *, count: int, ranks: int, ranks_with_points: int) -> None:
    """Write one run with its diagnosis, as ``fit()`` leaves it."""
    storage = open_storage(root / name)
    write_journal(storage, name, ranks, count // ranks_with_points)
    write_metrics(storage, count, ranks_with_points)
    write_steps(storage, ranks)
    final.conclude(storage, name)
    storage.put("logs/attempt-0/rank-0.log", b"a line of the log\n" * 20_000)


def main() -> None:
    """Write all."""
    write_run(ROOT / "large", "points", count=SETTINGS["points"], ranks=8, ranks_with_points=8)
    write_run(ROOT / "wide", "ranks", count=64_000, ranks=SETTINGS["ranks"], ranks_with_points=64)
    write_run(ROOT / "peer", "points", count=SETTINGS["compared"], ranks=1, ranks_with_points=1)
    for number in range(SETTINGS["runs"]):
        storage = open_storage(ROOT / "many" / f"run-{number:03d}")
        write_journal(storage, f"run-{number:03d}", 2, 50)
        write_metrics(storage, 100, 2)
    write_events(ROOT / "tensorboard", SETTINGS["compared"])


def write_events(directory: Path, count: int) -> None:
    """Write the same points as the run beside it for TensorBoard."""
    from tensorboardX import SummaryWriter

    writer = SummaryWriter(str(directory))
    for part in points(count, 1):
        for point in part:
            for name, value in point.metrics.items():
                writer.add_scalar(name, value, point.row, point.at)
    writer.close()


if __name__ == "__main__":
    main()
