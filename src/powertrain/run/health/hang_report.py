"""Description of a hang: the ranks that wait, the ranks that never arrived, the user's line. Pure: states in, text out.

One to four lines. A file is named by its whole path, so that a terminal can open it; the text of a line is cut short.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from powertrain.run.health.waits import (
    ALL_CAME,
    CIRCLE,
    GONE,
    STUCK,
    Blame,
    RankState,
    at_meeting,
    awaited_row,
    find_blame,
    is_saving,
    waits_for,
)
from powertrain.trace.stacks import frames
from powertrain.wire.values import Frame, ProcessStack, Where

#: Lines of a message; characters of a line, if paths are not long; characters of a source line.
_LINES = 4
_WIDTH = 200
_SOURCE = 70
#: Beyond this function, a DataLoader worker that was forked still shows the frames of the rank it comes from.
_WORKER_LOOP = "torch/utils/data/_utils/worker.py"
#: States of a process, in words for one rank and for several.
_STATE_WORDS = {
    "running": ("it is computing", "they are computing"),
    "sleeping": ("it sleeps", "they sleep"),
    "disk-sleep": ("it is in an uninterruptible disk wait", "they are in an uninterruptible disk wait"),
    "stopped": ("it is stopped (SIGSTOP)", "they are stopped (SIGSTOP)"),
    "zombie": ("its process has died", "their processes have died"),
    "gone": ("its process is gone", "their processes are gone"),
}
_CANNOT_ANSWER = {
    "stopped": "stopped (SIGSTOP)",
    "zombie": "dead",
    "gone": "gone",
    "disk-sleep": "in an uninterruptible disk wait",
}

Stacks = Mapping[int, Sequence[ProcessStack]]


@dataclass(frozen=True)
class Verdict:
    """The explanation of a hang. ``frame`` is the user's line to look at first; ``row`` the last that the culprits
    reported."""

    message: str
    culprits: tuple[int, ...]
    waiting: tuple[int, ...]
    frame: Frame | None
    row: int
    #: The awaited ranks whose functions have returned.
    returned: tuple[int, ...] = ()
    #: The line of each culprit whose function has not returned, as far as it is known.
    frames: Mapping[int, Frame] = field(default_factory=dict)


def explain(ranks: Sequence[RankState], stacks: Stacks, seconds: float) -> Verdict:
    """Explain which ranks hold the run up. ``stacks`` has, for each rank that could be sampled, its own process
    first."""
    by_rank = {state.rank: state for state in ranks}
    blame = find_blame(ranks) or Blame(STUCK, (), tuple(s.rank for s in ranks if s.still))
    lead = _lead(blame, by_rank)
    lines = _TELL[blame.kind](blame, by_rank, stacks, seconds)
    rows = [by_rank[rank].row for rank in blame.culprits] or [s.row for s in ranks]
    stands = {rank: _stand(by_rank[rank], stacks) for rank in blame.culprits if not by_rank[rank].over}
    return Verdict(
        message="\n".join(lines[:_LINES]),
        culprits=blame.culprits,
        waiting=blame.waiting,
        frame=_stand(by_rank[lead], stacks).frame if lead is not None else None,
        row=min(rows, default=0),
        returned=blame.gone,
        frames={rank: stand.frame for rank, stand in stands.items() if stand.frame is not None},
    )


def stretches(ranks: Iterable[int]) -> list[list[int]]:
    """Return the ranks in order, consecutive ones grouped."""
    found: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if found and rank == found[-1][-1] + 1:
            found[-1].append(rank)
        else:
            found.append([rank])
    return found


def rank_names(ranks: Sequence[int]) -> str:
    """Return the names of ranks for a sentence: "rank 1", "ranks 0, 2 and 3", "ranks 0 to 63"."""
    if len(set(ranks)) == 1:
        return f"rank {ranks[0]}"
    parts: list[str] = []
    for stretch in stretches(ranks):
        long = len(stretch) > 3
        parts += [f"{stretch[0]} to {stretch[-1]}"] if long else [str(rank) for rank in stretch]
    if len(parts) > 8:
        parts = [*parts[:7], f"{len(parts) - 7} more"]
    return "ranks " + (f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else parts[0])


# --------------------------------------------------------------------------- one rank


@dataclass(frozen=True)
class _Stand:
    """The description of one rank: a verb ("is", "has" or "waits"), the words after it, the line, and the state of its
    process (a key of ``_STATE_WORDS``, "" for none)."""

    verb: str
    words: str
    frame: Frame | None
    state: str = ""


def _stand(state: RankState, stacks: Stacks) -> _Stand:
    seen = stacks.get(state.rank, ())
    own = seen[0] if seen else None
    if state.silent or (own is not None and own.state in ("stopped", "zombie", "gone")):
        return _silent(state, own)
    where = state.beat.where if state.beat else None
    if where is not None and where.inside == "loader":
        return _in_loader(where, seen[1:])
    frame = where.frame if where else _outside_frame(own)
    at = f"at {_place(frame)}" if frame else "at an unknown place"
    beat = state.beat
    if is_saving(beat):
        waits = f"waiting for the {beat.awaits}" if beat and beat.awaits else "saving a checkpoint"
        return _Stand("is", waits + (f" at {_place(frame)}" if frame else ""), frame)
    if beat is not None and beat.awaits and awaited_row(state) is None and not at_meeting(state):
        at += f", waiting for the run ({beat.awaits})"
    elif where is not None and where.inside == "run":
        at += ", waiting for the run"
    elif where is not None and where.inside == "collective":
        at += f", inside {_call(where)}"
    return _Stand("is", at, frame, own.state if own is not None else "")


def _silent(state: RankState, own: ProcessStack | None) -> _Stand:
    """Describe a rank that does not answer: stopped, gone, or with an interpreter that cannot run."""
    outside = _outside_frame(own)
    frame = outside or state.frame
    at = "" if frame is None else f", {'at' if outside else 'last seen at'} {_place(frame)}"
    kernel = own.state if own is not None else ""
    if kernel == "stopped":
        return _Stand("is", f"stopped (SIGSTOP){at}", frame)
    if kernel in ("zombie", "gone"):
        return _Stand("is", f"gone{at}", frame, "zombie")
    if kernel == "disk-sleep":
        return _Stand("is", f"in an uninterruptible disk wait{at}", frame)
    if outside is not None:
        return _Stand("is", f"in C code that holds Python's lock{at}", frame, kernel)
    return _Stand("has", f"sent no heartbeat for {_seconds(state.unheard)}{at}", frame, kernel)


def _in_loader(where: Where, children: Sequence[ProcessStack]) -> _Stand:
    at = f"at {where.frame.file}:{where.frame.line}"
    workers = [child for child in children if child.title.startswith("DataLoader worker")]
    for child in workers:
        frame = _worker_frame(child)
        if frame is not None:
            who = f"its DataLoader worker (pid {child.pid}), which is at {_place(frame)}"
            return _Stand("waits", f"{at} for {who}{_state(child.state)}", frame)
    for child in workers or children:
        if child.state in ("stopped", "disk-sleep", "zombie"):
            return _Stand(
                "waits", f"{at} for its {child.title} (pid {child.pid}){_state(child.state)}", where.frame
            )
    return _Stand("waits", f"for the DataLoader at {_place(where.frame)}", where.frame)


def where_in_words(where: Where | None, awaits: str = "", state: str = "", *, debugged: bool = False) -> str:
    """Describe what ranks do and where, to follow their names: "waiting in the all_reduce at /home/me/train.py:31 in
    loop: ...".

    ``awaits`` is their wait on the run's own wire, ``state`` the kernel's state of their processes.
    """
    at = f"at {_place(where.frame)}" if where is not None else ""
    doing = ""
    if state in _CANNOT_ANSWER:
        doing = _CANNOT_ANSWER[state]
    elif debugged:
        doing = "held by a debugger"
    elif awaits:
        doing = f"waiting for the run ({awaits})"
    elif where is None:
        doing = "running no Python that could be seen"
    elif where.inside == "collective":
        doing = f"waiting in {_call(where)}"
    elif where.inside in ("loader", "run"):
        doing = f"waiting for the {'DataLoader' if where.inside == 'loader' else 'run'}"
    return f"{doing} {at}".strip()


def _outside_frame(own: ProcessStack | None) -> Frame | None:
    where = frames.where_of(own) if own is not None else None
    return where.frame if where is not None else None


def _worker_frame(child: ProcessStack) -> Frame | None:
    """Return the user's line in a DataLoader worker; None for one that waits for work or is in a library's own code."""
    for thread in child.threads:
        if thread.main:
            for frame in thread.frames:
                if frame.file.endswith(_WORKER_LOOP):
                    return None
                if frame.line > 0 and frames.is_users(frame.file):
                    return frame
    return None


def _state(state: str, *, many: bool = False) -> str:
    words = _STATE_WORDS.get(state)
    return f"; {words[many]}" if words else ""


def _place(frame: Frame) -> str:
    """ "/home/me/data.py:31 in __getitem__: lock.acquire()"."""
    function = "" if frame.function.startswith("<module") else f" in {frame.function}"
    return f"{frame.file}:{frame.line}{function}{_source(frame)}"


def _line(frame: Frame) -> str:
    return f"{frame.file}:{frame.line}{_source(frame)}"


def _source(frame: Frame) -> str:
    text = " ".join(frame.source.split())
    text = text if len(text) <= _SOURCE else text[: _SOURCE - 3] + "..."
    return f": {text}" if text else ""


def _call(where: Where) -> str:
    if where.call in ("backward", "_engine_run_backward"):
        return "the gradient all-reduce"
    return f"the {where.call}" if where.call else "a collective"


# --------------------------------------------------------------------------- the whole run


def _lead(blame: Blame, by_rank: Mapping[int, RankState]) -> int | None:
    """Return the rank with the most useful line: the first culprit that has one, else the first waiting rank that
    has."""
    for rank in (*blame.culprits, *blame.waiting):
        if not by_rank[rank].over:
            return rank
    return None


def _headline(blame: Blame, by_rank: Mapping[int, RankState], seconds: float) -> str:
    """Return how long nothing has moved, and how long a step usually takes."""
    usual = max((state.usual for state in by_rank.values()), default=0.0)
    usually = f" (usually {_seconds(usual)})" if usual else ""
    go_on = [s.rank for s in by_rank.values() if not s.still and not s.over and s.rank not in blame.waiting]
    if not any(state.begun for state in by_rank.values()):
        return f"No first step after {_seconds(max(s.idle for s in by_rank.values()))}."
    if blame.kind == STUCK and go_on and blame.culprits:
        return f"No step of {rank_names(blame.culprits)} for {_seconds(seconds)}{usually}; {_go_on(go_on)}."
    return f"No step for {_seconds(seconds)}{usually}."


def _go_on(ranks: list[int]) -> str:
    return f"{rank_names(ranks)} {'goes' if len(ranks) == 1 else 'go'} on"


def _tell_stuck(blame: Blame, by_rank: Mapping[int, RankState], stacks: Stacks, seconds: float) -> list[str]:
    headline, reason = _headline(blame, by_rank, seconds), _why_they_wait(blame, by_rank)
    together = f"{headline} {reason}".strip()
    lines = [together] if len(together) <= _WIDTH or not reason else [headline, reason]
    return lines + _places(blame.culprits, by_rank, stacks, _LINES - len(lines))


def _why_they_wait(blame: Blame, by_rank: Mapping[int, RankState]) -> str:
    """Describe the wait of the ranks that wait for the culprits directly."""
    waits = waits_for(list(by_rank.values()))
    blamed = set(blame.culprits)
    direct = [by_rank[rank] for rank in blame.waiting if not waits[rank].isdisjoint(blamed)]
    if not direct:
        return ""
    first, culprits = direct[0], rank_names(blame.culprits)
    alike = [s.rank for s in direct if (s.awaits, s.inside) == (first.awaits, first.inside)]
    who, many = rank_names(alike), len(alike) > 1
    line = f" ({_line(first.frame)})" if first.frame else ""
    wait = "wait" if many else "waits"
    row = awaited_row(first)
    have = "has" if len(blame.culprits) == 1 else "have"
    if row is not None:
        return f"{_capital(who)} {wait} for row {row}{line}, which {culprits} {have} not reported."
    if at_meeting(first):
        return f"{_capital(culprits)} {have} not reached the {first.awaits} that {who} {wait} at{line}."
    where = first.beat.where if first.beat else None
    if where is not None and first.inside == "collective":
        return f"{_capital(culprits)} {have} not entered {_call(where)} that {who} {wait} in{line}."
    least = min(by_rank[rank].collectives for rank in blame.culprits)
    began = f"{who} began {first.collectives} collectives, {culprits} only {least}"
    return f"{_capital(who)} {wait} for {culprits}{line}: {began}."


def _tell_gone(blame: Blame, by_rank: Mapping[int, RankState], stacks: Stacks, seconds: float) -> list[str]:
    waiting = [rank for rank in blame.waiting or blame.culprits if not by_rank[rank].over]
    first, gone = by_rank[waiting[0]], by_rank[blame.gone[0]]
    who, over = rank_names(waiting), rank_names(blame.gone)
    where = first.beat.where if first.beat else None
    call = f"in {_call(where).removeprefix('the ')}" if where and first.inside == "collective" else ""
    place = f"at {_line(first.frame)}" if first.frame else ""
    counts = ""
    if first.collectives > gone.collectives >= 0:
        it = "it" if len(blame.gone) == 1 else "they"
        counts = f" ({it} began {gone.collectives} collectives, {who} {first.collectives})"
    wait = "waits" if len(waiting) == 1 else "wait"
    has = "has" if len(blame.gone) == 1 else "have"
    waits = " ".join(part for part in (_capital(who), wait, call, place) if part)
    lines = [
        _headline(blame, by_rank, seconds),
        f"{waits}; {over} {has} returned from the training function and will not take part{counts}.",
    ]
    if counts:
        lines.append(f"Either {over} skipped a collective, or {who} called an extra one.")
    return lines


def _tell_circle(blame: Blame, by_rank: Mapping[int, RankState], stacks: Stacks, seconds: float) -> list[str]:
    lines = [
        f"{_headline(blame, by_rank, seconds)} The ranks wait for each other and do not make the same calls."
    ]
    for rank in (*blame.culprits[:2], *blame.waiting[: _LINES - 1 - len(blame.culprits[:2])]):
        lines.append(_waits_in_circle(by_rank[rank]))
    return lines


def _waits_in_circle(state: RankState) -> str:
    reports = state.beat.reports if state.beat else 0
    made = f"Rank {state.rank} has made {reports} {'report' if reports == 1 else 'reports'} and waits"
    where = state.beat.where if state.beat else None
    if awaited_row(state) is not None:
        made += f" for all ranks to report row {awaited_row(state)}"
    elif at_meeting(state):
        made += f" for all ranks to come to {state.awaits}"
    elif where is not None and state.inside == "collective":
        made += f" in {_call(where).removeprefix('the ')}"
    return f"{made} at {_line(state.frame)}." if state.frame else f"{made}."


def _tell_all_came(
    blame: Blame, by_rank: Mapping[int, RankState], stacks: Stacks, seconds: float
) -> list[str]:
    headline = _headline(blame, by_rank, seconds)
    calls = {s.beat.where.call for s in by_rank.values() if s.beat and s.beat.where and not s.over}
    first = by_rank[blame.waiting[0]]
    where = first.beat.where if first.beat else None
    if len(calls) > 1 or where is None:
        lines = [f"{headline} All ranks are inside a collective, but not the same one."]
        return lines + _places(blame.waiting, by_rank, stacks, _LINES - 1)
    return [
        f"{headline} All ranks are inside {_call(where)} at {_line(where.frame)}, but it does not complete.",
        "No single rank is to blame: it is the network between them, or a deadlock below Python.",
    ]


def _places(ranks: Sequence[int], by_rank: Mapping[int, RankState], stacks: Stacks, room: int) -> list[str]:
    """Return one line for each place where some of ``ranks`` stand, ``room`` lines at most."""
    groups: dict[_Stand, list[int]] = {}
    for rank in ranks:
        groups.setdefault(_stand(by_rank[rank], stacks), []).append(rank)
    lines = [_sentence(members, stand) for stand, members in groups.items()]
    if len(lines) > room:
        hidden = [rank for members in list(groups.values())[room - 1 :] for rank in members]
        lines = [*lines[: room - 1], f"{_capital(rank_names(hidden))} are at other lines: see their stacks."]
    return lines


_PLURAL = {"is": "are", "has": "have", "waits": "wait"}


def _sentence(members: list[int], stand: _Stand) -> str:
    many = len(members) > 1
    verb = _PLURAL[stand.verb] if many else stand.verb
    return f"{_capital(rank_names(members))} {verb} {stand.words}{_state(stand.state, many=many)}."


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _seconds(seconds: float) -> str:
    """ "0.2 s", "6 s", "3 min 20 s"."""
    if seconds < 0.0095:
        return f"{seconds * 1000:.2g} ms"
    if seconds < 9.5:
        return f"{seconds:.2g} s" if seconds < 1 else f"{seconds:.1f} s".replace(".0 s", " s")
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole % 60 else f"{whole // 60} min"


_TELL = {STUCK: _tell_stuck, GONE: _tell_gone, CIRCLE: _tell_circle, ALL_CAME: _tell_all_came}
