"""A run's directory with a journal and what its ranks would have recorded."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from powertrain.diagnosis.tables.samples import Samples
from powertrain.diagnosis.tables.steps import RECORD, StepTable
from powertrain.run import events as ev
from powertrain.run.record.journal import Journal
from powertrain.storage import Storage
from powertrain.trace.store import FACTS, SAMPLES, STEPS, PartFrame, TelemetryStore


def record(
    place: Storage,
    steps: StepTable,
    samples: Sequence[Samples] = (),
    *,
    attempt: int = 0,
    world: int = 0,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Write what an attempt of ``world`` ranks (as many as ``steps`` has, if 0) leaves behind."""
    hosts = (*steps.hosts, *("host-a",) * (world - len(steps.ranks)))
    journal = Journal(place, attempt + 1)
    journal.append(
        ev.RunStarted(
            time=1.7e9,
            name="run",
            lease=attempt + 1,
            host=socket.gethostname(),
            pid=os.getpid(),
            version="0.1.0",
            engine="local",
        )
    )
    journal.append(
        ev.AttemptStarted(time=1.7e9, attempt=attempt, world_size=len(hosts), first_row=1, hosts=hosts)
    )
    journal.close()
    telemetry = TelemetryStore(place, attempt + 1)
    for column, rank in enumerate(steps.ranks):
        telemetry.add(PartFrame(attempt, rank, STEPS, records(steps, column)))
    for looks in samples:
        telemetry.add(PartFrame(attempt, looks.rank, SAMPLES, looks.table.tobytes()))
    if facts:
        telemetry.add(PartFrame(attempt, 0, FACTS, msgspec.json.encode(facts)))
    telemetry.close()


def records(steps: StepTable, column: int) -> bytes:
    """One rank's steps as it would have recorded them."""
    table = np.zeros(len(steps), RECORD)
    table["step"] = steps.numbers
    for name in RECORD.names or ():
        if name != "step":
            table[name] = getattr(steps, name)[:, column]
    return table.tobytes()
