"""Failures of ranks as facts, built from events of the engine or messages of the rank. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from powertrain.engine import base
from powertrain.run.events import WorkerFailure
from powertrain.run.health.hang_report import Verdict, rank_names
from powertrain.run.workers.attempt import Attempt, Member
from powertrain.wire.values import ErrorReport
from powertrain.worker.main import UNREACHABLE

#: Parts of the messages with which gloo and NCCL give up a collective, in lower case.
_TIMEOUT_WORDS = (
    "ms for recv operation to complete",
    "ms for send operation to complete",
    "application timeout caused pair closure",
    "collective operation timeout",
)


def died(member: Member, event: base.Exited, endpoint: str = "") -> WorkerFailure:
    """Return the failure of a process that ended without a message. ``endpoint`` is the address of the run."""
    kind, words = base.describe_exit(event)
    if event.code == UNREACHABLE and not member.greeted:
        host = member.placement.slot.host
        kind, words = "start", f"on {host} cannot reach the run at {endpoint}; its log says why"
    code = 128 - event.code if event.code < 0 else event.code or 1
    return _failure(member, kind, f"rank {member.rank} {words}", message=event.error, exit_code=code)


def silent(member: Member, why: str) -> WorkerFailure:
    """Return the failure of a process that never connected."""
    return _failure(member, "start", f"rank {member.rank} {why}")


def raised(member: Member, report: ErrorReport, kind: str, *, is_echo: bool = False) -> WorkerFailure:
    """Return the failure that a rank reported; ``kind`` is "raised", "exit" or "start". ``is_echo``: another rank is
    the cause."""
    report = msgspec.structs.replace(report, secondary=report.secondary or is_echo)
    return reported(member.rank, report, kind, **_circumstances(member))


def reported(rank: int, report: ErrorReport, kind: str, **circumstances: Any) -> WorkerFailure:
    """Return a rank's error with the circumstances (fields of ``WorkerFailure``) known to the receiver."""
    return WorkerFailure(
        rank=rank,
        kind=kind,
        summary=f"rank {rank} raised {report.type}: {report.message}".rstrip(": "),
        error_type=report.type,
        message=report.message,
        traceback=report.traceback,
        file=report.file,
        line=report.line,
        function=report.function,
        source=report.source,
        secondary=report.secondary,
        causes=report.causes,
        exception=report.exception,
        exit_code=_exit_code(report) if kind == "exit" else 1,
        **circumstances,
    )


def _exit_code(report: ErrorReport) -> int:
    """Return the code of a ``sys.exit``, as the system keeps it; 1 for one with a message."""
    try:
        return int(report.message) & 0xFF or 1
    except ValueError:
        return 1


def may_follow_a_notice(failure: WorkerFailure) -> bool:
    """Return True for the end of a rank, or of one of its DataLoader workers, that the same scheduler may have
    caused."""
    return failure.kind != "raised" or "killed by signal: Terminated" in failure.message


def is_collective_timeout(report: ErrorReport) -> bool:
    """Return True when a collective has timed out waiting for other ranks: the cause is then on one of those."""
    return any(words in report.message.lower() for words in _TIMEOUT_WORDS)


def hung(attempt: Attempt, verdict: Verdict, seconds: float) -> list[WorkerFailure]:
    """Return the failures of the ranks that hang; where none can be blamed, of the first that waits."""
    blamed = [rank for rank in verdict.culprits if not attempt.members[rank].exited]
    return [
        _failure(
            attempt.members[rank],
            "hung",
            f"{_hang_summary(rank, verdict)}: nothing moved for {seconds:.0f} s",
            message=verdict.message,
            **_place_in_hang(rank, verdict),
        )
        for rank in blamed or verdict.waiting[:1]
    ]


def _hang_summary(rank: int, verdict: Verdict) -> str:
    if rank in verdict.returned:
        return f"rank {rank} returned while {rank_names(verdict.waiting)} waited for it"
    if verdict.culprits:
        return f"rank {rank} hung"
    return f"{rank_names(verdict.waiting)} hung in collectives that do not end"


def _place_in_hang(rank: int, verdict: Verdict) -> dict[str, Any]:
    """Return the rank's own line. A rank that has returned has none: the message names the line where the others
    wait."""
    frame = verdict.frames.get(rank) if verdict.culprits else verdict.frame
    return msgspec.structs.asdict(frame) if frame is not None else {}


def _failure(member: Member, kind: str, summary: str, message: str = "", **place: Any) -> WorkerFailure:
    return WorkerFailure(
        rank=member.rank, kind=kind, summary=summary, message=message, **place, **_circumstances(member)
    )


def _circumstances(member: Member) -> dict[str, Any]:
    return {
        "host": member.placement.slot.host,
        "pid": member.pid,
        "row": member.attempt.rows.last_row(member.rank),
        "after": round(member.attempt.age(), 3),
    }
