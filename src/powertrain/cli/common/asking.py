"""Asking a run that is under way, and what to say when it is not."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from powertrain.errors import StorageError
from powertrain.run.record.lease import current_holder
from powertrain.run.remote import protocol
from powertrain.storage.addresses import without_secrets

if TYPE_CHECKING:
    from powertrain.cli.common.finding import FoundRun

#: Seconds for a run to say how it stands; one whose process is suspended (Ctrl-Z) says nothing.
_STANDS_WITHIN = 3.0


def ask(
    run: FoundRun, question: protocol.Request, told: Callable[[protocol.Part], None] | None = None
) -> protocol.Answer:
    """The answer of a run; ``told`` is called with each part that comes before it.

    Raises :class:`StorageError` that says where the run is, where it cannot be asked from here.
    """
    if run.live is None:
        raise StorageError(out_of_reach(run))
    try:
        for reply in protocol.send_request(run.live.directory, question):
            if isinstance(reply, protocol.Answer):
                return reply
            if told is not None:
                told(reply)
    except OSError as error:
        raise StorageError(
            f"The {run.noun} {run.name!r} (process {run.live.card.pid}) did not answer: {error}. 'powertrain show' "
            "says whether it has ended."
        ) from error
    raise AssertionError("a reply ends with an answer")


def how_it_stands(live: protocol.LiveRun) -> protocol.Description | None:
    """What a run under way says of itself; None where it does not answer any more."""
    try:
        parts = list(protocol.send_request(live.directory, protocol.Describe(), _STANDS_WITHIN))
    except OSError:
        return None
    return next((part for part in parts if isinstance(part, protocol.Description)), None)


def out_of_reach(run: FoundRun) -> str:
    """Why a run that does not listen here cannot be asked: who runs it, or that nobody does."""
    where = f"The {run.noun} {run.name!r} at {without_secrets(run.place.uri)}"
    about = f"{where} is not under way on this machine as this user"
    holder = current_holder(run.place)
    if holder is None or holder.released:
        return f"{about}: it has ended. 'powertrain ls' lists the runs that are under way."
    who = f"process {holder.pid} of user {holder.user!r} on host {holder.host!r}"
    if holder.host != socket.gethostname():
        return f"{about}. It was started by {who}: ask there, as that user."
    return f"{about}. It was started by {who}, which is gone, or does not listen to this user."
