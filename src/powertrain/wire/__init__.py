"""Framed, authenticated messages between a worker and its run.

One :class:`Hub` (the controller's side) listens; each worker has one :class:`Link`. Both are ZeroMQ sockets
with CURVE keys; the hub knows the public key of every worker it expects and drops all others before a byte
of theirs is decoded, and it knows a sender by its key, never by what the message claims.

Everything a worker says travels in :class:`Envelope` batches, in numbered frames. A link keeps what is not acknowledged
and sends it again after a lost connection, and the hub drops what it has already seen. So a message handed to a link
arrives once, or the worker is dead. Batches are acknowledged when they have been dealt with, not when they arrive: a
controller that falls behind slows what workers send, and its memory stays bounded. Commands are numbered too, and sent
again over a new connection until an envelope says that they were heard.

No frame is longer than :data:`FRAME_LIMIT`: ZeroMQ closes a connection over which a longer one begins to come, before
it is known who has sent it. What is longer goes in several frames, up to :data:`MESSAGE_LIMIT`; beyond that the sender
says so and leaves out what is too large. A frame of a known sender that cannot be read is not acknowledged, and nothing
of that sender is read any more: the hub reports it to the controller, which fails that rank with the reason. Other
senders are not affected.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket as sockets
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, Union

import msgspec
import zmq
import zmq.auth
from zmq.auth.base import Authenticator

from powertrain.wire.connections import UnprovenConnections
from powertrain.errors import EngineError, WireError
from powertrain.values.exceptions import ExceptionData

_logger = logging.getLogger("powertrain")
#: Bytes of a message in one frame. It bounds what a stranger can make this process hold, so it is small.
FRAME_LIMIT = 2**20
#: Bytes of one message in all its frames: it bounds what a worker can make the controller hold.
MESSAGE_LIMIT = 2**31
#: What a command may have beyond that, which may hold all that a message has brought.
_COMMAND_ROOM = 2**20
#: Characters of why a message was refused.
_LONGEST_REASON = 300
#: What CURVE adds to a frame.
_ENCRYPTION = 33
#: Bytes in the path of a Unix socket, the ending NUL left out.
_SOCKET_PATH_LIMIT = 107
#: Seconds for a connection to be made, when it is only looked whether that can be.
_CONNECT_WITHIN = 3.0
#: Connections that may wait to be taken: all workers of a run come at the same moment. The system may allow fewer.
_BACKLOG = 4096
#: Connections to a TCP port that have not proved a key: how many beside those of expected workers, and how long.
MOST_UNPROVEN = 128
_HANDSHAKE_TIMEOUT_S = 10.0
#: Events of connections that are not read yet: ZeroMQ accepts none while there are more, so it is bounded how far it
#: runs ahead of the hub that counts them. 1,000 are ZeroMQ's own.
_EVENTS_AHEAD = 1000 + 1
#: What ZeroMQ sends for such an event: which, and a number, which is the connection's descriptor.
_EVENT = struct.Struct("=HI")
#: Files that a process has open beside its connections.
_OTHER_FILES = 512
#: Seconds between two looks of the hub, for each worker it knows, so that with thousands it deals with many messages
#: at once; below the second number it does not wait at all, and a few hundred workers are heard at once.
_GATHER_EACH, _GATHER_LEAST, _GATHER_MOST = 5e-6, 2e-3, 2e-2
#: How many, or which: whoever says another number is not understood.
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


# --------------------------------------------------------------------------- what a worker says


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="m"):
    """Anything that travels."""


class ErrorReport(msgspec.Struct, frozen=True, kw_only=True):
    """An exception as text: the controller never unpickles one."""

    type: str
    message: str
    traceback: str
    file: str = ""
    line: int = 0
    function: str = ""
    source: str = ""
    #: True when it looks like the echo of another rank's end (a broken collective, say).
    secondary: bool = False
    #: The exceptions that it was raised from, a line each, and what it can be rebuilt of.
    causes: list[str] = []
    exception: ExceptionData | None = None


class Hello(Message, frozen=True, tag="hello"):
    """The first message of a process."""

    pid: Count
    host: str


class FilePart(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a rank's share of a checkpoint; an empty directory's name ends in "/"."""

    name: str
    size: Count
    #: Its hash once it is durable in storage, "" before.
    xxh3: str = ""


class Validation(msgspec.Struct, frozen=True, kw_only=True):
    """How a checkpoint is to be validated, where ``report`` said more than "yes"."""

    #: Keyword arguments that go over the trainer's own.
    arguments: dict[str, Any] = {}
    #: Seconds it may take; 0 for what the trainer says.
    timeout: float = 0.0


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's share of a checkpoint: staged on the rank's node when this is sent, not yet in storage."""

    #: The name that ``report`` was given; "" for the usual one of the row.
    checkpoint: str
    files: list[FilePart]
    metadata: dict[str, Any] = {}
    #: The staged directory on the rank's node; its files lie below ``files/``.
    staged: str = ""
    #: The user's directory that was moved to ``staged``: its files go back there should the checkpoint fail. "" where
    #: the user's files are still in their place, or were written for the run.
    taken: str = ""
    #: Where the user put the files himself (a path or address); nothing is staged or carried then.
    elsewhere: str = ""
    #: Why there is no share although the rank reported a checkpoint, such as a full disk, and where that is.
    error: str = ""
    error_place: str = ""
    #: True while the user's own upload function runs in the rank: :class:`Carried` tells where it put the files.
    pending: bool = False
    #: Asked for with ``report(validation=...)``: arguments for the function, merged over the trainer's.
    validation: Validation | None = None
    #: What goes into the manifest's extras: the same on every rank, or under keys of the rank's own.
    extras: dict[str, Any] = {}


class Point(Message, frozen=True, tag="point"):
    """One ``report``: row ``row`` of this rank (0 for ``solo``)."""

    row: Count
    at: float
    metrics: dict[str, Any]
    solo: bool = False
    barrier: bool = False
    part: Part | None = None
    #: Rank 0's objects among the metrics: see :mod:`powertrain.values.kinds`.
    originals: dict[str, bytes] = {}


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """One line of one thread's stack. ``source`` is the text of the line, where it is known."""

    file: str
    line: int
    function: str
    source: str = ""


