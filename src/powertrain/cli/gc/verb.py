"""``powertrain gc``: what can be deleted of the runs of a storage path, and of this machine."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Annotated

import typer

from powertrain.cli.common.output import print_json, print_line, print_message
from powertrain.cli.gc.leftovers import Leftover, RunLeftovers, delete_leftovers, find_leftovers
from powertrain.cli.gc.machine import delete_on_machine, find_on_machine
from powertrain.errors import PowertrainError
from powertrain.lookup.finding import RUN, SWEEP, default_storage, kind_of, names_in, run_names
from powertrain.storage import Storage, addresses, open_storage
from powertrain.storage.addresses import without_secrets
from powertrain.terminal.text import data_size


def gc(
    storage: Annotated[
        str,
        typer.Argument(
            help="Storage path, or the path of one run; the default storage path when omitted.",
            show_default=False,
        ),
    ] = "",
    delete: Annotated[bool, typer.Option("--delete", help="Delete it; else only list it.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
) -> None:
    """List what can be deleted: checkpoints beyond retention, and files of killed runs. Deletes only with --delete."""
    place = open_storage(storage or default_storage())
    runs, errors = [], []
    for name, own, is_trial in _runs_in(place):
        try:
            if delete:
                found, failed = delete_leftovers(name, own, is_trial=is_trial)
                errors += failed
            else:
                found = find_leftovers(name, own, is_trial=is_trial)
        except (PowertrainError, OSError, ValueError, RecursionError) as error:
            errors.append(f"{name}: {error}")
            continue
        runs.append(found)
    on_machine = find_on_machine()
    if delete:
        delete_on_machine()
    if json:
        shown = {
            "deleted": delete,
            "runs": [dataclasses.asdict(run) for run in runs],
            "machine": [dataclasses.asdict(one) for one in on_machine],
        }
        print_json({**shown, "errors": errors})
    else:
        _print(runs, on_machine, delete)
    for text in errors if not json else []:
        print_message(f"Error: {text}", err=True)
    raise typer.Exit(1 if errors else 0)


def _runs_in(place: Storage) -> Iterator[tuple[str, Storage, bool]]:
    """Yield the runs of a storage path, or the one at it: name, storage, and whether it is a trial of a sweep."""
    if kind_of(place) == RUN:
        yield os.path.basename(without_secrets(place.uri).rstrip("/")), place, _has_sweep_above(place)
        return
    names, sweeps = names_in(place)
    for name in names:
        own = place.child(name)
        if name not in sweeps:
            yield name, own, kind_of(place) == SWEEP
            continue
        for trial in run_names(own):
            yield f"{name}/{trial}", own.child(trial), True


def _has_sweep_above(place: Storage) -> bool:
    """Return True when a run lies in the directory of a sweep."""
    if place.local_path("probe") is not None:
        above = os.path.dirname(without_secrets(place.uri).removeprefix("file://").rstrip("/"))
    else:
        address = addresses.parse(place.uri)
        above = dataclasses.replace(address, prefix=os.path.dirname(address.prefix.rstrip("/"))).uri
    return kind_of(open_storage(above)) == SWEEP


def _print(runs: list[RunLeftovers], on_machine: list[Leftover], delete: bool) -> None:
    for run in runs:
        for item in run.items:
            print_line(f"{data_size(item.bytes):>9}  {item.kind:<21}  {run.run}/{item.path}: {item.reason}")
        if run.in_use:
            print_line(f"{'':>9}  {'left alone':<21}  {run.run}: {run.in_use}")
        for note in run.notes:
            print_line(f"{'':>9}  {'kept':<21}  {run.run}: {note}")
    for item in on_machine:
        print_line(f"{data_size(item.bytes):>9}  {item.kind:<21}  {item.path}: {item.reason}")
    every = [*(item for run in runs for item in run.items), *on_machine]
    size = data_size(sum(item.bytes for item in every))
    done = "deleted" if delete else "could be deleted (--delete does it)"
    print_line(f"{len(every)} leftovers, {size}, {done}." if every else "There is nothing to delete.")
