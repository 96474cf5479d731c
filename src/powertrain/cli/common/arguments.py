"""What several verbs are told in the same way."""

from __future__ import annotations

from typing import Annotated

import typer

Run = Annotated[
    str, typer.Argument(help="A run: its name, its path, or its address; SWEEP/TRIAL for one of a sweep.")
]
Storage = Annotated[
    str, typer.Option(help="Storage path; the default one when left out.", show_default=False)
]
Ranks = Annotated[
    list[str] | None,
    typer.Option("--rank", "-r", help="Only these ranks: 3, or 0-3,7. May be repeated.", show_default=False),
]
Attempt = Annotated[
    int | None,
    typer.Option(
        help="Which attempt of the run; the newest with enough steps when left out.",
        show_default=False,
        min=0,
    ),
]
