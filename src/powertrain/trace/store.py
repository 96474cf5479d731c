"""Records of ranks on disk: every step of every rank up to a size limit, then a selection of the oldest.

The holder of the run's lease writes parts, ``telemetry/{lease}-{part}-{level}.frames``. A part is a row of frames, each
with some records of one rank and its own checksum. The newest part is a file that grows, ``telemetry/{lease}.open``:
records survive the death of the process at the latest a second later. When it is large enough it becomes a part
that never changes again.

When all parts together exceed the budget the oldest one is thinned: of each :data:`GROUP` steps the fastest, the median
and the slowest stay, the same steps of every rank, and the level in its name grows by one; the next time of four times
as many. So a run of any length has its whole course on disk, and its newest steps in full.
"""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import FileIO
from typing import TYPE_CHECKING, Any

import msgspec

from powertrain.errors import StorageError
from powertrain.storage.addresses import without_secrets
from powertrain.storage.base import LARGE_RECORD_BYTES_LIMIT
from powertrain.storage.files.descriptors import open_for_append
from powertrain.text.loggers import module_logger
from powertrain.trace.machine import samples
from powertrain.trace.part_format import (
    FACTS,
    SAMPLES,
    STEPS,
    PartContent,
    PartFrame,
    complete,
    encode,
    read_part,
)
from powertrain.trace.recording import phases

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from powertrain.storage import Storage

#: Bytes of all parts of a run.
BUDGET = 64 << 20
#: Bytes of one part.
PART = 4 << 20
#: Three of this many steps stay when a part is thinned.
GROUP = 12
#: Maximum bytes pending to be written; more is dropped, oldest first, and counted.
_BACKLOG = 16 << 20
_WRITE_EVERY = 0.25
#: Timeout for storage to write or read a part.
_PATIENCE = 3.0
_PART_KEY = re.compile(r"telemetry/(\d+)-(\d+)-(\d+)\.frames")
_OPEN_KEY = re.compile(r"telemetry/(\d+)\.open")
_logger = module_logger(__name__)

__all__ = [
    "FACTS",
    "SAMPLES",
    "STEPS",
    "PartFrame",
    "RecordedTelemetry",
    "TelemetryStore",
    "decode",
    "encode",
    "read",
    "thinned",
]


def decode(data: bytes) -> Iterator[PartFrame]:
    """Return the frames up to the first cut or damaged one."""
    return iter(read_part(data, is_growing=True).frames)


def thinned(frames: Iterable[PartFrame], group: int = GROUP) -> list[PartFrame]:
    """Return the fastest, the median and the slowest of each ``group`` steps, by the slowest rank.

    Samples are thinned alike, to every fourth; facts are kept. The same steps are kept on every rank, so that they can
    still be compared.
    """
    import numpy as np

    steps: dict[tuple[int, int], list[bytes]] = {}
    looks: dict[tuple[int, int], list[bytes]] = {}
    kept = []
    for frame in frames:
        if frame.kind == FACTS:
            kept.append(frame)
        elif frame.kind in (STEPS, SAMPLES):
            into = steps if frame.kind == STEPS else looks
            into.setdefault((frame.attempt, frame.rank), []).append(frame.data)
    tables = {place: _records(b"".join(parts)) for place, parts in steps.items()}
    for attempt in sorted({attempt for attempt, _ in tables}):
        of_attempt = {rank: table for (number, rank), table in tables.items() if number == attempt}
        stay = _telling_steps(list(of_attempt.values()), group)
        for rank, table in of_attempt.items():
            kept.append(PartFrame(attempt, rank, STEPS, table[np.isin(table["step"], stay)].tobytes()))
    for (attempt, rank), parts in looks.items():
        data = b"".join(parts)
        size = samples.SAMPLE_SIZE
        fourth = b"".join(data[at : at + size] for at in range(0, len(data) - size + 1, 4 * size))
        kept.append(PartFrame(attempt, rank, SAMPLES, fourth))
    return kept


