"""Profiles of ranks for the command line (``powertrain profile``).

Each rank profiles its own next steps and sends the trace, which is kept in the run's directory. The client is notified
where, rank by rank, and meanwhile which ranks are still to come.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from powertrain.run.health.hang_report import rank_names
from powertrain.run.record import profiles as records
from powertrain.run.remote.protocol import ControlClient, ProfileSteps, RankProfiled, StillWaiting
from powertrain.run.workers.attempt import Attempt, Member
from powertrain.storage import Storage
from powertrain.text.errors import describe_error
from powertrain.wire.envelope import FromController
from powertrain.wire.from_controller import Profile
from powertrain.wire.from_worker import Profiled

#: The first number of these requests.
_FIRST_NUMBER = 1 << 32
#: Seconds between two messages to a client that waits: it gives up on a silent run.
_PROGRESS_INTERVAL_S = 5.0
#: Ranks of one request: each holds a trace of some megabytes while it is stored.
RANKS_LIMIT = 64

#: Does the first argument on another thread, then calls the second on the controller's thread.
Submit = Callable[[Callable[[], Any], Callable[[Any, BaseException | None], None]], None]


@dataclass(eq=False)
class _Request:
    client: ControlClient
    attempt: Attempt
    #: Ranks whose profiles have not been stored yet.
    awaited: dict[int, Member]
    began: float
    until: float
    progress_at: float


class Profiles:
    """The profiles that are being made. The controller's thread only."""

    def __init__(
        self,
        storage: Storage,
        send: Callable[[Member, FromController], None],
        submit: Submit,
        show: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``show`` prints a line: for profiles that the run was configured to make."""
        self._storage, self._send, self._submit, self._clock = storage, send, submit, clock
        self._show = show
        self._last_ask = _FIRST_NUMBER
        self._requests: dict[int, _Request] = {}

    def begin(self, attempt: Attempt, wanted: ProfileSteps, client: ControlClient) -> None:
        """Request the profiles."""
        if problem := _problem(attempt, wanted):
            client.answer(problem, False)
            return
        now = self._clock()
        members = {m.rank: m for m in attempt.members if m.rank in wanted.ranks}
        self._last_ask += 1
        self._requests[self._last_ask] = _Request(
            client, attempt, members, now, now + wanted.within, now + _PROGRESS_INTERVAL_S
        )
        for member in members.values():
            self._send(member, Profile(ask=self._last_ask, steps=wanted.steps, memory=wanted.memory))

    def on_profiled(self, member: Member, message: Profiled) -> None:
        """Store the profile that a rank has sent, also where its client has given up."""
        if message.error:
            self._tell(message.ask, member, RankProfiled(rank=member.rank, error=message.error))
            return
        attempt, rank = member.attempt.number, member.rank

        def stored(key: Any, error: BaseException | None) -> None:
            reason = f"it could not be stored: {describe_error(error)}" if error is not None else ""
            self._tell(message.ask, member, RankProfiled(rank=rank, key="" if error else key, error=reason))

        self._submit(partial(records.keep, self._storage, attempt, rank, message), stored)

    def due(self) -> float:
        """Return when to call :meth:`poll` next; inf while none is awaited."""
        return min((min(one.until, one.progress_at) for one in self._requests.values()), default=float("inf"))

    def poll(self, now: float) -> None:
        """Show progress, and end requests that have timed out or whose ranks are gone."""
        for ask, request in list(self._requests.items()):
            for member in [one for one in request.awaited.values() if one.exited]:
                self._tell(ask, member, RankProfiled(rank=member.rank, error="it has ended"))
            if ask not in self._requests:
                continue
            if now >= request.until:
                self._end(
                    ask,
                    f"{_capital(rank_names(sorted(request.awaited)))} did not finish the steps within "
                    f"{request.until - request.began:g} s. What comes later is kept in profiles/ all the same.",
                    ok=False,
                )
            elif now >= request.progress_at:
                request.progress_at = now + _PROGRESS_INTERVAL_S
                waiting = StillWaiting(ranks=sorted(request.awaited), seconds=now - request.began)
                request.client.send_part(waiting)

    def close(self) -> None:
        """End all requests."""
        for ask in list(self._requests):
            self._end(ask, "The run has ended.", ok=False)

    def _tell(self, ask: int, member: Member, part: RankProfiled) -> None:
        if ask < _FIRST_NUMBER:
            self._show(_configured(part))
            return
        request = self._requests.get(ask)
        if request is None or request.attempt is not member.attempt:
            return
        if request.awaited.pop(member.rank, None) is not None:
            request.client.send_part(part)
        if not request.awaited:
            self._end(ask, "", ok=True)

    def _end(self, ask: int, message: str, *, ok: bool) -> None:
        self._requests.pop(ask).client.answer(message, ok)


def _problem(attempt: Attempt, wanted: ProfileSteps) -> str:
    last = attempt.world_size - 1
    if unknown := [rank for rank in wanted.ranks if not 0 <= rank <= last]:
        return f"There is no {rank_names(unknown)} in attempt {attempt.number}: its last is rank {last}."
    if not 0 < len(set(wanted.ranks)) <= RANKS_LIMIT:
        return f"One request profiles 1 to {RANKS_LIMIT} ranks, not {len(set(wanted.ranks))}: name fewer with --rank."
    if wanted.steps < 1:
        return f"{wanted.steps} steps cannot be profiled: name at least 1 with --steps."
    return ""


def _configured(part: RankProfiled) -> str:
    if part.error:
        return f"RunConfig(profile=...): rank {part.rank} was not profiled: {part.error}."
    return f"The profile of rank {part.rank} is in {part.key}; 'powertrain profile' prints its tables."


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
