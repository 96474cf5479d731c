"""Messages from a run to its workers."""

from __future__ import annotations

from typing import Any

import msgspec

from powertrain.wire.values import Message


class Ack(Message, frozen=True, tag="ack"):
    """Frames up to number ``seq`` need not be sent again: what they brought has been dealt with, or is kept."""

    seq: int


class Execute(Message, frozen=True, tag="execute"):
    """Call this pickled function in the main thread, before training."""

    call: int
    function: bytes


class Train(Message, frozen=True, tag="train"):
    """Call the user's function."""

    #: Seconds for which reports that nobody waits for gather, and between two beats; 0 to send each report at once.
    gather: float = 0.0


class Hold(Message, frozen=True, tag="hold"):
    """Stop at your next boundary and say how many are behind you."""

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
    #: What ``get_preemption_info`` tells from there on; None for nothing new.
    preemption: Preemption | None = None
    #: The number of workers the run is about to go on with: ``resize_pending`` is true from there on. 0 for no change.
    resize_to: int = 0


class Inspect(Message, frozen=True, tag="inspect"):
    """Say what every thread of yours, and of the processes you have started, is doing."""

    ask: int


class Opened(Message, frozen=True, tag="opened"):
    """All are at collective ``sync``: ``data`` is what rank 0 brought; or they cannot meet, and ``error`` says why."""

    sync: int
    data: bytes = b""
    error: str = ""


class RowClosed(Message, frozen=True, tag="row_closed"):
    """Row ``row`` is complete: ``report(barrier=True)`` may return, or end the function where ``stop`` says why."""

    row: int
    stop: str = ""


class Dismissed(Message, frozen=True, tag="dismissed"):
    """Your outcome is recorded; you may exit. ``summary`` is the run's end as far as it is known."""

    summary: dict[str, Any] = {}


class Carry(Message, frozen=True, tag="carry"):
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
    """Forget a share that was to be carried, and remove it."""

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
    """The checkpoint of ``row`` is committed at ``path``, or will never be, and ``error`` says why."""

    row: int
    path: str = ""
    error: str = ""


class CheckpointReply(msgspec.Struct, frozen=True, kw_only=True):
    """One committed checkpoint, as a worker is told of it."""

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
    """The answer to :class:`DebugOpened`: the terminal is yours, or there is none for you and you go on."""

    granted: bool


class DebugLine(Message, frozen=True, tag="debug_line"):
    """The answer to :class:`DebugPrompt`, with its line end; "" at the end of input."""

    number: int
    text: str


class DebugEnd(Message, frozen=True, tag="debug_end"):
    """Leave your debugger, go on, and open none any more: the run is ending."""
