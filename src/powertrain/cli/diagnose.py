"""``powertrain diagnose``: why a run is slow, from the telemetry in its directory."""

from __future__ import annotations

import shutil
from typing import Annotated

import typer

from powertrain.cli.common import arguments
from powertrain.cli.common.output import print_json, print_text
from powertrain.lookup.finding import find_run


def diagnose(
    run: arguments.Run,
    storage: arguments.Storage = "",
    attempt: arguments.Attempt = None,
    json: Annotated[bool, typer.Option("--json", help="Print the content of final_summary.json.")] = False,
) -> None:
    """Find out why a run is slow: findings with remedies, and the time of each phase."""
    from powertrain.diagnosis.recorded import report_of
    from powertrain.diagnosis.report import render

    found = find_run(run, storage)
    report = report_of(found.place, found.name, attempt)
    if json:
        print_json(report)
    else:
        print_text(render(report, shutil.get_terminal_size((100, 24)).columns))
