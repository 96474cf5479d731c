"""``powertrain ls``: the runs of a storage path, newest first."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from powertrain.cli.asking import how_it_stands
from powertrain.config import RunConfig
from powertrain.engine.local import runtime_root
from powertrain.run import control, journal, lifecycle
from powertrain.run import events as ev
from powertrain.storage import Storage, open_storage
from powertrain.storage.addresses import without_secrets
from powertrain.terminal import clock

#: What is said of a run whose process is gone, and that did not come to an end.
INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class RunSummary:
    """A run in one line, as its journal tells it. ``seconds`` is how long it has gone on, as far as is known."""

    name: str
    state: str
    rows: int
    world_size: int
    attempts: int
    started: float
    seconds: float
    #: The process that runs it on this machine; 0 where none does.
    pid: int = 0


def ls(
    storage: Annotated[
        str, typer.Argument(help="Storage path; the default one when left out.", show_default=False)
    ] = "",
) -> None:
    """List the runs of a storage path, newest first."""
    place = open_storage(storage or default_storage())
    elsewhere = {real_path(one.card.path): one for one in control.live_runs(runtime_root())}
    summaries = [
        _with_life(summary, elsewhere.pop(real_path(place.child(summary.name).uri), None))
        for summary in sorted(summaries_in(place), key=lambda run: -run.started)
    ]
    if summaries:
        _print_table(summaries)
    else:
        typer.echo(f"There are no runs in {without_secrets(place.uri)}.")
    for _, one in sorted(elsewhere.items()):
        path = without_secrets(one.card.path)
        typer.echo(f"{one.card.name} is under way at {path} (pid {one.card.pid}).")


def real_path(path: str) -> str:
    """The path or address of a run, the same for all ways that lead to it."""
    return path if "://" in path else os.path.realpath(path)


def _with_life(summary: RunSummary, live: control.LiveRun | None) -> RunSummary:
    """With what a run under way on this machine says of itself."""
    if live is None:
        return summary
    stands = how_it_stands(live)
    return replace(
        summary, pid=live.card.pid, rows=max(summary.rows, stands.row if stands is not None else 0)
    )


def default_storage() -> str:
    """Where runs go that name no storage path."""
    return str(RunConfig().storage_root)


def summaries_in(place: Storage) -> Iterable[RunSummary]:
    """A summary of every run directly below ``place``."""
    for name in run_names(place):
        events = journal.read(place.child(name))
        if events:
            yield summarize(name, events)


def run_names(place: Storage) -> list[str]:
    """Names below ``place`` that have a journal."""
    keys = (entry.key.split("/") for entry in place.list())
    return sorted({parts[0] for parts in keys if len(parts) > 2 and parts[1] == "journal"})


def summarize(name: str, events: Sequence[ev.Event], rows: int = 0) -> RunSummary:
    """What ``events`` add up to; ``rows`` where more is known than the journal says."""
    run = journal.replay(events)
    starts = [event for event in events if isinstance(event, ev.RunStarted)]
    ended = [event.rows for event in events if isinstance(event, ev.Ended)]
    committed = [row for row, _ in run.committed]
    began = starts[-1].time if starts else events[0].time
    state = state_in_words(run, starts)
    until = events[-1].time if state in (*lifecycle.ENDED, INTERRUPTED) else time.time()
    return RunSummary(
        name=name,
        state=state,
        rows=max([rows, *ended[-1:], *committed[-1:]]),
        world_size=run.world_size,
        attempts=run.attempt + 1,
        started=began,
        seconds=max(0.0, until - began),
    )


def state_in_words(run: lifecycle.RunState, starts: Sequence[ev.RunStarted]) -> str:
    """The state; "interrupted" where the run was going on in a process of this machine that is gone."""
    if run.state in lifecycle.ENDED or not starts:
        return run.state
    start = starts[-1]
    if start.host == socket.gethostname() and not was_running(start.pid, start.time):
        return INTERRUPTED
    return run.state


def was_running(pid: int, at: float) -> bool:
    """True when the process ``pid`` of today is the one that existed at ``at``."""
    import psutil

    try:
        # A second of slack: the start of a process is known to the clock tick, not closer.
        process = psutil.Process(pid)
        return bool(process.create_time() <= at + 1.0 and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def ago(then: float, now: float) -> str:
    """How long ago ``then`` was, for people."""
    return f"{clock(now - then)} ago"


def _print_table(runs: Sequence[RunSummary]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("run", "state"):
        table.add_column(column, overflow="fold")
    for column in ("rows", "workers", "attempts"):
        table.add_column(column, justify="right")
    table.add_column("started")
    table.add_column("under way")
    now = time.time()
    for run in runs:
        numbers = (str(run.rows), str(run.world_size), str(run.attempts))
        process = f"pid {run.pid}" if run.pid else ""
        age = ago(run.started, now)
        table.add_row(run.name, run.state, *numbers, age, process, style=style_of(run.state))
    Console(highlight=False).print(table)


def style_of(state: str) -> str:
    """The colour of a state; "" for the terminal's own."""
    colours = {"failed": "red", INTERRUPTED: "yellow", "preempted": "yellow", "training": "green"}
    return colours.get(state, "")
