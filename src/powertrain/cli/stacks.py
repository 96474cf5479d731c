"""``powertrain stacks``: stacks of all threads of every rank."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from powertrain.cli.common import arguments
from powertrain.cli.common.output import print_json, print_line, print_lines, print_message, print_text
from powertrain.cli.common.ranks import parse_ranks
from powertrain.lookup.asking import out_of_reach
from powertrain.lookup.finding import FoundRun, find_run
from powertrain.lookup.stacks import ask_for_stacks, stack_lines
from powertrain.lookup.summaries import ago
from powertrain.lookup.watching import RunWatch
from powertrain.run.remote import protocol
from powertrain.storage import Storage
from powertrain.storage.addresses import without_secrets

_KEPT = re.compile(r"stacks/attempt-(\d+)-hang-(\d+)\.txt")


def stacks(
    run: arguments.Run,
    storage: arguments.Storage = "",
    rank: arguments.Ranks = None,
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Print the stacks of every rank's threads; of a run that has ended, those saved when it hung."""
    ranks, found = parse_ranks(rank or ()), find_run(run, storage)
    if found.live is None:
        _print_kept(found, json=json)
        return
    answer, stands, seen = ask_for_stacks(found, ranks)
    if not answer.ok:
        print_message(answer.message, err=True)
        raise typer.Exit(1)
    if json:
        print_json(_as_json(found, stands, seen, answer.message))
        return
    print_lines(stack_lines(found.name, stands, seen, each=bool(ranks)))
    if answer.message:
        print_message(answer.message, err=True)


def _as_json(
    found: FoundRun, stands: protocol.Description | None, seen: Sequence[protocol.RankSeen], missing: str
) -> dict[str, Any]:
    return {
        "run": found.name,
        "path": without_secrets(found.place.uri),
        "stands": stands,
        "ranks": list(seen),
        "missing": missing,
    }


def _print_kept(found: FoundRun, *, json: bool) -> None:
    """Print the newest saved stacks of a run that cannot be reached."""
    watch = RunWatch(found)
    watch.look()
    print_line(watch.ending() if watch.is_over else out_of_reach(found), err=True)
    newest = _newest_kept(found.place)
    if newest is None:
        print_line("It has no saved stacks: they are saved when a run hangs.", err=True)
        raise typer.Exit(1)
    kept = found.place.get(newest).decode("utf-8", "replace")
    if json:
        path = without_secrets(found.place.uri)
        print_json({"run": found.name, "path": path, "kept_in": newest, "kept": kept})
        return
    when = ago(found.place.modified(newest), time.time())
    print_line(f"Stacks saved {when} in {newest}:", err=True)
    print_line("", err=True)
    print_text(kept, end="")


def _newest_kept(place: Storage) -> str | None:
    kept = [(match, entry.key) for entry in place.list("stacks") if (match := _KEPT.fullmatch(entry.key))]
    return max(kept, key=lambda one: (int(one[0][1]), int(one[0][2])))[1] if kept else None
