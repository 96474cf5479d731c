"""The state of one attempt: its members, their progress, and the boundary they agree on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from powertrain.run.events import WorkerFailure
from powertrain.run.workers.pacing import gathering_seconds
from powertrain.run.workers.placement import Placement
from powertrain.run.workers.rows import RowTable
from powertrain.run.workers.worker_group import RemoteWorkers
from powertrain.wire.from_controller import Goto, Opened, Preemption
from powertrain.wire.from_worker import Arrived, Beat, Held, Outcome

#: The phases of an attempt, in order. "clearing" may follow any of them.
STARTING = "starting"
TRAINING = "training"
SHUTTING_DOWN = "shutting down"
DISMISSED = "dismissed"
CLEARING = "clearing"
#: How often ranks may miss each other at a report before it is clear that they do not come to the same ones.
MISSES_ALLOWED = 4
#: Ranks that are named for each of several different calls.
_CALLS_NAMED = 8


@dataclass(eq=False)
class Member:
    """One rank of the attempt."""

    placement: Placement
    #: The public key that its messages are signed with, which identifies it.
    key: bytes
    attempt: Attempt
    pid: int = 0
    greeted: bool = False
    outcome: Outcome | None = None
    exited: bool = False
    failure: WorkerFailure | None = None
    beat: Beat | None = None
    #: Rows whose reports were found on its node after its death, and those whose reports had returned and were not.
    recovered: set[int] = field(default_factory=set)
    missing: set[int] = field(default_factory=set)

    @property
    def rank(self) -> int:
        return self.placement.rank

    @property
    def was_stopped(self) -> bool:
        """Return True when its function was ended at an agreed boundary, before its own end."""
        return self.outcome is not None and self.outcome.status == "stopped"


@dataclass
class BoundaryHold:
    """A boundary being agreed on: the asked ranks, their answers, and the action there."""

    number: int
    reason: str
    asked: set[int]
    #: True when the ranks should end only where a checkpoint was committed, so that nothing is redone.
    needs_commit: bool = False
    preemption: Preemption | None = None
    resize_to: int = 0
    answers: dict[int, Held] = field(default_factory=dict)
    #: The boundary that all were sent to; 0 before. And True where they end there.
    boundary: int = 0
    stops: bool = False
    #: Ranks that wait at it to be sent on, with the row of each.
    reached: dict[int, int] = field(default_factory=dict)

    def agreed(self) -> int | None:
        """Return the first boundary that no rank has passed, once all asked ranks have answered."""
        if self.boundary or not self.asked <= self.answers.keys() or not self.answers:
            return None
        return max(answer.boundary for answer in self.answers.values()) + 1

    @property
    def can_save(self) -> bool:
        """Return True when every rank can save on request."""
        return all(answer.can_save for answer in self.answers.values())

    def goto(self, action: str) -> Goto:
        """Return the message that sends the ranks to the agreed boundary."""
        return Goto(
            hold=self.number,
            boundary=self.boundary,
            action=action,
            reason=self.reason,
            preemption=self.preemption,
            resize_to=0 if action == "go" else self.resize_to,
        )


class Attempt:
    """The controller's state of the current workers."""

    def __init__(
        self,
        number: int,
        placements: list[Placement],
        first_row: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.number = number
        self._clock = clock
        self.first_row = first_row
        self.placements = placements
        self.began = clock()
        self.phase = STARTING
        #: The backend's one instance for this attempt, made by its first hook.
        self.backend: Any = None
        self.first_row_seen = False
        #: True once some rank has reached a boundary, or has made an optimizer step.
        self.has_trained = False
        #: How often ranks missed the reports at which others waited for them.
        self.misses = 0
        #: True once the backend's on_shutdown has been called.
        self.shut_down = False
        self.members: list[Member] = []
        #: All members before these have connected, or exited: they are not checked again.
        self._greeted = self._exited = 0
        #: Ranks whose functions have ended.
        self._over: set[int] = set()
        self._ranks_by_slot = {placement.slot.id: placement.rank for placement in placements}
        self.group: RemoteWorkers | None = None
        self.rows = RowTable(len(placements), first_row)
        self.failures: list[WorkerFailure] = []
        #: The time of the first failure that reads like an echo of another.
        self.failing_since = 0.0
        self.losses: list[tuple[int, str]] = []
        self.hold: BoundaryHold | None = None
        #: By collective the ranks that have arrived, and their calls.
        self.arrivals: dict[int, dict[int, Arrived]] = {}
        self._calls: dict[int, set[str]] = {}
        self.barrier_rows: dict[int, set[int]] = {}
        #: By row the reason why all ranks end there.
        self.stops_at: dict[int, str] = {}

    @property
    def world_size(self) -> int:
        return len(self.placements)

    @property
    def gather(self) -> float:
        """Return the seconds for which its ranks let reports gather: see ``wire.Train``."""
        return gathering_seconds(self.world_size)

    def by_slot(self, slot_id: str) -> Member | None:
        rank = self._ranks_by_slot.get(slot_id, self.world_size)
        return self.members[rank] if rank < len(self.members) else None

    def running(self) -> list[Member]:
        """Return the members whose user function has not ended and whose process lives."""
        return [m for m in self.members if m.outcome is None and not m.exited]

    def all_greeted(self) -> bool:
        while self._greeted < len(self.members) and self.members[self._greeted].greeted:
            self._greeted += 1
        return self._greeted == self.world_size

    def all_exited(self) -> bool:
        while self._exited < len(self.members) and self.members[self._exited].exited:
            self._exited += 1
        return self._exited == len(self.members)

    def all_done(self) -> bool:
        """Return True when every rank's function has returned or was stopped."""
        return len(self._over) == self.world_size and all(m.failure is None for m in self.members)

    def end(self, member: Member, outcome: Outcome) -> None:
        """Note that a member's function has ended."""
        member.outcome = outcome
        self._over.add(member.rank)

    @property
    def out_of_step(self) -> bool:
        """Return True when the ranks do not make the same reports: they cannot be stopped at one of them."""
        return self.misses >= MISSES_ALLOWED

    def age(self) -> float:
        return self._clock() - self.began

    def arrive(self, rank: int, message: Arrived) -> None:
        """Note a rank at a collective."""
        self.arrivals.setdefault(message.sync, {})[rank] = message
        self._calls.setdefault(message.sync, set()).add(message.kind)

    def pop_finished_collectives(self) -> list[tuple[Opened, list[Member]]]:
        """Remove and return the collectives whose ranks need not wait any longer, with those ranks: all have arrived,
        or one never will."""
        finished = []
        for sync, here in list(self.arrivals.items()):
            opened = self._answer(sync, here)
            if opened is not None:
                del self.arrivals[sync], self._calls[sync]
                finished.append((opened, [self.members[rank] for rank in here]))
        return finished

    def _answer(self, sync: int, here: dict[int, Arrived]) -> Opened | None:
        if len(self._calls[sync]) > 1:
            return Opened(sync=sync, error=f"The ranks do not call the same thing: {_different_calls(here)}.")
        if gone := sorted(self._over - here.keys()):
            kind = next(iter(here.values())).kind
            return Opened(
                sync=sync,
                error=f"Rank {gone[0]} has ended without calling this {kind}(). Call it as often on every rank.",
            )
        return Opened(sync=sync, data=here[0].data) if len(here) == self.world_size else None


def _different_calls(here: dict[int, Arrived]) -> str:
    """Return the different calls, each with its first few ranks."""
    by_kind: dict[str, list[int]] = {}
    for rank, message in sorted(here.items()):
        by_kind.setdefault(message.kind, []).append(rank)
    calls = [
        f"rank {rank} called {kind}()" for kind, ranks in by_kind.items() for rank in ranks[:_CALLS_NAMED]
    ]
    more = sum(max(0, len(ranks) - _CALLS_NAMED) for ranks in by_kind.values())
    return ", ".join([*sorted(calls), *([f"{more} more ranks one of these"] if more else [])])
