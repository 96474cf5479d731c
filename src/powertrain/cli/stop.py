"""``powertrain stop``: stop a live run or sweep, as Ctrl-C in its own terminal does."""

from __future__ import annotations

import getpass
import os
import socket
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from powertrain.cli.common import arguments
from powertrain.cli.common.output import print_json, print_line, print_message, print_status
from powertrain.lookup.asking import ask, out_of_reach
from powertrain.lookup.finding import FoundRun, find_run_or_sweep
from powertrain.lookup.watching import RunWatch
from powertrain.run import events as ev
from powertrain.run.remote import protocol
from powertrain.terminal.text import clock

if TYPE_CHECKING:
    from powertrain.lookup.sweeps import SweepWatch

#: Seconds between two reads of the journal, and between two updates of the status line at a terminal.
_POLL_INTERVAL_S = 0.1
_STATUS_INTERVAL_S = 1.0


def stop(
    run: arguments.Run,
    storage: arguments.Storage = "",
    now: Annotated[
        bool,
        typer.Option(
            "--now", help="End it at once, without waiting for a boundary, as a second Ctrl-C does."
        ),
    ] = False,
    timeout: Annotated[
        float,
        typer.Option(
            help="Seconds to wait for its next boundary before it is ended; no limit when omitted.",
            show_default=False,
            min=0.0,
        ),
    ] = 0.0,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until it has ended.")] = True,
    json: Annotated[
        bool, typer.Option("--json", help="Print the outcome as JSON, messages on stderr.")
    ] = False,
) -> None:
    """Stop a run at its next boundary, with a checkpoint if its loop can save. Exits with 0 when it was stopped.

    A sweep starts no more trials, and its running trials stop in the same way. It can be resumed.
    """
    found = find_run_or_sweep(run, storage)
    watch = _watch_of(found)
    watch.look()
    if found.live is None:
        message = watch.ending() if watch.is_over else out_of_reach(found)
        print_line(message, err=True)
        _print_outcome(found, json, False, message)
        raise typer.Exit(1)
    answer = ask(found, protocol.StopRequest(by=_requester(), now=now, within=timeout))
    print_message(answer.message, err=json or not answer.ok)
    if answer.ok and wait:
        _wait(watch, found, json)
        return
    # Without waiting, the request is all that was done.
    _print_outcome(found, json, False, answer.message)
    if not answer.ok:
        raise typer.Exit(1)


def _print_outcome(found: FoundRun, json: bool, stopped: bool, message: str) -> None:
    if json:
        print_json({"run": found.name, "stopped": stopped, "message": message})


def _watch_of(found: FoundRun) -> RunWatch | SweepWatch:
    if not found.is_sweep:
        return RunWatch(found)
    from powertrain.lookup.sweeps import SweepWatch

    return SweepWatch(found)


def _requester() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())  # a container's user without a name
    return f"{user}@{socket.gethostname()} pid {os.getpid()}"


def _wait(watch: RunWatch | SweepWatch, found: FoundRun, json: bool) -> None:
    """Wait for the end of the run or sweep and print it; after Ctrl-C it keeps stopping by itself."""
    began, status_at = time.monotonic(), _STATUS_INTERVAL_S
    shows_time = sys.stderr.isatty()
    try:
        while True:
            for fact in watch.look():
                _print_fact(fact, shows_time, json)
            if watch.is_over:
                break
            waited = time.monotonic() - began
            if shows_time and waited >= status_at:
                status_at = waited + _STATUS_INTERVAL_S
                print_status(f"waiting for {found.name!r} to stop: {clock(waited)}")
            time.sleep(_POLL_INTERVAL_S)
    except KeyboardInterrupt:
        print_line("", err=True)
        print_line(f"The {found.noun} {found.name!r} keeps stopping by itself.", err=True)
        raise typer.Exit(130) from None
    _clear_line(shows_time)
    was_stopped = watch.has_stopped
    print_line(watch.ending(), err=json or not was_stopped)
    if was_stopped and (text := watch.continuing()):
        print_line(text, err=json)
    _print_outcome(found, json, was_stopped, watch.ending())
    if not was_stopped:
        raise typer.Exit(1)


def _print_fact(fact: object, shows_time: bool, json: bool) -> None:
    if isinstance(fact, ev.Committed):
        _clear_line(shows_time)
        print_line(f"{fact.checkpoint} is committed (row {fact.row}).", err=json)
    elif isinstance(fact, ev.CheckpointFailed):
        _clear_line(shows_time)
        print_line(f"The checkpoint of row {fact.row} is lost: {fact.reason}.", err=True)


def _clear_line(shows_time: bool) -> None:
    if shows_time:
        print_status("")
