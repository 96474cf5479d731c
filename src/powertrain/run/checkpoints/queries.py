"""Queries of ranks for the committed checkpoints: each waits until those that its rank reported are settled."""

from __future__ import annotations

from collections.abc import Callable

from powertrain.run.checkpoints.manager import CheckpointManager, described
from powertrain.run.deadlines import Deadline, Deadlines
from powertrain.run.workers.attempt import Member
from powertrain.wire.envelope import FromController
from powertrain.wire.from_controller import Reported
from powertrain.wire.from_worker import AskCheckpoints


class CheckpointQueries:
    """Queries that wait for their answer. The controller's thread only."""

    def __init__(
        self,
        checkpoints: CheckpointManager,
        deadlines: Deadlines,
        send: Callable[[Member, FromController], None],
        is_unvalidated: Callable[[int], bool],
    ) -> None:
        """``is_unvalidated`` returns True while a validation of a row up to the given one is still to come."""
        self._checkpoints, self._deadlines = checkpoints, deadlines
        self._send, self._is_unvalidated = send, is_unvalidated
        self._waiting: list[tuple[Member, AskCheckpoints, float]] = []

    def add(self, member: Member, ask: AskCheckpoints) -> None:
        """Answer the query of a rank, now or when its checkpoints are settled."""
        until = self._deadlines.now() + ask.timeout if ask.timeout >= 0 else float("inf")
        self._waiting.append((member, ask, until))
        self.answer()

    def answer(self) -> None:
        """Answer those whose checkpoints are all settled, or whose time is up."""
        waiting, self._waiting = self._waiting, []
        for member, ask, until in waiting:
            if self._is_open(member, ask) and self._deadlines.now() < until:
                self._waiting.append((member, ask, until))
                continue
            found = [
                described(m, self._checkpoints.value(m), self._checkpoints.status(m))
                for m in self._checkpoints.kept
            ]
            self._send(member, Reported(ask=ask.ask, checkpoints=found))
        first = min((until for *_, until in self._waiting), default=float("inf"))
        self._deadlines.set_at(Deadline.QUERIES, first)

    def _is_open(self, member: Member, ask: AskCheckpoints) -> bool:
        unsettled = any(pending.row <= ask.row for pending in self._checkpoints.pending)
        unclosed = member.attempt.rows.closed < ask.row
        return unsettled or unclosed or (ask.validated and self._is_unvalidated(ask.row))
