"""The typed facts of a run, for the journal, replay and observers.

A fact is something that has happened, in the past tense, with the values needed to understand it later.
Points (the reports of ranks) are not facts: they are many, and live in columns in :mod:`powertrain.run.metrics`.
"""

from __future__ import annotations

from typing import Annotated, Any, Union

import msgspec

from powertrain.text.redaction import redact_values
from powertrain.values.exceptions import ExceptionData

#: Values outside of these bounds were never written: a line with one is damaged, or was changed on purpose.
AttemptNumber = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Whole = Annotated[int, msgspec.Meta(ge=-1, le=(1 << 63) - 1)]
#: Before the year 10000.
UnixSeconds = Annotated[float, msgspec.Meta(ge=0.0, lt=253_402_300_800.0)]
Seconds = Annotated[float, msgspec.Meta(gt=-1e12, lt=1e12)]


class WorkerFailure(msgspec.Struct, frozen=True, kw_only=True):
    """The failure of one rank, as text and in parts."""

    rank: int
    #: "raised", "signal", "exit", "oom", "start" (never came up), "hung" or "lost" (slot or node gone).
    kind: str
    #: One sentence: "rank 1 was killed by SIGSEGV (segmentation fault)".
    summary: str
    #: Exception type and message where the rank raised.
    error_type: str = ""
    message: str = ""
    traceback: str = ""
    #: The user's own frame: file, line, function and the text of that line.
    file: str = ""
    line: int = 0
    function: str = ""
    source: str = ""
    host: str = ""
    pid: Whole = 0
    #: Last row the rank reported, 0 when none.
    row: Whole = 0
    #: Seconds after the attempt began.
    after: Seconds = 0.0
    #: True where this failure follows from another rank's (a broken collective, say).
    secondary: bool = False
    #: The exceptions that it was raised from, a line each, and the data to rebuild it from.
    causes: list[str] = []
    exception: ExceptionData | None = None
    #: The exit code as a shell shows it: 128 and its number for a signal. 1 where it was ended for the failure.
    exit_code: Whole = 1


class Fact(msgspec.Struct, frozen=True, kw_only=True, tag_field="fact"):
    """Common to all facts: when it happened (Unix seconds)."""

    time: UnixSeconds


class RunStarted(Fact, frozen=True, tag="run_started"):
    """A controller took the lease. Legal in any state: the one before may have been killed."""

    name: str
    lease: Whole
    host: str
    pid: Whole
    version: str
    engine: str
    #: How many workers it may have; 0 where that was not recorded.
    min_workers: int = 0
    max_workers: int = 0
    #: Row and name of the committed checkpoint it resumes from; 0 and "" for a fresh start.
    row: Whole = 0
    checkpoint: str = ""


class SlotsRequested(Fact, frozen=True, tag="slots_requested"):
    """Slots were requested from the engine."""

    attempt: AttemptNumber
    count: Whole


class SlotsWaited(Fact, frozen=True, tag="slots_waited"):
    """Slots are not available yet; ``reason`` names the missing resources."""

    attempt: AttemptNumber
    granted: Whole
    count: Whole
    reason: str


class AttemptStarted(Fact, frozen=True, tag="attempt_started"):
    """All slots are granted and workers are being forked. Rows of this attempt begin at ``first_row``."""

    attempt: AttemptNumber
    world_size: Count
    first_row: Whole
    checkpoint: str = ""
    #: Host of each rank, in rank order.
    hosts: tuple[str, ...] = ()


class WorkerStarted(Fact, frozen=True, tag="worker_started"):
    """One rank's process answered for the first time."""

    attempt: AttemptNumber
    rank: int
    pid: Whole
    host: str


class StartupMeasured(Fact, frozen=True, tag="startup_measured"):
    """The time from the call of ``fit``, or the end of the attempt before, to the first step of all ranks, by phase.

    One for each attempt. Journals of old have one for each phase of a rank instead, with ``phase`` and its ``seconds``.
    """

    attempt: AttemptNumber
    #: The slowest rank; -1 where none stands out.
    rank: int = -1
    phase: str = ""
    #: The whole time. The critical path has the phases of ``path``, which add up to it.
    seconds: Seconds = 0.0
    world_size: Count = 0
    path: dict[str, float] = {}
    #: By phase the seconds of each of ``ranks``: of all, or of the slowest where there are many; then ``spread`` has
    #: the fastest, the median and the slowest of all.
    ranks: tuple[int, ...] = ()
    phases: dict[str, tuple[float, ...]] = {}
    spread: dict[str, tuple[float, float, float]] = {}
    #: Ranks without a step or a report.
    unfinished: tuple[int, ...] = ()
    #: The resources that were missing while slots were awaited; "" where they came soon.
    waited_for: str = ""
    #: The package that loading the function spent most on: "transformers"; "" where it was quick.
    loaded: str = ""
    #: The package that the function itself has begun to load first, before its first step; "" where it loaded little.
    imported: str = ""
    #: True when the script had imported torch before it called ``fit``.
    torch_was_loaded: bool = False
    #: True when the ranks run a whole script, so that no code of the user's runs before ``fit()``.
    runs_script: bool = False
    engine: str = ""
    #: True when workers may be forked from the driver; None in records of earlier versions.
    forks_driver: bool | None = None

    def __post_init__(self) -> None:
        if any(len(seconds) != len(self.ranks) for seconds in self.phases.values()):
            raise ValueError("a phase has the seconds of another number of ranks")


