"""The directory of a run, written as a controller writes it, without training anything."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from powertrain.checkpoint.chain import Chain
from powertrain.checkpoint.commit import commit
from powertrain.checkpoint.manifest import ManifestFile
from powertrain.run import events as ev
from powertrain.run.metrics.points import PointRecord
from powertrain.run.metrics.store import MetricsStore
from powertrain.run.record.journal import Journal
from powertrain.storage import Storage, open_storage

#: When the run began, in Unix seconds; a row takes ten.
BEGAN = 1_700_000_000.0
ROW_SECONDS = 10.0
RAISED = ev.WorkerFailure(
    rank=1, kind="raised", summary="rank 1 raised ValueError", error_type="ValueError", message="shard 7 is <empty>",
    file="train.py", line=12, function="loop", source="raise ValueError", row=6, after=1.5,
)  # fmt: skip


def at(row: float) -> float:
    return BEGAN + ROW_SECONDS * row


def attempt(number: int, world_size: int, first_row: int) -> ev.AttemptStarted:
    return ev.AttemptStarted(
        time=at(first_row - 0.5), attempt=number, world_size=world_size, first_row=first_row
    )


#: Two workers fail after row 6 and begin again from row 5; then there are three.
EVENTFUL: tuple[ev.Event, ...] = (
    attempt(0, 2, 1),
    ev.TrainingStarted(time=at(0.6), attempt=0),
    ev.Failed(time=at(6.5), attempt=0, failures=(RAISED,), decision="retry", reason="failure 1 of 3"),
    ev.SlotsRequested(time=at(6.6), attempt=1, count=2),
    attempt(1, 2, 5),
    ev.TrainingStarted(time=at(6.7), attempt=1),
    ev.Resized(time=at(8.5), attempt=1, world_size=3, reason="there is room"),
    ev.SlotsRequested(time=at(8.6), attempt=2, count=3),
    attempt(2, 3, 9),
    ev.TrainingStarted(time=at(8.7), attempt=2),
)


def points(
    rows: Sequence[int], metrics: Any, *, attempt: int = 0, ranks: Sequence[int] = (0,)
) -> list[PointRecord]:
    """A point of each rank for each row, of the metrics that ``metrics(row, rank)`` gives."""
    return [
        PointRecord(
            rank=rank, attempt=attempt, row=row, at=at(row + attempt), solo=False, metrics=metrics(row, rank)
        )
        for row in rows
        for rank in ranks
    ]


def write(
    directory: Path,
    records: Sequence[PointRecord] = (),
    *,
    facts: Sequence[ev.Event] = (attempt(0, 1, 1), ev.TrainingStarted(time=at(0.6), attempt=0)),
    checkpoints: Mapping[int, Mapping[str, Any]] | None = None,
    score: tuple[str, str] | None = None,
    end: ev.Ended | None = None,
) -> Storage:
    """The run in ``directory``; ``checkpoints`` has the metrics of those that were committed, by row."""
    storage = open_storage(directory)
    attribute, order = score or (None, "max")
    config = {"checkpoint_score_attribute": attribute, "checkpoint_score_order": order}
    storage.put("run.json", json.dumps({"run_config": {"checkpoint_config": config}}).encode())
    journal = Journal(storage, 1)
    journal.append(
        ev.RunStarted(
            time=BEGAN, name=directory.name, lease=1, host="host", pid=1, version="0", engine="local"
        )
    )
    for fact in facts:
        journal.append(fact)
    if end is not None:
        journal.append(end)
    journal.close()
    store = MetricsStore(storage, 1)
    store.add(records)
    store.close()
    chain = Chain.take_over(storage, 1)
    for row, metrics in (checkpoints or {}).items():
        digest = storage.put_file(f"checkpoints/c{row}/model", __file__)
        file = ManifestFile(name="model", size=digest.size, xxh3=digest.xxh3, rank=0)
        commit(
            storage,
            chain,
            name=f"c{row}",
            row=row,
            attempt=0,
            files=[file],
            metrics=dict(metrics),
            world_size=1,
        )
    return storage


def training_run(storage: Storage) -> Journal:
    """Return the journal of a run that trains on one rank."""
    journal = Journal(storage, 1)
    journal.append(
        ev.RunStarted(time=at(0), name="run", lease=1, host="elsewhere", pid=1, version="0", engine="local")
    )
    journal.append(attempt(0, 1, 1))
    journal.append(ev.TrainingStarted(time=at(0.6), attempt=0))
    return journal
