"""Common part of the loggers of trials: their hooks, and the places of their files."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from powertrain.text.loggers import module_logger
from powertrain.text.redaction import strip_secrets
from powertrain.tune.callback import Callback
from powertrain.values.arguments import plain_scalar, shorten

if TYPE_CHECKING:
    from powertrain.tune.trial import Trial

logger = module_logger(__name__)


class LoggerCallback(Callback):
    """Base class of loggers. Subclasses define the ``log_trial_...`` methods that they need.

    Example::

        class Log(LoggerCallback):
            def log_trial_result(self, iteration, trial, result):
                print(trial, result)

        tune.Tuner(train, run_config=RunConfig(callbacks=[Log()]))
    """

    def log_trial_start(self, trial: Trial) -> None:
        """Handle a trial that was started.

        Args:
            trial: The trial.
        """

    def log_trial_restore(self, trial: Trial) -> None:
        """Handle a trial that continues from a checkpoint.

        Args:
            trial: The trial.
        """

    def log_trial_save(self, trial: Trial) -> None:
        """Handle a trial that has saved a checkpoint.

        Args:
            trial: The trial.
        """

    def log_trial_result(self, iteration: int, trial: Trial, result: dict[str, Any]) -> None:
        """Handle a report.

        Args:
            iteration: Number of rounds so far.
            trial: The trial that reported.
            result: Its metrics, with "training_iteration", "time_total_s", "trial_id" and "config".
        """

    def log_trial_end(self, trial: Trial, failed: bool = False) -> None:
        """Handle a trial that ended.

        Args:
            trial: The trial.
            failed: Whether it failed.
        """

    def on_trial_start(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """Call :meth:`log_trial_start`."""
        self.log_trial_start(trial)

    def on_trial_restore(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """Call :meth:`log_trial_restore`."""
        self.log_trial_restore(trial)

    def on_trial_save(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """Call :meth:`log_trial_save`."""
        self.log_trial_save(trial)

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict[str, Any], **info: Any
    ) -> None:
        """Call :meth:`log_trial_result`."""
        self.log_trial_result(iteration, trial, result)

    def on_trial_complete(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """Call :meth:`log_trial_end`."""
        self.log_trial_end(trial, failed=False)

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """Call :meth:`log_trial_end`."""
        self.log_trial_end(trial, failed=True)


class FileLogger(LoggerCallback):
    """A logger that writes to the directories of trials that are on this machine."""

    def __init__(self) -> None:
        self._is_absence_said = False

    def directory_of(self, trial: Trial) -> Path | None:
        """Return the directory of a trial, which is made where it is missing.

        None for a trial on another file system, with one warning.
        """
        if not trial.path:
            return None  # it has no directory yet
        is_address = trial.path.startswith(("file:///", "file://localhost/"))
        directory = Path(unquote(urlsplit(trial.path).path) if is_address else trial.path)
        # The sweep's directory exists. If not, the path is on a file system that the user passed.
        if not directory.is_absolute() or not directory.parent.is_dir():
            self._say_absence(trial.path)
            return None
        directory.mkdir(exist_ok=True)
        return directory

    def remove_earlier(self, trial: Trial, pattern: str) -> None:
        """Remove files that a failed earlier start left, for a trial that begins at its first iteration.

        Args:
            trial: The trial.
            pattern: The names of the files, as in ``Path.glob``.
        """
        if trial.iteration == 0 and (directory := self.directory_of(trial)) is not None:
            for path in list(directory.glob(pattern)):
                path.unlink()

    def _say_absence(self, path: str) -> None:
        if not self._is_absence_said:
            self._is_absence_said = True
            logger.warning(
                "%s writes no files for trials in %s: it writes to directories of this machine only. The metrics of "
                "these trials are in their runs.",
                type(self).__name__,
                strip_secrets(path.rpartition("/")[0]),
            )


def pretty_print(result: Mapping[str, Any], exclude: Collection[str] | None = None) -> str:
    """Return a report as YAML, without its configuration.

    Args:
        result: The report.
        exclude: Entries to leave out.

    Example::

        print(pretty_print(trainable.train()))
    """
    import yaml

    left_out = {"config", "hist_stats", *(exclude or ())}
    shown = {key: value for key, value in result.items() if key not in left_out and value is not None}
    text: str = yaml.safe_dump(json.loads(as_json(shown)), default_flow_style=False, sort_keys=True)
    return text


def as_json(value: Any, indent: int | None = None) -> str:
    """Return a value as JSON; values for which JSON has no form are written as text.

    NaN and infinities are written as Python and pandas read them: ``NaN``, ``Infinity``.
    """
    return json.dumps(_with_text_keys(value), indent=indent, default=_fallback)


def _with_text_keys(value: Any) -> Any:
    """Return the same value with dict keys that JSON accepts."""
    if isinstance(value, Mapping):
        return {
            key if isinstance(key, str) else str(key): _with_text_keys(item) for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_with_text_keys(item) for item in value]
    return value


def _fallback(value: Any) -> Any:
    plain = plain_scalar(value)
    if isinstance(plain, (bool, int, float, str)):
        return plain
    try:
        listed = value.tolist()  # arrays and tensors
    except Exception:
        return str(value) if isinstance(value, os.PathLike) else shorten(value)
    return listed


def flatten(result: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the entries of a report by path: "a/b" for nested ones."""
    flat: dict[str, Any] = {}
    for key, value in result.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}/"))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
