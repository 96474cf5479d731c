"""Progress of a sweep as text, and the reporters that show it."""

from powertrain.tune.reporter.reporters import (
    CLIReporter,
    JupyterNotebookReporter,
    ProgressReporter,
    TuneReporterBase,
)
from powertrain.tune.reporter.table import (
    error_table,
    estimate_seconds_left,
    find_best,
    format_seconds,
    status_of,
    summary_line,
    trial_table,
)

__all__ = [
    "ProgressReporter",
    "TuneReporterBase",
    "CLIReporter",
    "JupyterNotebookReporter",
    "error_table",
    "estimate_seconds_left",
    "find_best",
    "format_seconds",
    "status_of",
    "summary_line",
    "trial_table",
]
