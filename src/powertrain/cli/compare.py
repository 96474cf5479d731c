"""``powertrain compare``: compare the speed of two runs, with an exit code for CI."""

from __future__ import annotations

from typing import Annotated

import typer

from powertrain.cli.common import arguments
from powertrain.cli.common.output import print_json, print_text
from powertrain.lookup.finding import find_run


def compare(
    first: Annotated[str, typer.Argument(help="The run to compare with: its name, path or address.")],
    second: Annotated[str, typer.Argument(help="The run to judge.")],
    storage: arguments.Storage = "",
    json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
) -> None:
    """Compare the step times of two runs. Exits with 3 if the second is slower, with 4 if there are too few steps."""
    from powertrain.diagnosis.compare import compare as compared
    from powertrain.diagnosis.compare import render_comparison, with_rates
    from powertrain.diagnosis.final import report_of
    from powertrain.diagnosis.recorded import read

    found = [find_run(run, storage) for run in (first, second)]
    before, after = (read(one.place).steps for one in found)
    comparison = compared(before, after)
    reports = [report_of(one.place, one.name) for one in found]
    if reports[0] is not None and reports[1] is not None:
        comparison = with_rates(comparison, reports[0], reports[1])
    if json:
        print_json(comparison)
    else:
        print_text(render_comparison(comparison, *(one.name for one in found)))
    raise typer.Exit(comparison.exit_code)
