"""Reports of a trial as event files of TensorBoard in its directory."""

from __future__ import annotations

import importlib
import importlib.util
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from powertrain.text.errors import describe_error
from powertrain.text.loggers import module_logger
from powertrain.tune.logger.base import FileLogger, flatten
from powertrain.tune.trial import flat_numbers
from powertrain.values.arguments import plain_scalar

if TYPE_CHECKING:
    from powertrain.tune.trial import Trial

logger = module_logger(__name__)

#: Packages with a ``SummaryWriter``, the lighter one first, and the packages to install for each.
_WRITERS = {"tensorboardX": "tensorboardX", "torch.utils.tensorboard": "tensorboard"}
#: Entries of a report without a chart.
_NOT_CHARTED = frozenset(
    {
        "config",
        "pid",
        "timestamp",
        "time_total_s",
        "training_iteration",
        "done",
        "trial_id",
        "date",
        "hostname",
    }
)
#: Prefix of chart names in Ray Tune, so that boards show old and new trials side by side.
_PREFIX = "ray/tune/"
#: Suffix of event files, which distinguishes them from those that a training function writes.
_SUFFIX = ".powertrain-tune"


def has_tensorboard() -> bool:
    """Return whether a package that writes event files is installed. Imports none."""
    return any(importlib.util.find_spec(needed) is not None for needed in _WRITERS.values())


class TBXLoggerCallback(FileLogger):
    """Writes the reports of each trial to event files in its directory.

    When a trial ends, its drawn values are written with the last metrics as hyperparameters. Nested metrics are charted
    as "a/b". Numbers become scalars; lists and arrays become histograms, arrays of three and four dimensions images.

    Raises:
        ImportError: Neither tensorboardX nor tensorboard is installed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._module_name = _find_writer_module()
        self._writers: dict[str, Any] = {}
        self._last_step: dict[str, int] = {}
        self._said: set[str] = set()

    def log_trial_start(self, trial: Trial) -> None:
        """Begin a new file for a trial that has not reported yet."""
        if trial.iteration == 0:
            self._close(trial.trial_id)
            self.remove_earlier(trial, f"*{_SUFFIX}")

    def log_trial_result(self, iteration: int, trial: Trial, result: dict[str, Any]) -> None:
        """Write the numbers of a report, unless a file of the trial has this step already."""
        key = trial.trial_id
        if key not in self._writers and not self._open(trial):
            return
        step = int(result.get("timesteps_total") or result.get("training_iteration") or 0)
        if 0 < step <= self._last_step[key]:
            return
        for name, value in flatten({k: v for k, v in result.items() if k not in _NOT_CHARTED}).items():
            self._write(self._writers[key], f"{_PREFIX}{name}", value, step)
        self._writers[key].flush()
        self._last_step[key] = step

    def log_trial_end(self, trial: Trial, failed: bool = False) -> None:
        """Write the hyperparameters and close the file."""
        numbers = {
            f"{_PREFIX}{name}": value
            for name, value in flat_numbers(trial.last_result)
            if name not in _NOT_CHARTED and not math.isnan(value)
        }
        try:
            # After a restart, the file may have been closed before the end of the trial was recorded.
            has_writer = trial.trial_id in self._writers
            if trial.evaluated_params and numbers and (has_writer or self._open(trial)):
                self._write_hparams(self._writers[trial.trial_id], trial.evaluated_params, numbers)
        finally:
            self._close(trial.trial_id)

    def on_experiment_end(self, trials: list[Trial], **info: Any) -> None:
        """Close the files of trials that did not end."""
        for key in list(self._writers):
            self._close(key)

    def _close(self, key: str) -> None:
        self._last_step.pop(key, None)
        writer = self._writers.pop(key, None)
        if writer is not None:
            writer.close()

    def __getstate__(self) -> dict[str, Any]:
        # Writers have threads; another process creates its own, and reads the newest step from the files.
        return {**vars(self), "_writers": {}}

    def _open(self, trial: Trial) -> bool:
        directory = self.directory_of(trial)
        if directory is None:
            return False
        earlier = list(directory.glob(f"*{_SUFFIX}"))
        self._last_step[trial.trial_id] = max(map(_newest_step, earlier), default=0)
        # Numbered: file names have a resolution of one second, and a writer replaces a file of the same name.
        self._writers[trial.trial_id] = importlib.import_module(self._module_name).SummaryWriter(
            str(directory), flush_secs=30, filename_suffix=f".{len(earlier)}{_SUFFIX}"
        )
        return True

    def _write(self, writer: Any, tag: str, value: Any, step: int) -> None:
        value = plain_scalar(value)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            if not math.isnan(value):
                writer.add_scalar(tag, value, global_step=step)
            return
        dimensions = getattr(value, "ndim", 1 if isinstance(value, list) else 0)
        if not dimensions or not len(value):
            return
        try:
            if dimensions == 3:
                writer.add_image(tag, value, global_step=step)
            elif dimensions == 4:
                writer.add_images(tag, value, global_step=step)
            else:
                import numpy as np

                writer.add_histogram(tag, np.asarray(value, dtype=float), global_step=step)
        except Exception as error:  # text in a list, or a shape that is not an image
            self._say_once(tag, f"The metric {tag!r} has no chart in TensorBoard: {describe_error(error)}")

    def _write_hparams(self, writer: Any, drawn: dict[str, Any], numbers: dict[str, float]) -> None:
        plain = {name: plain_scalar(value) for name, value in flatten(drawn).items()}
        shown = {
            name: value if isinstance(value, (str, bool, int, float)) else repr(value)
            for name, value in plain.items()
            if value is not None
        }
        try:
            summary = importlib.import_module(f"{self._module_name}.summary")
            for part in summary.hparams(hparam_dict=shown, metric_dict=numbers):
                writer._get_file_writer().add_summary(part)
        except Exception as error:
            self._say_once(
                "hparams", f"TensorBoard's hyperparameters are not written: {describe_error(error)}"
            )

    def _say_once(self, key: str, message: str) -> None:
        if key not in self._said:
            self._said.add(key)
            logger.warning("%s", message)


def _find_writer_module() -> str:
    for module, needed in _WRITERS.items():
        if importlib.util.find_spec(needed) is not None:
            return module
    raise ImportError(
        "TBXLoggerCallback writes event files with tensorboardX or tensorboard, and neither is installed. Install one: "
        "pip install tensorboardX."
    )


def _newest_step(path: Path) -> int:
    """Return the greatest step in an event file; a truncated last record is skipped."""
    return max(map(_step_of, _records(path)), default=0)


def _records(path: Path) -> Iterator[bytes]:
    """Yield the records of a TFRecord file: length (8 bytes), its checksum (4), the content, its checksum (4)."""
    size = path.stat().st_size
    with path.open("rb") as file:
        while len(head := file.read(12)) == 12:
            length = struct.unpack("<Q", head[:8])[0]
            if file.tell() + length > size:
                return
            yield file.read(length)
            file.read(4)


def _step_of(event: bytes) -> int:
    """Return the step of an event, a protocol buffer: field 1 is the time (8 bytes), field 2 the step (a varint)."""
    place = 9 if event[:1] == b"\x09" else 0
    if event[place : place + 1] != b"\x10":
        return 0
    step = shift = 0
    for byte in event[place + 1 :]:
        step |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    return step
