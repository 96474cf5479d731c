"""Detection of hangs. Pure: heartbeats and times in, decisions out; no clock, no input or output.

A rank *moves* when its reports, optimizer steps or batches grow. A rank that has not moved for longer than is usual
stands still; ``waits`` finds the rank to blame, if there is one. Then, in this order::

    Suspect    after 0.6 of the time to a notice: request stacks, so that they have arrived by then
    Notice     warn the user which ranks wait, which have not arrived, and at which line
    Act        end the culprits after a long further delay
    Withdrawn  it moves again; a place where that happens may take longer from then on

The owner of a :class:`Watchdog` calls ``poll`` at ``due`` and carries out the decision.
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
    is_compiling,
    is_saving,
    waits_for,
)
from powertrain.wire.from_worker import Beat

#: Seconds without a move after which there may be a notice, however short the usual step: five are promised, and
#: showing it takes a moment.
NOTICE_DELAY_S = 4.8
#: Usual steps without a move that are not worth a notice.
_STEPS = 5.0
#: The part of the time to a notice after which stacks are requested.
_SUSPECT_PART = 0.6
#: The part of it after which a rank has stopped too, when another one is noticed.
_STOPPED_PART = 0.8
#: The part of ``NOTICE_DELAY_S`` that ranks have to send the requested stacks.
_STACKS_PART = 0.2
#: Seconds that the set-up and the first step may take while no rank waits for them.
SET_UP_TIMEOUT_S = 30.0
#: Seconds without a beat after which a rank counts as silent: beats come every second.
SILENCE_TIMEOUT_S = 3.0
#: Where heartbeats are rarer, so many heartbeat intervals are added to the time limit of a rank: by then every rank has
#: sent one, even where it was late by half an interval.
_OVERDUE = 1.5
#: The least seconds without a move after which ranks are ended; and for a rank that saves a checkpoint, or has not made
#: its first step, which may load and compile for long.
ACT_TIMEOUT_S = 120.0
SLOW_ACT_TIMEOUT_S = 1800.0
#: So many ``NOTICE_DELAY_S`` after the start of a collective ranks are ended that wait for a rank which has returned.
_ACT_DELAYS_IF_DOOMED = 2.0
#: The part of ``ACT_TIMEOUT_S`` for which a rank must have been at the same line before it is ended.
_SAME_LINE = 0.9
_ACT_PAUSES = 3.0
_ACT_STEPS = 60.0
#: How much longer than the longest pause that ended by itself at a place the next one there may be.
_PATIENCE = 1.5
#: Seconds between two notices about one stall, when others turn out to be to blame.
NOTICE_INTERVAL_S = 60.0


@dataclass(frozen=True)
class Suspect:
    """Ranks may soon have stood still for too long: request their stacks now."""

    ranks: tuple[int, ...]
    seconds: float
    states: tuple[RankState, ...]


@dataclass(frozen=True)
class HangNotice:
    """The run seems to hang: explain it with ``hang_report.explain(states, stacks, seconds)``."""

    #: The ranks that hold the others up, and the ranks that wait for them.
    ranks: tuple[int, ...]
    waiting: tuple[int, ...]
    seconds: float
    states: tuple[RankState, ...]


@dataclass(frozen=True)
class Act:
    """The run has hung for as long as it may. Decided once for each stall.

    With a timeout shorter than the time to a notice it comes first; the notice follows if the run goes on.
    """

    ranks: tuple[int, ...]
    waiting: tuple[int, ...]
    seconds: float
    states: tuple[RankState, ...]


@dataclass(frozen=True)
class Withdrawn:
    """The noticed stall has ended by itself after ``seconds``."""

    seconds: float
    ranks: tuple[int, ...]


Decision = Union[Suspect, HangNotice, Act, Withdrawn]


@dataclass
class _NoticedStall:
    """A stall that was noticed or acted on: it holds until its ranks move."""

    kind: str
    ranks: set[int]
    since: float
    at: float
    #: By rank whose move ends it: how often the rank had moved by then.
    moves: dict[int, int]
    #: True when all of ``moves`` must move, and not any of them.
    all_must_move: bool
    is_announced: bool = False
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
        """``timeout``: seconds without a move after which to act; ``None`` to derive it from the pace of the run.
        ``gather``: seconds between two beats of a rank, where they do not come every second.
        ``after`` is that of the attempt before: pauses that it saw end by themselves may come again."""
        self._ranks = [Pace.starting(rank, now) for rank in range(ranks)]
        self._timeout = timeout
        #: Extra delay until a rank's move is known, compared with a heartbeat every second.
        self._lag = _OVERDUE * gather
        #: Ranks that a debugger holds.
        self._debugged: set[int] = set()
        #: The longest pause of any rank that ended by itself, and the largest of the ranks' usual steps.
        self._longest: float = after._longest if after is not None else 0.0
        self._usual = 0.0
        #: How long a pause may be at places where longer ones than usual have ended by themselves.
        self._bars: dict[Place, float] = dict(after._bars) if after is not None else {}
        self._noticed: _NoticedStall | None = None
        self._suspected_at: float | None = None
        #: Since when, and for how long, each rank may go without a move; as of the newest poll.
        self._clocks: dict[int, tuple[float, float]] = {}
        #: Ranks that wait in vain for one that has returned; as of the newest poll.
        self._doomed: frozenset[int] = frozenset()
        self._due = now + self._lag + _SUSPECT_PART * NOTICE_DELAY_S

    # ----------------------------------------------------------------------- events

    def on_beat(self, rank: int, beat: Beat, now: float) -> None:
        """Note a heartbeat of ``rank``."""
        known = self._ranks[rank]
        self._mark_debugged(known, beat.debugged, now)
        grown = known.growth(beat)
        moved_at = max(known.moved_at, now - beat.idle)
        if grown:
            known.count(moved_at, grown)
        if grown and (not known.begun or moved_at > known.moved_at):
            self._moved(known, moved_at, now)
        else:  # known from reports already; or the rank's whole process stood still, which is not its fault
            known.moved_at = moved_at
        if not is_compiling(beat):
            known.compiles_since = None
        else:
            known.compiles_since = now if known.compiles_since is None else known.compiles_since
            if now - known.compiles_since < SLOW_ACT_TIMEOUT_S:
                known.moved_at = now  # compiling is progress, which no counter shows
        known.take(beat, now)
        if beat.phase == "end":
            self.on_rank_ended(rank, now)

    def on_report(self, rank: int, now: float, row: int = 0) -> None:
        """Note that ``rank`` has reported ``row``."""
        known = self._ranks[rank]
        known.begun = True
        known.reported = max(known.reported, row)
        self._moved(known, max(known.moved_at, now), now)

    def on_disconnect(self, rank: int) -> None:
        """Note a closed connection: ``rank`` counts as silent until its next message."""
        self._ranks[rank].is_disconnected = True

    def on_rank_ended(self, rank: int, now: float) -> None:
        """Note that the rank's function has returned, raised or was stopped. May be called again."""
        known = self._ranks[rank]
        if known.over_at is None:
            known.over_at = now
            self._mark_debugged(known, False, now)
            # The clean-up takes a while, except after a notice that held until this rank moved.
            is_noticed = self._noticed is not None and rank in self._noticed.moves
            self._due = min(self._due, now if is_noticed else now + _STACKS_PART * NOTICE_DELAY_S)

    def on_debugger_attached(self, rank: int, now: float) -> None:
        """Note that a debugger holds the rank from outside, until its next heartbeat says otherwise."""
        self._mark_debugged(self._ranks[rank], self._ranks[rank].over_at is None, now)

    def on_standstill(self, seconds: float) -> None:
        """Note that the controller itself did not run for ``seconds``: no rank is to blame for that time."""
        for known in self._ranks:
            known.shift(seconds)
        self._clocks = {rank: (since + seconds, limit) for rank, (since, limit) in self._clocks.items()}
        self._due += seconds
        if self._suspected_at is not None:
            self._suspected_at += seconds
        if self._noticed is not None:
            self._noticed.since += seconds
            self._noticed.at += seconds

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
        is_noticed = self._noticed is not None and known.rank in self._noticed.moves
        if pause >= NOTICE_DELAY_S + self._lag:
            for place in known.places:
                if is_noticed or place in self._bars:
                    self._bars[place] = max(self._bars.get(place, 0.0), _PATIENCE * pause)
        known.places.clear()
        known.moved_at = moved_at
        known.moves += 1
        if is_noticed:
            self._due = min(self._due, now)

    # ----------------------------------------------------------------------- decisions

    def due(self) -> float:
        """Return when to call ``poll`` next; ``math.inf`` when all ranks have ended. Always later than the last
        poll."""
        return self._due

    def poll(self, now: float) -> Decision | None:
        """Return the decision that is due now, if any."""
        decision = None
        if not self._debugged:
            self._measure(now)
            decision = self._decide(now)
        self._due = self._next_poll(now)
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
        if (
            stall is not None
        ):  # ranks that stopped a moment later have stopped too: they are not shown as running
            stall = self._stall(now, _STOPPED_PART) or stall
        if self._noticed is not None and self._is_resolved(self._noticed, stall):
            return self._withdraw(self._noticed, now)
        if stall is None:
            return self._suspect(now)
        if self._is_due_to_act(stall, now):
            self._note_stall(stall, now).acted = True
            return Act(stall.blame.culprits, stall.blame.waiting, now - stall.since, stall.states)
        if not self._is_news(stall, now):
            return None
        if self._suspected_at is None or (self._noticed and self._suspected_at <= self._noticed.at):
            return self._suspect(now)
        if now < self._suspected_at + _STACKS_PART * NOTICE_DELAY_S:
            return None
        self._note_stall(stall, now).is_announced = True
        return HangNotice(stall.blame.culprits, stall.blame.waiting, now - stall.since, stall.states)

    def _suspect(self, now: float) -> Suspect | None:
        """Request stacks, once, when there may soon be a notice."""
        early = self._stall(now, _SUSPECT_PART)
        if early is None:
            self._suspected_at = None
            return None
        if self._suspected_at is not None and not (self._noticed and self._suspected_at <= self._noticed.at):
            return None
        self._suspected_at = now
        return Suspect(early.blame.culprits, now - early.since, early.states)

    def _is_news(self, stall: _Stall, now: float) -> bool:
        """Return True when a notice would be new to the user, and the last one is not recent."""
        if self._noticed is None or not self._noticed.is_announced:
            return True
        same = stall.blame.kind == self._noticed.kind and self._noticed.ranks >= set(stall.blame.culprits)
        return not same and now >= self._noticed.at + NOTICE_INTERVAL_S

    def _is_due_to_act(self, stall: _Stall, now: float) -> bool:
        """Return True when the stall has lasted long enough. Without a timeout set by the user, no rank is ended that
        was at another line a while ago: an evaluation that is not counted here moves from line to line. A wait that
        cannot end needs no such proof."""
        if (self._noticed is not None and self._noticed.acted) or now < stall.since + stall.act_after:
            return False
        if stall.is_certain:
            return True
        blamed = stall.blame.culprits or stall.blame.waiting
        moving_on = [self._ranks[rank].placed_at for rank in blamed if self._ranks[rank].over_at is None]
        return (
            self._timeout is not None
            or now >= max(moving_on, default=now - ACT_TIMEOUT_S) + _SAME_LINE * ACT_TIMEOUT_S
        )

    def _note_stall(self, stall: _Stall, now: float) -> _NoticedStall:
        before, blame = self._noticed, stall.blame
        culprits = [rank for rank in blame.culprits if self._ranks[rank].over_at is None]
        self._noticed = _NoticedStall(
            kind=blame.kind,
            ranks=set(blame.culprits) | (before.ranks if before else set()),
            since=min(stall.since, before.since) if before else stall.since,
            at=now,
            moves={rank: self._ranks[rank].moves for rank in culprits or blame.waiting},
            all_must_move=bool(culprits),
            is_announced=before is not None and before.is_announced,
            acted=before is not None and before.acted,
        )
        return self._noticed

    def _is_resolved(self, noticed: _NoticedStall, stall: _Stall | None) -> bool:
        if stall is None:
            return True
        changed = [
            self._ranks[rank].moves != moves or self._ranks[rank].over_at is not None
            for rank, moves in noticed.moves.items()
        ]
        return all(changed) if noticed.all_must_move else any(changed)

    def _withdraw(self, noticed: _NoticedStall, now: float) -> Withdrawn | None:
        moved = [
            self._ranks[rank].moved_at
            for rank, moves in noticed.moves.items()
            if self._ranks[rank].moves != moves
        ]
        self._noticed = self._suspected_at = None
        if not noticed.is_announced:
            return None
        return Withdrawn(max(0.0, max(moved, default=now) - noticed.since), tuple(sorted(noticed.ranks)))

    # ----------------------------------------------------------------------- stalls

    def _measure(self, now: float) -> None:
        """Compute how long each rank may go without a move."""
        self._clocks = {}
        self._usual = max((known.usual for known in self._live()), default=0.0)
        waits_since, grace = self._awaited_since(now), self._grace(now)
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
            if waits + NOTICE_DELAY_S < since + limit:
                self._clocks[rank] = waits, NOTICE_DELAY_S

    def _grace(self, now: float) -> float:
        """Return extra seconds where all ranks have fallen silent: more likely their machine stood still."""
        live = self._live()
        all_silent = len(live) > 1 and all(
            now > known.heard_at + SILENCE_TIMEOUT_S + self._lag for known in live
        )
        return SILENCE_TIMEOUT_S if all_silent else 0.0

    def _awaited_since(self, now: float) -> dict[int, float]:
        """Return, for each rank whose usual step is not known yet, since when a rank waits for it or at the same
        place."""
        if self._usual and all(known.begun for known in self._live()):
            return {}
        states = [self._state(known, now) for known in self._ranks]
        since: dict[int, float] = {}
        #: Since when each set of ranks is awaited: many ranks wait for the same set.
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
        """Return since when a move of this rank is awaited, and how many seconds it may take."""
        base = self._base()
        since, limit = known.moved_at, self._with_bars(known, base)
        if not known.begun or not self._usual:
            limit = (
                max(SET_UP_TIMEOUT_S, base)
                if not known.begun
                else min(SET_UP_TIMEOUT_S, max(NOTICE_DELAY_S, _STEPS * known.first_step))
            )
            start = max(since, waits_since) if waits_since is not None else math.inf
            if start + base < since + limit:
                since, limit = start, base
        if self._timeout is not None and not is_saving(known.beat):
            limit = min(limit, self._timeout)
        return since, limit

    def _base(self) -> float:
        return max(NOTICE_DELAY_S, _STEPS * self._usual)

    def _with_bars(self, known: Pace, base: float) -> float:
        """Return ``base``, or more at a place where longer pauses have ended by themselves."""
        if known.place in self._bars:
            return max(base, self._bars[known.place])
        passed = max((self._bars.get(place, 0.0) for place in known.places), default=0.0)
        if passed <= base:
            return base
        # It was at such a place within this pause: a pause elsewhere counts only if it stays there.
        return min(passed, known.placed_at - known.moved_at + base)

    def _stall(self, now: float, part: float) -> _Stall | None:
        """Return the stall, if ranks stand still after ``part`` of the time they may take."""
        still = {rank for rank in self._clocks if self._is_late(self._ranks[rank], now, part)}
        blame = None
        if still:
            states = tuple(self._state(known, now, known.rank in still) for known in self._ranks)
            blame = find_blame(states)
        if blame is None:
            return None
        since = self._start_of(blame)
        is_certain = blame.kind == GONE and not self._doomed.isdisjoint((*blame.culprits, *blame.waiting))
        least = NOTICE_DELAY_S if is_certain else self._base()
        if blame.kind == GONE and now < since + self._lag + part * min(least, self._timeout or math.inf):
            return None
        act_after = self._act_after(blame, states)
        if is_certain:
            act_after = min(act_after, self._lag + _ACT_DELAYS_IF_DOOMED * NOTICE_DELAY_S)
        return _Stall(blame, since, act_after, states, is_certain)

    def _is_late(self, known: Pace, now: float, part: float) -> bool:
        since, limit = self._clocks[known.rank]
        is_noticed = (
            self._noticed is not None and known.begun and self._noticed.moves.get(known.rank) == known.moves
        )
        return is_noticed or now >= since + self._lag + part * limit

    def _start_of(self, blame: Blame) -> float:
        """Return when the stall began."""
        involved = [*blame.culprits, *blame.waiting]
        clocks = [self._clocks[rank][0] for rank in involved if rank in self._clocks]
        if blame.kind == STUCK:
            return min(self._clocks[rank][0] for rank in blame.culprits)
        if blame.kind == GONE:  # ranks may have waited long for one that moved until it ended
            ends = [at for rank in blame.gone if (at := self._ranks[rank].over_at) is not None]
            return max(max(ends), min(clocks))
        return max(clocks)

    def _act_after(self, blame: Blame, states: Iterable[RankState]) -> float:
        """Return the seconds that this stall may last: the user's timeout, or a value derived from the run's pace."""
        if self._timeout is not None:
            return self._timeout
        blamed = [state for state in states if state.rank in (blame.culprits or blame.waiting)]
        patient = any(is_saving(state.beat) or not state.begun for state in blamed)
        least = SLOW_ACT_TIMEOUT_S if patient else ACT_TIMEOUT_S
        return max(least, _ACT_PAUSES * self._longest, _ACT_STEPS * self._usual)

    def _state(self, known: Pace, now: float, still: bool = False) -> RankState:
        over = known.over_at is not None
        return RankState(
            rank=known.rank,
            beat=known.beat,
            idle=max(0.0, now - known.moved_at),
            unheard=max(0.0, now - known.heard_at),
            still=still,
            silent=not over
            and (known.is_disconnected or now > known.heard_at + SILENCE_TIMEOUT_S + self._lag),
            over=over,
            begun=known.begun,
            collectives=known.collectives,
            usual=known.usual,
            reported=known.reported,
        )

    def _live(self) -> list[Pace]:
        return [known for known in self._ranks if known.over_at is None]

    # ----------------------------------------------------------------------- the next poll

    def _next_poll(self, now: float) -> float:
        """Return the first moment after ``now`` at which a decision could be due if no message arrives."""
        if not self._live() and self._noticed is None:
            return math.inf
        moments = [now + _STACKS_PART * NOTICE_DELAY_S]
        for since, limit in self._clocks.values():
            moments += [since + self._lag + _SUSPECT_PART * limit, since + self._lag + limit]
        base = self._base()
        for known in self._ranks:
            if known.over_at is None:
                moments.append(known.heard_at + SILENCE_TIMEOUT_S + self._lag)
            else:
                moments += [known.over_at + self._lag + part * base for part in (_SUSPECT_PART, 1.0)]
        if self._suspected_at is not None:
            moments.append(self._suspected_at + _STACKS_PART * NOTICE_DELAY_S)
        if self._noticed is not None:
            moments.append(self._noticed.at + NOTICE_INTERVAL_S)
        return min(moment for moment in moments if moment > now)