class TrainingStarted(Fact, frozen=True, tag="training_started"):
    """Every rank was ordered to call the user's function."""

    attempt: AttemptNumber


class RanksAbsent(Fact, frozen=True, tag="ranks_absent"):
    """These ranks have never reported while others wait at ``row``; rows close without them."""

    attempt: AttemptNumber
    row: Whole
    ranks: tuple[int, ...]


class Committed(Fact, frozen=True, tag="committed"):
    """A checkpoint's manifest was written: from here on it can be resumed from."""

    attempt: AttemptNumber
    row: Whole
    checkpoint: str
    bytes: Whole = 0
    files: Whole = 0


class UploadLagged(Fact, frozen=True, tag="upload_lagged"):
    """Reported checkpoints are not in storage yet: since when, how many bytes, and the error of storage."""

    attempt: AttemptNumber
    #: The oldest of them.
    row: Whole
    seconds: Seconds
    waiting: Whole
    bytes: Whole
    reason: str = ""


class CheckpointFailed(Fact, frozen=True, tag="checkpoint_failed"):
    """A reported checkpoint will never be committed, and why. Training continues; older ones are unaffected."""

    attempt: AttemptNumber
    row: Whole
    checkpoint: str
    reason: str
    #: The file system, directory or address that did not take it, or the function that failed; "" where unknown.
    place: str = ""


class ValidationEnded(Fact, frozen=True, tag="validation_ended"):
    """The user's validation of a checkpoint is over; ``status`` is that of a reported checkpoint."""

    checkpoint: str
    row: Whole
    status: str
    metrics: dict[str, Any] = {}
    reason: str = ""
    seconds: Seconds = 0.0


class Stopping(Fact, frozen=True, tag="stopping"):
    """The run was asked to end early at a boundary; ``cause`` is "criterion", "interrupt", "notice", "asked", or "quit"
    for a debugger that was quit: then it ends at once."""

    attempt: AttemptNumber
    cause: str
    reason: str


class Failed(Fact, frozen=True, tag="failed"):
    """An attempt ended badly. ``failures`` has the first failing rank first."""

    attempt: AttemptNumber
    failures: tuple[WorkerFailure, ...]
    #: "retry" or "give_up", and why in words.
    decision: str
    reason: str
    #: Seconds until the retry.
    delay: Seconds = 0.0


class Lost(Fact, frozen=True, tag="lost"):
    """Slots were withdrawn: free of ``max_failures``."""

    attempt: AttemptNumber
    ranks: tuple[int, ...]
    decision: str
    reason: str
    #: True when a notice had come before: it counts against ``max_preemption_failures``.
    preempted: bool = False


class Notified(Fact, frozen=True, tag="notified"):
    """A preemption of ranks, or of the whole run, was announced; ``deadline`` is Unix seconds, 0 where unknown."""

    attempt: AttemptNumber
    #: Empty for the whole run.
    ranks: tuple[int, ...]
    reason: str
    deadline: Seconds = 0.0


class HangNoticed(Fact, frozen=True, tag="hang_noticed"):
    """The run seems to hang. ``message`` explains which ranks wait for which, and where."""

    attempt: AttemptNumber
    row: Whole
    #: The ranks that the others wait for.
    ranks: tuple[int, ...]
    waiting: tuple[int, ...]
    seconds: Seconds
    message: str
    #: The user's line of the first of ``ranks``.
    file: str = ""
    line: int = 0
    function: str = ""
    source: str = ""
    #: Where all stacks are kept, in the run's directory.
    stacks: str = ""


class HangOver(Fact, frozen=True, tag="hang_over"):
    """The run moves again: the notice before this is withdrawn."""

    attempt: AttemptNumber
    seconds: Seconds
    ranks: tuple[int, ...] = ()


class Resized(Fact, frozen=True, tag="resized"):
    """The attempt was brought to a boundary, and the next will have another world size, or be on other slots."""

    attempt: AttemptNumber
    world_size: Count
    reason: str


class Warned(Fact, frozen=True, tag="warned"):
    """A warning for the user."""

    message: str
    attempt: AttemptNumber = 0
    rank: int = -1


class Informed(Fact, frozen=True, tag="informed"):
    """A line for the terminal. It is shown and not recorded."""

    message: str


class Ended(Fact, frozen=True, tag="ended"):
    """The last fact of a controller: "finished", "stopped", "failed" or "preempted", and why."""

    state: str
    reason: str
    rows: Whole = 0
    seconds: Seconds = 0.0
    #: Bytes of the pickled return value of rank 0's function; 0 for none.
    returned: Whole = 0


Event = Union[
    RunStarted,
    SlotsRequested,
    SlotsWaited,
    AttemptStarted,
    WorkerStarted,
    StartupMeasured,
    TrainingStarted,
    RanksAbsent,
    Committed,
    UploadLagged,
    CheckpointFailed,
    ValidationEnded,
    Stopping,
    Failed,
    Lost,
    Notified,
    HangNoticed,
    HangOver,
    Resized,
    Warned,
    Informed,
    Ended,
]

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Event)


def encode(event: Event) -> bytes:
    """Return one fact as one line of JSON, without the line end. Texts that it quotes lose secrets of addresses."""
    line = _encoder.encode(event)
    if b"://" not in line and b"=" not in line:
        return line
    redacted = redact_values(msgspec.to_builtins(event))
    return msgspec.json.encode(redacted)


def decode(line: bytes) -> Event:
    """Return the fact in one line of JSON; raises ``msgspec.DecodeError`` on anything else."""
    event: Event = _decoder.decode(line)
    return event
