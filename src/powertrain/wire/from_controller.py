"""Messages from a run to its workers."""

from __future__ import annotations

from typing import Any

import msgspec

from powertrain.wire.values import Message


class Ack(Message, frozen=True, tag="ack"):
    """Acknowledges frames up to number ``seq``: their messages have been handled, or are stored."""

    seq: int


class Execute(Message, frozen=True, tag="execute"):
    """Call this pickled function in the main thread, before training."""

    call: int
    function: bytes


class Train(Message, frozen=True, tag="train"):
    """Call the user's function."""

    #: Seconds for which reports without a waiting caller are batched, and between two heartbeats; 0 for the worker's
    #: own, which are shorter.
    gather: float = 0.0


class Hold(Message, frozen=True, tag="hold"):
    """Command to stop at the next boundary and report the number of boundaries passed."""

    hold: int


class Preemption(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks that will be taken away."""

    #: Unix milliseconds; None where it is not known.
    deadline_ms: int | None
    #: Ranks by the node they are on.
    ranks: dict[str, list[int]]


class Goto(Message, frozen=True, tag="goto"):
    """Go on to ``boundary`` and there do ``action``.

    "stop" ends the function there, after saving where that can be done; "step" waits there to be sent on; "go" lets go
    of the hold.
    """

    hold: int
    boundary: int
    action: str
    reason: str = ""
    #: The value of ``get_preemption_info`` from there on; None for no change.
    preemption: Preemption | None = None
    #: The number of workers after a pending resize: ``resize_pending`` is true from there on. 0 for no change.
    resize_to: int = 0


class Inspect(Message, frozen=True, tag="inspect"):
    """Request for the stacks of every thread of the rank and of its child processes."""

    ask: int


class Profile(Message, frozen=True, tag="profile"):
    """Request for a profile of the rank's next steps."""

    ask: int
    steps: int
    #: Also record allocations.
    memory: bool = False


class Opened(Message, frozen=True, tag="opened"):
    """All ranks are at collective ``sync``: ``data`` is rank 0's value; or they cannot meet, with the reason in
    ``error``."""

    sync: int
    data: bytes = b""
    error: str = ""


class RowClosed(Message, frozen=True, tag="row_closed"):
    """Row ``row`` is complete: ``report(barrier=True)`` may return, or end the function where ``stop`` has a reason."""

    row: int
    stop: str = ""


class Dismissed(Message, frozen=True, tag="dismissed"):
    """Your outcome is recorded; you may exit. ``summary`` is the run's end as far as it is known."""

    summary: dict[str, Any] = {}


class UploadShare(Message, frozen=True, tag="carry"):
    """Put these files of a staged share into storage, below ``checkpoints/{checkpoint}/``; then remove the share."""

    attempt: int
    row: int
    rank: int
    checkpoint: str
    staged: str
    names: list[str]
    #: True for a share that stays whole until :class:`Drop`: it may have to be given back.
    keeps: bool = False


class Drop(Message, frozen=True, tag="drop"):
    """Forget a share that was to be uploaded, and remove it."""

    attempt: int
    row: int
    rank: int
    staged: str
    #: Where its files are moved first; "" removes them.
    back: str = ""


class Unstaged(Message, frozen=True, tag="unstaged"):
    """The share of ``row`` has left the staging area: its bytes no longer count against the limit."""

    row: int


class CheckpointSettled(Message, frozen=True, tag="settled"):
    """The checkpoint of ``row`` is committed at ``path``, or will never be, with the reason in ``error``."""

    row: int
    path: str = ""
    error: str = ""


class CheckpointReply(msgspec.Struct, frozen=True, kw_only=True):
    """One committed checkpoint, in a reply to a worker."""

    path: str
    metrics: dict[str, Any]
    status: str


class Reported(Message, frozen=True, tag="reported"):
    """The answer to :class:`AskCheckpoints`, oldest first."""

    ask: int
    checkpoints: list[CheckpointReply]


class MessageRefused(Message, frozen=True, tag="refused"):
    """The run could not read a message of yours, and reads none any more: your function must end with this error."""

    reason: str


class DebugGrant(Message, frozen=True, tag="debug_grant"):
    """Reply to :class:`DebugOpened`: the rank gets the terminal, or there is none and it continues."""

    granted: bool


class DebugLine(Message, frozen=True, tag="debug_line"):
    """The answer to :class:`DebugPrompt`, with its line end; "" at the end of input."""

    number: int
    text: str


class DebugEnd(Message, frozen=True, tag="debug_end"):
    """Command to leave the debugger, continue, and open no other: the run is ending."""
