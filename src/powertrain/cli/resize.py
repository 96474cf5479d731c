"""``powertrain resize``: change the number of workers of a live run."""

from __future__ import annotations

from typing import Annotated

import typer

from powertrain.cli.common import arguments
from powertrain.cli.common.output import print_json, print_message
from powertrain.lookup.asking import ask
from powertrain.lookup.finding import find_run
from powertrain.run.remote import protocol


def resize(
    run: arguments.Run,
    workers: Annotated[int, typer.Argument(help="New number of workers.", min=1)],
    storage: arguments.Storage = "",
    json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> None:
    """Change the number of workers of an elastic run, at its next checkpoint."""
    answer = ask(find_run(run, storage), protocol.ResizeRequest(workers=workers))
    if json:
        print_json({"ok": answer.ok, "workers": workers, "message": answer.message})
    else:
        print_message(answer.message, err=not answer.ok)
    if not answer.ok:
        raise typer.Exit(1)
