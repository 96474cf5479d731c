"""Points as lines of a CSV file."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from powertrain.config.checks import Config, option, optional, replace
from powertrain.errors import ConfigError
from powertrain.trackers.base import TrackedPoint, TrackedRun, Tracker, TrackerSession
from powertrain.trackers.settings import file_path, tracker_name
from powertrain.trackers.text_files import cut_to_whole_lines, read_csv

#: The first columns, named as in ``Result.metrics_dataframe``. A reported metric of such a name is "reported/…".
_STEP, _TIME = "training_iteration", "timestamp"


@dataclass(frozen=True, repr=False)
class CSV(Config, Tracker):
    """Writes a line for each report of rank 0: ``training_iteration``, ``timestamp``, and a column for each metric.

    A metric that appears later gets a column of its own. After a restart that goes back, the lines of rows that are
    trained again are replaced.

    Args:
        path: The file. None: ``metrics.csv`` in the run's directory.
        name: Names the tracker where a run has several of its kind.

    Raises:
        ConfigError: A value cannot be used.

    Example::

        RunConfig(trackers=[powertrain.trackers.CSV("results/digits.csv")])
    """

    path: str | os.PathLike[str] | None = option(None, optional(file_path))
    name: str = option("csv", tracker_name)

    def settled(self, directory: str) -> CSV:
        """Return the tracker with its path filled in."""
        if self.path is not None:
            return self
        if not directory:
            raise ConfigError(
                "The tracker 'csv' writes to the run's directory, which is in an object store here, and that cannot "
                "append to files. Give a file of this machine: CSV(path=...)."
            )
        return replace(self, path=os.path.join(directory, "metrics.csv"))

    def open(self, run: TrackedRun) -> TrackerSession:
        """Open the file and find out how far it goes."""
        return _CSVSession(Path(os.fspath(self.path or os.path.join(run.directory, "metrics.csv"))))


class _CSVSession(TrackerSession):
    """A session whose state is the file itself: present rows are not written again, and lost ones are."""

    def __init__(self, path: Path) -> None:
        self._path, self.id = path, str(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = read_csv(cut_to_whole_lines(path, has_quotes=True))
        self._columns = rows[0] if rows else []
        if rows and self._columns[:2] != [_STEP, _TIME]:
            raise ConfigError(
                f"The file {str(path)!r} is not one that this tracker has written: its first columns are not "
                f"{_STEP!r} and {_TIME!r}. Give CSV(path=...) another file, or move this one away."
            )
        self.last_step = max((int(row[0]) for row in rows[1:]), default=0)

    def log(self, points: Sequence[TrackedPoint]) -> None:
        """Append lines, after the header where the file is new."""
        lines = [{_STEP: p.step, _TIME: p.time, **_renamed(p.metrics)} for p in points]
        new = [name for name in dict.fromkeys(n for line in lines for n in line) if name not in self._columns]
        if new:
            self._rewrite([*self._columns, *new], self._lines())
        data = _as_text(self._columns, lines)
        with self._path.open("ab") as file:
            file.write(data.encode())
            file.flush()
            os.fsync(file.fileno())
        self.last_step = points[-1].step if points else self.last_step

    def rewind(self, step: int) -> bool:
        """Remove the lines from a step on."""
        self._rewrite(self._columns, (line for line in self._lines() if int(line[_STEP]) < step))
        return True

    def _lines(self) -> list[dict[str, Any]]:
        rows = read_csv(cut_to_whole_lines(self._path, has_quotes=True))
        return [dict(zip(self._columns, row, strict=False)) for row in rows[1:]]

    def _rewrite(self, columns: Sequence[str], lines: Iterable[dict[str, Any]]) -> None:
        """Put a file with these columns and lines in the place of the old one, whole or not at all."""
        unfinished = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            with unfinished.open("wb") as file:
                file.write((_as_text(columns, [dict(zip(columns, columns, strict=True))])).encode())
                file.write(_as_text(columns, lines).encode())
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(self._path)
        finally:
            unfinished.unlink(missing_ok=True)
        self._columns = list(columns)


def _as_text(columns: Sequence[str], lines: Iterable[dict[str, Any]]) -> str:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([_cell(line.get(name)) for name in columns] for line in lines)
    return text.getvalue()


def _renamed(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {f"reported/{name}" if name in (_STEP, _TIME) else name: value for name, value in metrics.items()}


def _cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, (list, dict)) else value
