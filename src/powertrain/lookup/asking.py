"""Requests to a live run, and the errors for a run that cannot be reached."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from powertrain.errors import StorageError
from powertrain.run.record.lease import current_holder
from powertrain.run.remote import protocol
from powertrain.storage.addresses import without_secrets

if TYPE_CHECKING:
    from powertrain.lookup.finding import FoundRun

#: Seconds to wait for the status of a run; a suspended process (Ctrl-Z) does not reply.
_STATUS_TIMEOUT_S = 3.0


def ask(
    run: FoundRun, question: protocol.Request, on_part: Callable[[protocol.Part], None] | None = None
) -> protocol.Answer:
    """Send a request to a run and return its final reply; ``on_part`` is called with each part before it.

    Raises :class:`StorageError` with the location of the run if it cannot be reached from here.
    """
    if run.live is None:
        raise StorageError(out_of_reach(run))
    try:
        for reply in protocol.send_request(run.live.directory, question):
            if isinstance(reply, protocol.Answer):
                return reply
            if on_part is not None:
                on_part(reply)
    except OSError as error:
        raise StorageError(
            f"The {run.noun} {run.name!r} (process {run.live.card.pid}) did not answer: {error}. 'powertrain show' "
            "tells whether it has ended."
        ) from error
    raise AssertionError("a reply ends with an answer")


def how_it_stands(live: protocol.LiveRun) -> protocol.Description | None:
    """Return the status of a live run; None if it does not reply."""
    try:
        parts = list(protocol.send_request(live.directory, protocol.Describe(), _STATUS_TIMEOUT_S))
    except OSError:
        return None
    return next((part for part in parts if isinstance(part, protocol.Description)), None)


def out_of_reach(run: FoundRun) -> str:
    """Return the reason why a run cannot be reached here: it has ended, or another user or host runs it."""
    where = f"The {run.noun} {run.name!r} at {without_secrets(run.place.uri)}"
    about = f"{where} is not running on this machine as this user"
    holder = current_holder(run.place)
    if holder is None or holder.released:
        return f"{about}: it has ended. 'powertrain ls' lists active runs."
    who = f"process {holder.pid} of user {holder.user!r} on host {holder.host!r}"
    if holder.host != socket.gethostname():
        return f"{about}. It was started by {who}: run this command there, as that user."
    return f"{about}. It was started by {who}, which has exited, or does not accept connections of this user."
