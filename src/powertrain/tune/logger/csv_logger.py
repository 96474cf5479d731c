"""Reports of a trial as ``progress.csv`` in its directory."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from powertrain.text.loggers import module_logger
from powertrain.trackers.text_files import cut_to_whole_lines, read_csv
from powertrain.tune.logger.base import FileLogger, flatten

if TYPE_CHECKING:
    from powertrain.tune.trial import Trial

logger = module_logger(__name__)
_ITERATION, _NAME = "training_iteration", "progress.csv"


class _Sheet:
    """One file: its columns, and the newest iteration in it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        rows = read_csv(cut_to_whole_lines(path, has_quotes=True))
        self.columns: list[str] = rows[0] if rows else []
        self.last = 0
        if _ITERATION in self.columns and len(rows) > 1:
            place = self.columns.index(_ITERATION)
            written = [row[place] for row in rows[1:] if len(row) > place]
            self.last = max((int(number) for number in written if number.isdecimal()), default=0)

    def append(self, values: dict[str, Any]) -> None:
        """Write a row, after the header if the file is new."""
        text = io.StringIO(newline="")
        writer = csv.DictWriter(
            text, self.columns or list(values), extrasaction="ignore", lineterminator="\n"
        )
        if not self.columns:
            self.columns = list(values)
            writer.writeheader()
        writer.writerow(values)
        with self._path.open("a", encoding="utf-8", newline="") as file:
            file.write(text.getvalue())


class CSVLoggerCallback(FileLogger):
    """Write the reports of each trial to ``progress.csv`` in its directory, nested metrics as "a/b".

    The first report determines the columns; metrics that appear later are left out, with one warning. After a restart
    the file is continued.

    Example::

        tune.Tuner(train, run_config=RunConfig(callbacks=[CSVLoggerCallback()]))
    """

    def __init__(self) -> None:
        super().__init__()
        self._sheets: dict[str, _Sheet] = {}
        self._are_new_columns_said = False

    def log_trial_start(self, trial: Trial) -> None:
        """Begin a new file for a trial that has not reported yet."""
        self._sheets.pop(trial.trial_id, None)
        self.remove_earlier(trial, _NAME)

    def log_trial_result(self, iteration: int, trial: Trial, result: dict[str, Any]) -> None:
        """Write a row, unless the file has this iteration already."""
        if trial.trial_id not in self._sheets:
            directory = self.directory_of(trial)
            if directory is None:
                return
            self._sheets[trial.trial_id] = _Sheet(directory / _NAME)
        sheet, number = self._sheets[trial.trial_id], int(result.get(_ITERATION, 0))
        if _ITERATION in result and number <= sheet.last:
            return
        values = flatten({key: value for key, value in result.items() if key != "config"})
        self._say_new_columns(trial, sheet, values)
        sheet.append(values)
        sheet.last = max(sheet.last, number)

    def log_trial_end(self, trial: Trial, failed: bool = False) -> None:
        """Forget the trial."""
        self._sheets.pop(trial.trial_id, None)

    def _say_new_columns(self, trial: Trial, sheet: _Sheet, values: dict[str, Any]) -> None:
        new = [key for key in values if sheet.columns and key not in sheet.columns]
        if new and not self._are_new_columns_said:
            self._are_new_columns_said = True
            logger.warning(
                "Trial %s reports %s, which its first report did not have: progress.csv has no column for it. Report "
                "the same metrics each time, or read result.json. This message is shown once.",
                trial,
                ", ".join(map(repr, new[:5])),
            )
