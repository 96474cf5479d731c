"""The slots of a run: how many to request, which it holds, and how it continues when some are missing."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from powertrain.engine import base
from powertrain.errors import EngineError, ResourceError
from powertrain.run import events as ev
from powertrain.run.deadlines import Deadline, Deadlines
from powertrain.run.lifecycle import WAITING
from powertrain.run.record.facts import Facts
from powertrain.run.scaling import policy
from powertrain.run.scaling.policy import Elastic
from powertrain.run.scaling.reservation import Reservation
from powertrain.run.spec import RunSpec

#: Seconds for an engine to report its capacity, of which Ray's may take one until it counts what was just released;
#: without a report, the maximum is requested.
_CAPACITY_TIMEOUT_S = 4.0
#: Seconds that a run which can continue with fewer waits for slots that seemed to be available.
_MORE_SLOTS_TIMEOUT_S = 10.0


class Slots:
    """The slots that a run holds. The controller's thread only."""

    #: Called when all requested slots are held. Set before the first request.
    on_complete: Callable[[], None]

    def __init__(
        self,
        spec: RunSpec,
        engine: base.Engine,
        elastic: Elastic,
        deadlines: Deadlines,
        facts: Facts,
    ) -> None:
        self._spec, self._engine, self._elastic, self._deadlines = spec, engine, elastic, deadlines
        self._facts = facts
        self._claim: base.Claim | None = None
        self._awaits_capacity = False
        self.wanted = 0
        self.held: list[base.Slot] = []
        #: Slots for more workers, beside those of the running attempt.
        self.reservation = Reservation(engine, spec.shape, deadlines)
        #: The last message of the engine about missing resources.
        self.reason = ""

    # -- requests

    def begin(self) -> None:
        """Request slots; an elastic run first waits for the engine's capacity."""
        if self._elastic.is_elastic and self._engine.restarts:
            self._awaits_capacity = True
            self._deadlines.set(Deadline.CAPACITY, _CAPACITY_TIMEOUT_S)
            self.watch()
        else:
            self.request()

    def watch(self) -> None:
        """Subscribe to the engine's capacity, and tell the engine how many slots the run would use."""
        self._engine.watch_capacity(self._spec.shape, self._elastic.limit)

    def withdraw_demand(self) -> None:
        """Withdraw the run's demand: the cluster need not grow for it any more."""
        if self._elastic.is_elastic and self._engine.restarts:
            self._engine.watch_capacity(self._spec.shape, 0)

    def on_capacity_known(self) -> None:
        """Request slots, now that the capacity is known or will stay unknown."""
        self._deadlines.cancel(Deadline.CAPACITY)
        if self._awaits_capacity:
            self._awaits_capacity = False
            self.request()

    def request(self) -> None:
        """Request as many as there is room for, fewer where the engine can never give so many; held ones are
        released."""
        self.release()
        problem: ResourceError | None = None
        for count in policy.sizes_to_try(self._spec.min_workers, self._elastic.size()):
            self._record_request(count)
            try:
                self._request_count(count)
                return
            except ResourceError as error:
                problem = problem or error
        raise problem or ResourceError("no number of workers was allowed")

    def again(self) -> None:
        """Reuse the held slots, and request others for lost ones."""
        if len(self.held) == self.wanted:
            self._record_request(self.wanted)
            self.on_complete()
        elif self._engine.replaces and self.held and not self._elastic.is_elastic:
            self._record_request(self.wanted)
            self._request_count(self.wanted - len(self.held))
        else:
            self.request()

    def change_to(self, workers: int) -> None:
        """Continue with ``workers`` slots: with the held ones, and reserved or new ones where they are short."""
        self.held += self.reservation.take(workers - len(self.held))
        self._engine.release(self.held[workers:])
        self.held = self.held[:workers]
        self._record_request(workers)
        missing = workers - len(self.held)
        if missing == 0:
            self.on_complete()
            return
        try:
            self._request_count(missing)
        except (ResourceError, EngineError):
            self.on_overdue()
            return
        if len(self.held) >= self._spec.min_workers and len(self.held) < self.wanted:
            self._deadlines.set(Deadline.SLOTS, _MORE_SLOTS_TIMEOUT_S)

    def on_overdue(self) -> None:
        """Continue with the held slots, if they are enough: the additional ones did not come."""
        self._give_up_claim()
        if len(self.held) >= self._spec.min_workers:
            self.wanted = len(self.held)
            self.on_complete()
        else:
            self.request()

    def _request_count(self, count: int) -> None:
        self._give_up_claim()
        self.reason = ""
        if self._spec.queue_timeout is not None:
            self._deadlines.set(Deadline.QUEUE, self._spec.queue_timeout)
        self._claim = self._engine.request(count, self._spec.shape)

    def timeout_message(self) -> str:
        """Return the error message for slots that were not granted within the timeout."""
        self._give_up_claim()
        missing = self.reason or f"{len(self.held)} of {self.wanted} workers were placed"
        return (
            f"There was no room for the run within {self._spec.queue_timeout:g} s: {missing}. Wait longer with "
            "ScalingConfig(queue_timeout_s=...), ask for fewer workers or resources, or free what others hold."
        )

    def owns_claim(self, claim: str) -> bool:
        """Return True when this claim is the open one."""
        return self._claim is not None and claim == self._claim.id

    def _give_up_claim(self) -> None:
        """Withdraw the open claim: later grants for it are released."""
        self._deadlines.cancel(Deadline.SLOTS, Deadline.QUEUE)
        if self._claim is not None:
            self._engine.withdraw(self._claim)
            self._claim = None

    def _record_request(self, count: int) -> None:
        self.wanted = count
        number = self._facts.state.attempt + 1
        self._facts.record(ev.SlotsRequested(time=self._deadlines.clock.time(), attempt=number, count=count))

    # -- more slots, while the ranks train

    def reserve(self, workers: int) -> bool:
        """Return True when there are slots for ``workers``; otherwise request the missing ones."""
        return self.reservation.ensure(workers - len(self.held))

    def is_reserving(self, workers: int) -> bool:
        """Return True while slots for ``workers`` are awaited."""
        return self.reservation.is_awaiting(workers - len(self.held))

    def on_reservation_overdue(self) -> None:
        """Grow by the slots that were granted: the engine has no room for more."""
        if self.reservation.slots:
            count = len(self.held) + len(self.reservation.slots)
            self._elastic.set_capacity(count, self._deadlines.now())
        self.reservation.on_overdue()

    # -- events of the engine

    def on_granted(self, event: base.Granted) -> None:
        """Keep the granted slots; release those of a withdrawn claim."""
        if self.reservation.owns_claim(event.claim):
            self.reservation.on_granted(event)
            return
        if not self.owns_claim(event.claim):
            self._engine.release(event.slots)
            return
        self.held += event.slots
        if len(self.held) == self.wanted:
            self._deadlines.cancel(Deadline.SLOTS, Deadline.QUEUE)
            self.on_complete()

    def on_waiting(self, event: base.Waiting) -> None:
        if not self.owns_claim(event.claim):
            return
        state = self._facts.state
        self.reason = event.reason
        if state.state == WAITING:
            self._facts.record(
                ev.SlotsWaited(
                    time=self._deadlines.clock.time(),
                    attempt=state.attempt + 1,
                    granted=max(event.granted, len(self.held)),
                    count=self.wanted,
                    reason=f"{event.reason}; {self._wait_limit()}",
                )
            )

    def _wait_limit(self) -> str:
        left = self._deadlines.seconds_left(Deadline.QUEUE)
        if left is None:
            return "it waits as long as it takes (queue_timeout_s sets an end)"
        ends = self._deadlines.clock.time() + left
        return f"it waits until {time.strftime('%H:%M:%S', time.localtime(ends))} (queue_timeout_s)"

    def lose(self, slot: base.Slot) -> bool:
        """Forget a lost slot; return True when the run held it, not just reserved it."""
        self.reservation.forget(slot, is_lost=True)
        left = [held for held in self.held if held.id != slot.id]
        was_ours, self.held = len(left) < len(self.held), left
        return was_ours

    # -- releasing

    def drop(self, ids: Collection[str]) -> None:
        """Release these slots."""
        self._engine.release([slot for slot in self.held if slot.id in ids])
        self.held = [slot for slot in self.held if slot.id not in ids]

    def release(self) -> None:
        """Release all slots, also the reserved ones."""
        self.reservation.cancel()
        self._engine.release(self.held)
        self.held = []
