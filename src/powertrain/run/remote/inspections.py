"""What ranks are doing, for somebody who asks from outside (``powertrain stacks``).

Every rank is asked over the wire; one that does not answer soon is looked at from outside, on a few threads, because
that may take seconds. What is found is told as it comes. At the deadline whoever is left is named.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from powertrain.engine import base
from powertrain.run.health.hang_report import rank_names
from powertrain.run.remote.protocol import RankSeen, Visitor
from powertrain.run.workers.attempt import Attempt, Member
from powertrain.trace.stacks.frames import where_of
from powertrain.wire.envelope import FromController
from powertrain.wire.from_controller import Inspect
from powertrain.wire.from_worker import Stacks
from powertrain.wire.values import ProcessStack

#: Numbers of these asks; the watchdog's own are smaller.
_FIRST_ASK = 1 << 32
#: Seconds in which a rank that still answers has answered, and after which nobody is waited for any more.
_ANSWER_WITHIN = 1.0
DEADLINE = 10.0
#: How many ranks are looked at from outside at the same time.
_LOOKERS = 8


@dataclass(frozen=True)
class SeenFromOutside:
    """What was seen of a rank that did not answer. Posted to the controller's own thread."""

    ask: int
    member: Member
    found: base.Inspection


@dataclass(eq=False)
class _Visit:
    visitor: Visitor
    attempt: Attempt
    #: Those of whom nothing has been told yet, by rank.
    awaited: dict[int, Member]
    outside_at: float
    until: float
    lookers: ThreadPoolExecutor | None = field(default=None)


class Inspections:
    """The looks that are under way. The controller's thread only."""

    def __init__(
        self,
        engine: base.Engine,
        send: Callable[[Member, FromController], None],
        post: Callable[[Any], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``send`` is called on the controller's thread; ``post`` on any, to reach it."""
        self._engine, self._send, self._post, self._clock = engine, send, post, clock
        self._last_ask = _FIRST_ASK
        self._visits: dict[int, _Visit] = {}

    def begin(self, attempt: Attempt, ranks: Collection[int], visitor: Visitor) -> None:
        """Ask these ranks, all where none is named, what they are doing."""
        if unknown := [rank for rank in ranks if not 0 <= rank < attempt.world_size]:
            last = attempt.world_size - 1
            visitor.answer(
                f"There is no {rank_names(unknown)} in attempt {attempt.number}: its last is rank {last}.",
                False,
            )
            return
        now = self._clock()
        asked = {m.rank: m for m in attempt.members if not ranks or m.rank in ranks}
        self._last_ask += 1
        visit = _Visit(visitor, attempt, asked, now + _ANSWER_WITHIN, now + DEADLINE)
        self._visits[self._last_ask] = visit
        for member in list(asked.values()):
            if member.exited:
                self._tell(self._last_ask, member, [_ended(member)])
            else:
                self._send(member, Inspect(ask=self._last_ask))

    def answered(self, member: Member, message: Stacks) -> None:
        """A rank has said what it is doing, to us or to others."""
        self._tell(message.ask, member, message.processes)

    def seen(self, seen: SeenFromOutside) -> None:
        """A rank that did not answer was looked at."""
        found = seen.found
        nothing = ProcessStack(pid=found.pid, title=f"rank {seen.member.rank}", state=found.state)
        self._tell(seen.ask, seen.member, list(found.processes) or [nothing])

    def due(self) -> float:
        """When to look again; inf while nobody is waited for."""
        return min(
            (min(visit.outside_at, visit.until) for visit in self._visits.values()), default=float("inf")
        )

    def look(self, now: float) -> None:
        """Look at those who have not answered in time, and end what has taken too long."""
        for ask, visit in list(self._visits.items()):
            if now >= visit.until:
                silent = rank_names(sorted(visit.awaited))
                self._end(ask, f"{silent[:1].upper()}{silent[1:]} did not answer within {DEADLINE:g} s.")
            elif now >= visit.outside_at:
                self._look_from_outside(ask, visit)

    def close(self) -> None:
        """Nothing more will be seen."""
        for ask in list(self._visits):
            self._end(ask, "The run has ended.")

    def _look_from_outside(self, ask: int, visit: _Visit) -> None:
        visit.outside_at = float("inf")
        visit.lookers = ThreadPoolExecutor(_LOOKERS, thread_name_prefix="powertrain-inspections")

        def look(member: Member) -> None:
            found = self._engine.inspect(member.placement.slot, stacks=True)
            self._post(SeenFromOutside(ask, member, found))

        for member in visit.awaited.values():
            visit.lookers.submit(look, member)

    def _tell(self, ask: int, member: Member, processes: list[ProcessStack]) -> None:
        visit = self._visits.get(ask)
        if (
            visit is None
            or visit.attempt is not member.attempt
            or visit.awaited.pop(member.rank, None) is None
        ):
            return
        beat = member.beat
        visit.visitor.tell(
            RankSeen(
                rank=member.rank,
                processes=processes,
                where=where_of(processes[0]) if processes else None,
                awaits=beat.awaits if beat is not None else "",
                row=member.attempt.rows.last_row(member.rank),
                debugged=beat is not None and beat.debugged,
            )
        )
        if not visit.awaited:
            self._end(ask, "")

    def _end(self, ask: int, message: str) -> None:
        visit = self._visits.pop(ask)
        if visit.lookers is not None:
            visit.lookers.shutdown(wait=False, cancel_futures=True)
        visit.visitor.answer(message)


def _ended(member: Member) -> ProcessStack:
    return ProcessStack(pid=member.pid, title=f"rank {member.rank}", state="gone", remark="It has ended.")
