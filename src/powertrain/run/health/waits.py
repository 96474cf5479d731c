"""The waits between ranks, and from them the ranks that hold the run up. Pure: rank states in, ranks out.

A rank that stands still is to blame only if it waits for no other rank. A rank that waits for one which still moves is
not to blame, and neither is the other: a long evaluation on rank 0 holds the others up and is no hang.

Ranks that wait for the same event share one set of missing ranks, and a set is examined once, however many wait for it.
So a run of thousands of ranks takes a few passes over them, and not one for each of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from powertrain.wire.from_worker import Beat
from powertrain.wire.values import Frame

#: Values of ``Beat.awaits`` at a meeting of all ranks over the run's own wire.
_MEETINGS = ("barrier", "broadcast_from_rank_zero")
_ROWS = ("row ", "commit of row ")
#: Functions of torch.distributed in which a rank waits for one other rank only.
_POINT_TO_POINT = frozenset(
    {"send", "recv", "isend", "irecv", "send_object_list", "recv_object_list", "batch_isend_irecv", "wait"}
)

#: Kinds of stall: see :class:`Blame`.
STUCK = "stuck"
GONE = "gone"
CIRCLE = "circle"
ALL_CAME = "all came"
_NOBODY: frozenset[int] = frozenset()


@dataclass(frozen=True)
class RankState:
    """The state of one rank at one moment."""

    rank: int
    #: Its newest beat; None where none has come.
    beat: Beat | None
    #: Seconds since its last move, and since its last message.
    idle: float
    unheard: float
    #: True when it has not moved for longer than is usual.
    still: bool = False
    #: True when its beats have stopped coming.
    silent: bool = False
    #: True when its function has ended.
    over: bool = False
    #: True once it has made its first step.
    begun: bool = True
    #: Collectives that it has begun, as far as is known; -1 for unknown. A rank that has ended no longer sends it.
    collectives: int = -1
    #: Seconds between its moves, usually; 0 where that is not known.
    usual: float = 0.0
    #: The newest row whose report has arrived: beats are older where many reports gather.
    reported: int = 0

    @property
    def frame(self) -> Frame | None:
        """Return the user's line of its last heartbeat."""
        return self.beat.where.frame if self.beat and self.beat.where else None

    @property
    def inside(self) -> str:
        """Return the call its main thread is inside of (see ``wire.Where``); "" for a rank that no longer sends it."""
        told = self.beat is not None and not self.silent and not self.over
        return self.beat.where.inside if told and self.beat and self.beat.where else ""

    @property
    def has_final_count(self) -> bool:
        """True when its function has ended and ``collectives`` was read after that."""
        return self.over and self.beat is not None and self.beat.phase == "end" and self.beat.collectives >= 0

    @property
    def awaits(self) -> str:
        return self.beat.awaits if self.beat and not self.over else ""

    @property
    def row(self) -> int:
        return max(self.beat.row if self.beat else 0, self.reported)


@dataclass(frozen=True)
class Blame:
    """The cause of a stall.

    ``STUCK``: the culprits stand still and wait for no other rank. ``GONE``: ranks wait for others whose functions have
    ended. ``CIRCLE``: ranks wait for each other. ``ALL_CAME``: all are in the same collective, and it does not end;
    there is no culprit then.
    """

    kind: str
    culprits: tuple[int, ...]
    #: The ranks that wait for the culprits, directly or through others.
    waiting: tuple[int, ...]
    #: The ranks that have ended and are awaited.
    gone: tuple[int, ...] = ()


def is_saving(beat: Beat | None) -> bool:
    """True while a rank is saving a checkpoint, or waits for one to be committed."""
    return beat is not None and (beat.phase == "checkpoint" or beat.awaits.startswith("commit"))


def is_compiling(beat: Beat | None) -> bool:
    """True while torch.compile is compiling what a rank has called."""
    return beat is not None and beat.where is not None and beat.where.inside == "compiler"


def waits_for(states: Sequence[RankState]) -> dict[int, frozenset[int]]:
    """Return the ranks that each rank waits for; none for ranks that have ended or are silent, whose last heartbeat may
    be outdated."""
    found: dict[tuple[str, int], frozenset[int]] = {}
    waits: dict[int, frozenset[int]] = {}
    for state in states:
        what = _awaited(state)
        if what is None:
            waits[state.rank] = _NOBODY
            continue
        if what not in found:
            found[what] = _those_missing(what, states)
        missing = found[what]
        waits[state.rank] = missing - {state.rank} if state.rank in missing else missing
    behind = _Behind(states, waits)
    return {s.rank: waits[s.rank] or behind.of(s) for s in states}


def find_doomed(states: Sequence[RankState]) -> frozenset[int]:
    """Return the ranks inside a collective that can never end: a rank whose function has ended did not begin it.

    Only counts of collectives that were read after the end of a function are compared: older ones may be too low.
    Sends and receives between two ranks are left out, because they need no third rank.
    """
    final = min((s.collectives for s in states if s.has_final_count), default=None)
    if final is None:
        return _NOBODY
    return frozenset(s.rank for s in states if _is_in_collective_of_all(s) and s.collectives > final)


def _is_in_collective_of_all(state: RankState) -> bool:
    where = state.beat.where if state.beat else None
    return state.inside == "collective" and where is not None and where.call not in _POINT_TO_POINT


