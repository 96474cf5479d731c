"""A storage path with runs of every kind and a sweep, for tests, screenshots and benchmarks of the dashboard."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
from tests.diagnosis import synthetic
from tests.diagnosis.run_directory import records
from tests.tune.recorded_sweep import RECORD as SWEEP_RECORD
from tests.tune.recorded_sweep import started, trial_facts, write_sweep

from powertrain.checkpoint.chain import Chain
from powertrain.checkpoint.commit import commit
from powertrain.checkpoint.manifest import ManifestFile
from powertrain.diagnosis import final
from powertrain.diagnosis.tables.samples import SAMPLE
from powertrain.run import events as ev
from powertrain.run.metrics.points import PointRecord
from powertrain.run.metrics.store import MetricsStore
from powertrain.run.record.journal import Journal
from powertrain.storage import Storage, open_storage
from powertrain.trace.recording import phases
from powertrain.trace.store import SAMPLES, STEPS, PartFrame, TelemetryStore

RANKS = 4
#: The rank that is late in every step of the eventful run.
STRAGGLER = 2
#: Seconds of a row of the eventful run, and the rows at which it fails and goes on.
ROW_S, FAILS_AFTER, GOES_ON_AT = 0.9, 260, 201
LAST_ROW = 600


def write_all(root: Path, *, now: float | None = None) -> None:
    """Write all runs below ``root``."""
    now = time.time() if now is None else now
    write_eventful(open_storage(root / "resnet50-imagenet"), now - 5400)
    for place, (name, state, seed) in enumerate(
        [
            ("gpt-small-baseline", "finished", 1),
            ("gpt-small-warmup", "finished", 2),
            ("vit-base-augment", "failed", 3),
            ("digits", "finished", 4),
            ("segmentation-unet", "stopped", 5),
        ]
    ):
        write_plain(open_storage(root / name), now - 9000.0 * (place + 1), state=state, seed=seed)
    write_search(open_storage(root / "lr-search"), now - 40_000)


def _start(name: str, at: float, lease: int = 1) -> ev.RunStarted:
    return ev.RunStarted(
        time=at, name=name, lease=lease, host="node-a", pid=1, version="0.1.0", engine="local"
    )


def metrics_at(row: int, rank: int, seed: int = 0) -> dict[str, Any]:
    """Return metrics that look like those of a training."""
    noise = math.sin(row * 12.9898 + seed * 3.1 + rank) * 0.06
    progress = row / (120.0 + 15 * seed)
    loss = 6.5 / (1 + progress) ** 1.1 + 0.25 + noise
    values: dict[str, Any] = {
        "loss": loss + 0.02 * rank,
        "accuracy": 1 - math.exp(-progress / 1.4) + noise / 9,
    }
    if row % 20 == 0:
        values["eval"] = {"loss": loss * 1.08 + 0.1, "f1": 0.92 - math.exp(-progress)}
    values["lr"] = 3e-4 * (min(1.0, row / 50) * (1 + math.cos(math.pi * min(1.0, row / LAST_ROW))) / 2)
    values["grad_norm"] = 1.2 + 3 / (1 + progress) + abs(noise) * 9
    return values


def write_plain(storage: Storage, at: float, *, state: str, seed: int, rows: int = 400) -> None:
    """Write a run of two ranks that ended in ``state``."""
    name = Path(storage.uri).name
    journal = Journal(storage, 1)
    failure = ev.WorkerFailure(
        rank=1, kind="oom", summary="rank 1 ran out of GPU memory", error_type="OutOfMemoryError", row=rows
    )
    facts: list[ev.Event] = [
        _start(name, at),
        ev.AttemptStarted(time=at + 2, attempt=0, world_size=2, first_row=1, hosts=("node-a", "node-a")),
        ev.TrainingStarted(time=at + 9, attempt=0),
    ]
    end = at + 9 + rows * 1.5
    if state == "failed":
        facts.append(
            ev.Failed(time=end, attempt=0, failures=(failure,), decision="give_up", reason="failure 1 of 0")
        )
    if state == "stopped":
        facts.append(
            ev.Stopping(time=end - 3, attempt=0, cause="asked", reason="powertrain stop, asked by ada")
        )
    facts.append(ev.Ended(time=end, state=state, reason="", rows=rows, seconds=end - at))
    for fact in facts:
        journal.append(fact)
    journal.close()
    store = MetricsStore(storage, 1)
    store.add(
        [
            PointRecord(
                rank=rank,
                attempt=0,
                row=row,
                at=at + 9 + row * 1.5,
                solo=False,
                metrics=metrics_at(row, rank, seed),
            )
            for row in range(1, rows + 1)
            for rank in (0, 1)
        ]
    )
    store.close()
    fault = synthetic.bound(phases.INPUT, 0.02) if seed % 2 else synthetic.bound(phases.FORWARD, 0.01)
    _write_steps(storage, [(0, synthetic.run(seed, fault, ranks=2, steps=400), at + 9)])
    final.conclude(storage, name)


def _write_steps(storage: Storage, attempts: list[tuple[int, Any, float]], *, scale: float = 1.0) -> None:
    """Write the steps of attempts, each as if it had begun at its time; ``scale`` makes them longer."""
    telemetry = TelemetryStore(storage, 1)
    for attempt, steps, at in attempts:
        moved = dataclasses.replace(
            steps, phases=steps.phases * scale, start=at + (steps.start - steps.start.min()) * scale
        )
        for column, rank in enumerate(steps.ranks):
            telemetry.add(PartFrame(attempt, rank, STEPS, records(moved, column)))
            end = float(moved.start[-1, column])
            telemetry.add(PartFrame(attempt, rank, SAMPLES, _samples(at, end, rank).tobytes()))
    telemetry.close()


def _samples(begin: float, end: float, rank: int) -> Any:
    times = np.arange(begin, end, max(1.0, (end - begin) / 300))
    table = np.zeros(len(times), SAMPLE)
    wave = np.sin(np.arange(len(times)) / 7 + rank)
    late = rank == STRAGGLER
    table["time"], table["step"] = times, np.arange(1, len(times) + 1)
    table["cpu"] = 3.1 + 0.4 * wave + (2.2 if late else 0.0)
    table["host_cpu"], table["host_cores"] = 14 + wave, 32
    table["rss"] = 5200 + np.arange(len(times)) * 1.5 + 40 * rank
    table["ram_used"], table["ram_total"] = 61000 + 300 * wave, 128000
    table["gpu_busy"] = np.clip((0.62 if late else 0.91) + 0.05 * wave, 0, 1)
    table["gpu_memory"], table["gpu_memory_total"] = 31200 + 90 * rank, 40960
    table["gpu_power"] = 265 + 22 * wave - (60 if late else 0)
    table["disk_read"], table["net_in"], table["net_out"] = 110 + 20 * wave, 42 + 5 * wave, 40 + 5 * wave
    return table


def write_eventful(storage: Storage, at: float) -> None:
    """Write a run of four ranks with a straggler, which fails once, goes back to a checkpoint, and finishes."""
    name = Path(storage.uri).name
    config = {"checkpoint_score_attribute": "loss", "checkpoint_score_order": "min"}
    storage.put("run.json", json.dumps({"run_config": {"checkpoint_config": config}}).encode())
    began = at + 14
    failed = began + FAILS_AFTER * ROW_S
    again = failed + 21
    end = again + (LAST_ROW - GOES_ON_AT) * ROW_S
    raised = ev.WorkerFailure(
        rank=1,
        kind="signal",
        summary="rank 1 was killed by SIGKILL (out of memory?)",
        row=FAILS_AFTER,
        host="node-b",
    )
    hosts = ("node-a", "node-a", "node-b", "node-b")
    facts: list[ev.Event] = [
        _start(name, at),
        ev.SlotsRequested(time=at, attempt=0, count=RANKS),
        ev.AttemptStarted(time=at + 4, attempt=0, world_size=RANKS, first_row=1, hosts=hosts),
        ev.TrainingStarted(time=began, attempt=0),
    ]
    for row in (100, 200):
        facts.append(_committed(row, 0, began + row * ROW_S + 1.2))
    facts += [
        ev.Failed(time=failed, attempt=0, failures=(raised,), decision="retry", reason="failure 1 of 3"),
        ev.SlotsRequested(time=failed + 1, attempt=1, count=RANKS),
        ev.AttemptStarted(
            time=failed + 8,
            attempt=1,
            world_size=RANKS,
            first_row=GOES_ON_AT,
            checkpoint="checkpoint_000200",
            hosts=hosts,
        ),
        ev.TrainingStarted(time=again, attempt=1),
    ]
    for row in (300, 400, 500, 600):
        facts.append(_committed(row, 1, again + (row - GOES_ON_AT) * ROW_S + 1.2))
    facts.append(ev.Ended(time=end + 3, state="finished", reason="", rows=LAST_ROW, seconds=end + 3 - at))
    journal = Journal(storage, 1)
    for fact in facts:
        journal.append(fact)
    journal.close()
    _write_points(storage, began, again)
    _write_checkpoints(storage)
    late = synthetic.late(STRAGGLER, phases.INPUT, 0.008)
    slow = [
        synthetic.run(seed, late, synthetic.every(100, phases.REPORT, 0.1), ranks=RANKS, steps=steps)
        for seed, steps in ((7, 260), (8, 400))
    ]
    mean = float(slow[0].phases.sum(axis=2).mean())
    _write_steps(storage, [(0, slow[0], began), (1, slow[1], again)], scale=ROW_S / mean)
    final.conclude(storage, name)
    _write_logs(storage)


def _committed(row: int, attempt: int, at: float) -> ev.Committed:
    return ev.Committed(
        time=at, attempt=attempt, row=row, checkpoint=f"checkpoint_{row:06d}", bytes=102_400_000, files=4
    )


def _write_points(storage: Storage, began: float, again: float) -> None:
    store = MetricsStore(storage, 1)
    parts = ((0, 1, FAILS_AFTER, began), (1, GOES_ON_AT, LAST_ROW, again))
    for attempt, first, last, since in parts:
        store.add(
            [
                PointRecord(
                    rank=rank,
                    attempt=attempt,
                    row=row,
                    at=since + (row - first) * ROW_S,
                    solo=False,
                    metrics=metrics_at(row, rank),
                )
                for row in range(first, last + 1)
                for rank in range(RANKS)
            ]
        )
    store.close()


def _write_checkpoints(storage: Storage) -> None:
    chain = Chain.take_over(storage, 1)
    for row in (300, 400, 500, 600):
        name = f"checkpoint_{row:06d}"
        digest = storage.put_file(f"checkpoints/{name}/model", __file__)
        file = ManifestFile(name="model", size=digest.size, xxh3=digest.xxh3, rank=0)
        metrics = {"loss": metrics_at(row, 0)["loss"], "accuracy": metrics_at(row, 0)["accuracy"]}
        commit(storage, chain, name=name, row=row, attempt=1, files=[file], metrics=metrics, world_size=RANKS)


def _write_logs(storage: Storage) -> None:
    for attempt, first, last in ((0, 1, FAILS_AFTER), (1, GOES_ON_AT, LAST_ROW)):
        for rank in range(RANKS):
            lines = [
                f"step {row:4d}  loss {metrics_at(row, rank)['loss']:.4f}  {1 / ROW_S:.2f} it/s"
                for row in range(first, last + 1)
            ]
            storage.put(f"logs/attempt-{attempt}/rank-{rank}.log", ("\n".join(lines) + "\n").encode())


def write_search(storage: Storage, at: float, trials: int = 24) -> None:
    """Write a sweep over a learning rate, a width and an optimizer."""
    generator = np.random.default_rng(5)
    facts = []
    for number in range(trials):
        rate = float(10 ** generator.uniform(-4.5, -1.5))
        width = int(generator.choice([64, 128, 256, 512]))
        dropout = float(generator.uniform(0, 0.5))
        optimizer = str(generator.choice(["adamw", "sgd", "lion"]))
        floor = 0.25 + 0.35 * abs(math.log10(rate) + 3) + 0.08 * (optimizer == "sgd") + 0.1 / math.log2(width)
        rows = 40 if number % 3 else 14
        losses = [floor + 2.2 * math.exp(-row / 9) + 0.01 * math.sin(row * 3 + number) for row in range(rows)]
        params = {"lr": rate, "width": width, "dropout": dropout, "optimizer": optimizer}
        facts.append(trial_facts(number, params, losses, at=at + 30 * number, is_stopped_early=rows < 40))
    record = {**SWEEP_RECORD, "num_samples": trials, "metric": ["loss"], "mode": ["min"]}
    write_sweep(storage, facts, start=started(at), record=record)
