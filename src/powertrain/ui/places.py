"""The runs and sweeps below the dashboard's directory, each read once for all viewers of the same state."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar
from urllib.parse import unquote_to_bytes

from powertrain.errors import StorageError
from powertrain.lookup import sweeps
from powertrain.lookup.finding import SWEEP, FoundRun, kind_of, names_in, real_path
from powertrain.lookup.log_files import LogFile, LogFiles
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
from powertrain.tune.sweep.journal.events import SweepEvent
from powertrain.ui.replies import Memo

#: Seconds for which a listing is taken as current: of real files, and of remote storage; and how many times as long
#: that of a run that is over.
_LOCAL_AGE_S = 0.5
_REMOTE_AGE_S = 3.0
_SETTLED_FACTOR = 10
#: Runs whose facts are kept, and sweeps.
_MOST_RECORDS, _MOST_SWEEPS = 512, 64
#: Directories of runs that are kept for further looks.
_MOST_CHILDREN = 20_000
#: Bytes at the begin of a journal that tell runs apart.
_HEAD_BYTES = 4096
#: Bytes of the longest id: two names of files, each byte as "%ff".
_LONGEST_ID = 2048

#: Names and sizes of the files that hold a run's state.
Version = tuple[object, ...]
_T = TypeVar("_T")


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
    #: Reads on in the journal, for the record after this one.
    watch: RunWatch
    #: The begin of its journal, which another run of the same name does not have.
    head: bytes

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


@dataclass(frozen=True)
class SweepRecord:
    """A sweep as it was at one moment."""

    found: FoundRun
    watch: sweeps.SweepWatch
    facts: list[SweepEvent]
    #: The content of its ``sweep.json``.
    settings: Mapping[str, Any]


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
        self._recent = _Recent()
        self._children: dict[str, Storage] = {}
        self._kinds: dict[str, str] = {}
        #: Versions of journals of runs that are over.
        self._settled: dict[str, Version] = {}
        self._records: Memo[RunRecord] = Memo(_MOST_RECORDS)
        self._sweeps: Memo[SweepRecord] = Memo(_MOST_SWEEPS)
        self._telemetry: Memo[RecordedTelemetry] = Memo(2)
        self._logs: Memo[tuple[LogFiles, list[LogFile]]] = Memo(_MOST_SWEEPS)

    def child(self, name: str) -> Storage:
        """Return the directory of a run or sweep. They are kept: making one is most of a look at a small run."""
        found = self._children.get(name)
        if found is None:
            if len(self._children) >= _MOST_CHILDREN:
                self._children.clear()
            found = self._children[name] = self.root.child(name)
        return found

    def names(self) -> tuple[list[str], list[str]]:
        """Return the names of all runs and sweeps, and the sweeps among them."""
        if self.only:
            return [self.only], []
        return self._recent.get("names", self._age, lambda: names_in(self.root, self._kinds))

    def live(self) -> dict[str, protocol.LiveRun]:
        """Return the live runs of this user on this machine by path."""
        return self._recent.get("live", _LOCAL_AGE_S, _live_by_path)

    def find(self, name: str) -> FoundRun:
        """Return a run or sweep; raises :class:`StorageError` if there is none of this name."""
        place = self.child(name)
        first, _, trial = name.partition("/")
        live = self.live().get(real_path(place.uri))
        kind = self._kind(first)
        is_known = name == self.only if self.only else bool(kind) and (not trial or kind == SWEEP)
        if not is_known or (live is None and not (kind if not trial else place.list("journal"))):
            raise StorageError(f"There is no run {name!r} here. It may have been removed.")
        return FoundRun(name, place, live, is_sweep=kind == SWEEP and not trial)

    def _kind(self, name: str) -> str:
        """Return whether a name is a run or a sweep, without a listing of the others."""
        return self._recent.get(("kind", name), self._age, lambda: kind_of(self.child(name)))

    def version(self, name: str) -> Version:
        """Return a value that changes whenever the run's journal, metrics or telemetry do."""
        return self._recent.get(("version", name), self._age, lambda: self._version_now(self.find(name)))

    def _version_now(self, found: FoundRun) -> Version:
        listed = [tuple(place.list("journal")) for place in found.places]
        rest = [tuple(found.place.list(prefix)) for prefix in ("metrics", "telemetry")]
        pid = found.live.card.pid if found.live is not None else 0
        return (*listed, *rest, pid)

    def journal_version(self, name: str) -> Version:
        """Return a value that changes with a run's journal. Of a run that is over it is looked for less often."""
        age = self._age * (1 if name not in self._settled else _SETTLED_FACTOR)
        return self._recent.get(("journal", name), age, lambda: tuple(self.child(name).list("journal")))

    def metrics_version(self, name: str) -> Version:
        """Return a value that changes with the metrics of a run that goes on; those of one that is over stay."""
        age = math.inf if self._settled.get(name) == self.journal_version(name) else self._age
        return self._recent.get(("metrics", name), age, lambda: tuple(self.child(name).list("metrics")))

    def settle(self, name: str, version: Version) -> None:
        """Note that a run is over as of this version of its journal."""
        self._settled[name] = version

    def record(self, name: str) -> RunRecord:
        """Return the run as it is now; raises :class:`StorageError` if there is none."""
        version = self.version(name)

        def read(before: RunRecord | None) -> RunRecord:
            found = self.find(name)
            head = _head_of(found)
            # Only what was added is read, where the same files still grow.
            if before is not None and _card(before.found) == _card(found) and head and before.head == head:
                return RunRecord(found, version, before.facts + before.watch.look(), before.watch, head)
            watch = RunWatch(found)
            facts = watch.look()
            if not facts:
                raise StorageError(f"The run {name!r} cannot be shown: it has no journal yet.")
            return RunRecord(found, version, facts, watch, head)

        return self._records.get(name, version, read)

    def sweep(self, name: str) -> SweepRecord:
        """Return the sweep as it is now; raises :class:`StorageError` if there is none."""

        def read(before: SweepRecord | None) -> SweepRecord:
            found = self.find(name)
            watch = sweeps.SweepWatch(found)
            return SweepRecord(found, watch, watch.look(), sweeps.read_record(found))

        return self._sweeps.get(name, self.version(name), read)

    def telemetry(self, record: RunRecord) -> RecordedTelemetry:
        """Return the recorded steps and samples of a run."""
        return self._telemetry.get(
            record.found.name, record.version, lambda _: store.read(record.found.place)
        )

    def logs(self, name: str) -> tuple[LogFiles, list[LogFile]]:
        """Return the log files of a run. They are listed again when the run has changed, and after some seconds."""

        def read(before: object) -> tuple[LogFiles, list[LogFile]]:
            files = LogFiles(self.find(name))
            return files, files.list()

        turn = int(time.monotonic() / (_SETTLED_FACTOR * self._age))
        return self._logs.get(name, (self.version(name), turn), read)


