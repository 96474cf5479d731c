"""The phases of a start, computed from times so that they add up. Pure.

A start goes from the call of ``fit`` (of a restart: from the moment when the attempt before was given up) to the first
step of a rank. It is a sequence of **legs**, each of which ends at a time of the controller's clock. Within a leg
durations are known, which the engine or the rank measured by clocks of their own: they are never compared with the
controller's, only laid into the leg, and never further than it is long. So phases have neither gap nor overlap,
whatever order messages came in, and unaccounted time is :data:`OTHER`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

#: The phases, in the order in which they are shown.
CLEARING = "clearing"
IMPORTS = "imports"
DATASETS = "datasets"
PREPARE = "prepare"
SLOTS = "slots"
SERVER = "server"
FORK = "fork"
HELLO = "hello"
OTHERS = "other ranks"
PROCESS_GROUP = "process group"
FUNCTION = "function"
SET_UP = "set-up"
DATA = "data"
FIRST_STEP = "first step"
OTHER = "other"

PHASES = (
    CLEARING, IMPORTS, DATASETS, PREPARE, SLOTS, SERVER, FORK, HELLO, OTHERS, PROCESS_GROUP,
    FUNCTION, SET_UP, DATA, FIRST_STEP, OTHER,
)  # fmt: skip

#: Ranks whose phases are all kept; of more, the spread is, and the slowest of them one by one.
KEPT_RANKS = 64
SLOWEST_KEPT = 8
#: Ranks that end their first step within this part of it, or so many seconds, have waited for each other in it.
_TOGETHER, _AT_ONCE = 0.1, 0.05
#: One rank is named where it was later than the usual one by this part of the time from the call of the function, and
#: by so many seconds.
_LATER, _LATER_SECONDS = 0.1, 0.05


@dataclass(frozen=True)
class Leg:
    """A part of a start: when it ended, if it has, and the known durations within it."""

    until: float | None
    #: The phase of the time that ``parts`` leave.
    rest: str
    parts: Mapping[str, float] = field(default_factory=dict)


def phases_of(begun: float, legs: Iterable[Leg], end: float) -> dict[str, float]:
    """Return the seconds by phase, from ``begun`` to the end of the last leg, or to ``end`` where one has not ended.

    They add up to exactly that time and none is negative. A moment that lies before the one it follows counts as that
    one. What has begun when ``end`` comes has the time until then.
    """
    at, phases = begun, dict[str, float]()
    for leg in legs:
        until = max(at, end if leg.until is None else leg.until)
        left = until - at
        for name, seconds in leg.parts.items():
            taken = (
                min(seconds, left) if seconds > 0 else 0.0
            )  # ignore a clock that was set back, and values that are no number
            phases[name] = phases.get(name, 0.0) + taken
            left -= taken
        phases[leg.rest] = phases.get(leg.rest, 0.0) + left
        at = until
        if leg.until is None:
            break
    return {name: phases[name] for name in PHASES if name in phases}


@dataclass
class RankStart:
    """The start of one rank. Times are the controller's, ``None`` before they have come."""

    #: When its process existed, and when its handshake came.
    started: float | None = None
    greeted: float | None = None
    #: Seconds before ``started`` in which the process that it is forked from was not ready, by activity.
    awaited: Mapping[str, float] = field(default_factory=dict)
    #: When its first step was done, or its function ended without one.
    done: float | None = None
    #: The rank's own measurements between the call of its function and that.
    own: Mapping[str, float] = field(default_factory=dict)
    has_stepped: bool = False
    #: The package that loading its function spent most on; "" where it was quick.
    loaded: str = ""
    #: The package that the function itself has begun to load first, before its first step; "" where it loaded little.
    imported: str = ""

    def before_first_step(self) -> float:
        """Return the rank's own seconds, in which it waited for no other."""
        return sum(seconds for name, seconds in self.own.items() if name != FIRST_STEP and seconds > 0)


