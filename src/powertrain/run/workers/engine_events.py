"""Events of the engine, routed to the part whose claim or slot they are about."""

from __future__ import annotations

from powertrain.engine import base
from powertrain.errors import ResourceError
from powertrain.run.active_run import ActiveRun
from powertrain.run.health.recovery import Recovery


class EngineEvents:
    """Slots that are granted, awaited, refused and lost; processes that exit. The controller's thread only."""

    def __init__(self, run: ActiveRun, recovery: Recovery) -> None:
        self._run, self._recovery = run, recovery

    def on_granted(self, event: base.Granted) -> None:
        if self._run.validations.owns_claim(event.claim):
            self._run.validations.on_slots_granted(event)
        else:
            self._run.slots.on_granted(event)

    def on_waiting(self, event: base.Waiting) -> None:
        if self._run.validations.owns_claim(event.claim):
            self._run.validations.on_slots_awaited(event)
        else:
            self._run.slots.on_waiting(event)

    def on_refused(self, event: base.ClaimRefused) -> None:
        """A claim will never be met: the run fails unless the slots that it holds are enough."""
        run = self._run
        if run.validations.owns_claim(event.claim):
            run.validations.on_slots_refused(event)
        elif run.slots.owns_claim(event.claim):
            if not run.elastic.is_elastic or len(run.slots.held) < run.spec.min_workers:
                raise ResourceError(event.reason)
            run.warn(event.reason)
            run.slots.on_overdue()
        elif run.slots.reservation.owns_claim(event.claim):
            run.warn_once(event.reason)
            run.slots.reservation.on_refused()

    def on_capacity(self, event: base.Capacity) -> None:
        self._run.elastic.set_capacity(event.count, self._run.deadlines.now())
        self.on_capacity_known()
        self._run.consider_resize()

    def on_capacity_known(self) -> None:
        """The engine has reported its capacity, or will not: request the slots."""
        if self._run.stop.request is None and self._run.outcome is None:
            self._run.slots.on_capacity_known()

    def on_queue_timeout(self) -> None:
        raise ResourceError(self._run.slots.timeout_message())

    def on_exited(self, event: base.Exited) -> None:
        if not self._is_beside_ranks(event):
            self._recovery.on_rank_exited(event)

    def on_slot_lost(self, event: base.SlotLost) -> None:
        if not self._is_beside_ranks(event):
            self._recovery.on_slot_lost(event)

    def _is_beside_ranks(self, event: base.Exited | base.SlotLost) -> bool:
        """Handle the end of a validation or an uploader; return False where it was neither."""
        run = self._run
        if run.validations.owns_slot(event.slot.id):
            run.validations.on_process_gone(event)
            return True
        if run.uploaders.owns_slot(event.slot.id):
            why = "the uploader process of its node ended several times in a row; its log may show why"
            run.uploaders.on_uploader_gone(
                event.slot, lambda share: run.checkpoints.fail_lost_shares([share], why)
            )
            return True
        return False
