"""Stacks of the ranks of a live run, asked for and as text."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from powertrain.lookup.asking import ask
from powertrain.lookup.finding import FoundRun
from powertrain.run.health.hang_report import where_in_words
from powertrain.run.remote import protocol
from powertrain.terminal.text import counted, rank_list
from powertrain.trace.stacks.stacks import text
from powertrain.wire.values import ProcessStack


def ask_for_stacks(
    found: FoundRun, ranks: tuple[int, ...] = ()
) -> tuple[protocol.Answer, protocol.Description | None, list[protocol.RankSeen]]:
    """Return the answer of a live run, where it stands, and the stacks of these ranks, or of all."""
    parts: list[protocol.Part] = []
    answer = ask(found, protocol.LookAround(ranks=ranks), parts.append)
    seen = sorted((part for part in parts if isinstance(part, protocol.RankSeen)), key=lambda part: part.rank)
    stands = next((part for part in parts if isinstance(part, protocol.Description)), None)
    return answer, stands, seen


def stack_lines(
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
