"""Reports of a trial as JSON lines in its directory, and its configuration."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle

from powertrain.text.errors import describe_error
from powertrain.text.loggers import module_logger
from powertrain.trackers.text_files import cut_to_whole_lines
from powertrain.tune.logger.base import FileLogger, as_json

if TYPE_CHECKING:
    from powertrain.tune.trial import Trial

logger = module_logger(__name__)
_NAME = "result.json"


class JsonLoggerCallback(FileLogger):
    """Writes each report of a trial as a line of ``result.json`` in its directory.

    Its configuration is in ``params.json`` and ``params.pkl``. After a restart the file is continued.
    """

    def __init__(self) -> None:
        super().__init__()
        #: The file of each trial, and the newest iteration in it.
        self._files: dict[str, Path] = {}
        self._last: dict[str, int] = {}

    def log_trial_start(self, trial: Trial) -> None:
        """Write the configuration, and begin a new file for a trial that has not reported yet.

        The configuration may be another than at an earlier start.
        """
        self._files.pop(trial.trial_id, None)
        self.remove_earlier(trial, _NAME)
        self.update_config(trial, trial.config)

    def log_trial_result(self, iteration: int, trial: Trial, result: dict[str, Any]) -> None:
        """Write a line, unless the file has this iteration already."""
        key = trial.trial_id
        if key not in self._files:
            directory = self.directory_of(trial)
            if directory is None:
                return
            self._files[key] = directory / _NAME
            self._last[key] = _newest_iteration(self._files[key])
        number = int(result.get("training_iteration", 0))
        if "training_iteration" in result and number <= self._last[key]:
            return
        with self._files[key].open("a", encoding="utf-8") as file:
            file.write(f"{as_json(result)}\n")
        self._last[key] = max(self._last[key], number)

    def log_trial_end(self, trial: Trial, failed: bool = False) -> None:
        """Forget the trial."""
        self._files.pop(trial.trial_id, None)
        self._last.pop(trial.trial_id, None)

    def update_config(self, trial: Trial, config: Mapping[str, Any]) -> None:
        """Write the configuration of a trial in place of an earlier one.

        Args:
            trial: The trial.
            config: Its configuration.
        """
        directory = self.directory_of(trial)
        if directory is None:
            return
        _replace(directory / "params.json", as_json(config, indent=2).encode())
        try:
            pickled = cloudpickle.dumps(dict(config))
        except Exception as error:
            logger.warning("params.pkl of trial %s is not written: %s", trial, describe_error(error))
        else:
            _replace(directory / "params.pkl", pickled)


def _newest_iteration(path: Path) -> int:
    newest = 0
    for line in cut_to_whole_lines(path).split("\n"):
        try:
            newest = max(newest, int(json.loads(line)["training_iteration"]))
        except (ValueError, TypeError, KeyError):
            continue  # a line with unknown content
    return newest


def _replace(path: Path, content: bytes) -> None:
    """Replace a file atomically."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_bytes(content)
    draft.replace(path)
