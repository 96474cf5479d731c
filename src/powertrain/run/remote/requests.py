"""Requests of the command line (``powertrain stop``, ``resize``, ``stacks``, ``profile``, ``show``), answered by the
controller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from powertrain.run.active_run import ActiveRun
from powertrain.run.deadlines import Deadline
from powertrain.run.ending import Ending
from powertrain.run.remote import protocol, status
from powertrain.run.remote.inspections import Inspections, StacksFromOutside
from powertrain.run.remote.profiles import Profiles, Submit
from powertrain.run.scaling.policy import in_words
from powertrain.run.workers import attempt as phases
from powertrain.run.workers.attempt import Attempt, Member
from powertrain.run.workers.reports import Reports
from powertrain.wire.from_worker import Profiled, Stacks


class Requests:
    """Answers requests from outside. The controller's thread only."""

    def __init__(self, run: ActiveRun, reports: Reports, ending: Ending, submit: Submit) -> None:
        self._run, self._reports, self._ending = run, reports, ending
        self._inspections = Inspections(run.engine, run.send, run.post, run.clock.monotonic)
        self._profiles = Profiles(run.storage, run.send, submit, run.inform_once, run.clock.monotonic)
        self._handlers: dict[type, Callable[[Any, protocol.ControlClient], None]] = {
            protocol.ResizeRequest: self._on_resize,
            protocol.StopRequest: self._on_stop,
            protocol.LookAround: self._on_stacks_request,
            protocol.ProfileSteps: self._on_profile_request,
            protocol.Describe: self._on_describe,
        }

    def on_request(self, event: status.ControlRequest) -> None:
        self._handlers[type(event.request)](event.request, event.client)

    def close(self) -> None:
        self._inspections.close()
        self._profiles.close()

    def _on_resize(self, request: protocol.ResizeRequest, client: protocol.ControlClient) -> None:
        """Change the number of workers, or answer why that is not possible."""
        run, spec = self._run, self._run.spec
        lowest, highest = spec.min_workers, spec.max_workers
        if not run.elastic.is_elastic or not run.engine.restarts:
            client.answer(
                f"The run {spec.run.name!r} has a fixed number of workers. Start it with "
                "ScalingConfig(num_workers=(min, max)) to be able to change it.",
                False,
            )
        elif not lowest <= request.workers <= highest:
            client.answer(f"The run {spec.run.name!r} trains with {lowest} to {highest} workers.", False)
        elif run.stop.request is not None or run.has_returned:
            client.answer(f"The run {spec.run.name!r} is ending.", False)
        else:
            reason = f"{in_words(request.workers)} {'was' if request.workers == 1 else 'were'} asked for"
            run.elastic.set_limit(request.workers, reason, run.deadlines.now())
            run.slots.watch()
            run.consider_resize()
            size = run.attempt.world_size if run.attempt is not None else run.slots.wanted
            client.answer(run.elastic.prospect(request.workers, size))

    def _on_stop(self, request: protocol.StopRequest, client: protocol.ControlClient) -> None:
        """End as Ctrl-C does, but without its time limit; with ``now`` as the second Ctrl-C does."""
        run = self._run
        is_over, can_kill = self._ending.is_outcome_certain, run.engine.owns_processes
        client.answer(
            status.stop_prospect(
                run.state, run.attempt, request, ends_in_place=is_over, can_be_ended=can_kill
            )
        )
        if request.now and (is_over or can_kill):
            run.stop.interrupts = max(run.stop.interrupts, 2)
        if is_over:
            self._ending.hurry(2 if request.now else 1)
            return
        self._ending.stop("asked", status.stop_reason(request.by))
        if not can_kill or run.outcome is not None:
            return
        if request.now:
            self._ending.end_now()
        elif request.within:
            run.deadlines.shorten(Deadline.GRACE, request.within)

    def _on_describe(self, request: protocol.Describe, client: protocol.ControlClient) -> None:
        client.send_part(self._description())
        client.answer("")

    def _description(self) -> protocol.Description:
        run, now, row_at = self._run, self._run.deadlines.now(), self._reports.row_closed_at
        return status.describe(
            run.state,
            run.attempt,
            run.checkpoints.pending,
            row_age=now - row_at if row_at else -1.0,
            now=now,
        )

    # -- stacks

    def _on_stacks_request(self, request: protocol.LookAround, client: protocol.ControlClient) -> None:
        attempt = self._attempt_with_ranks(client)
        if attempt is None:
            return
        client.send_part(self._description())
        self._inspections.begin(attempt, request.ranks, client)
        self._schedule()

    def on_stacks(self, member: Member, message: Stacks) -> None:
        """A rank has sent its stacks."""
        self._inspections.on_stacks(member, message)
        self._schedule()

    def on_stacks_from_outside(self, sampled: StacksFromOutside) -> None:
        """A rank that did not answer was inspected from outside."""
        self._inspections.on_stacks_from_outside(sampled)
        self._schedule()

    def on_inspections_due(self) -> None:
        self._inspections.poll(self._run.deadlines.now())
        self._schedule()

    def _schedule(self) -> None:
        self._run.deadlines.set_at(Deadline.INSPECTIONS, self._inspections.due())

    def _attempt_with_ranks(self, client: protocol.ControlClient) -> Attempt | None:
        """Return the current attempt; None, and the client is answered, where it has no ranks."""
        run, attempt = self._run, self._run.attempt
        if attempt is None or attempt.phase in (phases.DISMISSED, phases.CLEARING):
            client.answer(f"The run {run.spec.run.name!r} has no ranks now: it is {run.state.state}.", False)
            return None
        return attempt

    # -- profiles

    def _on_profile_request(self, request: protocol.ProfileSteps, client: protocol.ControlClient) -> None:
        attempt = self._attempt_with_ranks(client)
        if attempt is None:
            return
        client.send_part(self._description())
        self._profiles.begin(attempt, request, client)
        self._schedule_profiles()

    def on_profiled(self, member: Member, message: Profiled) -> None:
        """A rank has sent its profile."""
        self._profiles.on_profiled(member, message)
        self._schedule_profiles()

    def on_profiles_due(self) -> None:
        self._profiles.poll(self._run.deadlines.now())
        self._schedule_profiles()

    def _schedule_profiles(self) -> None:
        self._run.deadlines.set_at(Deadline.PROFILES, self._profiles.due())