def _records(data: bytes) -> NDArray[np.void]:
    import numpy as np

    return np.frombuffer(data, np.dtype(list(phases.FIELDS)))


def _telling_steps(tables: list[NDArray[np.void]], size: int) -> NDArray[np.uint32]:
    """Return the numbers of the fastest, the median and the slowest step of each group.

    A group is kept whole if ranks have different steps of it, because it spans two parts: thinned twice, ranks would be
    left with different steps.
    """
    import numpy as np

    numbers = np.concatenate([table["step"] for table in tables])
    totals = np.concatenate([table["phases"].sum(axis=1) for table in tables])
    steps, where, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    longest = np.zeros(len(steps))
    np.maximum.at(longest, where, totals)
    stay: list[int] = []
    for group in np.split(np.arange(len(steps)), np.flatnonzero(np.diff(steps // size)) + 1):
        if np.any(counts[group] < len(tables)):
            stay += group.tolist()
            continue
        by_time = group[np.argsort(longest[group], kind="stable")]
        stay += [by_time[0], by_time[len(by_time) // 2], by_time[-1]]
    return steps[np.unique(np.asarray(stay, np.int64))]


# --------------------------------------------------------------------------- writing


class TelemetryStore:
    """The writer, for the holder of lease ``lease``. ``add`` may be called by any thread, and never waits.

    Telemetry never fails a run: records that storage refuses are dropped, and :attr:`dropped` counts them.
    """

    def __init__(self, storage: Storage, lease: int, *, budget: int = BUDGET, part: int = PART) -> None:
        """Create a writer. ``storage`` is the run's; it must provide real files for the open part (``local_path``)."""
        # A shorter timeout than for checkpoints: storage that does not reply must not delay the run's end.
        self._storage, self._lease = storage.within(_PATIENCE), lease
        self._budget, self._part_size = budget, part
        #: Without local files, the open file is uploaded unchanged by the component that syncs them.
        self._closes_at_once = storage.local_path(_part_key(lease, 0, 0)) is not None
        self._changed = threading.Condition()
        self._pending: list[PartFrame] = []
        self._bytes = 0
        self._closing = self._is_abandoned = False
        #: Frames that could not be kept.
        self.dropped = 0
        self._is_troubled = False
        self._open = _OpenPart(storage, lease)
        self._next = 0
        #: Parts that a warning was logged for.
        self._damaged: set[str] = set()
        self._thread = threading.Thread(target=self._write, name="powertrain-telemetry", daemon=True)
        self._thread.start()

    def add(self, frame: PartFrame) -> None:
        with self._changed:
            self._pending.append(frame)
            self._bytes += len(frame.data)
            while self._bytes > _BACKLOG and len(self._pending) > 1:
                self._bytes -= len(self._pending.pop(0).data)
                self.dropped += 1

    def close(self) -> None:
        """Write pending records, and stop. May be called again."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def abandon(self) -> None:
        """Stop without writing: the directory was removed, and a new one has files of the same names."""
        self._is_abandoned = True
        self.close()

    def _write(self) -> None:
        recovered = False
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing, _WRITE_EVERY)
                frames, self._pending, self._bytes = self._pending, [], 0
                closing = self._closing
            if self._is_abandoned:
                self._open.close(keep=True)
                return
            # Any error, of storage or of this code: telemetry must not end a run.
            try:
                self._save(frames, closing)
                if not recovered and not (closing and self._is_troubled):
                    self._recover()
                    recovered = True
                self._on_result("")
            except Exception as error:
                self._on_result(f"{type(error).__name__}: {error}")
            if closing:
                self._open.close()
                return

    def _on_result(self, trouble: str) -> None:
        """Log the beginning and the end of a failure, once each."""
        if trouble and not self._is_troubled:
            _logger.warning("Telemetry of the ranks cannot be written: %s", trouble)
        elif self._is_troubled and not trouble:
            _logger.warning("Telemetry of the ranks is written again.")
        self._is_troubled = bool(trouble)

    def _save(self, frames: list[PartFrame], closing: bool) -> None:
        if frames:
            try:
                self._open.append(encode(frames))
            except BaseException:
                self.dropped += len(frames)
                raise
        is_last = closing and self._closes_at_once
        if self._open.size and (is_last or self._open.size >= self._part_size):
            self._storage.put(_part_key(self._lease, self._next, 0), complete(self._open.content()))
            self._next += 1
            self._open.empty()
            self._keep_within_budget()

    def _recover(self) -> None:
        """Turn the open files of earlier lease holders into parts."""
        for entry in self._storage.list("telemetry"):
            found = _OPEN_KEY.fullmatch(entry.key)
            if found and int(found[1]) != self._lease:
                content = _content_of(self._storage, entry.key)
                if content.damage:  # the file stays in place, and is read as far as possible
                    _warn_of_damage(entry.key, content.damage)
                    continue
                left = encode(content.frames)
                taken = [number for lease, number, _, _ in _parts(self._storage) if lease == int(found[1])]
                if left:
                    self._storage.put(_part_key(int(found[1]), max(taken, default=-1) + 1, 0), complete(left))
                self._storage.delete(entry.key)

    def _keep_within_budget(self) -> None:
        """Thin the oldest parts of the lowest level until all fit.

        A part that is damaged or unreadable stays unchanged, for manual repair, and is not counted.
        """
        left_alone: set[str] = set()
        while True:
            parts = [part for part in _parts(self._storage) if _part_key(*part[:3]) not in left_alone]
            if sum(size for *_, size in parts) <= self._budget or len(parts) < 2:
                return
            lease, number, level, size = min(parts[:-1], key=lambda part: (part[2], part[0], part[1]))
            key = _part_key(lease, number, level)
            frames = self._intact_frames(key)
            if frames is None:
                left_alone.add(key)
                continue
            smaller = complete(encode(thinned(frames, GROUP * 4**level)))
            if len(smaller) >= size:  # only facts and single steps are left: the oldest are dropped
                self._storage.delete(key)
            else:
                self._storage.put(_part_key(lease, number, level + 1), smaller)
                self._storage.delete(key)

    def _intact_frames(self, key: str) -> list[PartFrame] | None:
        """Return all frames of a part; None if some are unreadable, with one warning."""
        try:
            content = _content_of(self._storage, key)
        except FileNotFoundError:  # listed by a file system that has not noticed the deletion yet
            return None
        except OSError as error:
            content = PartContent([], error.strerror or str(error))
        if content.damage and key not in self._damaged:
            self._damaged.add(key)
            _warn_of_damage(key, content.damage)
        return None if content.damage else content.frames


class _OpenPart:
    """The growing part: a file, created by the first ``append``."""

    def __init__(self, storage: Storage, lease: int) -> None:
        path = storage.local_path(f"telemetry/{lease:04d}.open")
        if path is None:
            where = without_secrets(storage.uri)
            raise StorageError(
                f"Telemetry cannot be kept at {where!r}: growing files need a real file system."
            )
        self._path = path
        self._file: FileIO | None = None
        self.size = 0

    def append(self, data: bytes) -> None:
        """Append all of ``data``, or none of it."""
        if self._file is None:
            # The lease is new, and so is its file: an existing one was not written by this run.
            self._file = FileIO(open_for_append(self._path, 3, fresh=True), "w")
        try:
            if self._file.write(data) < len(data):
                raise OSError(f"only a part of {len(data)} bytes could be written to {self._path}")
        except OSError:
            self._file.truncate(self.size)
            raise
        self.size += len(data)

    def content(self) -> bytes:
        return os.pread(self._file.fileno(), self.size, 0) if self._file is not None and self.size else b""

    def empty(self) -> None:
        if self._file is not None:
            self._file.truncate(0)
        self.size = 0

    def close(self, *, keep: bool = False) -> None:
        """Delete the file if its content is in parts; otherwise, or with ``keep``, leave it for the next lease
        holder.
        """
        if self._file is not None:
            self._file.close()
            self._file = None
            if not self.size and not keep:
                self._path.unlink(missing_ok=True)


# --------------------------------------------------------------------------- reading


@dataclass
class RecordedTelemetry:
    """All records of a run, by attempt and rank: arrays of the fields of steps and samples, and facts."""

    steps: dict[int, dict[int, NDArray[np.void]]]
    samples: dict[int, dict[int, NDArray[np.void]]]
    facts: dict[int, dict[int, dict[str, Any]]]
    #: Number of times the oldest part was thinned; 0 if every step is kept.
    level: int


def read(storage: Storage) -> RecordedTelemetry:
    """Return the records on disk; cut or damaged parts are skipped."""
    parts = _parts(storage)
    found = RecordedTelemetry({}, {}, {}, max((level for *_, level, _ in parts), default=0))
    pieces: dict[tuple[int, int, int], list[bytes]] = {}
    for key in _keys_in_order(storage, parts):
        for frame in _frames(storage, key):
            pieces.setdefault((frame.kind, frame.attempt, frame.rank), []).append(frame.data)
    for (kind, attempt, rank), data in pieces.items():
        if kind == STEPS:
            found.steps.setdefault(attempt, {})[rank] = _once(_records(b"".join(data)), "step")
        elif kind == SAMPLES:
            found.samples.setdefault(attempt, {})[rank] = _once(_looks(b"".join(data)), "time")
        elif kind == FACTS:
            facts = found.facts.setdefault(attempt, {}).setdefault(rank, {})
            for text in data:
                facts.update(msgspec.json.decode(text))
    return found


def _frames(storage: Storage, key: str) -> list[PartFrame]:
    """Return the frames of a part or growing file, with a warning if it is damaged or unreadable."""
    try:
        content = _content_of(storage, key)
    except FileNotFoundError:  # it became a part or was thinned meanwhile
        return []
    except OSError as error:
        _warn_of_damage(key, error.strerror or str(error))
        return []
    if content.damage:
        _warn_of_damage(key, content.damage)
    return content.frames


def _content_of(storage: Storage, key: str) -> PartContent:
    """Return the content of a part or growing file; a file above the size limit is damaged."""
    try:
        data = storage.get(key, limit=LARGE_RECORD_BYTES_LIMIT)
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise
        return PartContent([], error.strerror or str(error))
    return read_part(data, is_growing=_OPEN_KEY.fullmatch(key) is not None)


def _warn_of_damage(key: str, why: str) -> None:
    _logger.warning("The telemetry file %r is damaged, and the rest of it was skipped: %s", key, why)


def _once(records: NDArray[np.void], field: str) -> NDArray[np.void]:
    """Return records ascending by the field, without duplicates, which a crash can leave."""
    import numpy as np

    values = np.ascontiguousarray(records[field])
    if (values[1:] > values[:-1]).all():  # as in every run without a crash
        return records
    _, first = np.unique(values, return_index=True)
    return records[first]


def _looks(data: bytes) -> NDArray[np.void]:
    import numpy as np

    return np.frombuffer(data, np.dtype(list(samples.FIELDS)))


def _parts(storage: Storage) -> list[tuple[int, int, int, int]]:
    """Return (lease, number, level, size) of each part, oldest first; the most thinned of duplicates."""
    newest: dict[tuple[int, int], tuple[int, int]] = {}
    for entry in storage.list("telemetry"):
        if found := _PART_KEY.fullmatch(entry.key):
            lease, number, level = map(int, found.groups())
            newest[lease, number] = max(newest.get((lease, number), (-1, 0)), (level, entry.size))
    return [(*place, *newest[place]) for place in sorted(newest)]


def _keys_in_order(storage: Storage, parts: Iterable[tuple[int, int, int, int]]) -> list[str]:
    written = [_part_key(lease, number, level) for lease, number, level, _ in parts]
    return written + sorted(e.key for e in storage.list("telemetry") if _OPEN_KEY.fullmatch(e.key))


def _part_key(lease: int, number: int, level: int) -> str:
    return f"telemetry/{lease:04d}-{number:06d}-{level}.frames"
