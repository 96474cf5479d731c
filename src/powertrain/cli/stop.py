"""``powertrain stop``: the end of a run that is under way, as its own Ctrl-C would bring it about."""

from __future__ import annotations

import getpass
import os
import socket
import sys
import time
from typing import Annotated

import typer

from powertrain.cli import arguments
from powertrain.cli.asking import ask, out_of_reach
from powertrain.cli.finding import find_run
from powertrain.cli.watching import Watch
from powertrain.run import control, lifecycle
from powertrain.run import events as ev
from powertrain.terminal import clock

#: Seconds between two looks at the run; between two words about how long it takes, at a terminal.
_LOOK_EVERY = 0.1
_WORD_EVERY = 1.0


def stop(
    run: arguments.Run,
    storage: arguments.Storage = "",
    now: Annotated[
        bool, typer.Option("--now", help="End it at once, wherever its ranks are, as a second Ctrl-C does.")
    ] = False,
    timeout: Annotated[
        float,
        typer.Option(
            help="Seconds for it to come to its boundary; then it is ended. However long it takes when left out.",
            show_default=False,
            min=0.0,
        ),
    ] = 0.0,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until it has ended.")] = True,
) -> None:
    """Stop a run at its next boundary, with a checkpoint if its loop can save. Exits with 0 when it was stopped."""
    found = find_run(run, storage)
    watch = Watch(found)
    watch.look()
    if found.live is None:
        typer.echo(watch.ending() if watch.is_over else out_of_reach(found), err=True)
        raise typer.Exit(1)
    answer = ask(found, control.Stop(by=_asker(), now=now, within=timeout))
    typer.echo(answer.message, err=not answer.ok)
    if not answer.ok:
        raise typer.Exit(1)
    if wait:
        _wait(watch, found.name)


def _asker() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())  # a container's user without a name
    return f"{user}@{socket.gethostname()} pid {os.getpid()}"


def _wait(watch: Watch, name: str) -> None:
    """Wait for the end of the run, and say what comes of it; Ctrl-C leaves it to itself."""
    began, word_at = time.monotonic(), _WORD_EVERY
    shows_time = sys.stderr.isatty()
    try:
        while True:
            for fact in watch.look():
                _tell(fact, shows_time)
            if watch.is_over:
                break
            waited = time.monotonic() - began
            if shows_time and waited >= word_at:
                word_at = waited + _WORD_EVERY
                typer.echo(f"\r\x1b[Kwaiting for {name!r} to stop: {clock(waited)}", err=True, nl=False)
            time.sleep(_LOOK_EVERY)
    except KeyboardInterrupt:
        typer.echo(f"\nThe run {name!r} goes on to its end by itself.", err=True)
        raise typer.Exit(130) from None
    _clear_line(shows_time)
    was_stopped = watch.run.state == lifecycle.STOPPED
    typer.echo(watch.ending(), err=not was_stopped)
    if was_stopped and watch.run.committed:
        row, checkpoint = watch.run.committed[-1]
        typer.echo(f"The same script goes on from {checkpoint} (row {row}).")
    if not was_stopped:
        raise typer.Exit(1)


def _tell(fact: ev.Event, shows_time: bool) -> None:
    if isinstance(fact, ev.Committed):
        _clear_line(shows_time)
        typer.echo(f"{fact.checkpoint} is committed (row {fact.row}).")
    elif isinstance(fact, ev.CheckpointFailed):
        _clear_line(shows_time)
        typer.echo(f"The checkpoint of row {fact.row} is lost: {fact.reason}.", err=True)


def _clear_line(shows_time: bool) -> None:
    if shows_time:
        typer.echo("\r\x1b[K", err=True, nl=False)