class ThreadStack(msgspec.Struct, frozen=True, kw_only=True):
    """What one thread is doing, the innermost frame first."""

    name: str
    #: True for the thread that the process began with: a rank's is the one that runs the user's function.
    main: bool
    frames: list[Frame]


class ProcessStack(msgspec.Struct, frozen=True, kw_only=True):
    """What one process is doing: a rank, or a process that it has started."""

    pid: int
    #: "rank 1", "DataLoader worker of rank 1", or the command's name.
    title: str
    #: The kernel's word: see ``powertrain.engine.base.Inspection``.
    state: str
    threads: list[ThreadStack] = []
    #: Why there are no stacks, or what to know of them; "" for nothing.
    remark: str = ""


class Where(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank's main thread is, as far as the user's own code goes."""

    #: The user's innermost frame.
    frame: Frame
    #: What that frame has called, if it is a library's: "collective" (torch.distributed, or a backward that averages
    #: gradients), "loader" (a DataLoader), "run" (waits for the run: report, barrier, load_state), or "".
    inside: str = ""
    #: The library function that the user's frame has called: "all_reduce", "backward", "__next__"; "" for none.
    call: str = ""


class Beat(Message, frozen=True, tag="beat"):
    """The rank is alive: how far it has come, and what its main thread is doing."""

    #: Reports, optimizer steps and loader batches so far, and seconds since one of them grew. Time in which the
    #: whole process stood still is left out.
    reports: Count
    steps: Count
    batches: Count
    idle: float
    #: "set-up", "training", "checkpoint" (it is saving or staging) or "end".
    phase: str = ""
    row: Count = 0
    #: Collectives begun on torch's default process group; -1 where there is none.
    collectives: int = -1
    #: What it waits for on this wire: "barrier", "broadcast_from_rank_zero", "row 7", "commit of row 7"; or "".
    awaits: str = ""
    where: Where | None = None
    #: True while a debugger holds it.
    debugged: bool = False
    #: How far its data have been read: "train: epoch 3, 45 %"; "" where nothing is known.
    data: str = ""


class FirstStep(Message, frozen=True, tag="first_step"):
    """The rank has made its first step, or its function has ended without one: what it did since it was told to train,
    in seconds by its own clock. Said once."""

    #: Loading the user's function; what that did before its first batch; waiting for that batch; and the rest.
    function: float = 0.0
    setup: float = 0.0
    data: float = 0.0
    step: float = 0.0
    #: False where the function has ended before it made a step or a report.
    stepped: bool = True
    #: The package that most of the modules are of which loading the function has loaded; "" where that was quick.
    loaded: str = ""


class Stacks(Message, frozen=True, tag="stacks"):
    """Answer to :class:`Inspect`: the rank's own process first, then those that it has started."""

    ask: Count
    processes: list[ProcessStack]


class Noticed(Message, frozen=True, tag="noticed"):
    """The rank's process was asked to end by a signal; ``times`` counts them."""

    signal: str
    times: Count = 1


class Held(Message, frozen=True, tag="held"):
    """Answer to :class:`Hold`: this many boundaries are behind the rank, and it will stop at the next."""

    hold: Count
    boundary: Count
    #: True when it can save there: its state is registered, or its loop asks whether to.
    can_save: bool = False


class Reached(Message, frozen=True, tag="reached"):
    """The rank stands at ``boundary``, to which it was sent with the action "step"; its newest report is ``row``."""

    hold: Count
    boundary: Count
    row: Count


class Arrived(Message, frozen=True, tag="arrived"):
    """The rank is at collective number ``sync``; rank 0 may bring data for the others."""

    sync: Count
    kind: str
    data: bytes = b""


class Executed(Message, frozen=True, tag="executed"):
    """Answer to :class:`Execute`: a pickled value, or the error."""

    call: Count
    value: bytes = b""
    error: ErrorReport | None = None


class Outcome(Message, frozen=True, tag="outcome"):
    """How the user's function ended: "returned", "raised" or "stopped". The last message of a rank."""

    status: str
    #: The pickled return value; opened only by the caller of ``Result.return_value``.
    value: bytes = b""
    error: ErrorReport | None = None
    #: As in :class:`Beat`.
    data: str = ""


class Noted(Message, frozen=True, tag="noted"):
    """A warning for the user; with ``once`` it is shown for the first rank that sends it, and not again."""

    message: str
    once: bool = False


class Carried(Message, frozen=True, tag="carried"):
    """A rank's share of a row's checkpoint is durable in storage with these hashes, or will not be: ``error``."""

    attempt: Count
    row: Count
    rank: Count
    files: list[FilePart] = []
    #: Where the user's own upload function put the files.
    elsewhere: str = ""
    error: str = ""
    #: The file system that is full, or the function that failed; "" for the run's storage.
    error_place: str = ""


class CarryTrouble(Message, frozen=True, tag="carry_trouble"):
    """Storage refuses or is silent, and it is tried again; ``reason`` says what it answers."""

    attempt: Count
    row: Count
    rank: Count
    reason: str
    #: The file system that is full; "" for the run's storage.
    place: str = ""


class StagingFull(Message, frozen=True, tag="staging_full"):
    """The rank cannot stage its share of ``row`` before an older one has left the staging area."""

    row: Count
    #: Bytes that are needed, and what is allowed.
    needed: Count
    limit: Count


class AskCheckpoints(Message, frozen=True, tag="ask_checkpoints"):
    """Which checkpoints are there, once all up to ``row`` are settled (and validated, if asked)?"""

    ask: Count
    row: Count
    validated: bool = False
    #: Seconds after which the answer comes in any case; negative for never.
    timeout: float = -1.0


class Validated(Message, frozen=True, tag="validated"):
    """What the user's validation function returned for a checkpoint, or why it returned nothing."""

    checkpoint: str
    metrics: dict[str, Any] = {}
    error: ErrorReport | None = None
    seconds: float = 0.0
    #: About values that cannot be kept.
    warnings: list[str] = []


# --------------------------------------------------------------------------- what a node's agent says


class NodeReady(Message, frozen=True, tag="node_ready"):
    """An agent is there, and what it found on its node."""

    pid: Count
    host: str
    address: str
    version: str
    #: Why nothing can be started there; "" where all is well.
    problem: str = ""
    #: True where the run's files are not there: it says this again when they have been brought.
    wants_files: bool = False


class NodeBeat(Message, frozen=True, tag="node_beat"):
    """The agent lives."""


class ProcessStarted(Message, frozen=True, tag="process_started"):
    id: str
    pid: Count
    #: As in ``powertrain.engine.base.Started``.
    waited: float = 0.0
    imports: float = 0.0


class ProcessOutput(Message, frozen=True, tag="process_output"):
    """What a process has written, in order."""

    id: str
    data: bytes


class ProcessEnded(Message, frozen=True, tag="process_ended"):
    """A process and all that it had started are gone; its output has been sent."""

    id: str
    pid: Count
    code: int
    out_of_memory: bool = False
    #: Why it could not be started, where it never ran.
    error: str = ""
    #: True when the agent's own server was killed, and the process with it.
    lost: bool = False
    #: Of a rank that was not on the controller's machine: the newest row whose report had returned, and the reports
    #: with shares that still lie staged on its node.
    row: Count = 0
    sealed: list[Point] = []
    #: Should it have died: its newest steps, as they lie in its ring.
    steps: bytes = b""


class ProcessSeen(Message, frozen=True, tag="process_seen"):
    """The answer to :class:`LookAt`."""

    ask: Count
    pid: Count
    state: str
    processes: list[ProcessStack] = []
    debugged: bool = False


class Telemetry(Message, frozen=True, tag="telemetry"):
    """What a rank has recorded since it last said so: records of :mod:`powertrain.trace`, as they lie on disk."""

    #: Of steps, the number of the first among those the rank has made; some may be missing before it.
    first: Count = 0
    steps: bytes = b""
    samples: bytes = b""
    #: One JSON object, with what holds from now on; empty where nothing changed.
    facts: bytes = b""


class DebugOpened(Message, frozen=True, tag="debug_opened"):
    """A debugger stands at ``frame`` and wants the terminal: it waits for :class:`DebugGrant`."""

    frame: Frame
    #: For a post mortem the error that it is about, and whether that reads like the echo of another rank's end.
    error: str = ""
    secondary: bool = False
    #: True where it talks in its own process's terminal, which only has to be left to it.
    native: bool = False


class DebugOutput(Message, frozen=True, tag="debug_output"):
    """What the debugger has to say."""

    text: str


class DebugPrompt(Message, frozen=True, tag="debug_prompt"):
    """The debugger asks for a line, with ``text`` in front of it, and waits for the :class:`DebugLine`."""

    number: Count
    text: str


class DebugClosed(Message, frozen=True, tag="debug_closed"):
    """The debugger was left."""


class DebugQuit(Message, frozen=True, tag="debug_quit"):
    """The user has quit a debugger that stood at ``frame``: the run is to end."""

    frame: Frame


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
    Noted,
    Carried,
    CarryTrouble,
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


# --------------------------------------------------------------------------- what a worker is told


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


class Settled(Message, frozen=True, tag="settled"):
    """The checkpoint of ``row`` is committed at ``path``, or will never be, and ``error`` says why."""

    row: int
    path: str = ""
    error: str = ""


class ReportedCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One committed checkpoint, as a worker is told of it."""

    path: str
    metrics: dict[str, Any]
    status: str


class Reported(Message, frozen=True, tag="reported"):
    """The answer to :class:`AskCheckpoints`, oldest first."""

    ask: int
    checkpoints: list[ReportedCheckpoint]


class Refused(Message, frozen=True, tag="refused"):
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


# --------------------------------------------------------------------------- what a node's agent is told


class StartProcess(Message, frozen=True, tag="start_process"):
    """Start a process: see ``engine.base.ProcessSpec``."""

    id: str
    entry: str
    payload: bytes
    env: dict[str, str | None]
    cwd: str = ""
    title: str = ""
    shielded: bool = False
    stacks: str = ""
    #: For a rank: where it marks its row, and where its attempt's shares are staged, to be looked at when it is gone.
    mark: str = ""
    staging: str = ""
    attempt: int = 0
    rank: int = -1
    #: Where it keeps its newest steps.
    ring: str = ""


class SignalProcess(Message, frozen=True, tag="signal_process"):
    """SIGKILL reaches all that the process has started."""

    id: str
    number: int


class LookAt(Message, frozen=True, tag="look_at"):
    """Say what can be seen of a process from outside; with ``stacks`` also what it is doing."""

    ask: int
    id: str
    stacks: bool = False


class EndNode(Message, frozen=True, tag="end_node"):
    """End everything on the node, and the agent."""


FromController = Union[
    Ack,
    Execute,
    Train,
    Hold,
    Goto,
    Inspect,
    Opened,
    RowClosed,
    Dismissed,
    Carry,
    Drop,
    Unstaged,
    Settled,
    Reported,
    Refused,
    DebugGrant,
    DebugLine,
    DebugEnd,
    StartProcess,
    SignalProcess,
    LookAt,
    EndNode,
]


# --------------------------------------------------------------------------- frames

#: Before each frame: 1 where its message ends with it, else 0; and its number, from 1; 0 for an acknowledgement.
_HEADER = struct.Struct(">BQ")


def _no_extension(code: int, _: memoryview) -> Any:
    """Nothing that a worker says has any, and what is kept of it as text could not hold one."""
    raise msgspec.ValidationError(f"it has a msgpack extension of type {code}")


_encode = msgspec.msgpack.Encoder().encode
_decode_envelope = msgspec.msgpack.Decoder(Envelope, ext_hook=_no_extension).decode
_decode_command: Callable[[bytes | bytearray | memoryview], FromController] = msgspec.msgpack.Decoder(
    FromController
).decode


def _frames(body: bytes, first: int) -> Iterator[tuple[int, bytes]]:
    """An encoded message as frames with their numbers, which go on from ``first``."""
    view = memoryview(body)
    for number, start in enumerate(range(0, len(body), FRAME_LIMIT), first):
        end = start + FRAME_LIMIT
        yield number, b"".join((_HEADER.pack(end >= len(body), number), view[start:end]))


def _frame_count(body: bytes) -> int:
    return -(-len(body) // FRAME_LIMIT)


def _read_frame(frame: memoryview) -> tuple[int, bool, memoryview]:
    """A frame's number, whether its message ends with it, and what it brings; raises :class:`WireError`."""
    if len(frame) < _HEADER.size:
        raise WireError(f"it is {len(frame)} bytes long, which is less than the header of a frame")
    ends, number = _HEADER.unpack_from(frame)
    if ends > 1:
        raise WireError("it does not begin with the header of a frame")
    return number, bool(ends), frame[_HEADER.size :]


def _read_envelope(body: bytearray | memoryview) -> Envelope:
    """Raises :class:`WireError` for anything that is not one."""
    try:
        return _decode_envelope(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, MemoryError) as error:
        raise WireError(f"it is not an envelope ({error or type(error).__name__})") from error


class _Gathering:
    """The frames of one message, which come in order, until the last is there."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = bytearray()
        #: Number of the first frame; 0 while there is none.
        self.first = 0

    def add(self, number: int, ends: bool, piece: memoryview) -> bytearray | memoryview | None:
        """The whole message once it has ended, else None. Forgets all of it and raises :class:`WireError` where it is
        too long."""
        if ends and not self.first:
            return piece
        size = len(self._held) + len(piece)
        if size > self._limit:
            self._forget()
            raise WireError(
                f"with {size:,} bytes it is longer than the {self._limit:,} that a message may have"
            )
        self.first = self.first or number
        self._held += piece
        return self._forget() if ends else None

    def _forget(self) -> bytearray:
        held, self._held, self.first = self._held, bytearray(), 0
        return held


# --------------------------------------------------------------------------- keys


class KeyPair(msgspec.Struct, frozen=True):
    """A CURVE key pair, Z85-encoded."""

    public: bytes
    secret: bytes

    @classmethod
    def new(cls) -> KeyPair:
        return cls(*zmq.curve_keypair())


class Door(msgspec.Struct, frozen=True, kw_only=True):
    """All a worker needs to reach its run. Travels down inherited pipes or actor arguments only."""

    endpoint: str
    hub_key: bytes
    keys: KeyPair


# --------------------------------------------------------------------------- the controller's side


class Received(msgspec.Struct, frozen=True):
    """A batch, the public key it was sent with, and the number of its last frame."""

    sender: bytes
    number: int
    envelope: Envelope


class _Peer:
    """What the hub knows of one worker. The hub's thread only."""

    def __init__(self, deliver: Callable[[Received], None], speaks_as: tuple[int, int] | None) -> None:
        self.deliver = deliver
        #: The rank and attempt that its envelopes name; None until the first of them.
        self.speaks_as = speaks_as
        #: Where its connection is; None before it came.
        self.route: bytes | None = None
        #: The last frame that was taken, and the last that need not be sent again.
        self.seen = self.acknowledged = 0
        self.gathering = _Gathering(MESSAGE_LIMIT)
        #: The last command's number, and the commands not yet known to have arrived.
        self.number = 0
        self.unheard: deque[tuple[int, bytes]] = deque()
        #: True once a message of it could not be read: nothing of it is read from then on.
        self.is_refused = False
        #: True once it was logged that there was no memory for a message of it.
        self.is_told = False
        #: The descriptor of its connection, -1 while it has none.
        self.descriptor = -1

    def __str__(self) -> str:
        if self.speaks_as is None:
            return "a process of the run that has not said yet which it is"
        rank, attempt = self.speaks_as
        return f"rank {rank} of attempt {attempt}" if rank >= 0 else "a process of the run that is no rank"

    def dealt_with(self, number: int) -> None:
        """The batch that ended with this frame has been; so has what came after it and waits for the rest."""
        self.acknowledged = max(self.acknowledged, number)
        if self.gathering.first and self.acknowledged >= self.gathering.first - 1:
            self.acknowledged = self.seen

    def heard(self, number: int) -> None:
        """Commands up to this number have arrived."""
        while self.unheard and self.unheard[0][0] <= number:
            self.unheard.popleft()

    def check(self, envelope: Envelope) -> None:
        """Raises :class:`WireError` for what cannot be of this worker, or in answer to what it was sent."""
        claims = (envelope.rank, envelope.attempt)
        if self.speaks_as is not None and claims != self.speaks_as:
            raise WireError(f"it claims to be of rank {claims[0]} of attempt {claims[1]}")
        if envelope.heard > self.number:
            raise WireError(f"it claims that command {envelope.heard} has arrived; {self.number} were sent")
        self.speaks_as = claims


class Hub:
    """Listens for links, delivers their batches in order and once, and sends to them.

    One thread owns the socket, reads and decodes. ``deliver`` is called on that thread with each new batch, which
    whoever deals with it must :meth:`acknowledge`; then, once for all that has come meanwhile, ``delivered``. So who
    deals with batches is woken once for many of them. ``refused`` is called once for each worker that sent something
    which cannot be read or cannot be its own, with its key and a sentence; nothing of that worker is read from then on.
    Without ``refused`` the sentence goes to ``rejected``, as do other warnings. Messages without a known key are
    dropped without a word, because their sender is not known. Connections to a TCP port without a proved key are
    bounded, by :data:`MOST_UNPROVEN` and a timeout.

    ``parted`` is called with the key of a worker whose connection has ended, by whatever cause, at once. That alone
    means little: a link connects again by itself where its process lives.
    """

    def __init__(
        self,
        address: str,
        deliver: Callable[[Received], None],
        rejected: Callable[[str], None] = _logger.warning,
        *,
        delivered: Callable[[], None] = lambda: None,
        parted: Callable[[bytes], None] = lambda _: None,
        refused: Callable[[bytes, str], None] | None = None,
        directory: str = "",
        port: int = 0,
        listen_on: str = "",
    ) -> None:
        """Listen on ``address``: "ipc" for a Unix socket in ``directory``, else an IP address (0: any free port).

        ``listen_on`` is another IP address of this node to use instead, or that for all of them, "0.0.0.0" or "::".
        """
        self.keys = KeyPair.new()
        self._deliver, self._rejected = deliver, rejected
        self._delivered, self._parted, self._refused = delivered, parted, refused
        self._context = zmq.Context()
        self._auth = Authenticator(self._context)
        self._peers: dict[bytes, _Peer] = {}
        #: The keys of those who are connected, by the descriptor of their connection. The thread's only.
        self._connected: dict[int, bytes] = {}
        self._auth.configure_curve_callback("*", credentials_provider=self)
        self._auth.start()
        self._socket = self._listening_socket()
        # A Unix socket lies in a directory that only this user can enter.
        self._unproven = UnprovenConnections() if address != "ipc" else None
        self._told_flood = False
        self._events = self._event_socket()
        self._path = ""
        try:
            self.endpoint = self._bind(address, directory, port, listen_on)
        except BaseException:
            self._close_sockets()  # a context with open sockets would block whoever collects it
            raise
        #: For a worker: an encoded command, or the number of a batch that has been dealt with.
        self._outbox: deque[tuple[bytes, bytes | int]] = deque()
        #: Whom an acknowledgement is owed.
        self._owed: set[bytes] = set()
        #: True when something was delivered since ``delivered`` was called last.
        self._has_delivered = False
        self._wake = _Wakeup()
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="powertrain-hub", daemon=True)
        self._thread.start()

    def callback(self, domain: str, key: bytes) -> bool:
        """ZAP's question: may this key in? (The name is the authenticator's.)"""
        return key in self._peers

    def admit(
        self,
        public: bytes = b"",
        deliver: Callable[[Received], None] | None = None,
        speaks_as: tuple[int, int] | None = None,
    ) -> Door:
        """A door for one more worker: with keys made here, or for whoever holds the secret half of ``public``.

        What comes through it is given to ``deliver``, by default to the hub's own. Its envelopes must name the rank and
        attempt of ``speaks_as``; where that is not given, those that its first one names."""
        keys = KeyPair(public, b"") if public else KeyPair.new()
        self._peers.setdefault(keys.public, _Peer(deliver or self._deliver, speaks_as))
        make_room_for_connections(len(self._peers))
        return Door(endpoint=self.endpoint, hub_key=self.keys.public, keys=keys)

    def count_connected(self) -> int:
        """How many of the admitted are connected, as far as they have said a word. Any thread."""
        return len(self._connected)

    def expel(self, public: bytes) -> None:
        """Nothing that comes with this key counts any more, and nothing is sent to who has it. Any thread."""
        self._peers.pop(public, None)

    def acknowledge(self, received: Received) -> None:
        """The batch has been dealt with: its sender may forget it. Any thread."""
        self._outbox.append((received.sender, received.number))
        self._wake.set()

    def send(self, public: bytes, message: FromController) -> None:
        """Hand a message to the worker with this key, now or when it connects. Any thread.

        Raises :class:`EngineError` for one that is too large."""
        try:
            body = _encoded(message, MESSAGE_LIMIT + _COMMAND_ROOM)
        except _TooLarge as error:
            raise EngineError(
                f"A worker was to be sent {error.size} at once ({type(message).__name__}), and at most "
                f"{_amount(MESSAGE_LIMIT)} can be. What the training function, its config or a backend's function "
                "brings along is sent with it: let workers read large data from files or datasets instead."
            ) from error
        self._outbox.append((public, body))
        self._wake.set()

    def close(self) -> None:
        """Send what is queued, stop, and leave no socket file."""
        if self._closing:
            return
        self._closing = True
        self._wake.set()
        self._thread.join()
        self._close_sockets()
        self._wake.close()
        if self._path:
            try:
                os.unlink(self._path)
            except FileNotFoundError:
                pass

    def _close_sockets(self) -> None:
        self._auth.stop()
        with self._draining_events():  # ZeroMQ would wait for ever where strangers have filled their queue
            self._socket.disable_monitor()
        self._events.close()
        if self._unproven is not None:
            self._unproven.close()
        self._socket.close(linger=200)
        self._context.term()

    # -- the thread

    def _listening_socket(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.ROUTER)
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self.keys.public, self.keys.secret
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.BACKLOG, _BACKLOG)
        # Honest links have no more than a window under way, and may send it again.
        socket.setsockopt(zmq.RCVHWM, 4 * Link.WINDOW)
        socket.setsockopt(zmq.MAXMSGSIZE, _HEADER.size + FRAME_LIMIT + _ENCRYPTION)
        socket.setsockopt(zmq.HANDSHAKE_IVL, int(_HANDSHAKE_TIMEOUT_S * 1000))
        return socket

    def _event_socket(self) -> zmq.Socket[bytes]:
        """Where ZeroMQ says which connections have begun and ended."""
        wanted = zmq.EVENT_DISCONNECTED
        if self._unproven is not None:
            wanted |= zmq.EVENT_ACCEPTED
            make_room_for_connections(MOST_UNPROVEN + _EVENTS_AHEAD)
        events = self._context.socket(zmq.PAIR)
        events.setsockopt(zmq.RCVHWM, 1)
        self._socket.monitor("inproc://connections", wanted)
        events.connect("inproc://connections")
        return events

    @contextlib.contextmanager
    def _draining_events(self) -> Iterator[None]:
        done = threading.Event()

        def drain() -> None:
            while not done.is_set():
                if self._events.poll(1):
                    self._events.recv_multipart()

        thread = threading.Thread(target=drain, name="powertrain-hub-events", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _bind(self, address: str, directory: str, port: int, listen_on: str) -> str:
        if address != "ipc":
            told = address if listen_on in ("", "0.0.0.0", "::") else listen_on
            port = self._bind_tcp(_in_brackets(listen_on or address), port)
            return f"tcp://{_in_brackets(told)}:{port}"
        path = os.path.join(directory, "wire")
        if len(os.fsencode(path)) > _SOCKET_PATH_LIMIT:
            raise WireError(
                f"The socket path {path!r} is longer than {_SOCKET_PATH_LIMIT} bytes, which the system does "
                "not allow. Set XDG_RUNTIME_DIR or TMPDIR to a shorter directory."
            )
        self._socket.bind(f"ipc://{path}")
        os.chmod(path, 0o600)
        self._path = path
        return f"ipc://{path}"

    def _bind_tcp(self, host: str, port: int) -> int:
        self._socket.setsockopt(zmq.IPV6, int(host.startswith("[")))
        try:
            if not port:
                return self._socket.bind_to_random_port(f"tcp://{host}")
            self._socket.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            if error.errno == zmq.EADDRINUSE:
                cure = "choose another in RunConfig(port=...), or leave it out to take any that is free"
                why = f"Another run or program may have the port: {cure}."
            else:
                why = "Is it an address of this machine? Leave TraceConfig(bind_host=...) out to take its usual one."
            raise WireError(
                f"The run cannot listen on {host}:{port} for its workers: {error}. {why}"
            ) from error
        return port

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._auth.zap_socket, zmq.POLLIN)
        poller.register(self._events, zmq.POLLIN)
        poller.register(self._wake.fileno(), zmq.POLLIN)
        while not self._closing:
            ready = poller.poll()
            if (pause := gathering_pause(len(self._peers))) > 0:
                time.sleep(pause)
                ready = poller.poll(0)
            for source, _ in ready:
                if source is self._auth.zap_socket:
                    self._let_in()
                elif source is self._socket:
                    self._receive_all()
                elif source is self._events:
                    self._take_events()
                else:
                    self._wake.clear()
            self._flush()
        self._flush()

    def _let_in(self) -> None:
        """Answer all who knock: at the start of a run that is every worker at once."""
        while self._auth.zap_socket.poll(0):
            _run_now(self._auth.handle_zap_message(self._auth.zap_socket.recv_multipart()))

    def _receive_all(self) -> None:
        """What is there, or so much of it that the outbox should be looked at again."""
        for _ in range(256):
            try:
                route, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            if len(frames) == 1:
                self._receive(bytes(route.buffer), frames[0])
            elif frames and (peer := self._peers.get(sender := _sender(frames[0]))) is not None:
                self._refuse(sender, peer, f"it is made of {len(frames)} frames")
        if self._has_delivered:
            self._has_delivered = False
            self._delivered()

    def _take_events(self, most: int = 256) -> None:
        """Take in which connections have begun and ended, or so many that others should be looked at again."""
        for _ in range(most):
            try:
                event, descriptor = _EVENT.unpack(self._events.recv_multipart(zmq.NOBLOCK)[0])
            except zmq.Again:
                return
            if event == zmq.EVENT_DISCONNECTED:
                self._on_disconnect(descriptor)
            elif self._unproven is not None:
                self._unproven.add(descriptor)
                self._bound_unproven(self._unproven)

    def _on_disconnect(self, descriptor: int) -> None:
        if self._unproven is not None:
            self._unproven.remove(descriptor)
        public = self._connected.pop(descriptor, None)
        peer = self._peers.get(public) if public is not None else None
        if public is not None and peer is not None and peer.descriptor == descriptor:
            peer.descriptor = -1
            self._parted(public)

    def _bound_unproven(self, unproven: UnprovenConnections) -> None:
        """Close the oldest connections that have proved no key, where there are more than workers can explain."""
        expected = max(0, len(self._peers) - len(self._connected))
        if unproven.close_beyond(MOST_UNPROVEN + expected) and not self._told_flood:
            self._told_flood = True
            self._rejected(
                f"More than {MOST_UNPROVEN} connections to {self.endpoint} have not proved that they are of this run; "
                "the oldest are closed. A port scanner or another program may use the port: close it to other "
                "machines than those of the run, or choose another with RunConfig(port=...)."
            )

    def _receive(self, route: bytes, frame: zmq.Frame) -> None:
        sender = _sender(frame)
        peer = self._peers.get(sender)
        if peer is None or peer.is_refused:
            return
        try:
            if peer.route != route:
                self._connects(sender, peer, frame.get(zmq.SRCFD))
            self._take(sender, peer, route, frame.buffer)
        except WireError as problem:
            self._answer_over(peer, route)  # so that it can be told
            self._refuse(sender, peer, str(problem))
        except MemoryError:  # it comes again, and there may be room by then
            if not peer.is_told:
                peer.is_told = True
                self._rejected(f"There is no memory left for a message of {peer}; it is sent again.")

    def _connects(self, sender: bytes, peer: _Peer, descriptor: int) -> None:
        """A frame has come over a new connection. Its descriptor may have been another's, whose end is told before."""
        self._take_events(_EVENTS_AHEAD)
        if self._unproven is not None:
            self._unproven.remove(descriptor)
        peer.descriptor = descriptor
        self._connected[descriptor] = sender

    def _take(self, sender: bytes, peer: _Peer, route: bytes, frame: memoryview) -> None:
        """Deal with one frame of a known worker; raises :class:`WireError` where it is to be refused."""
        number, ends, piece = _read_frame(frame)
        if number != peer.seen + 1:
            # Seen already: the acknowledgement was lost. Too early: it comes again, after those lost before it.
            self._owed.add(sender)
            self._answer_over(peer, route)
            return
        whole = peer.gathering.add(number, ends, piece)
        if whole is None:
            peer.seen = number
            peer.dealt_with(peer.acknowledged)
            self._owed.add(sender)
            self._answer_over(peer, route)
            return
        envelope = _read_envelope(whole)
        peer.check(envelope)
        peer.seen = number
        peer.heard(envelope.heard)
        self._answer_over(peer, route)
        try:
            peer.deliver(Received(sender, number, envelope))
            self._has_delivered = True
        except (
            Exception
        ) as error:  # a fault of ours, but one that must not make this thread deaf to all others
            _logger.exception("A batch could not be dealt with.")
            raise WireError(f"it could not be dealt with ({type(error).__name__}: {error})") from error

    def _refuse(self, sender: bytes, peer: _Peer, problem: str) -> None:
        """Read nothing of this worker any more, and say why."""
        if peer.is_refused:
            return
        peer.is_refused = True
        # Part of it may be the sender's own words.
        why = ascii(problem)[1:-1][:_LONGEST_REASON]
        sentence = (
            f"A message of {peer} cannot be read: {why}. A value that the rank sent was not checked before, which is a "
            "fault of Powertrain, or something else uses the rank's keys."
        )
        if self._refused is None:
            self._rejected(sentence)
        else:
            self._refused(sender, sentence)

    def _answer_over(self, peer: _Peer, route: bytes) -> None:
        """Over a new connection, send (again) the commands that have not arrived."""
        if peer.route != route:
            peer.route = route
            for _, frame in peer.unheard:
                self._socket.send_multipart([route, frame])

    def _flush(self) -> None:
        while self._outbox:
            public, said = self._outbox.popleft()
            peer = self._peers.get(public)
            if peer is None:
                continue
            if isinstance(said, int):
                peer.dealt_with(said)
                self._owed.add(public)
            else:
                self._command(peer, said)
        while self._owed:
            peer = self._peers.get(self._owed.pop())
            if peer is not None and peer.route is not None:
                ((_, frame),) = _frames(_encode(Ack(seq=peer.acknowledged)), 0)
                self._socket.send_multipart([peer.route, frame])

    def _command(self, peer: _Peer, body: bytes) -> None:
        for number, frame in _frames(body, peer.number + 1):
            peer.number = number
            peer.unheard.append((number, frame))
            if peer.route is not None:
                self._socket.send_multipart([peer.route, frame])


