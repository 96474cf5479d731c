"""Validations within a run: which checkpoints are validated, what the outcome changes, and the wait for the last."""

from __future__ import annotations

from powertrain.checkpoint.manifest import Manifest, Validation
from powertrain.run import events as ev
from powertrain.run.active_run import ActiveRun
from powertrain.run.checkpoints.validations import (
    PENDING,
    Task,
    Validations,
    cut_off,
    requested_validation,
    task_of,
)
from powertrain.run.deadlines import Deadline
from powertrain.run.next_steps import EndRun


class Validating:
    """Connects the validations to the run. The controller's thread only."""

    def __init__(self, run: ActiveRun) -> None:
        self._run = run
        #: What follows once no validation waits or runs; None while the run does not wait for them.
        self._next: EndRun | None = None

    def open(self) -> Validations:
        """Make the run's validations, with those that an earlier start did not bring to an end."""
        run = self._run
        validations = Validations(
            run.spec,
            run.engine,
            run.hub,
            post=run.post,
            over=self._on_ended,
            idle=self._on_idle,
            remind=lambda when: run.deadlines.set_at(Deadline.VALIDATION, when),
            warn=run.warn,
            clock=run.clock.monotonic,
        )
        if run.spec.validation is not None:
            for manifest in cut_off(run.checkpoints.kept, run.checkpoints.status):
                validations.ask(self._task_of(manifest))
        return validations

    def validate(self, manifest: Manifest) -> None:
        """Have a committed checkpoint validated, if its report requested that."""
        if requested_validation(manifest) is not None and self._run.spec.validation is not None:
            self._run.checkpoints.validated(manifest.name, PENDING)
            self._run.validations.ask(self._task_of(manifest))

    def _task_of(self, manifest: Manifest) -> Task:
        config, requested = self._run.spec.validation, requested_validation(manifest)
        assert config is not None
        assert requested is not None
        return task_of(config, requested, manifest, self._run.checkpoints.value(manifest))

    def _on_ended(self, task: Task, found: Validation) -> None:
        """Add the metrics to the checkpoint, which may change which ones are kept."""
        run = self._run
        if run.stop.is_fenced:
            return
        run.checkpoints.validated(task.checkpoint, found)
        run.record(
            ev.ValidationEnded(
                time=run.clock.time(),
                checkpoint=task.checkpoint,
                row=task.row,
                status=found.status,
                metrics=found.metrics,
                reason=found.error,
                seconds=found.seconds,
            )
        )
        self.discard_old()
        run.queries.answer()

    def discard_old(self) -> None:
        """Apply retention, except to checkpoints that may be being read.

        Those are the ones that are validated, and the one that the attempt started from until every rank has reported.
        """
        attempt, pinned = self._run.attempt, set(self._run.validations.names)
        if attempt is not None and attempt.rows.silent():
            pinned |= {m.name for m in self._run.checkpoints.kept if m.row == attempt.first_row - 1}
        self._run.checkpoints.discard_old(pinned)

    @property
    def is_awaited(self) -> bool:
        """True while the end of the run waits for validations."""
        return self._next is not None

    def wait(self, then: EndRun) -> bool:
        """Take the step ``then`` when all validations have ended. Returns False where there is nothing to wait for."""
        run = self._run
        if not run.validations.busy or run.stop.is_fenced or run.stop.is_urgent:
            return False
        self._next = then
        run.slots.withdraw_demand()
        if run.validations.wants_slot:  # it may be one that the ranks held, which have exited
            run.slots.release()
        run.validations.training_over()
        return True

    def _on_idle(self) -> None:
        if self._next is not None:
            then, self._next = self._next, None
            self._run.flow.proceed(then)

    def on_overdue(self) -> None:
        self._run.validations.overdue()

    def cut_short(self) -> None:
        """Wait for no validation any longer."""
        if names := ", ".join(self._run.validations.names):
            self._run.warn(
                f"The validation of {names} was cut off. It is started again when the run is resumed."
            )
        self._run.validations.cut_short()
