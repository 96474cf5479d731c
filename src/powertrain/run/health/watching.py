"""The watch over ranks that train: heartbeats in, hangs recorded or acted upon."""

from __future__ import annotations

from powertrain.run import events as ev
from powertrain.run.active_run import ActiveRun
from powertrain.run.deadlines import Deadline
from powertrain.run.health.hangs import StacksSampled
from powertrain.run.health.waits import is_compiling
from powertrain.run.inbox import Disconnected
from powertrain.run.workers import attempt as phases
from powertrain.run.workers.attempt import Member
from powertrain.wire.from_worker import Beat, Stacks

#: Seconds after which the terminal says that a rank compiles.
_COMPILING_SHOWN_AFTER_S = 5.0


class HangWatch:
    """Feeds the watchdog and carries out what it decides. The controller's thread only."""

    def __init__(self, run: ActiveRun) -> None:
        self._run = run
        #: By key the ranks that compile, and since when.
        self._compiling: dict[bytes, float] = {}

    def schedule(self) -> None:
        """Look at the ranks again when the watchdog says so."""
        due = self._run.hangs.due()
        self._run.deadlines.set_at(Deadline.WATCH, float("inf") if due is None else due)

    def on_due(self) -> None:
        for found in self._run.hangs.poll(self._run.deadlines.now()):
            if isinstance(found, (ev.HangNoticed, ev.HangOver)):
                self._run.record(found)
            else:
                self.fail_hung(found)
        self.schedule()

    def on_beat(self, member: Member, message: Beat) -> None:
        """Note the heartbeat of a rank."""
        member.beat = message
        if message.steps:
            member.attempt.has_trained = True
        hold = member.attempt.hold
        if hold is not None and member.rank in hold.reached:
            self._run.hangs.on_report(member.rank)  # it stands still because it was asked to
        self._run.hangs.on_beat(member, message)
        self.schedule()
        self._show_compiling(member, message)
        self.show_data(member, message.data)

    def _show_compiling(self, member: Member, beat: Beat) -> None:
        """Show that a rank compiles, once it has done so for some seconds: no step ends meanwhile."""
        if not is_compiling(beat):
            self._compiling.pop(member.key, None)
            return
        now = self._run.deadlines.now()
        if now - self._compiling.setdefault(member.key, now) >= _COMPILING_SHOWN_AFTER_S and beat.where:
            frame = beat.where.frame
            self._run.inform_once(
                f"torch.compile is compiling what {frame.file}:{frame.line} in {frame.function} calls; steps follow "
                "when it is done."
            )

    def show_data(self, member: Member, text: str) -> None:
        """Show how far data have been read: the same on every rank, so rank 0's message is enough."""
        if member.rank == 0 and text:
            self._run.observer.data(text)

    def on_disconnect(self, event: Disconnected) -> None:
        """The link of a rank is closed. It connects again by itself unless its process has ended."""
        if (member := self._run.members.get(event.key)) is not None:
            self._run.hangs.on_disconnect(member)
            self.schedule()

    def on_stacks(self, member: Member, message: Stacks) -> None:
        self._run.hangs.on_stacks(member, message)
        self.schedule()

    def on_stacks_sampled(self, sampled: StacksSampled) -> None:
        """A rank that did not answer was inspected from outside."""
        self._run.hangs.on_stacks_sampled(sampled)
        self.schedule()

    def fail_hung(self, hung: list[ev.WorkerFailure]) -> None:
        """Fail the ranks that hang for too long; a rank in this very process cannot be ended."""
        run, attempt = self._run, self._run.attempt
        if attempt is None or attempt.phase != phases.TRAINING or run.engine.shares_driver_process:
            return
        for failure in hung:
            run.flow.fail(attempt.members[failure.rank], failure)
