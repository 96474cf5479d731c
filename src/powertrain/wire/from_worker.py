"""Messages from a worker to its run."""

from __future__ import annotations

from typing import Any

from powertrain.wire.values import Count, ErrorReport, FilePart, Frame, Message, ProcessStack, Where


class Hello(Message, frozen=True, tag="hello"):
    """The first message of a process."""

    pid: Count
    host: str


class Beat(Message, frozen=True, tag="beat"):
    """Heartbeat of a rank: its progress, and the position of its main thread."""

    #: Reports, optimizer steps and loader batches so far, and seconds since one of them grew. Time in which the
    #: whole process stood still is left out.
    reports: Count
    steps: Count
    batches: Count
    idle: float
    #: "set-up", "training", "checkpoint" (it is saving or staging) or "end".
    phase: str = ""
    row: Count = 0
    #: Collectives begun on torch's default process group; -1 without a group.
    collectives: int = -1
    #: Its pending wait on this wire: "barrier", "broadcast_from_rank_zero", "row 7", "commit of row 7"; or "".
    awaits: str = ""
    where: Where | None = None
    #: True while a debugger holds it.
    debugged: bool = False
    #: How far its data have been read: "train: epoch 3, 45 %"; "" where nothing is known.
    data: str = ""


class FirstStep(Message, frozen=True, tag="first_step"):
    """The rank has made its first step, or its function has ended without one: the time since the start of training by
    phase, in seconds by its own clock. Sent once."""

    #: Loading the user's function; the function before its first batch; waiting for that batch; and the rest.
    function: float = 0.0
    setup: float = 0.0
    data: float = 0.0
    step: float = 0.0
    #: False where the function has ended before it made a step or a report.
    stepped: bool = True
    #: The package that most of the modules are of which loading the function has loaded; "" where that was quick.
    loaded: str = ""
    #: The package that the function itself has begun to load first, before its first step; "" where it loaded little.
    imported: str = ""


class Stacks(Message, frozen=True, tag="stacks"):
    """Reply to :class:`Inspect`: the rank's own process first, then those that it has started."""

    ask: Count
    processes: list[ProcessStack]


class Profiled(Message, frozen=True, tag="profiled"):
    """Reply to :class:`Profile`: the profile of some steps, or the reason why there is none in ``error``."""

    ask: Count
    error: str = ""
    #: The number of profiled steps, and of the steps of the attempt before them.
    steps: Count = 0
    first_step: Count = 0
    #: Seconds on the training thread to start the profiler, of the profiled steps, and to stop it; and beside it.
    start_seconds: float = 0.0
    step_seconds: float = 0.0
    stop_seconds: float = 0.0
    packing_seconds: float = 0.0
    #: The trace in Chrome's format and the history of the CUDA allocator, both compressed by gzip; b"" for none.
    trace: bytes = b""
    memory: bytes = b""


class Noticed(Message, frozen=True, tag="noticed"):
    """The rank's process received a termination signal; ``times`` counts them."""

    signal: str
    times: Count = 1


class Held(Message, frozen=True, tag="held"):
    """Answer to :class:`Hold`: this many boundaries are behind the rank, and it will stop at the next."""

    hold: Count
    boundary: Count
    #: True when it can save there: its state is registered, or its loop checks for it.
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
    """The outcome of the user's function: "returned", "raised" or "stopped". The last message of a rank."""

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


class ShareUploaded(Message, frozen=True, tag="carried"):
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


class UploadTrouble(Message, frozen=True, tag="carry_trouble"):
    """An upload to storage failed or timed out and is retried; ``reason`` is the storage's error."""

    attempt: Count
    row: Count
    rank: Count
    reason: str
    #: The file system that is full; "" for the run's storage.
    place: str = ""


class StagingFull(Message, frozen=True, tag="staging_full"):
    """The rank cannot stage its share of ``row`` before an older one has left the staging area."""

    row: Count
    #: Bytes that are needed, and the limit.
    needed: Count
    limit: Count


class AskCheckpoints(Message, frozen=True, tag="ask_checkpoints"):
    """Request for the checkpoints, once all up to ``row`` are settled (and validated, if requested)."""

    ask: Count
    row: Count
    validated: bool = False
    #: Seconds after which the answer comes in any case; negative for never.
    timeout: float = -1.0


class Validated(Message, frozen=True, tag="validated"):
    """The result of the user's validation function for a checkpoint, or its failure."""

    checkpoint: str
    metrics: dict[str, Any] = {}
    error: ErrorReport | None = None
    seconds: float = 0.0
    #: About values that cannot be kept.
    warnings: list[str] = []


class Telemetry(Message, frozen=True, tag="telemetry"):
    """A rank's new records of :mod:`powertrain.trace`, in their on-disk form."""

    #: Of steps, the number of the first among those the rank has made; some may be missing before it.
    first: Count = 0
    steps: bytes = b""
    samples: bytes = b""
    #: One JSON object with the current settings; empty where nothing changed.
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
    """Output of the debugger."""

    text: str


class DebugPrompt(Message, frozen=True, tag="debug_prompt"):
    """The debugger prompts for a line with ``text``, and waits for the :class:`DebugLine`."""

    number: Count
    text: str


class DebugClosed(Message, frozen=True, tag="debug_closed"):
    """The debugger was left."""


class DebugQuit(Message, frozen=True, tag="debug_quit"):
    """The user has quit a debugger that stood at ``frame``: the run is to end."""

    frame: Frame
