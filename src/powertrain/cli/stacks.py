"""``powertrain stacks``: stacks of all threads of every rank."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import typer

from powertrain.cli.common import arguments
from powertrain.cli.common.output import print_json, print_line, print_lines, print_message, print_text
from powertrain.cli.common.ranks import parse_ranks
from powertrain.lookup.asking import ask, out_of_reach
from powertrain.lookup.finding import FoundRun, find_run
from powertrain.lookup.summaries import ago
from powertrain.lookup.watching import RunWatch
from powertrain.run.health.hang_report import where_in_words
from powertrain.run.remote import protocol
from powertrain.storage import Storage
from powertrain.storage.addresses import without_secrets
from powertrain.terminal.text import counted, rank_list
from powertrain.trace.stacks.stacks import text
from powertrain.wire.values import ProcessStack

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
    parts: list[protocol.Part] = []
    answer = ask(found, protocol.LookAround(ranks=ranks), parts.append)
    seen = sorted((part for part in parts if isinstance(part, protocol.RankSeen)), key=lambda part: part.rank)
    stands = next((part for part in parts if isinstance(part, protocol.Description)), None)
    if not answer.ok:
        print_message(answer.message, err=True)
        raise typer.Exit(1)
    if json:
        print_json(_as_json(found, stands, seen, answer.message))
        return
    print_lines(page(found.name, stands, seen, each=bool(ranks)))
    if answer.message:
        print_message(answer.message, err=True)


def page(
    name: str, stands: protocol.Description | None, seen: Sequence[protocol.RankSeen], *, each: bool
) -> list[str]:
    """Return the location of every rank, grouped; then all threads of one rank per group, or of ``each`` rank."""
    groups = _by_place(seen)
    lines = [_headline(name, stands, seen)] if stands is not None else []
    for words, members in groups.items():
        lines.append(f"{rank_list(one.rank for one in members)}: {words}")
    for members in groups.values():
        for one in members if each else members[:1]:
            alike = [other.rank for other in members if other is not one]
            first, *rest = text([_drop_own_threads(process) for process in one.processes]).splitlines()
            lines += ["", first if each or not alike else f"{first}; same for {rank_list(alike)}", *rest]
    return lines


def _drop_own_threads(process: ProcessStack) -> ProcessStack:
    """Return the process without Powertrain's own threads, which only ``--json`` prints."""
    threads = [thread for thread in process.threads if not thread.name.startswith("powertrain-")]
    return msgspec.structs.replace(process, threads=threads)


def _headline(name: str, stands: protocol.Description, seen: Sequence[protocol.RankSeen]) -> str:
    rows = sorted({one.row for one in seen})
    at = "" if not rows else f", at row {rows[0]}" if len(rows) == 1 else f", at rows {rows[0]} to {rows[-1]}"
    return f"{name}: {stands.state}, attempt {stands.attempt}, {counted(stands.workers, 'rank')}{at}"


def _by_place(seen: Sequence[protocol.RankSeen]) -> dict[str, list[protocol.RankSeen]]:
    groups: dict[str, list[protocol.RankSeen]] = {}
    for one in seen:
        own = one.processes[0] if one.processes else None
        state = own.state if own is not None else "gone"
        words = where_in_words(one.where, one.awaits, state, debugged=one.debugged)
        groups.setdefault(words, []).append(one)
    return groups


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
