"""Whether a run hangs. Pure: beats and moments in, decisions out; no clock, no input or output.

A rank *moves* when its reports, optimizer steps or batches grow. One that has not moved for longer than is usual stands
still; who is to blame for that, if anybody, is for ``waits`` to say. Then, in this order::

    Suspect  at 0.8 of the time: ask for stacks, so that they are there when they are needed
    Notice   tell the user who waits, who never came, and where
    Act      so long after it that nobody would wait any longer
    Withdrawn  it moves again; a place where that happens may take longer from then on

Whoever owns a :class:`Watchdog` calls ``look`` at ``due`` and does what the decision says.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Union

from powertrain.run.health.pace import Pace, Place
from powertrain.run.health.waits import (
    GONE,
    STUCK,
    Blame,
    RankState,
    find_blame,
    find_doomed,
    is_saving,
    waits_for,
)
from powertrain.wire.from_worker import Beat

#: Seconds without a move after which there may be a notice, however short the usual step: five are promised, and to
#: tell it takes a moment.
FLOOR = 4.8
#: Usual steps without a move that are not worth a notice.
_STEPS = 5.0
#: The part of the time to a notice after which stacks are asked for.
_EARLY = 0.6
#: The part of it after which a rank has stopped too, when another one is noticed.
_NEARLY = 0.8
#: The part of ``FLOOR`` that is left to get them.
_FOR_STACKS = 0.2
#: Seconds that the set-up and the first step may take while nobody waits for them.
SET_UP = 30.0
#: Seconds without a beat after which a rank counts as silent: beats come every second.
SILENT = 3.0
#: Where beats come less often, so many times what is between two is added to what a rank is given: when it is over all
#: ranks have beaten since, also those whose beat was late by half of it.
_OVERDUE = 1.5
#: The least seconds without a move after which something is done; and of a rank that saves a checkpoint, or has not
#: made its first step, which may load and compile for long.
ACT = 120.0
ACT_WITH_PATIENCE = 1800.0
#: Times ``FLOOR`` after which a collective is acted on that a rank has left out for good: its function has returned.
_ACT_FLOORS_IF_DOOMED = 2.0
#: The part of ``ACT`` for which whoever is ended must have been at the same line.
_SAME_LINE = 0.9
_ACT_PAUSES = 3.0
_ACT_STEPS = 60.0
#: How much longer than the longest pause that ended by itself at a place the next one there may be.
_PATIENCE = 1.5
#: Seconds between two notices about one stall, when others turn out to be to blame.
AGAIN = 60.0


@dataclass(frozen=True)
class Suspect:
    """Nobody may have moved for too long soon: ask all ranks for their stacks now."""

    ranks: tuple[int, ...]
    seconds: float
    states: tuple[RankState, ...]


@dataclass(frozen=True)
class HangNotice:
    """The run hangs, as far as can be told: explain it with ``hang_report.explain(states, stacks, seconds)``."""

    #: Those who hold the others up, and those who wait for them.
    ranks: tuple[int, ...]
    waiting: tuple[int, ...]
    seconds: float
    states: tuple[RankState, ...]


@dataclass(frozen=True)
class Act:
    """It has hung for as long as it may. Comes once for one stall.

    With a timeout shorter than the time to a notice it comes first; the notice follows if the run goes on.
    """

    ranks: tuple[int, ...]
    waiting: tuple[int, ...]
    seconds: float
    states: tuple[RankState, ...]


@dataclass(frozen=True)
class Withdrawn:
    """What was noticed has ended by itself after ``seconds``."""

    seconds: float
    ranks: tuple[int, ...]


Decision = Union[Suspect, HangNotice, Act, Withdrawn]


@dataclass
class _Told:
    """A stall that was noticed or acted on: it stands until those it is about move."""

    kind: str
    ranks: set[int]
    since: float
    at: float
    #: How often each of those had moved by then of whom a move ends it.
    moves: dict[int, int]
    #: True when all of ``moves`` must move, and not any of them.
    all_must_move: bool
    noticed: bool = False
    acted: bool = False


@dataclass(frozen=True)
class _Stall:
    blame: Blame
    since: float
    #: Seconds after ``since`` at which it is acted on.
    act_after: float
    states: tuple[RankState, ...]
    #: True when ranks wait for a rank that has returned and it is certain that they wait in vain.
    is_certain: bool = False


class Watchdog:
    """Watches the ranks of one attempt, from the moment their functions are called. Times are monotonic seconds."""

    def __init__(
        self,
        ranks: int,
        now: float,
        *,
        timeout: float | None,
        gather: float = 0.0,
        after: Watchdog | None = None,
    ) -> None:
        """``timeout``: seconds without a move after which to act; ``None`` to derive it from what the run shows.
        ``gather``: seconds between two beats of a rank, where they do not come every second.
        ``after`` is that of the attempt before: pauses that it saw end by themselves may come again."""
        self._ranks = [Pace.starting(rank, now) for rank in range(ranks)]
        self._timeout = timeout
        #: How much later than with a beat a second a rank's move may be known.
        self._lag = _OVERDUE * gather
        #: Ranks that a debugger holds.
        self._debugged: set[int] = set()
        #: The longest pause of any rank that ended by itself, and the largest of the ranks' usual steps.
        self._longest: float = after._longest if after is not None else 0.0
        self._usual = 0.0
        #: How long a pause may be at places where longer ones than usual have ended by themselves.
        self._bars: dict[Place, float] = dict(after._bars) if after is not None else {}
        self._told: _Told | None = None
        self._suspected_at: float | None = None
        #: Since when, and for how long, each rank may go without a move; as of the newest look.
        self._clocks: dict[int, tuple[float, float]] = {}
        #: Ranks that wait in vain for one that has returned; as of the newest look.
        self._doomed: frozenset[int] = frozenset()
        self._due = now + self._lag + _EARLY * FLOOR

    # ----------------------------------------------------------------------- what happens

    def beat(self, rank: int, beat: Beat, now: float) -> None:
        """A beat of ``rank`` has arrived."""
        known = self._ranks[rank]
        self._mark_debugged(known, beat.debugged, now)
        grown = known.growth(beat)
        moved_at = max(known.moved_at, now - beat.idle)
        if grown:
            known.count(moved_at, grown)
        if grown and (not known.begun or moved_at > known.moved_at):
            self._moved(known, moved_at, now)
        else:  # reports that have come have told of it; or the rank's whole process stood still, which is not its fault
            known.moved_at = moved_at
        known.take(beat, now)
        if beat.phase == "end":
            self.ended(rank, now)

    def row(self, rank: int, now: float, row: int = 0) -> None:
        """A report of ``rank`` has arrived, that of ``row``."""
        known = self._ranks[rank]
        known.begun = True
        known.reported = max(known.reported, row)
        self._moved(known, max(known.moved_at, now), now)

    def parted(self, rank: int) -> None:
        """The connection to ``rank`` has ended: it counts as silent until it is heard of again."""
        self._ranks[rank].parted = True

    def ended(self, rank: int, now: float) -> None:
        """The rank's function has returned, raised or was stopped. May be called again."""
        known = self._ranks[rank]
        if known.over_at is None:
            known.over_at = now
            self._mark_debugged(known, False, now)
            # What follows takes a while, but for a notice that stood until this rank moved.
            is_told = self._told is not None and rank in self._told.moves
            self._due = min(self._due, now if is_told else now + _FOR_STACKS * FLOOR)

    def held_by_debugger(self, rank: int, now: float) -> None:
        """A debugger holds the rank from outside, as far as its process shows; until its next beat says otherwise."""
        self._mark_debugged(self._ranks[rank], self._ranks[rank].over_at is None, now)

    def stood_still(self, seconds: float) -> None:
        """Whoever owns this did not run for so long: nobody is to blame for that time."""
        for known in self._ranks:
            known.shift(seconds)
        self._clocks = {rank: (since + seconds, limit) for rank, (since, limit) in self._clocks.items()}
        self._due += seconds
        if self._suspected_at is not None:
            self._suspected_at += seconds
        if self._told is not None:
            self._told.since += seconds
            self._told.at += seconds

    def _mark_debugged(self, known: Pace, debugged: bool, now: float) -> None:
        before = bool(self._debugged)
        if debugged:
            self._debugged.add(known.rank)
        else:
            self._debugged.discard(known.rank)
        if before and not self._debugged:
            for each in self._ranks:
                each.restart(now)

    def _moved(self, known: Pace, moved_at: float, now: float) -> None:
        pause = moved_at - known.moved_at
        self._longest = max(self._longest, pause)
        told = self._told is not None and known.rank in self._told.moves
        if pause >= FLOOR + self._lag:
            for place in known.places:
                if told or place in self._bars:
                    self._bars[place] = max(self._bars.get(place, 0.0), _PATIENCE * pause)
        known.places.clear()
        known.moved_at = moved_at
        known.moves += 1
        if told:
            self._due = min(self._due, now)

    # ----------------------------------------------------------------------- what to do

    def due(self) -> float:
        """When to call ``look`` next; ``math.inf`` when all ranks are over. A look makes it later than that look."""
        return self._due

    def look(self, now: float) -> Decision | None:
        """What is to be done now, if anything."""
        decision = None
        if not self._debugged:
            self._measure(now)
            decision = self._decide(now)
        self._due = self._next_look(now)
        return decision

    def behind_timeout(self, rank: int, now: float) -> Act | None:
        """Return the stall behind a collective that has timed out on ``rank``, or None where others are not to blame.

        torch may give up long before this class would, so it does not matter here for how long ranks have not moved.
        """
        states = tuple(self._state(known, now, still=known.over_at is None) for known in self._ranks)
        blame = find_blame(states)
        if blame is None or blame.kind not in (STUCK, GONE) or rank in blame.culprits:
            return None
        return Act(blame.culprits, blame.waiting, max(0.0, now - self._ranks[rank].moved_at), states)

    def _decide(self, now: float) -> Decision | None:
        stall = self._stall(now, 1.0)
        if stall is not None:  # those who stopped a moment later have stopped too, and are not said to go on
            stall = self._stall(now, _NEARLY) or stall
        if self._told is not None and self._is_resolved(self._told, stall):
            return self._withdraw(self._told, now)
        if stall is None:
            return self._suspect(now)
        if self._is_due_to_act(stall, now):
            self._tell(stall, now).acted = True
            return Act(stall.blame.culprits, stall.blame.waiting, now - stall.since, stall.states)
        if not self._is_news(stall, now):
            return None
        if self._suspected_at is None or (self._told and self._suspected_at <= self._told.at):
            return self._suspect(now)
        if now < self._suspected_at + _FOR_STACKS * FLOOR:
            return None
        self._tell(stall, now).noticed = True
        return HangNotice(stall.blame.culprits, stall.blame.waiting, now - stall.since, stall.states)

    def _suspect(self, now: float) -> Suspect | None:
        """Ask for stacks, once, when there may soon be a notice."""
        early = self._stall(now, _EARLY)
        if early is None:
            self._suspected_at = None
            return None
        if self._suspected_at is not None and not (self._told and self._suspected_at <= self._told.at):
            return None
        self._suspected_at = now
        return Suspect(early.blame.culprits, now - early.since, early.states)

    def _is_news(self, stall: _Stall, now: float) -> bool:
        """Whether a notice says something that the user has not been told, or not just now."""
        if self._told is None or not self._told.noticed:
            return True
        same = stall.blame.kind == self._told.kind and self._told.ranks >= set(stall.blame.culprits)
        return not same and now >= self._told.at + AGAIN

    def _is_due_to_act(self, stall: _Stall, now: float) -> bool:
        """Without a timeout of the user's own, no rank is ended that was at another line of theirs a while ago: an
        evaluation that is not counted here moves from line to line. A wait that cannot end needs no such proof."""
        if (self._told is not None and self._told.acted) or now < stall.since + stall.act_after:
            return False
        if stall.is_certain:
            return True
        blamed = stall.blame.culprits or stall.blame.waiting
        moving_on = [self._ranks[rank].placed_at for rank in blamed if self._ranks[rank].over_at is None]
        return self._timeout is not None or now >= max(moving_on, default=now - ACT) + _SAME_LINE * ACT

    def _tell(self, stall: _Stall, now: float) -> _Told:
        before, blame = self._told, stall.blame
        culprits = [rank for rank in blame.culprits if self._ranks[rank].over_at is None]
        self._told = _Told(
            kind=blame.kind,
            ranks=set(blame.culprits) | (before.ranks if before else set()),
            since=min(stall.since, before.since) if before else stall.since,
            at=now,
            moves={rank: self._ranks[rank].moves for rank in culprits or blame.waiting},
            all_must_move=bool(culprits),
            noticed=before is not None and before.noticed,
            acted=before is not None and before.acted,
        )
        return self._told

    def _is_resolved(self, told: _Told, stall: _Stall | None) -> bool:
        if stall is None:
            return True
        changed = [
            self._ranks[rank].moves != moves or self._ranks[rank].over_at is not None
            for rank, moves in told.moves.items()
        ]
        return all(changed) if told.all_must_move else any(changed)

    def _withdraw(self, told: _Told, now: float) -> Withdrawn | None:
        moved = [
            self._ranks[rank].moved_at
            for rank, moves in told.moves.items()
            if self._ranks[rank].moves != moves
        ]
        self._told = self._suspected_at = None
        if not told.noticed:
            return None
        return Withdrawn(max(0.0, max(moved, default=now) - told.since), tuple(sorted(told.ranks)))

    # ----------------------------------------------------------------------- who stands still

    def _measure(self, now: float) -> None:
        """Work out how long each rank may go without a move, from what is known now."""
        self._clocks = {}
        self._usual = max((known.usual for known in self._live()), default=0.0)
        waits_since, grace = self._waits_since(now), self._grace(now)
        for known in self._live():
            since, limit = self._clock(known, waits_since.get(known.rank))
            self._clocks[known.rank] = since, limit + grace
        ends = [known.over_at for known in self._ranks if known.over_at is not None]
        # While no rank has ended, none can wait for an ended one; collecting the states of many ranks takes long.
        self._doomed = (
            find_doomed([self._state(known, now) for known in self._ranks]) if ends else frozenset()
        )
        last_end = max(ends, default=now)
        for rank in self._doomed:
            waits = max(self._ranks[rank].waits_since, min(last_end, now))
            since, limit = self._clocks[rank]
            if waits + FLOOR < since + limit:
                self._clocks[rank] = waits, FLOOR

    def _grace(self, now: float) -> float:
        """Seconds more for ranks that have all fallen silent: it is rather the machine they are on that stood still."""
        live = self._live()
        all_silent = len(live) > 1 and all(now > known.heard_at + SILENT + self._lag for known in live)
        return SILENT if all_silent else 0.0

    def _waits_since(self, now: float) -> dict[int, float]:
        """Since when somebody waits for, or at the same place as, each rank whose usual step is not known yet."""
        if self._usual and all(known.begun for known in self._live()):
            return {}
        states = [self._state(known, now) for known in self._ranks]
        since: dict[int, float] = {}
        #: Since when each set of ranks is waited for: many wait for the same.
        awaited: dict[frozenset[int], float] = {}
        for state, targets in zip(states, waits_for(states).values(), strict=True):
            if targets or state.inside == "collective":
                since[state.rank] = start = self._ranks[state.rank].waits_since
                awaited[targets] = min(start, awaited.get(targets, math.inf))
        for targets, start in awaited.items():
            for rank in targets:
                since[rank] = min(start, since.get(rank, math.inf))
        return since

    def _clock(self, known: Pace, waits_since: float | None) -> tuple[float, float]:
        """Since when it is waited for a move of this rank, and how many seconds that may take."""
        base = self._base()
        since, limit = known.moved_at, self._with_bars(known, base)
        if not known.begun or not self._usual:
            limit = (
                max(SET_UP, base) if not known.begun else min(SET_UP, max(FLOOR, _STEPS * known.first_step))
            )
            start = max(since, waits_since) if waits_since is not None else math.inf
            if start + base < since + limit:
                since, limit = start, base
        if self._timeout is not None and not is_saving(known.beat):
            limit = min(limit, self._timeout)
        return since, limit

    def _base(self) -> float:
        return max(FLOOR, _STEPS * self._usual)

    def _with_bars(self, known: Pace, base: float) -> float:
        """``base``, or longer at a place where pauses have ended by themselves."""
        if known.place in self._bars:
            return max(base, self._bars[known.place])
        passed = max((self._bars.get(place, 0.0) for place in known.places), default=0.0)
        if passed <= base:
            return base
        # It has come from such a place within this pause: only if it stays elsewhere is that another matter.
        return min(passed, known.placed_at - known.moved_at + base)

    def _stall(self, now: float, part: float) -> _Stall | None:
        """Who holds the run up, if ranks stand still after ``part`` of the time they may take."""
        still = {rank for rank in self._clocks if self._is_late(self._ranks[rank], now, part)}
        blame = None
        if still:
            states = tuple(self._state(known, now, known.rank in still) for known in self._ranks)
            blame = find_blame(states)
        if blame is None:
            return None
        since = self._began(blame)
        is_certain = blame.kind == GONE and not self._doomed.isdisjoint((*blame.culprits, *blame.waiting))
        least = FLOOR if is_certain else self._base()
        if blame.kind == GONE and now < since + self._lag + part * min(least, self._timeout or math.inf):
            return None
        act_after = self._act_after(blame, states)
        if is_certain:
            act_after = min(act_after, self._lag + _ACT_FLOORS_IF_DOOMED * FLOOR)
        return _Stall(blame, since, act_after, states, is_certain)

    def _is_late(self, known: Pace, now: float, part: float) -> bool:
        since, limit = self._clocks[known.rank]
        told = self._told is not None and known.begun and self._told.moves.get(known.rank) == known.moves
        return told or now >= since + self._lag + part * limit

    def _began(self, blame: Blame) -> float:
        """When the stall began."""
        involved = [*blame.culprits, *blame.waiting]
        clocks = [self._clocks[rank][0] for rank in involved if rank in self._clocks]
        if blame.kind == STUCK:
            return min(self._clocks[rank][0] for rank in blame.culprits)
        if blame.kind == GONE:  # ranks may have waited long for one that moved until it ended
            ends = [at for rank in blame.gone if (at := self._ranks[rank].over_at) is not None]
            return max(max(ends), min(clocks))
        return max(clocks)

    def _act_after(self, blame: Blame, states: Iterable[RankState]) -> float:
        """Seconds that this stall may last: what the user has set, or else what the run's own pace suggests."""
        if self._timeout is not None:
            return self._timeout
        blamed = [state for state in states if state.rank in (blame.culprits or blame.waiting)]
        patient = any(is_saving(state.beat) or not state.begun for state in blamed)
        least = ACT_WITH_PATIENCE if patient else ACT
        return max(least, _ACT_PAUSES * self._longest, _ACT_STEPS * self._usual)

    def _state(self, known: Pace, now: float, still: bool = False) -> RankState:
        over = known.over_at is not None
        return RankState(
            rank=known.rank,
            beat=known.beat,
            idle=max(0.0, now - known.moved_at),
            unheard=max(0.0, now - known.heard_at),
            still=still,
            silent=not over and (known.parted or now > known.heard_at + SILENT + self._lag),
            over=over,
            begun=known.begun,
            collectives=known.collectives,
            usual=known.usual,
            reported=known.reported,
        )

    def _live(self) -> list[Pace]:
        return [known for known in self._ranks if known.over_at is None]

    # ----------------------------------------------------------------------- when to look again

    def _next_look(self, now: float) -> float:
        """The first moment after ``now`` at which something could be decided, if nothing is heard until then."""
        if not self._live() and self._told is None:
            return math.inf
        moments = [now + _FOR_STACKS * FLOOR]
        for since, limit in self._clocks.values():
            moments += [since + self._lag + _EARLY * limit, since + self._lag + limit]
        base = self._base()
        for known in self._ranks:
            if known.over_at is None:
                moments.append(known.heard_at + SILENT + self._lag)
            else:
                moments += [known.over_at + self._lag + part * base for part in (_EARLY, 1.0)]
        if self._suspected_at is not None:
            moments.append(self._suspected_at + _FOR_STACKS * FLOOR)
        if self._told is not None:
            moments.append(self._told.at + AGAIN)
        return min(moment for moment in moments if moment > now)
