"""``powertrain trace``: what the ranks of a run recorded, for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from powertrain.cli import arguments
from powertrain.cli.show import find_run
from powertrain.errors import StorageError

trace = typer.Typer(help="What the ranks of a run recorded, for other programs.", no_args_is_help=True)


@trace.callback()
def _verbs() -> None:
    """What the ranks of a run recorded, for other programs."""


@trace.command()
def export(
    run: arguments.Run,
    storage: arguments.Storage = "",
    output: Annotated[
        str,
        typer.Option(
            "--output", "-o", help="File to write; RUN.trace.json when left out.", show_default=False
        ),
    ] = "",
    attempt: arguments.Attempt = None,
) -> None:
    """Write a run's steps as a Chrome trace, for https://ui.perfetto.dev or chrome://tracing."""
    from powertrain.diagnosis import chrome
    from powertrain.diagnosis.recorded import read

    name, place = find_run(run, storage)
    recorded = read(place, attempt)
    path = Path(output or f"{name}.trace.json")
    try:
        with path.open("wb") as file:
            count = chrome.write(file, [recorded.steps], recorded.samples)
    except OSError as error:
        raise StorageError(
            f"The trace cannot be written to {path}: {error}. Name another file with --output."
        ) from error
    typer.echo(
        f"{path}: {count:,} events of {len(recorded.steps):,} steps. Open it at https://ui.perfetto.dev."
    )
