"""Telemetry of ranks, received and stored. It never ends a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from powertrain.engine import base
from powertrain.run.spec import RunSpec
from powertrain.run.workers import launch
from powertrain.run.workers.attempt import Member
from powertrain.storage import Storage
from powertrain.trace.machine.samples import SAMPLE_SIZE
from powertrain.trace.recording.phases import RECORD_SIZE
from powertrain.trace.store import FACTS, SAMPLES, STEPS, PartFrame, TelemetryStore
from powertrain.wire import from_worker
from powertrain.worker.tracing import newest_steps, remove_ring


class TelemetryWriter:
    """The controller's side. All calls on its thread."""

    def __init__(self, spec: RunSpec, storage: Storage, lease: int, warn_once: Callable[[str], None]) -> None:
        self._spec, self._storage, self._lease, self._warn_once = spec, storage, lease, warn_once
        self._is_kept = spec.trace is not None
        self._store: TelemetryStore | None = None
        #: By attempt and rank the number of the next expected step.
        self._next: dict[tuple[int, int], int] = {}

    def _add(self, frame: PartFrame) -> None:
        """Store a frame, if possible. The store is made with the first."""
        if self._store is None and self._is_kept:
            try:
                self._store = TelemetryStore(self._storage, self._lease)
            except Exception as error:
                self._is_kept = False
                self._warn_once(f"What ranks record of their time is not kept: {error}")
        if self._store is not None:
            self._store.add(frame)

    def on_telemetry(self, member: Member, message: from_worker.Telemetry) -> None:
        """Store the telemetry that a rank has sent."""
        if not self._is_kept:
            return
        attempt, rank = member.attempt.number, member.rank
        if wrong := why_unusable(message):
            self._warn_once(f"What rank {rank} has recorded of its steps is not kept: {wrong}.")
            return
        for kind, data in ((STEPS, message.steps), (SAMPLES, message.samples), (FACTS, message.facts)):
            if data:
                self._add(PartFrame(attempt, rank, kind, data))
        if message.steps:
            self._next[attempt, rank] = message.first + len(message.steps) // RECORD_SIZE

    def on_rank_gone(self, member: Member, event: base.Exited | None) -> None:
        """Store the unsent telemetry of a rank that is gone: it lies in a file of its node. For other machines the
        engine has read it, where there was an agent."""
        if not self._is_kept:
            return
        attempt, rank = member.attempt.number, member.rank
        path, after = launch.ring_path(self._spec, attempt, rank), self._next.get((attempt, rank), 0)
        steps = newest_steps(path, after)
        if event is not None and event.steps and not steps:
            steps = event.steps
        if steps and not len(steps) % RECORD_SIZE:
            self._add(PartFrame(attempt, rank, STEPS, steps))
        remove_ring(path)

    def abandon(self) -> None:
        """Stop and keep nothing more."""
        self._is_kept = False
        if self._store is not None:
            self._store.abandon()

    def close(self) -> None:
        """Flush, and warn of lost messages."""
        if self._store is not None:
            self._store.close()
            if self._store.dropped:
                self._warn_once(
                    f"{self._store.dropped} messages with step records of ranks could not be stored, "
                    "because the storage did not take them in time. The diagnosis uses the others."
                )


def why_unusable(message: from_worker.Telemetry) -> str:
    """Return why a message cannot be used; "" for one of whole records. Pure."""
    if len(message.steps) % RECORD_SIZE or len(message.samples) % SAMPLE_SIZE:
        return (
            f"{len(message.steps)} bytes of steps and {len(message.samples)} of samples are no whole records of "
            f"{RECORD_SIZE} and {SAMPLE_SIZE}"
        )
    if message.facts:
        try:
            msgspec.json.decode(message.facts, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return f"its facts cannot be read ({error})"
    return ""