def _sender(frame: zmq.Frame) -> bytes:
    """The public key that the frame came with."""
    return str(frame.get("User-Id")).encode()


def gathering_pause(workers: int) -> float:
    """Seconds for which a hub lets messages of so many workers gather before it looks at them; 0 for not at all."""
    pause = min(_GATHER_MOST, workers * _GATHER_EACH)
    return pause if pause >= _GATHER_LEAST else 0.0


def make_room_for_connections(connections: int) -> None:
    """Let this process open so many, where the system allows that: what it begins with, often 1,024 files, is raised.

    Only where it has to be: programs that still use ``select`` can use no file above that number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or connections + _OTHER_FILES <= soft:
        return
    wanted = max(2 * soft, 2 * connections + _OTHER_FILES)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    with contextlib.suppress(ValueError, OSError):  # refused: then connections wait until others end
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


# --------------------------------------------------------------------------- the worker's side


class Link:
    """A worker's connection. Not thread-safe: one thread owns it.

    ``poll`` waits for commands or for ``wake`` (from any thread); ``send`` numbers and sends a batch and
    keeps it until it is acknowledged; ``room`` says how many more batches may be under way.
    """

    #: Frames under way at most, and so batches; beyond it the caller keeps its messages to itself.
    WINDOW = 8
    #: Seconds without an acknowledgement after which everything unacknowledged is sent again.
    RESEND_AFTER = 5.0
    #: Seconds without any answer at all after which it is looked into whether the hub can be reached.
    REACH_WITHIN = 30.0

    def __init__(
        self, door: Door, rank: int, attempt: int, context: zmq.Context[zmq.Socket[bytes]] | None = None
    ) -> None:
        """``context`` is one that several links of a process share; it outlives them all."""
        self._rank, self._attempt = rank, attempt
        self.endpoint = door.endpoint
        self._owns_context = context is None
        self._context = context or zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.curve_serverkey = door.hub_key
        self._socket.curve_publickey, self._socket.curve_secretkey = (
            door.keys.public,
            door.keys.secret,
        )
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _HEADER.size + FRAME_LIMIT + _ENCRYPTION)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._socket.connect(door.endpoint)
        self._wake = _Wakeup()
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake.fileno(), zmq.POLLIN)
        #: The last frame's number; frames under way; and what goes when there is room for it again.
        self._seq = 0
        self._unacked: deque[tuple[int, bytes]] = deque()
        self._waiting: deque[Iterator[tuple[int, bytes]]] = deque()
        #: The last command's number, and what has come of one that is longer than a frame.
        self._commands = 0
        self._gathering = _Gathering(MESSAGE_LIMIT + _COMMAND_ROOM)
        self._heard = self._tried = time.monotonic()
        self._resent = 0.0
        #: True once the hub has answered anything.
        self.reached = False

    @property
    def room(self) -> int:
        """Batches that may still be sent before an acknowledgement is needed."""
        return 0 if self._waiting else self.WINDOW - len(self._unacked)

    @property
    def settled(self) -> bool:
        """True when everything sent has been acknowledged."""
        return not self._unacked and not self._waiting

    @property
    def silence(self) -> float:
        """Seconds for which what was sent has been without an answer; 0 when all is answered."""
        return time.monotonic() - self._heard if self._unacked else 0.0

    def why_unreachable(self) -> str:
        """Why the hub has never answered, once it had time to; "" while all may be well.

        A hub that takes the connection is there: its process may only have been stopped for a while."""
        now = time.monotonic()
        if self.reached or now - self._tried < self.REACH_WITHIN:
            return ""
        self._tried = now
        return _why_closed(self.endpoint)

    def watch(self, fileno: int) -> None:
        """Also return from ``poll`` when this descriptor becomes readable."""
        self._poller.register(fileno, zmq.POLLIN)

    def wake(self) -> None:
        """Make ``poll`` return. Any thread."""
        self._wake.set()

    def poll(self, timeout: float | None) -> tuple[list[FromController], set[int]]:
        """Wait for commands; returns them and the watched descriptors that are ready."""
        ready = self._poller.poll(None if timeout is None else max(0, int(timeout * 1000)))
        commands: list[FromController] = []
        watched: set[int] = set()
        for source, _ in ready:
            if source is self._socket:
                commands = self._receive_all()
            elif source == self._wake.fileno():
                self._wake.clear()
            else:
                watched.add(source)
        self._resend_if_silent()
        return commands, watched

    def send(
        self,
        messages: Iterable[FromWorker],
        boundary: int,
        row: int,
        extras: dict[str, Any] | None = None,
    ) -> None:
        """Send one batch. The caller has checked ``room``.

        What no message can be large enough for is left out, and the run is told so instead. Raises :class:`WireError`
        where nothing can be left out."""
        for body in self._bodies(list(messages), boundary, row, extras or {}):
            if self.settled:
                self._heard = time.monotonic()
            self._waiting.append(_frames(body, self._seq + 1))
            self._seq += _frame_count(body)
            self._send_waiting()

    def close(self) -> None:
        self._socket.close()
        if self._owns_context:
            self._context.term()
        self._wake.close()

    def _bodies(
        self, messages: list[FromWorker], boundary: int, row: int, extras: dict[str, Any]
    ) -> list[bytes]:
        """The messages as encoded envelopes: one, unless they are too large together."""
        envelope = Envelope(
            rank=self._rank,
            attempt=self._attempt,
            boundary=boundary,
            row=row,
            messages=messages,
            heard=self._commands,
            extras=extras,
        )
        try:
            return [_encoded(envelope, MESSAGE_LIMIT)]
        except _TooLarge as error:
            size = error.size
        if len(messages) == 1:
            return self._bodies(_shortened(messages[0], size), boundary, row, extras)
        middle = len(messages) // 2
        return [
            *self._bodies(messages[:middle], boundary, row, extras),
            *self._bodies(messages[middle:], boundary, row, extras),
        ]

    def _send_waiting(self) -> None:
        while self._waiting and len(self._unacked) < self.WINDOW:
            frame = next(self._waiting[0], None)
            if frame is None:
                self._waiting.popleft()
            else:
                self._unacked.append(frame)
                self._transmit(frame[1])

    def _transmit(self, frame: bytes) -> None:
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            pass  # the hub has shut its door: whoever has this link must learn of the silence, and not wait here

    def _receive_all(self) -> list[FromController]:
        commands: list[FromController] = []
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return commands
            number, ends, piece = _read_frame(memoryview(frame))
            self._heard, self.reached = time.monotonic(), True
            if number == 0:
                self._acknowledged(_decode_command(piece))
            elif number == self._commands + 1:  # any other has come already, over a connection that broke
                self._commands = number
                whole = self._gathering.add(number, ends, piece)
                if whole is not None:
                    commands.append(_decode_command(whole))

    def _acknowledged(self, answer: FromController) -> None:
        assert isinstance(answer, Ack)
        while self._unacked and self._unacked[0][0] <= answer.seq:
            self._unacked.popleft()
        self._send_waiting()

    def _resend_if_silent(self) -> None:
        """Less and less often: copies pile up in front of a hub that stands still."""
        now = time.monotonic()
        pause = max(self.RESEND_AFTER, (now - self._heard) / 4)
        if self._unacked and now - max(self._heard, self._resent) > pause:
            self._resent = now
            for _, frame in self._unacked:
                self._transmit(frame)


def _shortened(message: FromWorker, size: str) -> list[FromWorker]:
    """What to send instead of a message that is too large: all of it but what makes it so, and words about that.

    Raises :class:`WireError` where the rank would wait for an answer to what is left out."""
    most = f"more than the {_amount(MESSAGE_LIMIT)} that a message to the run may have"
    if isinstance(message, Outcome) and message.value:
        told = (
            f"The training function returned a value of {size}, {most}; Result.return_value will be None. Report it as "
            "a checkpoint, or write it to a file and return the path."
        )
        return [Noted(message=told), msgspec.structs.replace(message, value=b"")]
    if isinstance(message, Executed) and message.value:
        words = f"The function that was called in this rank returned a value of {size}, {most}."
        error = ErrorReport(type="WireError", message=words, traceback="")
        return [msgspec.structs.replace(message, value=b"", error=error)]
    if isinstance(message, Point) and message.metrics:
        told = (
            f"The metrics of row {message.row} come to {size}, {most}; they were left out. Report large data as the "
            "files of a checkpoint."
        )
        return [Noted(message=told), msgspec.structs.replace(message, metrics={}, originals={})]
    if isinstance(message, Validated) and message.metrics:
        words = f"The validation function returned metrics of {size}, {most}."
        error = ErrorReport(type="WireError", message=words, traceback="")
        return [msgspec.structs.replace(message, metrics={}, error=error)]
    if isinstance(message, (Stacks, Telemetry, ProcessOutput)):
        return [
            Noted(
                message=f"What the run was told as {type(message).__name__} came to {size}, {most}; it was left out."
            )
        ]
    raise WireError(
        f"What this process was to send to the run ({type(message).__name__}) comes to {size}, {most}. Pass large data "
        "by files."
    )


def _why_closed(endpoint: str) -> str:
    """Why no connection can be made to an endpoint; "" where one can."""
    kind, _, place = endpoint.partition("://")
    try:
        if kind == "ipc":
            with sockets.socket(sockets.AF_UNIX) as plain:
                plain.settimeout(_CONNECT_WITHIN)
                plain.connect(place)
        else:
            host, _, port = place.rpartition(":")
            sockets.create_connection((host.strip("[]"), int(port)), _CONNECT_WITHIN).close()
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__
    return ""


def _in_brackets(address: str) -> str:
    return f"[{address}]" if ":" in address else address


class _Wakeup:
    """A descriptor that any thread can make readable."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        # A number that was closed may soon mean somebody else's file: nobody writes to it after that.
        self._open = threading.Lock()
        self._closed = False
        #: True from ``set`` to ``clear``: whoever clears it looks afterwards at all that it was set for.
        self._is_set = False

    def fileno(self) -> int:
        return self._read

    def set(self) -> None:
        if self._is_set:
            return
        self._is_set = True
        with self._open:
            if not self._closed:
                try:
                    os.write(self._write, b"x")
                except BlockingIOError:
                    pass  # full: it is readable already

    def clear(self) -> None:
        try:
            os.read(self._read, 4096)
        except BlockingIOError:
            pass
        # Not before: a byte that comes in between would be read, and nobody would write another.
        self._is_set = False

    def close(self) -> None:
        with self._open:
            if not self._closed:
                self._closed = True
                os.close(self._read)
                os.close(self._write)


