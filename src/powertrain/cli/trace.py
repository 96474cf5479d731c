"""``powertrain trace``: export the recorded steps of a run for other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from powertrain.cli.common import arguments
from powertrain.cli.common.output import print_line
from powertrain.errors import StorageError
from powertrain.lookup.finding import find_run
from powertrain.terminal.text import data_size

#: Bytes of a trace above which viewers in a browser are slow.
_LARGE = 200 * 10**6

trace = typer.Typer(help="Export the recorded steps of a run for other tools.", no_args_is_help=True)


@trace.callback()
def _verbs() -> None:
    """Export the recorded steps of a run for other tools."""


@trace.command()
def export(
    run: arguments.Run,
    storage: arguments.Storage = "",
    output: Annotated[
        str,
        typer.Option(
            "--output", "-o", help="File to write; RUN.trace.json when omitted.", show_default=False
        ),
    ] = "",
    attempt: arguments.Attempt = None,
    last: Annotated[
        int | None,
        typer.Option("--last", help="Only the newest N steps; all when omitted.", show_default=False, min=1),
    ] = None,
) -> None:
    """Write a run's steps as a Chrome trace, for https://ui.perfetto.dev or chrome://tracing."""
    from powertrain.diagnosis import chrome
    from powertrain.diagnosis.recorded import read

    found = find_run(run, storage)
    recorded = read(found.place, attempt)
    steps, samples = recorded.steps, recorded.samples
    if last is not None:
        steps, samples = chrome.newest(steps, samples, last)
    path = Path(output or f"{found.name}.trace.json")
    try:
        with path.open("wb") as file:
            count = chrome.write(file, chrome.parts(steps), samples)
        size = path.stat().st_size
    except OSError as error:
        raise StorageError(
            f"The trace cannot be written to {path}: {error}. Name another file with --output."
        ) from error
    print_line(f"{path}: {count:,} events of {len(steps):,} steps. Open it at https://ui.perfetto.dev.")
    if size > _LARGE:
        print_line(_too_large(size, len(steps)))


def _too_large(size: int, steps: int) -> str:
    fitting = max(1, steps * _LARGE // size)
    fitting -= fitting % 10 ** (len(str(fitting)) - 1)
    return (
        f"It takes {data_size(size)}, and viewers are slow above {data_size(_LARGE)}. "
        f"`--last {fitting}` writes only the newest {fitting:,} steps."
    )
