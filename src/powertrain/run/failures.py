"""A rank's bad end as a fact: built from what the engine saw or what the rank itself said. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from powertrain import wire
from powertrain.engine import base
from powertrain.run.attempt import Attempt, Member
from powertrain.run.events import WorkerFailure
from powertrain.run.hang_report import Verdict
from powertrain.worker.main import UNREACHABLE


def died(member: Member, event: base.Exited, endpoint: str = "") -> WorkerFailure:
    """The process ended without a word. ``endpoint`` is where it was to find the run."""
    kind, words = base.describe_exit(event)
    if event.code == UNREACHABLE and not member.greeted:
        host = member.placement.slot.host
        kind, words = "start", f"on {host} cannot reach the run at {endpoint}; its log says why"
    return _failure(member, kind, f"rank {member.rank} {words}", message=event.error)


def silent(member: Member, why: str) -> WorkerFailure:
    """The process never said a word."""
    return _failure(member, "start", f"rank {member.rank} {why}")


def raised(member: Member, report: wire.ErrorReport, kind: str) -> WorkerFailure:
    """The rank said what went wrong; ``kind`` is "raised", "exit" or "start"."""
    return reported(member.rank, report, kind, **_circumstances(member))


def reported(rank: int, report: wire.ErrorReport, kind: str, **circumstances: Any) -> WorkerFailure:
    """What a rank said, with the circumstances (fields of ``WorkerFailure``) that whoever heard it knows."""
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
        **circumstances,
    )


def may_follow_a_notice(failure: WorkerFailure) -> bool:
    """True for the end of a rank, or of a DataLoader's process of its, that the same scheduler may have caused."""
    return failure.kind != "raised" or "killed by signal: Terminated" in failure.message


def hung(attempt: Attempt, verdict: Verdict, seconds: float) -> list[WorkerFailure]:
    """The ranks that hang; where all wait and none can be blamed, the first that waits."""
    ranks = verdict.culprits or verdict.waiting[:1]
    frame = verdict.frame
    place = msgspec.structs.asdict(frame) if frame is not None else {}
    return [
        _failure(
            attempt.members[rank],
            "hung",
            f"rank {rank} hung: nothing moved for {seconds:.0f} s",
            message=verdict.message,
            **place,
        )
        for rank in ranks
        if not attempt.members[rank].exited
    ]


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
