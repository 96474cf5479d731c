"""Envelopes: numbered batches of messages."""

from __future__ import annotations

from typing import Annotated, Any, Union

import msgspec

from powertrain.wire.from_controller import (
    Ack,
    CheckpointSettled,
    DebugEnd,
    DebugGrant,
    DebugLine,
    Dismissed,
    Drop,
    Execute,
    Goto,
    Hold,
    Inspect,
    MessageRefused,
    Opened,
    Profile,
    Reported,
    RowClosed,
    Train,
    Unstaged,
    UploadShare,
)
from powertrain.wire.from_node import (
    NodeBeat,
    NodeReady,
    ProcessEnded,
    ProcessOutput,
    ProcessSeen,
    ProcessStarted,
)
from powertrain.wire.from_worker import (
    Arrived,
    AskCheckpoints,
    Beat,
    DebugClosed,
    DebugOpened,
    DebugOutput,
    DebugPrompt,
    DebugQuit,
    Executed,
    FirstStep,
    Held,
    Hello,
    Noted,
    Noticed,
    Outcome,
    Profiled,
    Reached,
    ShareUploaded,
    Stacks,
    StagingFull,
    Telemetry,
    UploadTrouble,
    Validated,
)
from powertrain.wire.to_node import EndNode, LookAt, SignalProcess, StartProcess
from powertrain.wire.values import Count, Point

FromWorker = Union[
    Hello,
    Point,
    Beat,
    Telemetry,
    FirstStep,
    Stacks,
    Noticed,
    Held,
    Reached,
    Arrived,
    Executed,
    Outcome,
    Profiled,
    Noted,
    ShareUploaded,
    UploadTrouble,
    StagingFull,
    AskCheckpoints,
    Validated,
    DebugOpened,
    DebugOutput,
    DebugPrompt,
    DebugClosed,
    DebugQuit,
    NodeReady,
    NodeBeat,
    ProcessStarted,
    ProcessOutput,
    ProcessEnded,
    ProcessSeen,
]


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """A batch of messages of one rank, with where that rank stands; of a node's agent, where ``rank`` is -1."""

    rank: Annotated[int, msgspec.Meta(ge=-1, le=2**63 - 1)]
    attempt: Count
    #: Boundaries and rows behind the rank when the batch was closed.
    boundary: Count
    row: Count
    messages: list[FromWorker]
    #: Number of the last command that has arrived.
    heard: Count = 0
    extras: dict[str, Any] = {}


FromController = Union[
    Ack,
    Execute,
    Train,
    Hold,
    Goto,
    Inspect,
    Opened,
    Profile,
    RowClosed,
    Dismissed,
    UploadShare,
    Drop,
    Unstaged,
    CheckpointSettled,
    Reported,
    MessageRefused,
    DebugGrant,
    DebugLine,
    DebugEnd,
    StartProcess,
    SignalProcess,
    LookAt,
    EndNode,
]