def _live_by_path() -> dict[str, protocol.LiveRun]:
    return {real_path(one.card.path): one for one in protocol.live_runs(*runtime_roots())}


def _card(found: FoundRun) -> protocol.Card | None:
    return found.live.card if found.live is not None else None


def _head_of(found: FoundRun) -> bytes:
    """Return the first line of a run's journal, or its begin; b"" if it has none."""
    for place in found.places:
        for entry in place.list("journal")[:1]:
            with contextlib.suppress(OSError):
                return place.get_range(entry.key, 0, _HEAD_BYTES).data.partition(b"\n")[0]
    return b""


class _Recent:
    """Values that are made again after some seconds, by one thread for all; the oldest are dropped."""

    def __init__(self, most: int = 20_000) -> None:
        self._most = most
        self._guard = threading.Lock()
        self._making: dict[object, threading.Lock] = {}
        self._made: OrderedDict[object, tuple[float, object]] = OrderedDict()

    def get(self, key: object, age: float, make: Callable[[], _T]) -> _T:
        """Return a value that is at most ``age`` seconds old."""
        with self._guard:
            lock = self._making.setdefault(key, threading.Lock())
        try:
            with lock:
                with self._guard:
                    at, value = self._made.get(key, (None, None))
                if at is None or time.monotonic() - at >= age:
                    value = make()
                    with self._guard:
                        self._made[key] = (time.monotonic(), value)
                        self._made.move_to_end(key)
                        while len(self._made) > self._most:
                            self._made.popitem(last=False)
                return value  # type: ignore[return-value]
        finally:
            with self._guard:
                if self._making.get(key) is lock:
                    del self._making[key]
