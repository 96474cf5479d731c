"""``powertrain resize``: another number of workers for a run that is under way."""

from __future__ import annotations

from typing import Annotated

import typer

from powertrain.cli import arguments
from powertrain.cli.show import find_run
from powertrain.engine.local import runtime_root
from powertrain.errors import StorageError
from powertrain.run import control


def resize(
    run: arguments.Run,
    workers: Annotated[int, typer.Argument(help="How many workers it should go on with.", min=1)],
    storage: arguments.Storage = "",
) -> None:
    """Change the number of workers of an elastic run, at its next checkpoint."""
    name, place = find_run(run, storage)
    directory = control.find(runtime_root(), place.uri)
    try:
        if directory is None:
            raise FileNotFoundError("no live run has that path")
        answer = control.ask_run(directory, control.Resize(workers=workers))
    except OSError as error:
        raise StorageError(
            f"The run {name!r} at {place.uri} is not under way on this machine as this user ({error}). See 'powertrain "
            "ls' for what is, and give the storage path with --storage where it is not the default one."
        ) from error
    typer.echo(answer.message, err=not answer.ok)
    if not answer.ok:
        raise typer.Exit(1)
