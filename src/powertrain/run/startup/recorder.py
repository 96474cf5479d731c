"""The start of each attempt: times recorded as they come, and one fact when every rank has made its first step."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping

import msgspec

from powertrain.engine.base import Started
from powertrain.run import events as ev
from powertrain.run.startup import timeline
from powertrain.run.startup.timeline import AttemptTimes, RankStart
from powertrain.wire.from_worker import FirstStep

#: Seconds in the queue from which the missing resources are named.
_WORTH_A_REASON = 1.0


class StartupRecorder:
    """Records the start of attempts. The controller's thread only, which leaves out messages of ended attempts."""

    def __init__(
        self,
        record: Callable[[ev.StartupMeasured], None],
        engine: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``record`` is given one fact for each attempt; ``engine`` is the name of the run's."""
        self._record, self._engine, self._clock = record, engine, clock
        self._begun = clock()
        self._opening: Mapping[str, float] = {}
        self._opening_rest = timeline.PREPARE
        self._asked: float | None = None
        #: The attempt that is starting, and its number; None once its fact is written.
        self._start: AttemptTimes | None = None
        self._number = self._steps_left = 0
        self._waited_for = ""
        #: True when the ranks run a whole script.
        self.runs_script = False
        #: True when its engine may fork workers from the driver.
        self.forks_driver = False
        self._had_torch = sys.modules.get("torch") is not None

    def launched(self, at: float, parts: Mapping[str, float]) -> None:
        """Note that the run began ``at`` the call of ``fit``; ``parts`` of the time since then are known by phase."""
        self._begun, self._opening = at, dict(parts)

    def slots_asked(self) -> None:
        if self._asked is None:
            self._asked = self._clock()

    def attempt_began(self, number: int, world_size: int, waited_for: str = "") -> None:
        """Note that all slots are granted; ``waited_for`` is the engine's last message about missing resources."""
        now = self._clock()
        asked = self._asked if self._asked is not None else now
        self._start = AttemptTimes(
            begun=self._begun,
            ranks=[RankStart() for _ in range(world_size)],
            opening=self._opening,
            opening_rest=self._opening_rest,
            asked=asked,
            granted=now,
        )
        self._number, self._steps_left = number, world_size
        self._waited_for = waited_for if now - asked >= _WORTH_A_REASON else ""

    def started(self, rank: int, event: Started) -> None:
        """Note that a rank's process exists."""
        if self._start is not None:
            known = self._start.ranks[rank]
            known.started = self._clock()
            known.awaited = {timeline.IMPORTS: event.imports, timeline.SERVER: event.waited - event.imports}

    def greeted(self, rank: int) -> None:
        """Note the handshake of a rank."""
        if self._start is not None:
            self._start.ranks[rank].greeted = self._clock()

    def trained(self) -> None:
        """Note that every rank was ordered to call the user's function."""
        if self._start is not None:
            self._start.trained = self._clock()

    def first_step(self, rank: int, message: FirstStep) -> None:
        """Note that a rank has made its first step, or has ended without one. The last of them writes the fact."""
        start = self._start
        if start is None or start.ranks[rank].done is not None:
            return
        known = start.ranks[rank]
        known.done, known.has_stepped = self._clock(), message.stepped
        known.loaded, known.imported = message.loaded, message.imported
        known.own = {
            timeline.FUNCTION: message.function,
            timeline.DATA: message.data,
            timeline.SET_UP: message.setup,
            timeline.FIRST_STEP: message.step,
        }
        self._steps_left -= 1
        if self._steps_left == 0:
            self._write(start)

    def over(self) -> None:
        """Note that the attempt is given up or at its end. An unfinished start is written as far as it is known; the
        next one begins here."""
        if self._start is not None:
            self._write(self._start)
        if self._opening_rest != timeline.CLEARING or self._asked is not None:
            self._begun, self._asked = self._clock(), None
            self._opening, self._opening_rest = {}, timeline.CLEARING

    def _write(self, start: AttemptTimes) -> None:
        self._start = None
        fact = fact_of(start, self._number, self._clock())
        self._record(
            msgspec.structs.replace(
                fact,
                waited_for=self._waited_for,
                engine=self._engine,
                torch_was_loaded=self._had_torch,
                runs_script=self.runs_script,
                forks_driver=self.forks_driver,
            )
        )


def fact_of(start: AttemptTimes, attempt: int, now: float) -> ev.StartupMeasured:
    """Return the fact of a start; ``now`` is when an unfinished one was given up."""
    at, last = time.time(), timeline.slowest(start)
    kept = timeline.columns(start.by_rank(now), first=last)
    path = {name: round(seconds, 4) for name, seconds in timeline.critical_path(start, now).items()}
    return ev.StartupMeasured(
        time=at,
        attempt=attempt,
        rank=last if timeline.stands_out(start, last) else -1,
        seconds=round(start.ended(now) - start.begun, 4),
        world_size=len(start.ranks),
        path=path,
        ranks=kept.ranks,
        phases=dict(kept.phases),
        spread=dict(kept.spread),
        unfinished=tuple(number for number, rank in enumerate(start.ranks) if not rank.has_stepped),
        loaded=start.ranks[last].loaded,
        imported=start.ranks[last].imported,
    )
