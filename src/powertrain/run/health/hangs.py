"""Watching for hangs: the watchdog decides, this asks the ranks what they are doing and keeps what they say.

When a rank has stood still for a while, the ranks are asked over the wire for the stacks of their threads and of the
processes they have started; whoever does not answer is looked at from outside, on a thread, because that may take
seconds. So they are at hand when the notice is due. Of many ranks some are asked: those that hold the others up first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from powertrain.engine import base
from powertrain.run import events as ev
from powertrain.run.deadlines import Clock
from powertrain.run.health import failures
from powertrain.run.health.hang_report import Verdict, explain
from powertrain.run.health.watchdog import Act, HangNotice, Suspect, Watchdog, Withdrawn
from powertrain.run.spec import RunSpec
from powertrain.run.workers.attempt import Attempt, Member
from powertrain.storage import Storage
from powertrain.trace.stacks.stacks import py_spy, text
from powertrain.wire.envelope import FromController
from powertrain.wire.from_controller import Inspect
from powertrain.wire.from_worker import Beat, Stacks
from powertrain.wire.values import ProcessStack

#: Seconds in which a rank that still answers has answered.
_ANSWER_WITHIN = 0.5
#: Seconds that a notice waits for a look that is under way.
_LOOK_WITHIN = 2.0
#: Ranks that are asked for their stacks; of more than that, a part of these places is kept for who only waits.
ASKED_AT_MOST = 64
_KEPT_FOR_WAITING = 16
#: Seconds that the end of a run waits for a look that is under way.
_LOOK_GRACE = 5.0

#: What the controller is to record, or the failures that it is to act on.
Found = ev.HangNoticed | ev.HangOver | list[ev.WorkerFailure]


@dataclass(frozen=True)
class Looked:
    """What was seen of a rank from outside. Posted to the controller's own thread."""

    ask: int
    rank: int
    found: base.Inspection