@dataclass
class AttemptTimes:
    """One attempt's start, as the controller saw it."""

    begun: float
    ranks: list[RankStart]
    #: The time before slots were requested: durations, and the phase of the rest.
    opening: Mapping[str, float] = field(default_factory=dict)
    opening_rest: str = PREPARE
    asked: float | None = None
    granted: float | None = None
    #: When every rank was ordered to call the user's function.
    trained: float | None = None

    def all_greeted(self) -> float | None:
        """Return when the handshake of the last rank came; None before."""
        moments = [rank.greeted for rank in self.ranks]
        return max((m for m in moments if m is not None), default=None) if None not in moments else None

    def ended(self, now: float) -> float:
        """Return when its last rank was done; ``now`` while one is not."""
        done = [rank.done for rank in self.ranks if rank.done is not None]
        return max(done) if done and len(done) == len(self.ranks) else now

    def by_rank(self, now: float) -> list[dict[str, float]]:
        """Return each rank's phases; they add up to the time from ``begun`` to its first step, or to ``now``."""
        together = self.all_greeted()
        return [self.phases(rank, together, now) for rank in self.ranks]

    def phases(self, rank: RankStart, together: float | None, now: float) -> dict[str, float]:
        """Return the phases of ``rank``, which waits from its handshake on until that of the last, ``together``."""
        return phases_of(
            self.begun,
            (
                Leg(self.asked, self.opening_rest, self.opening),
                Leg(self.granted, SLOTS),
                Leg(rank.started if rank.started is not None else rank.greeted, FORK, rank.awaited),
                Leg(rank.greeted, HELLO),
                Leg(together, OTHERS),
                Leg(self.trained, PROCESS_GROUP),
                Leg(rank.done, OTHER, rank.own),
            ),
            now,
        )


def slowest(start: AttemptTimes) -> int:
    """Return the rank that delayed the first step: one that has not reached it, or the one that was last.

    Where ranks end their first step together they have waited for each other in it, and the last is the one that began
    it last.
    """
    for number, rank in enumerate(start.ranks):
        if rank.done is None:
            return number
    last = max(_done(rank) for rank in start.ranks)
    near = max(_AT_ONCE, _TOGETHER * (last - (start.trained or start.begun)))
    tied = [number for number, rank in enumerate(start.ranks) if last - _done(rank) <= near]
    return max(tied, key=lambda number: (start.ranks[number].before_first_step(), _done(start.ranks[number])))


def stands_out(start: AttemptTimes, number: int) -> bool:
    """Return True when the others would have been notably earlier without this rank."""
    if len(start.ranks) < 2:
        return False
    rank = start.ranks[number]
    if rank.done is None:
        return any(other.done is not None for other in start.ranks)
    own = max(0.0, rank.done - (start.trained or start.begun))
    others = [other for other in start.ranks if other is not rank and other.done is not None]
    later = rank.before_first_step() - statistics.median(other.before_first_step() for other in others)
    later = max(later, rank.done - statistics.median(_done(other) for other in others))
    return later > max(_LATER_SECONDS, _LATER * own)


def critical_path(start: AttemptTimes, now: float) -> dict[str, float]:
    """Return the phases of the critical path to the run's first step: of each leg, those of its last rank."""
    if None in [rank.greeted for rank in start.ranks]:
        last_up = next(rank for rank in start.ranks if rank.greeted is None)
    else:
        last_up = max(start.ranks, key=lambda rank: rank.greeted or 0.0)
    last = start.ranks[slowest(start)]
    done = None if last.done is None else start.ended(now)
    path = RankStart(last_up.started, last_up.greeted, last_up.awaited, done, last.own)
    phases = start.phases(path, last_up.greeted, now)
    return {name: seconds for name, seconds in phases.items() if name != OTHERS}


@dataclass(frozen=True)
class Columns:
    """The phases of many ranks, of bounded size."""

    #: Those that are kept one by one, and by phase the seconds of each of them, in that order.
    ranks: tuple[int, ...]
    phases: Mapping[str, tuple[float, ...]]
    #: Of more than :data:`KEPT_RANKS`: by phase the fastest, the median and the slowest of all.
    spread: Mapping[str, tuple[float, float, float]]


def columns(by_rank: Sequence[Mapping[str, float]], first: int = 0) -> Columns:
    """Return the ranks' phases in columns. Of many ranks, rank ``first`` and the slowest are kept."""
    names = [name for name in PHASES if any(name in phases for phases in by_rank)]
    ranks, spread = tuple(range(len(by_rank))), dict[str, tuple[float, float, float]]()
    if len(by_rank) > KEPT_RANKS:
        by_time = sorted(ranks, key=lambda rank: (rank != first, *_slowest_first(by_rank[rank])))
        ranks = tuple(by_time[:SLOWEST_KEPT])
        spread = {name: _spread([phases.get(name, 0.0) for phases in by_rank]) for name in names}
    kept = {name: tuple(_rounded(by_rank[rank].get(name, 0.0)) for rank in ranks) for name in names}
    return Columns(ranks, kept, spread)


def _slowest_first(phases: Mapping[str, float]) -> tuple[float, float]:
    """Sort key: a rank that waits for others, as in their first step, is not slow; then by the whole time."""
    own = sum(seconds for name, seconds in phases.items() if name not in (OTHERS, FIRST_STEP, OTHER))
    return -own, -sum(phases.values())


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    return _rounded(min(values)), _rounded(statistics.median(values)), _rounded(max(values))


def _rounded(seconds: float) -> float:
    return round(seconds, 4)


def _done(rank: RankStart) -> float:
    assert rank.done is not None
    return rank.done
