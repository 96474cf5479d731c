"""``powertrain report``: a run or a sweep as one HTML file."""

from __future__ import annotations

import functools
import os
import re
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from powertrain.cli.common import arguments
from powertrain.cli.common.output import print_json, print_line
from powertrain.errors import StorageError
from powertrain.lookup.finding import find_run_or_sweep

if TYPE_CHECKING:
    from powertrain.lookup.finding import FoundRun

#: Bytes of a file's name, less those of what is added to the run's name.
_LONGEST_NAME = 200


def report(
    run: arguments.Run,
    storage: arguments.Storage = "",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="File or directory to write to; NAME-report.html in the current directory when omitted.",
            show_default=False,
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the path and the size as JSON.")] = False,
) -> None:
    """Write a run or a sweep as one HTML file with all charts, which opens without a server and without a network."""
    found = find_run_or_sweep(run, storage)
    content = _sweep_content(found) if found.is_sweep else _run_content(found)
    path = target_of(output, found.name)
    _write(path, content)
    if json:
        print_json({"name": found.name, "path": os.path.abspath(path), "bytes": len(content)})
    else:
        print_line(f"{path} ({len(content) / 1e6:.2f} MB)")


def target_of(output: Path | None, name: str) -> Path:
    """Return the file to write to: as named, else one with the run's name in the named or the current directory."""
    if output is not None and not output.is_dir():
        return output
    plain = re.sub(r"[/\\\0]", "_", name).encode("utf-8", "replace")[:_LONGEST_NAME].decode("utf-8", "ignore")
    return (output or Path()) / f"{plain}-report.html"


def _write(path: Path, content: bytes) -> None:
    """Write a file as a whole or not at all."""
    if not path.parent.is_dir():
        raise StorageError(f"The directory {str(path.parent)!r} of the report does not exist. Make it first.")
    descriptor, new = tempfile.mkstemp(dir=path.parent, prefix=".powertrain-report-")
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        os.chmod(new, 0o666 & ~_umask())
        os.replace(new, path)
    except BaseException:
        os.unlink(new)
        raise


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _run_content(found: FoundRun) -> bytes:
    from powertrain.lookup.asking import how_it_stands
    from powertrain.lookup.log_files import LogFiles
    from powertrain.lookup.summaries import silent_since
    from powertrain.lookup.watching import RunWatch
    from powertrain.run import events as ev
    from powertrain.run.record import journal
    from powertrain.trace import store
    from powertrain.views.log_ends import log_ends
    from powertrain.views.report.content import run_report
    from powertrain.views.run_page import ShownRun

    facts = RunWatch(found).look()
    if not facts:
        raise StorageError(f"The run {found.name!r} has no journal yet, so there is nothing to report.")
    live, silent = found.live, 0.0
    if live is None:
        starts = [fact for fact in facts if isinstance(fact, ev.RunStarted)]
        silent = silent_since(found.place, journal.replay(facts), starts, time.time())
    view = ShownRun(
        found.name,
        found.place,
        facts,
        functools.cache(lambda: store.read(found.place)),
        pid=live.card.pid if live is not None else 0,
        stands=how_it_stands(live) if live is not None else None,
        silent_since=silent,
    )
    files = LogFiles(found)
    return run_report(
        view,
        lambda budget: log_ends(
            files.list(), lambda log, start, size: files.read(log, start, size).data, budget
        ),
    )


def _sweep_content(found: FoundRun) -> bytes:
    from powertrain.lookup import sweeps
    from powertrain.ui.places import SweepRecord
    from powertrain.ui.sweep_pages import sweep_page
    from powertrain.views.report.content import sweep_report

    watch = sweeps.SweepWatch(found)
    record = SweepRecord(found, watch, watch.look(), sweeps.read_record(found))
    return sweep_report(found.name, sweep_page(record))
