"""The log files of a run's ranks, wherever they are, and reading on in those that grow."""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from powertrain.errors import StorageError
from powertrain.lookup.finding import FoundRun
from powertrain.lookup.log_lines import LineSplitter, last_matching, matches, read_pieces, start_of_last
from powertrain.storage import Storage
from powertrain.storage.addresses import without_secrets
from powertrain.storage.base import StoredPart
from powertrain.storage.files.descriptors import open_below
from powertrain.views.log_ends import LogFile as LogFile
from powertrain.views.log_ends import log_at


class LogFiles:
    """The files of one run. Those that are not on this machine are fetched to be read, until ``close``."""

    def __init__(self, run: FoundRun) -> None:
        self._places = run.places
        self._fetched: tempfile.TemporaryDirectory[str] | None = None
        #: True when listing costs next to nothing.
        self.are_near = run.places[0].local_path("logs") is not None

    def close(self) -> None:
        """Remove fetched files. May be called again."""
        if self._fetched is not None:
            self._fetched.cleanup()
            self._fetched = None

    def list(self, attempt: int | None = None) -> list[LogFile]:
        """Return log files by attempt and rank. Those of one attempt are all in the same storage."""
        below = "logs" if attempt is None else f"logs/attempt-{attempt}"
        found: dict[str, LogFile] = {}
        for place in self._places:
            for key, size in place.list(below):
                log = log_at(key, size)
                if log is not None and (key not in found or found[key].size < size):
                    found[key] = log
            if found and attempt is not None:
                break
        return sorted(found.values())

    @contextlib.contextmanager
    def open(self, log: LogFile) -> Iterator[BinaryIO]:
        """Open the current file; raises ``FileNotFoundError`` if it is gone."""
        for place in self._places:
            path = place.local_path(log.key) or self._fetch(place, log.key)
            try:
                descriptor = open_below(path, len(log.key.split("/")))
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                continue
            except OSError as error:
                raise StorageError(
                    f"The log {str(path)!r} cannot be read: {error.strerror or error}. Make it readable, or choose "
                    "other ranks with --rank."
                ) from error
            with open(descriptor, "rb") as file:
                yield file
            return
        raise FileNotFoundError(log.key)

    def read(self, log: LogFile, start: int, length: int) -> StoredPart:
        """Return some bytes of the current file, and fetch no others; raises ``FileNotFoundError`` if it is gone."""
        for place in self._places:
            try:
                return place.get_range(log.key, start, length)
            except FileNotFoundError:
                continue
            except OSError as error:
                where = without_secrets(place.uri)
                raise StorageError(
                    f"The log {log.key!r} in {where} cannot be read: {error.strerror or error}. Make it readable, or "
                    "choose another rank."
                ) from error
        raise FileNotFoundError(log.key)

    def _fetch(self, place: Storage, key: str) -> Path:
        """Download the file from ``place`` and return its path, which does not exist if the file is gone."""
        if self._fetched is None:
            self._fetched = tempfile.TemporaryDirectory(prefix="powertrain-logs-")
        path = Path(self._fetched.name, key)
        path.unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            place.get_file(key, path)
        return path


@dataclass
class _Reading:
    lines: LineSplitter
    offset: int


class Readings:
    """Read positions of log files. ``show`` is called with lines of a rank, in the order of its file."""

    def __init__(
        self, files: LogFiles, show: Callable[[int, list[bytes]], None], pattern: re.Pattern[str] | None
    ) -> None:
        self._files, self._show, self._pattern = files, show, pattern
        self._by_key: dict[str, _Reading] = {}

    def read(self, log: LogFile, last: int | None = None) -> None:
        """Show new lines of the file; on the first read only the ``last`` lines, if given."""
        reading = self._by_key.get(log.key)
        if reading is not None and log.size <= reading.offset:
            return
        with (
            contextlib.suppress(FileNotFoundError),
            self._files.open(log) as file,
        ):  # it may just have been moved
            if reading is None:
                reading = self._by_key[log.key] = _Reading(LineSplitter(), self._begin(log, file, last))
            file.seek(reading.offset)
            for piece in read_pieces(file):
                reading.offset += len(piece)
                self._show_lines(log.rank, reading.lines.feed(piece))

    def finish(self, log: LogFile) -> None:
        """Show the rest of an unterminated line, after the last read."""
        if (reading := self._by_key.get(log.key)) is not None:
            self._show_lines(log.rank, reading.lines.finish())

    def _begin(self, log: LogFile, file: BinaryIO, last: int | None) -> int:
        """Return the offset to read from; shows the last matching lines first if they are limited."""
        if last is None:
            return 0
        if self._pattern is None:
            return start_of_last(file, last)
        lines, read_on = last_matching(file, last, self._pattern)
        self._show(log.rank, lines)
        return read_on

    def _show_lines(self, rank: int, lines: list[bytes]) -> None:
        if self._pattern is not None:
            lines = [line for line in lines if matches(line, self._pattern)]
        if lines:
            self._show(rank, lines)
