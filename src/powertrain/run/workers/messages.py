"""Messages of processes, routed by their sender and their type."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from powertrain.errors import WireError
from powertrain.run.active_run import ActiveRun
from powertrain.run.health import failures
from powertrain.run.inbox import UnreadableMessage
from powertrain.run.workers.attempt import Member
from powertrain.run.workers.reports import Reports
from powertrain.wire.from_controller import MessageRefused
from powertrain.wire.from_worker import Noted, ShareUploaded, UploadTrouble
from powertrain.wire.keys import Received
from powertrain.wire.values import ErrorReport, Point

#: Handlers of the messages of ranks, by type.
RankHandlers = Mapping[type, Callable[[Member, Any], None]]


class WorkerMessages:
    """Takes in batches of messages. The controller's thread only, but for :attr:`batches`."""

    def __init__(self, run: ActiveRun, reports: Reports, handlers: RankHandlers) -> None:
        """``handlers`` are called for messages of ranks of the current attempt."""
        self._run, self._reports, self._handlers = run, reports, handlers
        #: Batches that have arrived; the hub's thread appends.
        self.batches: deque[Received] = deque()
        #: Warnings of ranks that are not repeated.
        self._shown: set[str] = set()

    def take_in(self) -> None:
        """Handle all batches. Points are kept together, and batches acknowledged once theirs are."""
        batches = [self.batches.popleft() for _ in range(len(self.batches))]
        for received in batches:
            self._on_batch(received)
        self._reports.flush()
        for received in batches:
            self._run.hub.acknowledge(received)

    def _on_batch(self, received: Received) -> None:
        member = self._run.members.get(received.sender)
        if member is None:
            self._on_batch_beside_ranks(received)
            return
        if received.envelope.boundary:
            member.attempt.has_trained = True
        points: list[Point] = []
        for message in received.envelope.messages:
            if isinstance(message, Point):
                if self._reports.can_follow(member, message, len(points)):
                    points.append(message)
            else:
                self._reports.add(member, points)
                points = []
                handler = self._handlers.get(type(message))
                if handler is not None and member.attempt is self._run.attempt:
                    handler(member, message)
        self._reports.add(member, points)

    def _on_batch_beside_ranks(self, received: Received) -> None:
        """A validation or an uploader has sent something."""
        run = self._run
        if run.validations.owns_process(received.sender):
            run.validations.on_messages(received)
        elif run.uploaders.is_uploader(received.sender):
            for message in received.envelope.messages:
                if isinstance(message, ShareUploaded):
                    run.checkpoints.on_share_uploaded(message)
                elif isinstance(message, UploadTrouble):
                    run.checkpoints.trouble(message)

    def on_noted(self, member: Member, message: Noted) -> None:
        """A rank warns."""
        if message.once and message.message in self._shown:
            return
        if message.once:
            self._shown.add(message.message)
        self._run.warn(message.message, member.rank)

    def on_unreadable(self, unreadable: UnreadableMessage) -> None:
        """Fail a rank whose messages cannot be read: it would wait for an answer forever."""
        run = self._run
        member = run.members.get(unreadable.sender)
        if member is None or member.attempt is not run.attempt or member.exited or member.outcome is not None:
            run.warn(unreadable.problem)
            return
        # A process that the run cannot kill exits by itself when it gets this.
        run.send(member, MessageRefused(reason=unreadable.problem))
        report = ErrorReport(type=WireError.__name__, message=unreadable.problem, traceback="")
        run.flow.fail(member, failures.raised(member, report, "raised"))
