"""Points as event files of TensorBoard.

The files are made here and filled with TensorBoard's own writer of records, because two things matter that its
``SummaryWriter`` leaves to chance: the order of the files' names, by which they are read, and that a file is on disk
before the cursor moves. A file begins with a session start: readers forget all points from its step on. So a restart
that goes back behind points, and one that does not know whether its last points arrived, need no more than a new file.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from powertrain.config.checks import Config, option, optional, replace
from powertrain.errors import ConfigError
from powertrain.storage.base import host_in_names
from powertrain.trackers.base import RunEnding, TrackedPoint, TrackedRun, Tracker, TrackerSession
from powertrain.trackers.settings import file_path, require, tracker_name

#: Names of event files begin with this and the second in which they were made.
_NAME = re.compile(r"events\.out\.tfevents\.(\d+)\.")
#: Tells our event files from others in the same directory.
_SUFFIX = ".powertrain"


@dataclass(frozen=True, repr=False)
class TensorBoard(Config, Tracker):
    """Writes the numbers of rank 0's reports as scalars, and ``train_loop_config`` as text.

    Args:
        directory: Where event files are written. None: ``tensorboard`` in the run's directory, so that
            ``tensorboard --logdir STORAGE_PATH`` shows all runs side by side.
        name: Names the tracker where a run has several of its kind.

    Raises:
        ConfigError: A value cannot be used.

    Example::

        RunConfig(trackers=[powertrain.trackers.TensorBoard(directory="board/digits")])
    """

    directory: str | os.PathLike[str] | None = option(None, optional(file_path))
    name: str = option("tensorboard", tracker_name)

    def settled(self, directory: str) -> TensorBoard:
        """Return the tracker with its directory filled in."""
        require(self.name, "tensorboard", "tensorboard")
        if self.directory is not None:
            return self
        if not directory:
            raise ConfigError(
                "The tracker 'tensorboard' writes to the run's directory, which is in an object store here, and that "
                "cannot append to files. Give a directory of this machine: TensorBoard(directory=...)."
            )
        return replace(self, directory=os.path.join(directory, "tensorboard"))

    def open(self, run: TrackedRun) -> TrackerSession:
        """Begin a new event file behind the last step that is known to be written."""
        directory = self.directory or os.path.join(run.directory, "tensorboard")
        return _TensorBoardSession(Path(os.fspath(directory)), run)


class _TensorBoardSession(TrackerSession):
    def __init__(self, directory: Path, run: TrackedRun) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2

        self._event, self._summary, self._tensor = event_pb2, summary_pb2, tensor_pb2
        self._text_type = types_pb2.DT_STRING
        self._directory, self.id = directory, str(directory)
        is_continued = bool(run.id) and _event_files(directory)
        # If the files were removed, all points are written again.
        self.last_step = run.last_step if is_continued else 0
        self._begin_file(self.last_step + 1)
        if not is_continued and run.params:
            self._write_text("train_loop_config", _as_table(run.params), run.started or time.time())

    def log(self, points: Sequence[TrackedPoint]) -> None:
        """Append scalars and flush them to disk."""
        value = self._summary.Summary.Value
        for point in points:
            values = [value(tag=name, simple_value=number) for name, number in point.numbers.items()]
            summary = self._summary.Summary(value=values)
            self._write(self._event.Event(wall_time=point.time, step=point.step, summary=summary))
        self._flush()

    def rewind(self, step: int) -> bool:
        """Begin a file whose session start makes readers forget the points from ``step`` on."""
        self._file.close()
        self._begin_file(step)
        return True

    def finish(self, ending: RunEnding) -> None:
        """Write state, reason and findings as text."""
        facts = {"state": ending.state, "reason": ending.reason, "findings": ", ".join(ending.findings)}
        self._write_text("run", _as_table({name: text for name, text in facts.items() if text}), time.time())
        self._flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _begin_file(self, first_step: int) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._directory.mkdir(parents=True, exist_ok=True)
        newest = max(_event_files(self._directory).values(), default=0)
        second = max(int(time.time()), newest + 1)
        name = f"events.out.tfevents.{second:010d}.{host_in_names()}.{os.getpid()}{_SUFFIX}"
        self._file = open(self._directory / name, "xb")  # noqa: SIM115 (it stays open)
        self._records = RecordWriter(self._file)
        self._write(self._event.Event(wall_time=time.time(), file_version="brain.Event:2"))
        started = self._event.SessionLog(status=self._event.SessionLog.START)
        self._write(self._event.Event(wall_time=time.time(), step=first_step, session_log=started))
        self._flush()

    def _write_text(self, tag: str, text: str, at: float) -> None:
        plugin = self._summary.SummaryMetadata.PluginData(plugin_name="text")
        value = self._summary.Summary.Value(
            tag=tag,
            metadata=self._summary.SummaryMetadata(plugin_data=plugin),
            tensor=self._tensor.TensorProto(dtype=self._text_type, string_val=[text.encode()]),
        )
        self._write(self._event.Event(wall_time=at, summary=self._summary.Summary(value=[value])))

    def _write(self, event: Any) -> None:
        self._records.write(event.SerializeToString())

    def _flush(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())


def _event_files(directory: Path) -> dict[str, int]:
    """Names of our event files, each with the second in its name."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return {}
    return {name: int(match[1]) for name in names if name.endswith(_SUFFIX) and (match := _NAME.match(name))}


def _as_table(values: Mapping[str, Any]) -> str:
    """Return a table in Markdown, TensorBoard's format of text."""
    lines = [f"| {_cell(name)} | {_cell(value)} |" for name, value in values.items()]
    return "\n".join(["| name | value |", "|---|---|", *lines])


def _cell(value: Any) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")
