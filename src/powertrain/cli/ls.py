"""``powertrain ls``: the sweeps and runs of a storage path, newest first."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from powertrain.cli.common.output import cell, print_json, print_line, print_message, print_table, style_of
from powertrain.errors import StorageError
from powertrain.lookup.finding import default_storage, names_in, real_path
from powertrain.lookup.summaries import UNREADABLE, ago, summaries_in, with_life
from powertrain.run.remote import protocol
from powertrain.storage import Storage, open_storage
from powertrain.storage.addresses import without_secrets
from powertrain.storage.files.private_roots import runtime_roots

if TYPE_CHECKING:
    from powertrain.lookup.summaries import RunSummary
    from powertrain.lookup.sweeps import SweepSummary


def ls(
    storage: Annotated[
        str, typer.Argument(help="Storage path; the default storage path when omitted.", show_default=False)
    ] = "",
    json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
) -> None:
    """List the sweeps and runs of a storage path, newest first; of a sweep, its trials."""
    place = open_storage(storage or default_storage())
    elsewhere = {real_path(one.card.path): one for one in protocol.live_runs(*runtime_roots())}
    going = set(elsewhere)
    names, of_sweeps = names_in(place)
    sweeps = _summaries_of_sweeps(place, of_sweeps, elsewhere)
    runs = [name for name in names if name not in of_sweeps]
    found = summaries_in(place, runs, partial(print_message, err=True))
    summaries = [
        with_life(summary, elsewhere.pop(real_path(place.child(summary.name).uri), None))
        for summary in sorted(found, key=lambda run: -run.started)
    ]
    if json:
        _print_json(place, sweeps, summaries)
        return
    if sweeps:
        from powertrain.cli.common.sweeps import print_summaries

        print_summaries(sweeps)
    if summaries:
        if of_sweeps:
            print_line("")
        _print_table(summaries)
    elif not of_sweeps:
        print_line(f"There are no runs in {without_secrets(place.uri)}.")
    own = {real_path(place.child(name).uri) for name in of_sweeps}
    for path, one in sorted(elsewhere.items()):
        if os.path.dirname(path) not in going | own:  # not a trial of a listed sweep
            where = without_secrets(one.card.path)
            print_line(f"{one.card.name} is running at {where} (pid {one.card.pid}).")


def _print_json(place: Storage, sweeps: Sequence[SweepSummary], runs: Sequence[RunSummary]) -> None:
    shown = {"path": without_secrets(place.uri), "sweeps": [asdict(one) for one in sweeps]}
    print_json({**shown, "runs": [asdict(one) for one in runs]})


def _summaries_of_sweeps(
    place: Storage, names: Sequence[str], live: dict[str, protocol.LiveRun]
) -> list[SweepSummary]:
    """Return the sweeps, newest first; live ones are removed from ``live``."""
    if not names:
        return []
    from powertrain.lookup import sweeps
    from powertrain.lookup.finding import FoundRun

    summaries = []
    for name in names:
        own = place.child(name)
        try:
            found = FoundRun(name, own, live.pop(real_path(own.uri), None), is_sweep=True)
            summaries.append(sweeps.summarize(found))
        except (StorageError, OSError, ValueError, OverflowError, RecursionError) as error:
            print_message(f"{name}: {error}", err=True)
            summaries.append(sweeps.SweepSummary(name, UNREADABLE))
    return sorted(summaries, key=lambda sweep: -sweep.started)


def _print_table(runs: Sequence[RunSummary]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("run", "state"):
        table.add_column(column, overflow="fold")
    for column in ("rows", "workers", "attempts"):
        table.add_column(column, justify="right")
    table.add_column("started")
    table.add_column("process")
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
