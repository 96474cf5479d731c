"""The runs and sweeps below the dashboard's directory, each read once for all viewers of the same state."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar
from urllib.parse import quote, unquote_to_bytes

from powertrain.errors import StorageError
from powertrain.lookup.finding import FoundRun, names_in, real_path
from powertrain.lookup.watching import RunWatch
from powertrain.run import events as ev
from powertrain.run import lifecycle
from powertrain.run.lifecycle import RunState
from powertrain.run.record import journal
from powertrain.run.remote import protocol
from powertrain.storage import Storage, open_storage
from powertrain.storage.files.private_roots import runtime_roots
from powertrain.trace import store
from powertrain.trace.store import RecordedTelemetry
from powertrain.ui.replies import Memo

#: Seconds for which a listing is taken as current: of real files, and of remote storage.
_LOCAL_AGE_S = 0.5
_REMOTE_AGE_S = 3.0
#: Bytes of the longest id: two names of files, each byte as "%ff".
_LONGEST_ID = 2048

#: Names and sizes of the files that hold a run's state.
Version = tuple[object, ...]
_T = TypeVar("_T")


def id_of(name: str) -> str:
    """Return the name of a run for addresses; names of files need not be text."""
    return quote(os.fsencode(name), safe="/")


def name_of(run_id: str) -> str:
    """Return the name for an id; raises :class:`StorageError` for one that could lead out of the directory."""
    name = os.fsdecode(unquote_to_bytes(run_id)) if len(run_id) <= _LONGEST_ID else ""
    parts = name.split("/")
    if len(parts) > 2 or "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise StorageError(f"{run_id[:80]!r} is not the name of a run. Use RUN, or SWEEP/TRIAL.")
    return name


@dataclass(frozen=True)
class RunRecord:
    """A run as it was at one moment."""

    found: FoundRun
    version: Version
    facts: list[ev.Event]

    @cached_property
    def state(self) -> RunState:
        return journal.replay(self.facts)

    @property
    def has_ended(self) -> bool:
        return self.found.live is None and self.state.state in lifecycle.ENDED

    @property
    def world_size(self) -> int:
        """The most ranks that the run ever had."""
        return max((fact.world_size for fact in self.facts if isinstance(fact, ev.AttemptStarted)), default=0)


class Places:
    """The directory that is shown.

    Args:
        root: Its path or address.
        only: The only run that is shown; "" for all.
    """

    def __init__(self, root: str, only: str = "") -> None:
        self.root: Storage = open_storage(root)
        self.only = only
        self.is_near = self.root.local_path("x") is not None
        self._age = _LOCAL_AGE_S if self.is_near else _REMOTE_AGE_S
        self._recent = _Recent(self._age)
        self._records: Memo[RunRecord] = Memo(256)
        self._telemetry: Memo[RecordedTelemetry] = Memo(2)

    def names(self) -> tuple[list[str], list[str]]:
        """Return the names of all runs and sweeps, and the sweeps among them."""
        if self.only:
            return [self.only], []
        return self._recent.get("names", lambda: names_in(self.root))

    def live(self) -> dict[str, protocol.LiveRun]:
        """Return the live runs of this user on this machine by path."""
        return self._recent.get("live", _live_by_path)

    def find(self, name: str) -> FoundRun:
        """Return a run or sweep; raises :class:`StorageError` if there is none of this name."""
        place = self.root.child(name)
        names, sweeps = self.names()
        first, _, trial = name.partition("/")
        is_known = name in names or (trial and first in sweeps and not self.only)
        live = self.live().get(real_path(place.uri))
        if not is_known or (trial and live is None and not place.list("journal")):
            raise StorageError(f"There is no run {name!r} here. It may have been removed.")
        return FoundRun(name, place, live, is_sweep=name in sweeps)

    def version(self, name: str) -> Version:
        """Return a value that changes whenever the run's journal, metrics or telemetry do."""
        return self._recent.get(("version", name), lambda: self._version_now(self.find(name)))

    def _version_now(self, found: FoundRun) -> Version:
        listed = [tuple(place.list("journal")) for place in found.places]
        rest = [tuple(found.place.list(prefix)) for prefix in ("metrics", "telemetry")]
        pid = found.live.card.pid if found.live is not None else 0
        return (*listed, *rest, pid)

    def record(self, name: str) -> RunRecord:
        """Return the run as it is now; raises :class:`StorageError` if there is none."""
        version = self.version(name)

        def read() -> RunRecord:
            found = self.find(name)
            facts = RunWatch(found).look()
            if not facts:
                raise StorageError(f"The run {name!r} cannot be shown: it has no journal yet.")
            return RunRecord(found, version, facts)

        return self._records.get((name, version), read)

    def telemetry(self, record: RunRecord) -> RecordedTelemetry:
        """Return the recorded steps and samples of a run."""
        key = (record.found.name, record.version)
        return self._telemetry.get(key, lambda: store.read(record.found.place))


def _live_by_path() -> dict[str, protocol.LiveRun]:
    return {real_path(one.card.path): one for one in protocol.live_runs(*runtime_roots())}


class _Recent:
    """Values that are made again after some seconds, by one thread for all."""

    def __init__(self, age: float) -> None:
        self._age = age
        self._guard = threading.Lock()
        self._locks: dict[object, threading.Lock] = {}
        self._made: dict[object, tuple[float, object]] = {}

    def get(self, key: object, make: Callable[[], _T]) -> _T:
        with self._guard:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            at, value = self._made.get(key, (-1e9, None))
            if time.monotonic() - at >= self._age:
                value = make()
                self._made[key] = (time.monotonic(), value)
            return value  # type: ignore[return-value]
