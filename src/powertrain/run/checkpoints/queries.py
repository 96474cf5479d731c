"""Ranks that ask which checkpoints there are, and wait until those they have reported are settled."""

from __future__ import annotations

import time
from collections.abc import Callable, MutableMapping

from powertrain.run.checkpoints.tracker import Checkpoints, described
from powertrain.run.workers.attempt import Member
from powertrain.wire.envelope import FromController
from powertrain.wire.from_controller import Reported
from powertrain.wire.from_worker import AskCheckpoints


class Asks:
    """Questions that wait for their answer. The controller's thread only; the deadline is called "asks"."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        deadlines: MutableMapping[str, float],
        send: Callable[[Member, FromController], None],
        is_unvalidated: Callable[[int], bool],
    ) -> None:
        """``is_unvalidated`` tells whether a validation of a row up to the given one is still to come."""
        self._checkpoints, self._deadlines = checkpoints, deadlines
        self._send, self._is_unvalidated = send, is_unvalidated
        self._waiting: list[tuple[Member, AskCheckpoints, float]] = []

    def ask(self, member: Member, ask: AskCheckpoints) -> None:
        until = time.monotonic() + ask.timeout if ask.timeout >= 0 else float("inf")
        self._waiting.append((member, ask, until))
        self.answer()

    def answer(self) -> None:
        """Answer those whose checkpoints are all settled, or whose time is up."""
        waiting, self._waiting = self._waiting, []
        for member, ask, until in waiting:
            if self._is_open(member, ask) and time.monotonic() < until:
                self._waiting.append((member, ask, until))
                continue
            found = [
                described(m, self._checkpoints.value(m), self._checkpoints.status(m))
                for m in self._checkpoints.kept
            ]
            self._send(member, Reported(ask=ask.ask, checkpoints=found))
        self._deadlines.pop("asks", None)
        if (first := min((until for *_, until in self._waiting), default=float("inf"))) != float("inf"):
            self._deadlines["asks"] = first

    def _is_open(self, member: Member, ask: AskCheckpoints) -> bool:
        unsettled = any(pending.row <= ask.row for pending in self._checkpoints.pending)
        unclosed = member.attempt.rows.closed < ask.row
        return unsettled or unclosed or (ask.validated and self._is_unvalidated(ask.row))
