"""Description of a start: a line for the terminal, a table for ``powertrain show``, advice. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from powertrain.run.events import StartupMeasured
from powertrain.run.startup import timeline

#: A phase of less than this part of a start, or so many seconds, is shown with the rest.
_WORTH_TELLING, _WORTH_TELLING_SECONDS = 0.02, 0.01
#: A phase of at least this part of a start, and so many seconds, is worth advice.
_DOMINATES, _DOMINATES_SECONDS = 0.4, 2.0
#: The same of a function that imports much before its first step.
_IMPORTING_SECONDS = 1.0
#: The phases in which the user's function runs.
_OF_FUNCTION = (timeline.SET_UP, timeline.DATA, timeline.FIRST_STEP)
#: Ranks that a table has a column for; of more it has the fastest, the median and the slowest.
_COLUMNS = 8
#: A process with other threads is not forked: what it has imported is imported again.
_IN_TIME = "before fit(), and start no threads before it: workers are then forked with it already loaded"


def line(fact: StartupMeasured) -> str:
    """ "first step after 3.4 s: imports 1.7, process group 0.4, data 0.6, first step 0.7 (rank 1 was last)"."""
    last = f" (rank {fact.rank} was last)" if fact.rank >= 0 else ""
    return f"{_headline(fact)}: {_told(fact.path, fact.seconds)}{last}"


def has_phases(fact: StartupMeasured) -> bool:
    """Return True where the fact has all phases of a start; facts of old journals have one phase of one rank."""
    return bool(fact.path)


def table(fact: StartupMeasured) -> list[str]:
    """Return by phase each rank's seconds where ranks are few, and otherwise the fastest, the median and the
    slowest."""
    named = len(fact.ranks) <= _COLUMNS and not fact.spread
    heads = [f"rank {rank}" for rank in fact.ranks] if named else ["fastest", "median", "slowest"]
    rows = [["phase", *heads]]
    for name, seconds in fact.phases.items():
        values: Sequence[float] = seconds if named else _spread(fact, name)
        rows.append([name, *map(_seconds, values)])
    if named:
        rows.append(["together", *map(_seconds, map(sum, zip(*fact.phases.values(), strict=True)))])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]


def section(facts: Sequence[StartupMeasured]) -> list[str]:
    """Return every start of a run: a line for each, and below the longest its table and advice."""
    longest = max(facts, key=lambda fact: fact.seconds, default=None)
    lines: list[str] = []
    for fact in facts:
        lines.append(f"{fact.attempt}: {line(fact)}")
        if fact is longest:
            lines += [f"   {text}" for text in (*table(fact), *advice(fact))]
    return lines


def advice(fact: StartupMeasured) -> list[str]:
    """Return advice for the phases that dominate a long start: a sentence for each."""
    sentences = []
    # Elsewhere workers come from a process that knows nothing of the script's own.
    is_forked = bool(fact.forks_driver) and not fact.runs_script
    if is_forked and not fact.torch_was_loaded and (took := _dominating(fact, timeline.IMPORTS)) is not None:
        sentences.append(f"{took} went into imports. Import torch in the script {_IN_TIME}")
    if (took := _dominating(fact, timeline.SLOTS)) is not None and fact.waited_for:
        sentences.append(f"{took} went into waiting for slots: {fact.waited_for}")
    if is_forked and fact.loaded and (took := _dominating(fact, timeline.FUNCTION)) is not None:
        sentences.append(
            f"{took} went into loading the training function, mostly the package {fact.loaded}. Import it in the "
            f"script {_IN_TIME}"
        )
    in_function = {name: seconds for name, seconds in fact.path.items() if name in _OF_FUNCTION}
    if (
        is_forked
        and fact.imported
        and sum(in_function.values()) >= max(_IMPORTING_SECONDS, _DOMINATES * fact.seconds)
    ):
        longest = max(in_function, key=lambda name: in_function[name])
        sentences.append(
            f"Within {longest} every rank loads the package {fact.imported}, at each start and restart. Import what "
            f"the function uses of it by name (from {fact.imported} import ...) at the top of the script {_IN_TIME}"
        )
    return sentences


def _headline(fact: StartupMeasured) -> str:
    after = f"after {_seconds(fact.seconds)} s"
    if not fact.unfinished:
        return f"{'back' if timeline.CLEARING in fact.path else 'first step'} {after}"
    if len(fact.unfinished) == fact.world_size:
        return f"no rank had made a step or a report {after}"
    some = f"rank {fact.unfinished[0]}" if len(fact.unfinished) == 1 else f"{len(fact.unfinished)} ranks"
    return f"{some} had made no step and no report {after}"


def _told(path: Mapping[str, float], whole: float) -> str:
    least = max(_WORTH_TELLING_SECONDS, _WORTH_TELLING * whole)
    told = {name: s for name, s in path.items() if s >= least and name != timeline.OTHER}
    rest = whole - sum(told.values())
    if rest >= least or not told:
        told[timeline.OTHER] = max(0.0, rest)
    return ", ".join(f"{name} {_seconds(seconds)}" for name, seconds in told.items())


def _spread(fact: StartupMeasured, name: str) -> tuple[float, float, float]:
    if fact.spread:
        return fact.spread[name]
    values = fact.phases[name]
    return min(values), statistics.median(values), max(values)


def _dominating(fact: StartupMeasured, name: str) -> str | None:
    """Return the seconds of a phase as text, where it dominates a start that was not short."""
    seconds = fact.path.get(name, 0.0)
    return f"{_seconds(seconds)} s" if seconds >= max(_DOMINATES_SECONDS, _DOMINATES * fact.seconds) else None


def _seconds(seconds: float) -> str:
    """0.05, 3.4, 128: as many digits as tell something."""
    if seconds < 0.995:
        return f"{seconds:.2f}"
    return f"{seconds:.1f}" if seconds < 99.5 else f"{seconds:.0f}"