class _TooLarge(Exception):
    """``size`` in words."""

    def __init__(self, size: str) -> None:
        super().__init__(size)
        self.size = size


def _encoded(value: Any, limit: int) -> bytes:
    """``value`` in msgpack, with what that cannot hold made plain: halves of characters, very large whole numbers.

    Raises :class:`_TooLarge` for more than ``limit`` bytes."""
    try:
        body = _encode(value)
    except msgspec.EncodeError:
        raise _TooLarge("more than 4 GiB") from None  # of one string, which msgpack cannot write
    except (UnicodeEncodeError, OverflowError):
        body = _encode(_plain(msgspec.to_builtins(value, builtin_types=(bytes,))))
    if len(body) > limit:
        raise _TooLarge(_amount(len(body)))
    return body


def _amount(size: int) -> str:
    return f"{size / 2**30:.3g} GiB" if size >= 2**30 else f"{size / 2**20:.3g} MiB"


def encode_messages(messages: list[FromWorker]) -> bytes:
    """Messages for a file of this process's own."""
    return _encoded(messages, sys.maxsize)


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return str(value)
    if isinstance(value, dict):
        return {_plain(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    return value


def _run_now(coroutine: Any) -> None:
    """Run a coroutine that never awaits anything real (the authenticator's are only written that way)."""
    try:
        coroutine.send(None)
    except StopIteration:
        pass
