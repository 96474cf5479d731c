"""``powertrain ls``: the sweeps and runs of a storage path, newest first."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from powertrain.cli.common.asking import how_it_stands
from powertrain.cli.common.output import cell, print_line, print_message, print_table
from powertrain.config import RunConfig
from powertrain.errors import StorageError
from powertrain.run.remote import protocol
from powertrain.run.record import journal
from powertrain.run import lifecycle
from powertrain.run import events as ev
from powertrain.storage import Storage, open_storage
from powertrain.storage.addresses import strip_secrets, without_secrets
from powertrain.storage.base import TEMPORARY_PREFIX
from powertrain.storage.files.private_roots import runtime_roots
from powertrain.terminal import clock

#: What only sweeps have in their directory.
SWEEP_RECORD = "sweep.json"
#: What is said of a run whose process is gone, and that did not come to an end.
INTERRUPTED = "interrupted"
#: The state of a run whose journal cannot be read.
UNREADABLE = "unreadable"


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
    #: How many of its reported checkpoints could not be saved.
    unsaved: int = 0


def ls(
    storage: Annotated[
        str, typer.Argument(help="Storage path; the default one when left out.", show_default=False)
    ] = "",
) -> None:
    """List the sweeps and runs of a storage path, newest first. Of a sweep: its trials, which are runs."""
    place = open_storage(storage or default_storage())
    elsewhere = {real_path(one.card.path): one for one in protocol.live_runs(*runtime_roots())}
    going = set(elsewhere)
    names, of_sweeps = _names_in(place)
    if of_sweeps:
        _print_sweeps(place, of_sweeps, elsewhere)
    found = summaries_in(place, [name for name in names if name not in of_sweeps])
    summaries = [
        _with_life(summary, elsewhere.pop(real_path(place.child(summary.name).uri), None))
        for summary in sorted(found, key=lambda run: -run.started)
    ]
    if summaries:
        if of_sweeps:
            print_line("")
        _print_table(summaries)
    elif not of_sweeps:
        print_line(f"There are no runs in {without_secrets(place.uri)}.")
    own = {real_path(place.child(name).uri) for name in of_sweeps}
    for path, one in sorted(elsewhere.items()):
        if os.path.dirname(path) not in going | own:  # no trial of a sweep that is told of
            where = without_secrets(one.card.path)
            print_line(f"{one.card.name} is under way at {where} (pid {one.card.pid}).")


def _print_sweeps(place: Storage, names: Sequence[str], live: dict[str, protocol.LiveRun]) -> None:
    """Print a table of sweeps; those under way are taken out of ``live``."""
    from powertrain.cli.common import sweeps
    from powertrain.cli.common.finding import FoundRun

    summaries = []
    for name in names:
        own = place.child(name)
        try:
            found = FoundRun(name, own, live.pop(real_path(own.uri), None), is_sweep=True)
            summaries.append(sweeps.summarize(found))
        except (StorageError, OSError, ValueError, OverflowError, RecursionError) as error:
            print_message(f"{name}: {error}", err=True)
            summaries.append(sweeps.SweepSummary(name, UNREADABLE))
    sweeps.print_summaries(sorted(summaries, key=lambda sweep: -sweep.started))


def real_path(path: str) -> str:
    """The path or address of a run, the same for all ways that lead to it."""
    return strip_secrets(path) if "://" in path else os.path.realpath(path)


def _with_life(summary: RunSummary, live: protocol.LiveRun | None) -> RunSummary:
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


def summaries_in(place: Storage, names: Iterable[str]) -> Iterable[RunSummary]:
    """A summary of each run of these names directly below ``place``."""
    for name in names:
        try:
            run = place.child(name)
            events = journal.read(run)
            if events:
                yield summarize(name, events)
            elif _has_unreadable_journal(run):
                yield _unreadable(name)
        except (StorageError, OSError, ValueError, OverflowError) as error:
            print_message(f"{name}: {error}", err=True)
            yield _unreadable(name)


def run_names(place: Storage) -> list[str]:
    """Names below ``place`` that have a journal, or something in its place."""
    return _names_in(place)[0]


def _names_in(place: Storage) -> tuple[list[str], list[str]]:
    """Names below ``place`` that have a journal, or something in its place; and those of them that are of sweeps."""
    inside = place.local_path("x")
    if inside is not None:  # one run at a time: a run that cannot be listed keeps no other from being listed
        names = sorted(name for name in _directories_in(inside.parent) if _has_journal(place.child(name)))
        return names, [name for name in names if os.path.lexists(inside.parent / name / SWEEP_RECORD)]
    keys = [entry.key.split("/") for entry in place.list()]
    names = sorted({parts[0] for parts in keys if len(parts) > 2 and parts[1] == "journal"})
    sweeps = {parts[0] for parts in keys if len(parts) == 2 and parts[1] == SWEEP_RECORD}
    return names, [name for name in names if name in sweeps]


def _directories_in(path: Path) -> list[str]:
    """Names of the directories in ``path`` itself, without links and unfinished writes."""
    try:
        entries = list(os.scandir(path))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [
        entry.name
        for entry in entries
        if entry.is_dir(follow_symlinks=False) and not entry.name.startswith(TEMPORARY_PREFIX)
    ]


def _has_journal(run: Storage) -> bool:
    """True where a run of real storage has a journal with something in it, or something else in its place."""
    path = run.local_path("journal")
    try:
        return path is not None and bool(os.listdir(path))
    except FileNotFoundError:
        return os.path.islink(path or "")
    except OSError:  # a file in its place, or not for this user
        return True


def _has_unreadable_journal(run: Storage) -> bool:
    """True where a run of real storage has a journal that holds something, but no fact that can be read."""
    path = run.local_path("journal")
    if path is None or not os.path.lexists(path):
        return False
    try:
        entries = list(os.scandir(path))
    except OSError:  # a file in its place, or not for this user
        return True
    return any(not entry.is_file() or entry.stat().st_size > 0 for entry in entries)


def _unreadable(name: str) -> RunSummary:
    return RunSummary(name=name, state=UNREADABLE, rows=0, world_size=0, attempts=0, started=0.0, seconds=0.0)


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
        unsaved=len(run.unsaved),
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
    except (
        psutil.NoSuchProcess,
        ValueError,
        OverflowError,
    ):  # the last two for a number that no process can have
        return False


def ago(then: float, now: float) -> str:
    """How long ago ``then`` was, for people."""
    return f"{clock(now - then)} ago"


def _print_table(runs: Sequence[RunSummary]) -> None:
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
        if run.state == UNREADABLE:
            table.add_row(cell(run.name), run.state, "", "", "", "", "", style=style_of(run.state))
            continue
        numbers = (str(run.rows), str(run.world_size), str(run.attempts))
        process = f"pid {run.pid}" if run.pid else ""
        age = ago(run.started, now)
        lost = f", {run.unsaved} unsaved" if run.unsaved else ""
        cells = map(cell, (run.name, run.state + lost, *numbers, age, process))
        table.add_row(*cells, style=style_of(run.state))
    print_table(table)


def style_of(state: str) -> str:
    """The colour of a state; "" for the terminal's own."""
    colours = {
        "failed": "red",
        UNREADABLE: "red",
        INTERRUPTED: "yellow",
        "preempted": "yellow",
        "training": "green",
    }
    return colours.get(state, "")
