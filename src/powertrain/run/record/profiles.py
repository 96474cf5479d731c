"""Profiles of ranks in the run's directory: ``profiles/attempt-0-rank-00000-step-120.json`` and its trace.

Beside each record lies the trace that viewers open (``.trace.json.gz``), and for a profile of memory on a GPU the
history of its allocator (``.memory.pickle.gz``).
"""

from __future__ import annotations

import re

import msgspec

from powertrain.errors import StorageError
from powertrain.storage import Storage
from powertrain.storage.base import RECORD_BYTES_LIMIT
from powertrain.wire.from_worker import Profiled

_RECORD = re.compile(r"profiles/attempt-(\d+)-rank-(\d+)-step-(\d+)\.json")


class ProfileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One profile of one rank. Seconds are those of the rank."""

    attempt: int
    rank: int
    #: The number of profiled steps, and of the steps of the attempt before them.
    steps: int
    first_step: int
    #: On the training thread: to start the profiler, of the profiled steps, and to stop it; and beside it.
    start_seconds: float
    step_seconds: float
    stop_seconds: float
    packing_seconds: float
    #: Keys in the run's directory; "" for none.
    trace: str
    memory: str = ""


def keep(storage: Storage, attempt: int, rank: int, profiled: Profiled) -> str:
    """Store a profile and return the key of its record. Raises OSError or StorageError where that is not possible."""
    stem = f"profiles/attempt-{attempt}-rank-{rank:05d}-step-{profiled.first_step}"
    record = ProfileRecord(
        attempt=attempt,
        rank=rank,
        steps=profiled.steps,
        first_step=profiled.first_step,
        start_seconds=profiled.start_seconds,
        step_seconds=profiled.step_seconds,
        stop_seconds=profiled.stop_seconds,
        packing_seconds=profiled.packing_seconds,
        trace=f"{stem}.trace.json.gz",
        memory=f"{stem}.memory.pickle.gz" if profiled.memory else "",
    )
    storage.put(record.trace, profiled.trace)
    if record.memory:
        storage.put(record.memory, profiled.memory)
    # The record last: where it is, its files are.
    storage.put(f"{stem}.json", msgspec.json.format(msgspec.json.encode(record)))
    return f"{stem}.json"


def read(storage: Storage, key: str) -> ProfileRecord:
    """Return a record. Raises StorageError where it is damaged, OSError where storage does not give it."""
    try:
        return msgspec.json.decode(storage.get(key, limit=RECORD_BYTES_LIMIT), type=ProfileRecord)
    except msgspec.MsgspecError as error:
        raise StorageError(
            f"{key} is damaged: {error}. Make the profile again with 'powertrain profile'."
        ) from error


def kept(storage: Storage) -> list[str]:
    """Return the keys of all records, the newest last."""
    found = [
        (match, entry.key) for entry in storage.list("profiles") if (match := _RECORD.fullmatch(entry.key))
    ]
    return [key for _, key in sorted(found, key=lambda one: (int(one[0][1]), int(one[0][3]), int(one[0][2])))]