class Hangs:
    """The watch over one attempt at a time. The controller's thread only, but for ``_look_from_outside``."""

    def __init__(
        self,
        spec: RunSpec,
        engine: base.Engine,
        storage: Storage,
        send: Callable[[Member, FromController], None],
        post: Callable[[Any], None],
        say: Callable[[str], None],
        clock: Clock,
    ) -> None:
        """``send`` is called on the controller's thread; ``post`` and ``say`` on any, to reach it."""
        self._spec, self._engine, self._storage = spec, engine, storage
        self._send, self._post, self._say, self._clock = send, post, say, clock
        self._attempt: Attempt | None = None
        self._dog: Watchdog | None = None
        #: That of the attempt before: what it has learned of the run's pauses holds on.
        self._before: Watchdog | None = None
        self._asks, self._kept = 0, 0
        self._stacks: dict[int, Sequence[ProcessStack]] = {}
        self._suspects: frozenset[int] = frozenset()
        self._asked: frozenset[int] = frozenset()
        #: When those who have not answered are looked at from outside; inf when nobody is asked.
        self._outside_at = float("inf")
        #: Ranks that are being looked at from outside, and a notice that waits for what is seen, until when.
        self._looking: set[int] = set()
        self._waiting: HangNotice | None = None
        self._wait_until = float("inf")
        #: The ranks that a notice was told of which has not been withdrawn, and when they were seen to move last.
        self._told: tuple[tuple[int, ...], float] | None = None
        self._threads: list[threading.Thread] = []

    def begin(self, attempt: Attempt) -> None:
        """Training has begun."""
        self.forget()
        self._attempt = attempt
        self._dog = Watchdog(
            attempt.world_size,
            self._clock.monotonic(),
            timeout=self._spec.hang_timeout,
            gather=attempt.gather,
            after=self._before,
        )
        self._before = self._dog
        self._stacks = {}

    def forget(self) -> None:
        """There is nothing to watch now."""
        self._attempt = self._dog = self._waiting = self._told = None
        self._looking = set()
        self._outside_at = self._wait_until = float("inf")

    def close(self) -> None:
        """Wait for looks that are under way."""
        self.forget()
        for thread in self._threads:
            thread.join(_LOOK_GRACE)

    # -- what is known

    def beat(self, member: Member, beat: Beat) -> None:
        if self._dog is not None and member.attempt is self._attempt:
            self._dog.beat(member.rank, beat, self._clock.monotonic())

    def parted(self, member: Member) -> None:
        """The connection to the rank has ended."""
        if self._dog is not None and member.attempt is self._attempt:
            self._dog.parted(member.rank)

    def moved(self, rank: int, row: int = 0) -> None:
        """A report of the rank has come, that of ``row``; 0 where it only counts as a move."""
        if self._dog is not None:
            self._dog.row(rank, self._clock.monotonic(), row)

    def ended(self, member: Member) -> None:
        """The rank's function is over."""
        if self._dog is not None and member.attempt is self._attempt:
            self._dog.ended(member.rank, self._clock.monotonic())

    def debugger_opened(self, member: Member) -> None:
        """A debugger holds the rank, until its beats say otherwise."""
        if self._dog is not None and member.attempt is self._attempt:
            self._dog.held_by_debugger(member.rank, self._clock.monotonic())

    def stood_still(self, seconds: float) -> None:
        """This process itself did not run."""
        if self._dog is not None:
            self._dog.stood_still(seconds)

    def answered(self, member: Member, message: Stacks) -> None:
        if message.ask == self._asks and member.attempt is self._attempt:
            self._stacks[member.rank] = message.processes

    def looked(self, looked: Looked) -> None:
        if looked.ask != self._asks or self._dog is None:
            return
        found, known = looked.found, self._stacks.get(looked.rank)
        if known is None:
            seen = ProcessStack(pid=found.pid, title=f"rank {looked.rank}", state=found.state)
            self._stacks[looked.rank] = found.processes or (seen,)
        elif found.processes and found.processes[0].threads:
            self._stacks[looked.rank] = (found.processes[0], *known[1:])
        self._looking.discard(looked.rank)
        if not self._looking and self._waiting is not None:
            self._wait_until = float("-inf")
        if found.debugged:
            self._dog.held_by_debugger(looked.rank, self._clock.monotonic())

    # -- what follows

    def due(self) -> float | None:
        """When to look again."""
        return None if self._dog is None else min(self._dog.due(), self._outside_at, self._wait_until)

    def look(self, now: float) -> list[Found]:
        """What is to be told, or to be done: the failures of ranks that hang for too long."""
        if self._dog is None or self._attempt is None:
            return []
        if now >= self._outside_at:
            self._look_from_outside()
        decision = self._dog.look(now)
        if isinstance(decision, Suspect):
            self._ask(decision.ranks, now)
        elif isinstance(decision, HangNotice):
            if self._outside_at != float("inf"):
                self._look_from_outside()
            self._waiting = decision
            self._wait_until = now + _LOOK_WITHIN if self._looking else now
        elif isinstance(decision, Withdrawn):
            return self._withdrawn(self._attempt, decision)
        elif isinstance(decision, Act) and self._spec.on_hang != "report":
            hung = failures.hung(self._attempt, self._explained(decision), decision.seconds)
            return [*self._take_notice(self._attempt, now), hung]
        return self._take_notice(self._attempt, now) if now >= self._wait_until else []

    def _take_notice(self, attempt: Attempt, now: float) -> list[Found]:
        """The notice that waits for stacks, if there is one, with those that have come."""
        notice, self._waiting, self._wait_until = self._waiting, None, float("inf")
        if notice is None:
            return []
        self._told = notice.ranks, now - notice.seconds
        return [self._noticed(attempt, self._explained(notice), notice.seconds)]

    def behind_timeout(self, member: Member) -> list[ev.WorkerFailure]:
        """Return the failures of the ranks that a collective of ``member`` waited for until it timed out.

        Call it before ``ended``: from then on the rank counts as one that waits for nobody.
        """
        if self._dog is None or self._attempt is None or member.attempt is not self._attempt:
            return []
        act = self._dog.behind_timeout(member.rank, self._clock.monotonic())
        return [] if act is None else failures.hung(self._attempt, self._explained(act), act.seconds)

    def _withdrawn(self, attempt: Attempt, decision: Withdrawn) -> list[Found]:
        """It moves again; nothing to say where the notice had not been told yet."""
        told = self._waiting is None
        self._waiting, self._told, self._wait_until = None, None, float("inf")
        return [self._over(attempt, decision.ranks, decision.seconds)] if told else []

    def all_ended(self) -> list[ev.HangOver]:
        """Every function has come to its end: what was noticed before is over."""
        if self._told is None or self._attempt is None:
            return []
        (ranks, since), self._told = self._told, None
        return [self._over(self._attempt, ranks, self._clock.monotonic() - since)]

    def _over(self, attempt: Attempt, ranks: tuple[int, ...], seconds: float) -> ev.HangOver:
        now = self._clock.time()
        return ev.HangOver(time=now, attempt=attempt.number, seconds=round(seconds, 1), ranks=ranks)

    def _explained(self, decision: HangNotice | Act) -> Verdict:
        return explain(decision.states, self._stacks, decision.seconds)

    def _ask(self, suspects: Sequence[int], now: float) -> None:
        assert self._attempt is not None
        self._asks += 1
        running = self._attempt.running()
        self._stacks, self._suspects = {}, frozenset(suspects)
        self._asked = frozenset(whom_to_ask([member.rank for member in running], self._suspects))
        for member in running:
            if member.rank in self._asked:
                self._send(member, Inspect(ask=self._asks))
        self._outside_at = now + _ANSWER_WITHIN

    def _look_from_outside(self) -> None:
        """Look at those who have not answered, on a thread; also at the suspects where that shows C frames."""
        assert self._attempt is not None
        self._outside_at = float("inf")
        closer = self._suspects if py_spy() else frozenset[int]()
        asked = [member for member in self._attempt.running() if member.rank in self._asked]
        looked_at = [member for member in asked if member.rank not in self._stacks or member.rank in closer]
        looked_at.sort(key=lambda member: member.rank in self._stacks)  # of the others nothing is known yet
        ask, self._looking = self._asks, {member.rank for member in looked_at}

        def look() -> None:
            for member in looked_at:
                self._post(Looked(ask, member.rank, self._engine.inspect(member.placement.slot, stacks=True)))

        if looked_at:
            self._start(look)

    def _noticed(self, attempt: Attempt, verdict: Verdict, seconds: float) -> ev.HangNoticed:
        frame = verdict.frame
        return ev.HangNoticed(
            time=self._clock.time(),
            attempt=attempt.number,
            row=verdict.row,
            ranks=verdict.culprits,
            waiting=verdict.waiting,
            seconds=round(seconds, 1),
            message=verdict.message,
            file=frame.file if frame else "",
            line=frame.line if frame else 0,
            function=frame.function if frame else "",
            source=frame.source if frame else "",
            stacks=self._keep(attempt, verdict),
        )

    def _keep(self, attempt: Attempt, verdict: Verdict) -> str:
        """Put all stacks into the run's directory; returns where. A thread writes them: storage may be slow."""
        self._kept += 1
        place = f"stacks/attempt-{attempt.number}-hang-{self._kept}.txt"
        pages = [process for rank in sorted(self._stacks) for process in self._stacks[rank]]
        page = f"{verdict.message}\n\n{text(pages)}".encode()

        def put() -> None:
            try:
                self._storage.put(place, page)
            except Exception as error:
                self._say(f"The stacks of ranks that hang could not be kept in {place} ({error}).")

        self._start(put)
        return place

    def _start(self, work: Callable[[], None]) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=work, name="powertrain-hangs", daemon=True)
        self._threads.append(thread)
        thread.start()


def whom_to_ask(running: Sequence[int], suspects: Collection[int]) -> list[int]:
    """The ranks whose stacks are worth having: all of a few; of many the suspects, and others from all over. Pure."""
    if len(running) <= ASKED_AT_MOST:
        return list(running)
    first = [rank for rank in running if rank in suspects][: ASKED_AT_MOST - _KEPT_FOR_WAITING]
    taken = set(first)
    others, room = [rank for rank in running if rank not in taken], ASKED_AT_MOST - len(first)
    return sorted([*first, *(others[number * len(others) // room] for number in range(room))])
