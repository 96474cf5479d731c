"""Values that messages are made of."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from powertrain.values.exceptions import ExceptionData

#: A count or an index: messages with a number outside this range are refused.
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


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


class FilePart(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a rank's share of a checkpoint; an empty directory's name ends in "/"."""

    name: str
    size: Count
    #: Its hash once it is durable in storage, "" before.
    xxh3: str = ""


class ValidationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The validation settings of a checkpoint, where ``report`` was given more than True."""

    #: Keyword arguments that go over the trainer's own.
    arguments: dict[str, Any] = {}
    #: Timeout in seconds; 0 for the trainer's.
    timeout: float = 0.0


class CheckpointPart(msgspec.Struct, frozen=True, kw_only=True):
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
    #: Where the user's own code put the files (a path or address); nothing is staged or uploaded then.
    elsewhere: str = ""
    #: The reason for a missing share of a reported checkpoint, such as a full disk, and its place.
    error: str = ""
    error_place: str = ""
    #: True while the user's own upload function runs in the rank: :class:`ShareUploaded` has the place of the files.
    pending: bool = False
    #: Asked for with ``report(validation=...)``: arguments for the function, merged over the trainer's.
    validation: ValidationRequest | None = None
    #: Entries for the manifest's extras: the same on every rank, or under keys of the rank's own.
    extras: dict[str, Any] = {}


class Point(Message, frozen=True, tag="point"):
    """One ``report``: row ``row`` of this rank (0 for ``solo``)."""

    row: Count
    at: float
    metrics: dict[str, Any]
    solo: bool = False
    barrier: bool = False
    part: CheckpointPart | None = None
    #: Rank 0's objects among the metrics: see :mod:`powertrain.values.kinds`.
    originals: dict[str, bytes] = {}


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """One line of one thread's stack. ``source`` is the text of the line, where it is known."""

    file: str
    line: int
    function: str
    source: str = ""


class ThreadStack(msgspec.Struct, frozen=True, kw_only=True):
    """The stack of one thread, the innermost frame first."""

    name: str
    #: True for the thread that the process began with: a rank's is the one that runs the user's function.
    main: bool
    frames: list[Frame]


class ProcessStack(msgspec.Struct, frozen=True, kw_only=True):
    """The stacks of one process: a rank, or a process that it has started."""

    pid: int
    #: "rank 1", "DataLoader worker of rank 1", or the command's name.
    title: str
    #: The kernel's state: see ``powertrain.engine.base.Inspection``.
    state: str
    threads: list[ThreadStack] = []
    #: The reason for missing stacks, or a note about them; "" for none.
    remark: str = ""


class Where(msgspec.Struct, frozen=True, kw_only=True):
    """The position of a rank's main thread in the user's own code."""

    #: The user's innermost frame.
    frame: Frame
    #: The kind of library call in that frame: "collective" (torch.distributed, or a backward that averages
    #: gradients), "loader" (a DataLoader), "compiler" (torch.compile is compiling), "run" (waits for the run: report,
    #: barrier, load_state), or "".
    inside: str = ""
    #: The library function that the user's frame has called: "all_reduce", "backward", "__next__"; "" for none.
    call: str = ""
