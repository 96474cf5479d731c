"""Stacks of ranks for the command line (``powertrain stacks``).

Every rank is asked over the wire; one that does not answer soon is sampled from outside, on a few threads, because that
may take seconds. Stacks are sent as they arrive. At the timeout the remaining ranks are named.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from powertrain.engine import base
from powertrain.run.health.hang_report import rank_names
from powertrain.run.remote.protocol import ControlClient, RankSeen
from powertrain.run.workers.attempt import Attempt, Member
from powertrain.trace.stacks.frames import where_of
from powertrain.wire.envelope import FromController
from powertrain.wire.from_controller import Inspect
from powertrain.wire.from_worker import Stacks
from powertrain.wire.values import ProcessStack

#: The first number of these requests; the watchdog's own are smaller.
_FIRST_NUMBER = 1 << 32
#: Seconds for a rank to answer, and for the whole inspection.
_ANSWER_TIMEOUT_S = 1.0
INSPECTION_TIMEOUT_S = 10.0
#: Ranks that are sampled from outside at the same time.
_MAX_THREADS = 8


@dataclass(frozen=True)
class StacksFromOutside:
    """Stacks of a rank that did not answer, sampled from outside. Posted to the controller's thread."""

    ask: int
    member: Member
    found: base.Inspection


@dataclass(eq=False)
class _Inspection:
    client: ControlClient
    attempt: Attempt
    #: Ranks whose stacks have not been sent yet.
    awaited: dict[int, Member]
    outside_at: float
    until: float
    lookers: ThreadPoolExecutor | None = field(default=None)


class Inspections:
    """The inspections that are under way. The controller's thread only."""

    def __init__(
        self,
        engine: base.Engine,
        send: Callable[[Member, FromController], None],
        post: Callable[[Any], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``send`` is called on the controller's thread; ``post`` on any, to reach it."""
        self._engine, self._send, self._post, self._clock = engine, send, post, clock
        self._last_ask = _FIRST_NUMBER
        self._inspections: dict[int, _Inspection] = {}

    def begin(self, attempt: Attempt, ranks: Collection[int], client: ControlClient) -> None:
        """Request the stacks of these ranks; of all where none is named."""
        if unknown := [rank for rank in ranks if not 0 <= rank < attempt.world_size]:
            last = attempt.world_size - 1
            client.answer(
                f"There is no {rank_names(unknown)} in attempt {attempt.number}: its last is rank {last}.",
                False,
            )
            return
        now = self._clock()
        asked = {m.rank: m for m in attempt.members if not ranks or m.rank in ranks}
        self._last_ask += 1
        inspection = _Inspection(client, attempt, asked, now + _ANSWER_TIMEOUT_S, now + INSPECTION_TIMEOUT_S)
        self._inspections[self._last_ask] = inspection
        for member in list(asked.values()):
            if member.exited:
                self._send_stacks(self._last_ask, member, [_ended(member)])
            else:
                self._send(member, Inspect(ask=self._last_ask))

    def on_stacks(self, member: Member, message: Stacks) -> None:
        """Pass on the stacks that a rank has sent, if they were requested here."""
        self._send_stacks(message.ask, member, message.processes)

    def on_stacks_from_outside(self, seen: StacksFromOutside) -> None:
        """Pass on the stacks of a rank that were sampled from outside."""
        found = seen.found
        nothing = ProcessStack(pid=found.pid, title=f"rank {seen.member.rank}", state=found.state)
        self._send_stacks(seen.ask, seen.member, list(found.processes) or [nothing])

    def due(self) -> float:
        """Return when to call :meth:`poll` next; inf while no inspection is open."""
        return min(
            (min(inspection.outside_at, inspection.until) for inspection in self._inspections.values()),
            default=float("inf"),
        )

    def poll(self, now: float) -> None:
        """Sample ranks that have not answered in time, and end inspections that have timed out."""
        for ask, inspection in list(self._inspections.items()):
            if now >= inspection.until:
                silent = rank_names(sorted(inspection.awaited))
                self._end(
                    ask, f"{silent[:1].upper()}{silent[1:]} did not answer within {INSPECTION_TIMEOUT_S:g} s."
                )
            elif now >= inspection.outside_at:
                self._sample_from_outside(ask, inspection)

    def close(self) -> None:
        """End all inspections."""
        for ask in list(self._inspections):
            self._end(ask, "The run has ended.")

    def _sample_from_outside(self, ask: int, inspection: _Inspection) -> None:
        inspection.outside_at = float("inf")
        inspection.lookers = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="powertrain-inspections")

        def look(member: Member) -> None:
            found = self._engine.inspect(member.placement.slot, stacks=True)
            self._post(StacksFromOutside(ask, member, found))

        for member in inspection.awaited.values():
            inspection.lookers.submit(look, member)

    def _send_stacks(self, ask: int, member: Member, processes: list[ProcessStack]) -> None:
        inspection = self._inspections.get(ask)
        if (
            inspection is None
            or inspection.attempt is not member.attempt
            or inspection.awaited.pop(member.rank, None) is None
        ):
            return
        beat = member.beat
        inspection.client.send_part(
            RankSeen(
                rank=member.rank,
                processes=processes,
                where=where_of(processes[0]) if processes else None,
                awaits=beat.awaits if beat is not None else "",
                row=member.attempt.rows.last_row(member.rank),
                debugged=beat is not None and beat.debugged,
            )
        )
        if not inspection.awaited:
            self._end(ask, "")

    def _end(self, ask: int, message: str) -> None:
        inspection = self._inspections.pop(ask)
        if inspection.lookers is not None:
            inspection.lookers.shutdown(wait=False, cancel_futures=True)
        inspection.client.answer(message)


def _ended(member: Member) -> ProcessStack:
    return ProcessStack(pid=member.pid, title=f"rank {member.rank}", state="gone", remark="It has ended.")
