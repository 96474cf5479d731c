"""Replies of a run to the command line. Pure: state in, text and values out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from powertrain.run.checkpoints.pending import PendingCheckpoint
from powertrain.run.lifecycle import RunState
from powertrain.run.remote import protocol
from powertrain.run.workers import attempt as phases
from powertrain.run.workers.attempt import Attempt


@dataclass(frozen=True)
class ControlRequest:
    """A request of a client. Posted to the controller's thread."""

    request: protocol.Request
    client: protocol.ControlClient


def stop_reason(by: str) -> str:
    """Return the reason of a run that was stopped, for its journal and its result."""
    return f"powertrain stop, asked by {by}"


def stop_prospect(
    run: RunState,
    attempt: Attempt | None,
    request: protocol.StopRequest,
    *,
    ends_in_place: bool,
    can_be_ended: bool,
) -> str:
    """Describe the effect of ``powertrain stop``.

    ``ends_in_place``: the training is over already. ``can_be_ended``: ranks can be ended from outside.
    """
    if ends_in_place:
        rest = "what is left of its ending is cut short" if request.now else "only its ending is left"
        return f"The training of {run.name!r} is over already: {rest}."
    if attempt is None or attempt.phase in (phases.STARTING, phases.CLEARING):
        return f"The run {run.name!r} is not training now ({run.state}), and ends at once."
    newest = f"Its newest checkpoint is that of row {run.committed[-1][0]}." if run.committed else ""
    if request.now and can_be_ended:
        kept = newest or "It has no checkpoint."
        return f"The run {run.name!r} ends at once, wherever its ranks are. {kept}"
    words = [f"The run {run.name!r} stops at its next boundary, and saves there if its loop can."]
    if (request.now or request.within) and not can_be_ended:
        words.append("Its ranks live in processes that it did not start, and cannot end.")
    elif request.within:
        words.append(f"Should it not come to one within {request.within:g} s, it is ended.")
    return " ".join([*words, newest]).rstrip()


def describe(
    run: RunState,
    attempt: Attempt | None,
    pending: Sequence[PendingCheckpoint],
    *,
    row_age: float,
    now: float,
) -> protocol.Description:
    """Return the state of the run. ``row_age`` is -1 before the first row; ``now`` is of the monotonic clock."""
    members = attempt.members if attempt is not None else []
    first = next((m.beat for m in members if m.rank == 0), None)
    return protocol.Description(
        state=run.state,
        reason=run.reason,
        attempt=max(0, run.attempt),
        workers=attempt.world_size if attempt is not None else 0,
        row=attempt.rows.closed if attempt is not None else 0,
        row_age=round(row_age, 3),
        awaited=list(attempt.rows.behind()) if attempt is not None else [],
        checkpoint=run.committed[-1][1] if run.committed else "",
        uploads=len(pending),
        upload_bytes=sum(checkpoint.bytes for checkpoint in pending),
        upload_age=round(max((now - checkpoint.since for checkpoint in pending), default=0.0), 3),
        debugged=[m.rank for m in members if m.beat is not None and m.beat.debugged and not m.exited],
        data=first.data if first is not None else "",
    )
