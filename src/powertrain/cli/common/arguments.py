"""Arguments and options that several verbs share."""

from __future__ import annotations

from typing import Annotated

import typer

Run = Annotated[str, typer.Argument(help="Run name, path or address; SWEEP/TRIAL for a trial of a sweep.")]
Storage = Annotated[
    str, typer.Option(help="Storage path; the default storage path when omitted.", show_default=False)
]
Ranks = Annotated[
    list[str] | None,
    typer.Option("--rank", "-r", help="Only these ranks: 3, or 0-3,7. May be repeated.", show_default=False),
]
Attempt = Annotated[
    int | None,
    typer.Option(
        help="Attempt to read; the newest with enough steps when omitted.",
        show_default=False,
        min=0,
    ),
]