def awaited_row(state: RankState) -> int | None:
    """Return the row that it waits for all ranks to report."""
    for prefix in _ROWS:
        number = state.awaits.removeprefix(prefix)
        if number != state.awaits and number.isdigit():
            return int(number)
    return None


def at_meeting(state: RankState) -> bool:
    return state.awaits in _MEETINGS


def _awaited(state: RankState) -> tuple[str, int] | None:
    if state.silent or state.over:
        return None
    row = awaited_row(state)
    if row is not None:
        return ("row", row)
    if at_meeting(state):
        return ("meeting", 0)
    return ("collective", state.collectives) if state.inside == "collective" else None


def _those_missing(what: tuple[str, int], states: Sequence[RankState]) -> frozenset[int]:
    """Return the ranks that have not arrived at the awaited event."""
    kind, number = what
    if kind == "row":  # a rank that has ended takes no part in rows it did not reach
        return frozenset(s.rank for s in states if not s.over and s.row < number)
    if kind == "meeting":
        missing = [s for s in states if not at_meeting(s)]
        return frozenset(s.rank for s in missing if not s.over) or frozenset(s.rank for s in missing)
    behind = frozenset(s.rank for s in states if 0 <= s.collectives < number)
    if behind:
        return behind
    # Collectives of another group, or of a backend that does not count: any rank that is in none may be the culprit.
    outside = [s for s in states if s.inside != "collective" and not s.collectives > number >= 0]
    return frozenset(s.rank for s in outside if not s.over) or frozenset(s.rank for s in outside)


class _Behind:
    """The ranks that a rank standing still in its own code waits for on its device: those that have begun fewer
    collectives.

    Collectives on a GPU do not hold the thread that begins them; it stands wherever it needs a result next.
    """

    def __init__(self, states: Sequence[RankState], waits: Mapping[int, frozenset[int]]) -> None:
        self._free = [
            (s.collectives, s.rank)
            for s in states
            if (s.over or s.still) and s.collectives >= 0 and not waits[s.rank]
        ]
        self._found: dict[int, frozenset[int]] = {}

    def of(self, own: RankState) -> frozenset[int]:
        if not own.still or own.silent or own.over or own.inside == "loader":
            return _NOBODY
        number = own.collectives
        if number not in self._found:
            self._found[number] = frozenset(rank for count, rank in self._free if count < number)
        return self._found[number]


def find_blame(states: Sequence[RankState]) -> Blame | None:
    """Return the cause of the stall; ``None`` while every rank that stands still waits for one that moves."""
    waits = waits_for(states)
    live = [s.rank for s in states if not s.over]
    still = {s.rank for s in states if s.still and not s.over}
    free = {rank for rank in still if not waits[rank]}
    if len(live) > 1 and all(s.rank in free and s.inside == "collective" for s in states if not s.over):
        return Blame(ALL_CAME, (), tuple(live))
    if free:
        return Blame(STUCK, tuple(sorted(free)), _leading_to(free, live, waits))
    awaited = _union({waits[rank] for rank in still})
    gone = {s.rank for s in states if s.over and s.rank in awaited}
    if gone:
        return _for_those_gone(gone, live, waits)
    moving = set(live) - still
    circle = still - set(_leading_to(moving, live, waits))
    return _in_circle(circle, [s for s in states if s.rank in circle], waits) if circle else None


def _leading_to(
    targets: Collection[int], ranks: Iterable[int], waits: Mapping[int, frozenset[int]]
) -> tuple[int, ...]:
    """Return those of ``ranks`` that wait for one of ``targets``, directly or through others; without the targets."""
    reached, candidates = set(targets), set(ranks) - set(targets)
    while True:
        leading = {
            wanted for wanted in {waits[rank] for rank in candidates} if not wanted.isdisjoint(reached)
        }
        found = {rank for rank in candidates if waits[rank] in leading}
        if not found:
            return tuple(sorted(reached - set(targets)))
        reached |= found
        candidates -= found


def _union(sets: Iterable[frozenset[int]]) -> set[int]:
    return set().union(*sets)


def _for_those_gone(gone: set[int], live: list[int], waits: Mapping[int, frozenset[int]]) -> Blame:
    """Blame the smaller party: either the ended ranks skipped a collective, or the waiting ranks called one more."""
    waiting = _leading_to(gone, live, waits)
    over = tuple(sorted(gone))
    if len(waiting) < len(over):
        return Blame(GONE, waiting, (), over)
    return Blame(GONE, over, waiting, over)


def _in_circle(circle: set[int], members: list[RankState], waits: Mapping[int, frozenset[int]]) -> Blame:
    core = set(circle)
    while outer := core - _union({waits[rank] for rank in core}):
        core -= outer  # no rank waits for them: they lead into the circle and are not part of it
    culprits = _odd_ones([s for s in members if s.rank in core])
    return Blame(CIRCLE, culprits, tuple(sorted(circle - set(culprits))))


def _odd_ones(members: list[RankState]) -> tuple[int, ...]:
    """Return the ranks with the fewest reports; else the smaller party; else those with the fewest collectives."""
    fewest = min(s.row for s in members)
    behind = tuple(s.rank for s in members if s.row == fewest)
    if len(behind) < len(members):
        return behind
    meeting = tuple(s.rank for s in members if at_meeting(s))
    others = tuple(s.rank for s in members if not at_meeting(s))
    if meeting and others and len(meeting) != len(others):
        return min(meeting, others, key=len)
    least = min(s.collectives for s in members)
    return tuple(s.rank for s in members if s.collectives == least)
