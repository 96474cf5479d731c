"""Hang handling: the watchdog decides; this module requests stacks from the ranks and keeps them.

When a rank has stood still for a while, the ranks are asked over the wire for the stacks of their threads and of the
processes they have started; a rank that does not answer is sampled from outside, on a thread, because that may take
seconds. So the stacks are at hand when the notice is due. Of many ranks only some are asked: those that hold the others
up first.
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

#: Seconds for a rank to answer a request for stacks.
_ANSWER_TIMEOUT_S = 0.5
#: Seconds that a notice waits for stacks that are being sampled from outside.
_SAMPLING_TIMEOUT_S = 2.0
#: Ranks that are asked for their stacks; of more than that, a part of these places is kept for ranks that only wait.
ASKED_AT_MOST = 64
_KEPT_FOR_WAITING = 16
#: Seconds that the end of a run waits for sampling that is under way.
_CLOSE_TIMEOUT_S = 5.0

#: Facts for the controller to record, or failures for it to act on.
Found = ev.HangNoticed | ev.HangOver | list[ev.WorkerFailure]


@dataclass(frozen=True)
class StacksSampled:
    """Stacks of a rank that were sampled from outside. Posted to the controller's thread."""

    ask: int
    rank: int
    found: base.Inspection


class Hangs:
    """Hang detection for one attempt at a time.

    Called on the controller's thread only; stacks are sampled and written on threads of their own.
    """

    def __init__(
        self,
        spec: RunSpec,
        engine: base.Engine,
        storage: Storage,
        send: Callable[[Member, FromController], None],
        post: Callable[[Any], None],
        warn: Callable[[str], None],
        clock: Clock,
    ) -> None:
        """``send`` is called on the controller's thread; ``post`` and ``warn`` on any, to reach it."""
        self._spec, self._engine, self._storage = spec, engine, storage
        self._send, self._post, self._warn, self._clock = send, post, warn, clock
        self._attempt: Attempt | None = None
        self._dog: Watchdog | None = None
        #: The watchdog of the attempt before: the pauses it has learned of stay valid.
        self._before: Watchdog | None = None
        self._asks, self._kept = 0, 0
        self._stacks: dict[int, Sequence[ProcessStack]] = {}
        self._suspects: frozenset[int] = frozenset()
        self._asked: frozenset[int] = frozenset()
        #: When ranks that have not answered are sampled from outside; inf when no request is open.
        self._outside_at = float("inf")
        #: Ranks that are being sampled from outside, and the notice that waits for the result, until when.
        self._sampling: set[int] = set()
        self._waiting: HangNotice | None = None
        self._wait_until = float("inf")
        #: The ranks of a notice that has not been withdrawn, and when they moved last.
        self._noticed_hang: tuple[tuple[int, ...], float] | None = None
        self._threads: list[threading.Thread] = []

    def begin(self, attempt: Attempt) -> None:
        """Watch a new attempt, whose training has begun."""
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
        """Stop watching."""
        self._attempt = self._dog = self._waiting = self._noticed_hang = None
        self._sampling = set()
        self._outside_at = self._wait_until = float("inf")

    def close(self) -> None:
        """Wait for sampling that is under way."""
        self.forget()
        for thread in self._threads:
            thread.join(_CLOSE_TIMEOUT_S)

    # -- events

    def on_beat(self, member: Member, beat: Beat) -> None:
        if self._dog is not None and member.attempt is self._attempt:
            self._dog.on_beat(member.rank, beat, self._clock.monotonic())

    def on_disconnect(self, member: Member) -> None:
        """Note that the connection to the rank is closed."""
        if self._dog is not None and member.attempt is self._attempt:
            self._dog.on_disconnect(member.rank)

    def on_report(self, rank: int, row: int = 0) -> None:
        """Note that the rank has reported ``row``; 0 where it only counts as a move."""
        if self._dog is not None:
            self._dog.on_report(rank, self._clock.monotonic(), row)

    def on_rank_ended(self, member: Member) -> None:
        """Note that the rank's function has ended."""
        if self._dog is not None and member.attempt is self._attempt:
            self._dog.on_rank_ended(member.rank, self._clock.monotonic())

    def on_debugger_opened(self, member: Member) -> None:
        """Note that a debugger holds the rank, until its heartbeats say otherwise."""
        if self._dog is not None and member.attempt is self._attempt:
            self._dog.on_debugger_attached(member.rank, self._clock.monotonic())

    def on_standstill(self, seconds: float) -> None:
        """Note that this process itself did not run for ``seconds``."""
        if self._dog is not None:
            self._dog.on_standstill(seconds)

    def on_stacks(self, member: Member, message: Stacks) -> None:
        if message.ask == self._asks and member.attempt is self._attempt:
            self._stacks[member.rank] = message.processes

    def on_stacks_sampled(self, sampled: StacksSampled) -> None:
        if sampled.ask != self._asks or self._dog is None:
            return
        found, known = sampled.found, self._stacks.get(sampled.rank)
        if known is None:
            seen = ProcessStack(pid=found.pid, title=f"rank {sampled.rank}", state=found.state)
            self._stacks[sampled.rank] = found.processes or (seen,)
        elif found.processes and found.processes[0].threads:
            self._stacks[sampled.rank] = (found.processes[0], *known[1:])
        self._sampling.discard(sampled.rank)
        if not self._sampling and self._waiting is not None:
            self._wait_until = float("-inf")
        if found.debugged:
            self._dog.on_debugger_attached(sampled.rank, self._clock.monotonic())

    # -- decisions

    def due(self) -> float | None:
        """Return when to call :meth:`poll` next."""
        return None if self._dog is None else min(self._dog.due(), self._outside_at, self._wait_until)

    def poll(self, now: float) -> list[Found]:
        """Return the facts to record, and the failures of ranks that have hung for too long."""
        if self._dog is None or self._attempt is None:
            return []
        if now >= self._outside_at:
            self._sample_from_outside()
        decision = self._dog.poll(now)
        if isinstance(decision, Suspect):
            self._request_stacks(decision.ranks, now)
        elif isinstance(decision, HangNotice):
            if self._outside_at != float("inf"):
                self._sample_from_outside()
            self._waiting = decision
            self._wait_until = now + _SAMPLING_TIMEOUT_S if self._sampling else now
        elif isinstance(decision, Withdrawn):
            return self._on_withdrawn(self._attempt, decision)
        elif isinstance(decision, Act) and self._spec.on_hang != "report":
            hung = failures.hung(self._attempt, self._explained(decision), decision.seconds)
            return [*self._take_notice(self._attempt, now), hung]
        return self._take_notice(self._attempt, now) if now >= self._wait_until else []

    def _take_notice(self, attempt: Attempt, now: float) -> list[Found]:
        """Return the notice that waits for stacks, if there is one, with those that have arrived."""
        notice, self._waiting, self._wait_until = self._waiting, None, float("inf")
        if notice is None:
            return []
        self._noticed_hang = notice.ranks, now - notice.seconds
        return [self._noticed(attempt, self._explained(notice), notice.seconds)]

    def behind_timeout(self, member: Member) -> list[ev.WorkerFailure]:
        """Return the failures of the ranks that a collective of ``member`` waited for until it timed out.

        Call it before the rank is noted as ended: an ended rank no longer counts as waiting for others.
        """
        if self._dog is None or self._attempt is None or member.attempt is not self._attempt:
            return []
        act = self._dog.behind_timeout(member.rank, self._clock.monotonic())
        return [] if act is None else failures.hung(self._attempt, self._explained(act), act.seconds)

    def _on_withdrawn(self, attempt: Attempt, decision: Withdrawn) -> list[Found]:
        """Return the fact that the ranks move again; none where the notice had not been given yet."""
        was_noticed = self._waiting is None
        self._waiting, self._noticed_hang, self._wait_until = None, None, float("inf")
        return [self._over(attempt, decision.ranks, decision.seconds)] if was_noticed else []

    def end_all(self) -> list[ev.HangOver]:
        """Return the end of a noticed hang, now that every function has ended."""
        if self._noticed_hang is None or self._attempt is None:
            return []
        (ranks, since), self._noticed_hang = self._noticed_hang, None
        return [self._over(self._attempt, ranks, self._clock.monotonic() - since)]

    def _over(self, attempt: Attempt, ranks: tuple[int, ...], seconds: float) -> ev.HangOver:
        now = self._clock.time()
        return ev.HangOver(time=now, attempt=attempt.number, seconds=round(seconds, 1), ranks=ranks)

    def _explained(self, decision: HangNotice | Act) -> Verdict:
        return explain(decision.states, self._stacks, decision.seconds)

    def _request_stacks(self, suspects: Sequence[int], now: float) -> None:
        assert self._attempt is not None
        self._asks += 1
        running = self._attempt.running()
        self._stacks, self._suspects = {}, frozenset(suspects)
        self._asked = frozenset(ranks_to_ask([member.rank for member in running], self._suspects))
        for member in running:
            if member.rank in self._asked:
                self._send(member, Inspect(ask=self._asks))
        self._outside_at = now + _ANSWER_TIMEOUT_S

    def _sample_from_outside(self) -> None:
        """Sample ranks that have not answered, on a thread; also the suspects where that shows C frames."""
        assert self._attempt is not None
        self._outside_at = float("inf")
        closer = self._suspects if py_spy() else frozenset[int]()
        asked = [member for member in self._attempt.running() if member.rank in self._asked]
        targets = [
            member
            for member in asked
            if (known := self._stacks.get(member.rank)) is None
            or (member.rank in closer and not fails_when_stopped(known))
        ]
        targets.sort(key=lambda member: member.rank in self._stacks)  # of the others nothing is known yet
        ask, self._sampling = self._asks, {member.rank for member in targets}

        def sample() -> None:
            for member in targets:
                self._post(
                    StacksSampled(ask, member.rank, self._engine.inspect(member.placement.slot, stacks=True))
                )

        if targets:
            self._start(sample)

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
        """Write all stacks to the run's directory and return the key. A thread writes them: storage may be slow."""
        self._kept += 1
        place = f"stacks/attempt-{attempt.number}-hang-{self._kept}.txt"
        pages = [process for rank in sorted(self._stacks) for process in self._stacks[rank]]
        page = f"{verdict.message}\n\n{text(pages)}".encode()

        def put() -> None:
            try:
                self._storage.put(place, page)
            except Exception as error:
                self._warn(f"The stacks of ranks that hang could not be kept in {place} ({error}).")

        self._start(put)
        return place

    def _start(self, work: Callable[[], None]) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=work, name="powertrain-hangs", daemon=True)
        self._threads.append(thread)
        thread.start()


def fails_when_stopped(processes: Sequence[ProcessStack]) -> bool:
    """Return True where a rank's main thread is in LightGBM. Pure.

    Reading C frames stops a process for a moment, which interrupts its system calls. LightGBM takes an interrupted wait
    for another rank for an error, and ends the training.
    """
    return any(
        "/lightgbm/" in frame.file
        for thread in (processes[0].threads if processes else ())
        if thread.main
        for frame in thread.frames
    )


def ranks_to_ask(running: Sequence[int], suspects: Collection[int]) -> list[int]:
    """Return the ranks to request stacks from: all of a few; of many the suspects, and others spread evenly. Pure."""
    if len(running) <= ASKED_AT_MOST:
        return list(running)
    first = [rank for rank in running if rank in suspects][: ASKED_AT_MOST - _KEPT_FOR_WAITING]
    taken = set(first)
    others, room = [rank for rank in running if rank not in taken], ASKED_AT_MOST - len(first)
    return sorted([*first, *(others[number * len(others) // room] for number in range(room))])
