"""``powertrain track``: brings the trackers of a run up to date."""

from __future__ import annotations

from typing import Annotated

import typer

from powertrain.cli.common import arguments
from powertrain.cli.common.output import print_json, print_line
from powertrain.errors import StorageError
from powertrain.lookup.finding import FoundRun, find_run


def track(
    run: arguments.Run,
    storage: arguments.Storage = "",
    tracker: Annotated[
        list[str] | None,
        typer.Option(
            "--tracker",
            "-t",
            help="tensorboard, mlflow, wandb or csv, with settings from the environment, instead of those that the "
            "run was started with. May be repeated.",
            show_default=False,
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the progress of each tracker as JSON.")] = False,
) -> None:
    """Send the metrics of a run that its trackers have not received yet."""
    from powertrain.trackers import upkeep

    found = find_run(run, storage)
    if found.live is not None:
        raise StorageError(
            f"{found.name!r} is running and sends its metrics itself. Run this command when it has ended."
        )
    is_complete, progress = True, []
    for line, is_done in upkeep.bring_up_to_date(found.place, tracker or [], _command(found)):
        progress.append({"message": line, "done": is_done})
        if not json:
            print_line(line, err=not is_done)
        is_complete = is_complete and is_done
    if json:
        print_json({"run": found.name, "complete": is_complete, "trackers": progress})
    if not is_complete:
        raise typer.Exit(1)


def _command(found: FoundRun) -> str:
    return f"powertrain track {found.name}"
