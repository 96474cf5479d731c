"""Debuggers attached to ranks: their messages, their turns, and the deadlines that wait for them."""

from __future__ import annotations

from powertrain.run.active_run import ActiveRun
from powertrain.run.deadlines import Deadline
from powertrain.run.debugging.keyboard import Typed
from powertrain.run.debugging.sessions import Debugging
from powertrain.run.health.recovery import Recovery
from powertrain.run.workers import attempt as phases
from powertrain.run.workers.attempt import Member
from powertrain.run.workers.reports import Reports
from powertrain.wire.envelope import FromWorker
from powertrain.wire.from_worker import DebugOpened

#: Deadlines of the other ranks: a debugger holds one, and they wait for it.
_PAUSED = (Deadline.LATE, Deadline.ABSENT, Deadline.TOGETHER, Deadline.LAGGARDS)


class DebuggerAttachment:
    """Connects debuggers to the run. The controller's thread only."""

    def __init__(self, run: ActiveRun, reports: Reports, recovery: Recovery) -> None:
        self._run, self._reports, self._recovery = run, reports, recovery

    def open(self) -> Debugging:
        """Make the run's debuggers."""
        run = self._run
        return Debugging(
            "" if run.engine.restarts else run.engine.name,
            run.observer,
            send=run.send,
            post=run.post,
            warn_once=run.warn_once,
            begun=lambda: run.deadlines.pause(_PAUSED),
            over=self._on_all_closed,
            clock=run.clock.monotonic,
        )

    def on_message(self, member: Member, message: FromWorker) -> None:
        if isinstance(message, DebugOpened):
            self._run.hangs.on_debugger_opened(member)
        self._run.debugging.on_message(member, message)
        self._schedule()

    def on_typed(self, typed: Typed) -> None:
        self._run.debugging.on_typed(typed)
        self._schedule()

    def on_turn_over(self) -> None:
        self._run.debugging.on_turn_over()
        self._schedule()

    def _schedule(self) -> None:
        self._run.deadlines.set_at(Deadline.TURN, self._run.debugging.due)

    def _on_all_closed(self, seconds: float) -> None:
        """Debuggers were open for ``seconds``: resume the deadlines and act on failures that came meanwhile."""
        run = self._run
        run.deadlines.resume()
        self._reports.on_debuggers_closed(seconds)
        if run.attempt is not None and run.attempt.phase == phases.TRAINING:
            self._recovery.act_on_failures(run.attempt)
