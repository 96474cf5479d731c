"""``powertrain stop``: the end of a run or sweep that is under way, as its own Ctrl-C would bring it about."""

from __future__ import annotations

import getpass
import os
import socket
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from powertrain.cli.common import arguments
from powertrain.cli.common.asking import ask, out_of_reach
from powertrain.cli.common.finding import FoundRun, find_run_or_sweep
from powertrain.cli.common.output import print_line, print_message, print_status
from powertrain.cli.common.watching import RunWatch
from powertrain.run import events as ev
from powertrain.run.remote import protocol
from powertrain.terminal.text import clock

if TYPE_CHECKING:
    from powertrain.cli.common.sweeps import SweepWatch

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
    """Stop a run at its next boundary, with a checkpoint if its loop can save. Exits with 0 when it was stopped.

    A sweep begins no more trials, and those under way stop in the same way. It can be continued.
    """
    found = find_run_or_sweep(run, storage)
    watch = _watch_of(found)
    watch.look()
    if found.live is None:
        print_line(watch.ending() if watch.is_over else out_of_reach(found), err=True)
        raise typer.Exit(1)
    answer = ask(found, protocol.StopRequest(by=_asker(), now=now, within=timeout))
    print_message(answer.message, err=not answer.ok)
    if not answer.ok:
        raise typer.Exit(1)
    if wait:
        _wait(watch, found)


def _watch_of(found: FoundRun) -> RunWatch | SweepWatch:
    if not found.is_sweep:
        return RunWatch(found)
    from powertrain.cli.common.sweeps import SweepWatch

    return SweepWatch(found)


def _asker() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())  # a container's user without a name
    return f"{user}@{socket.gethostname()} pid {os.getpid()}"


def _wait(watch: RunWatch | SweepWatch, found: FoundRun) -> None:
    """Wait for the end of the run or sweep, and say what comes of it; Ctrl-C leaves it to itself."""
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
                print_status(f"waiting for {found.name!r} to stop: {clock(waited)}")
            time.sleep(_LOOK_EVERY)
    except KeyboardInterrupt:
        print_line("", err=True)
        print_line(f"The {found.noun} {found.name!r} goes on to its end by itself.", err=True)
        raise typer.Exit(130) from None
    _clear_line(shows_time)
    was_stopped = watch.has_stopped
    print_line(watch.ending(), err=not was_stopped)
    if not was_stopped:
        raise typer.Exit(1)
    if text := watch.continuing():
        print_line(text)


def _tell(fact: object, shows_time: bool) -> None:
    if isinstance(fact, ev.Committed):
        _clear_line(shows_time)
        print_line(f"{fact.checkpoint} is committed (row {fact.row}).")
    elif isinstance(fact, ev.CheckpointFailed):
        _clear_line(shows_time)
        print_line(f"The checkpoint of row {fact.row} is lost: {fact.reason}.", err=True)


def _clear_line(shows_time: bool) -> None:
    if shows_time:
        print_status("")
