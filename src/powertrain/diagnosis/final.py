"""The diagnosis at the end of a run: saved in ``final_summary.json`` and copied on request."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import msgspec

from powertrain.diagnosis import recorded
from powertrain.diagnosis.summary import Report, from_json, to_json
from powertrain.diagnosis.tables.steady import LEAST_STEPS
from powertrain.errors import StorageError
from powertrain.storage import Storage
from powertrain.storage.base import RECORD_BYTES_LIMIT
from powertrain.text.loggers import module_logger
from powertrain.trace.store import RecordedTelemetry

_logger = module_logger(__name__)
#: In the run's directory.
SUMMARY = "final_summary.json"


def conclude(storage: Storage, name: str) -> Report | None:
    """Make the report of a run that is over and keep it in its directory; None where nothing was recorded.

    Raises StorageError where it cannot be kept.
    """
    try:
        report = recorded.report_of(storage, name)
    except StorageError:
        return None
    storage.put(SUMMARY, to_json(report))
    return report


def copy_to(directory: str, session: str, report: Report) -> str:
    """Put a copy of the summary below a directory of the user's, as ``{session}/final_summary.json``; returns its path.

    The directory is always directly below: path separators in the session are replaced.
    Raises OSError if it cannot be written.
    """
    target = Path(os.path.expanduser(directory), _one_component(session or report.name or "run"), SUMMARY)
    target.parent.mkdir(parents=True, exist_ok=True)
    new = target.with_name(f".{SUMMARY}.{os.getpid()}")
    try:
        new.write_bytes(to_json(report))
        os.replace(new, target)
    finally:
        new.unlink(missing_ok=True)
    return str(target)


def _one_component(name: str) -> str:
    """Return ``name`` as a single path component; never empty."""
    plain = re.sub(r"[/\\\0]", "_", name) or "_"
    return plain if plain.strip(".") else "_" * len(plain)


def report_of(
    storage: Storage, name: str, telemetry: Callable[[], RecordedTelemetry] | None = None
) -> Report | None:
    """Return the saved diagnosis of a run, or a new one if it is missing or unreadable; None without telemetry.

    ``telemetry`` returns the run's records where they have been read already.
    """
    notes: tuple[str, ...] = ()
    try:
        return from_json(storage.get(SUMMARY, limit=RECORD_BYTES_LIMIT))
    except FileNotFoundError:
        pass
    except Exception as error:  # any error: the file can be made again
        notes = (
            f"{SUMMARY} could not be read, so this report was made again from the run's telemetry. {error}",
        )
        _logger.warning("%s of the run %r: %s", SUMMARY, name, notes[0])
    try:
        report = recorded.report_of(storage, name, telemetry=telemetry() if telemetry is not None else None)
    except StorageError:
        return None
    return msgspec.structs.replace(report, notes=(*report.notes, *notes))


def is_telling(report: Report) -> bool:
    """Return whether the report has enough steps for a card."""
    return report.steps - report.start_up_steps >= LEAST_STEPS
