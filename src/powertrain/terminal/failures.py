"""The report of a failed run: first failure, circumstances, other failures."""

from __future__ import annotations

import re
from collections.abc import Sequence

from powertrain.run import events as ev
from powertrain.terminal.text import clipped, counted, duration, one_line, rank_list, sentence, wrapped
from powertrain.text.printable import escape_controls, without_colours
from powertrain.text.redaction import redact
from powertrain.text.tracebacks import users_frames

#: Lines of the user's code that are named as callers of the one that failed.
_CALLERS = 5


def failure_report(
    failures: Sequence[ev.WorkerFailure],
    reason: str = "",
    *,
    logs: str = "",
    width: int | None = None,
) -> str:
    """Return the failure report as plain text; also the message of ``TrainingFailedError``.

    First the rank that failed first and not because of another: type, message and line of the user's code.
    Then the other ranks, folded. ``reason`` is the decision, ``logs`` the directory of the output.
    ``width`` wraps the lines that can be wrapped. No line holds a control character or a secret of an address.
    """
    if not failures:
        lines = ["The run failed before any worker did."]
    else:
        first = next((f for f in failures if not f.secondary), failures[0])
        others = [f for f in failures if f is not first]
        lines = [*_first_failure(first), *_other_failures(first, others)]
    if reason:
        lines.append(sentence(reason))
    if logs:
        lines.append(f"The output of every rank is kept in {logs}")
    lines = [escape_controls(without_colours(redact(line))) for line in lines]
    return "\n".join(lines if width is None else wrapped(lines, width))


def _first_failure(failure: ev.WorkerFailure) -> list[str]:
    if failure.error_type:
        heading = f"Rank {failure.rank} raised {failure.error_type}"
        message = failure.message.strip().splitlines()
        lines = [f"{heading}: {message[0]}" if message else heading]
        lines += clipped(["    " + line for line in message[1:]], 20)
    else:
        lines = [sentence(failure.summary or f"rank {failure.rank} failed")]
        if failure.kind == "hung":
            lines += ["    " + line for line in failure.message.splitlines()]
    if failure.file:
        inside = f" in {failure.function}" if failure.function else ""
        lines.append(f"  at {failure.file}:{failure.line}{inside}")
        if failure.source.strip():
            lines.append(f"      {failure.source.strip()}")
        lines += _callers(failure)
    elif failure.traceback.strip():
        # No frame of the user's code is known: show the end of the traceback.
        lines += ["    " + line for line in failure.traceback.strip().splitlines()[-12:]]
    lines += ["  " + cause for cause in failure.causes]
    return [*lines, "  " + _circumstances(failure)]


def _callers(failure: ev.WorkerFailure) -> list[str]:
    """Return the callers of the failed line in the user's own code, the nearest first."""
    frames = users_frames(failure.traceback)
    if not frames or (frames[-1].file, frames[-1].line) != (failure.file, failure.line):
        return []
    callers = [f"  called from {frame.file}:{frame.line} in {frame.function}" for frame in frames[-2::-1]]
    hidden = len(callers) - _CALLERS
    return callers if hidden <= 0 else [*callers[:_CALLERS], f"  ... {counted(hidden, 'more frame')}"]


def _circumstances(failure: ev.WorkerFailure) -> str:
    parts = [f"after row {failure.row}" if failure.row else "before its first report"]
    if failure.after:
        parts.append(f"{duration(failure.after)} into the attempt")
    if failure.host or failure.pid:
        process = f"process {failure.pid}" if failure.pid else "its process"
        parts.append(process + (f" on {failure.host}" if failure.host else ""))
    return ", ".join(parts)


def _other_failures(first: ev.WorkerFailure, others: Sequence[ev.WorkerFailure]) -> list[str]:
    lines: list[str] = []
    echoes = [f for f in others if f.secondary]
    same = [f for f in others if not f.secondary and _essence(f) == _essence(first)]
    own = [f for f in others if not f.secondary and _essence(f) != _essence(first)]
    if same:
        lines.append(f"The same happened on {rank_list(f.rank for f in same)}.")
    for failure in own[:3]:
        lines.append("Also: " + one_line(headline_of(failure), 300))
    if len(own) > 3:
        lines.append(f"Also failed: {rank_list(f.rank for f in own[3:])}.")
    if echoes:
        ranks = sorted({f.rank for f in echoes})
        noun = counted(len(ranks), "other rank")
        lines.append(f"{noun} ended after it: {rank_list(ranks)} ({one_line(_echo_of(echoes[0]), 120)})")
    return lines


def _essence(failure: ev.WorkerFailure) -> tuple[str, ...]:
    if failure.error_type:
        return (failure.error_type, failure.message)
    # Summaries that differ only in the rank are the same.
    return (failure.kind, re.sub(r"\brank \d+\b", "rank", failure.summary, flags=re.IGNORECASE))


def headline_of(failure: ev.WorkerFailure) -> str:
    if failure.error_type:
        return f"rank {failure.rank} raised {failure.error_type}: {failure.message}".rstrip(": ")
    return failure.summary or f"rank {failure.rank} failed"


def _echo_of(failure: ev.WorkerFailure) -> str:
    if failure.error_type:
        return f"{failure.error_type}: {failure.message}".rstrip(": ")
    return failure.summary or failure.kind
