"""Lines of the logs of ranks, the newest, with search, and those that were added since.

A reply reads at most :data:`MOST_BYTES` of a file, wherever it lies. A search that found too little in them is
continued by the viewer, from where it began.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from powertrain.lookup.log_files import LogFile, LogFiles
from powertrain.lookup.log_lines import matches
from powertrain.ui.queries import BadQuery, whole
from powertrain.views.log_ends import LONGEST_LINE, plain_line, shown_line

#: Lines of one reply, and bytes that are read for it.
_MOST_LINES = 500
MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class LogPart:
    """Lines of a part of a log, and the offsets that it is continued at."""

    lines: list[str]
    #: The begin of the oldest line, before which older ones are; 0 if there are none.
    searched_from: int
    #: The end of the newest complete line.
    offset: int
    #: The unterminated line after it as far as it is written, such as a progress bar.
    rest: str
    #: Whether lines between the requested offset and these were left out, because they are too many.
    is_cut: bool = False


def log_page(files: LogFiles, there: Sequence[LogFile], query: Mapping[str, str]) -> dict[str, Any]:
    """Return lines of one rank's log.

    Args:
        files: The run's log files.
        there: Those that exist.
        query: ``attempt`` and ``rank``; ``after`` for the lines after that offset, ``before`` for the last ones before
            it, else the last ones; ``search`` for a text that lines contain, whatever the case.
    """
    attempts = sorted({log.attempt for log in there})
    attempt = whole(query["attempt"], "attempt") if query.get("attempt") else max(attempts, default=0)
    ranks = [log.rank for log in there if log.attempt == attempt]
    rank = whole(query["rank"], "rank") if query.get("rank") else min(ranks, default=0)
    chosen = next((log for log in there if (log.attempt, log.rank) == (attempt, rank)), None)
    shown: dict[str, Any] = {"attempts": attempts, "ranks": ranks, "attempt": attempt, "rank": rank}
    part = LogPart([], 0, 0, "") if chosen is None else _part(files, chosen, query)
    return {
        **shown,
        "has_log": chosen is not None,
        "lines": part.lines,
        "searched_from": part.searched_from,
        "offset": part.offset,
        "rest": part.rest,
        "is_cut": part.is_cut,
    }


def _part(files: LogFiles, log: LogFile, query: Mapping[str, str]) -> LogPart:
    search = query.get("search", "")
    if len(search) > 200:
        raise BadQuery("search has more than 200 characters")
    pattern = re.compile(re.escape(search), re.IGNORECASE) if search else None
    with contextlib.suppress(FileNotFoundError):
        if query.get("before"):
            end = whole(query["before"], "before")
            start = max(0, end - MOST_BYTES)
            data, _ = files.read(log, start, end - start)
            return last_lines(data, start, pattern)
        if query.get("after"):
            start = whole(query["after"], "after")
            data, size = files.read(log, start, MOST_BYTES)
            if start <= size <= start + MOST_BYTES:
                return new_lines(data, start, pattern)
            # The viewer is far behind, or the file was replaced by a shorter one.
            return _newest(files, log, size, pattern, is_cut=True)
        return _newest(files, log, log.size, pattern)
    return LogPart([], 0, 0, "")


def _newest(
    files: LogFiles, log: LogFile, size: int, pattern: re.Pattern[str] | None, is_cut: bool = False
) -> LogPart:
    start = max(0, size - MOST_BYTES)
    data, _ = files.read(log, start, MOST_BYTES)
    return last_lines(data, start, pattern, is_cut=is_cut)


def new_lines(data: bytes, start: int, pattern: re.Pattern[str] | None) -> LogPart:
    """Return all lines of ``data``, which begins at ``start`` with a line."""
    whole_lines, rest = _split(data)
    lines = [shown_line(line) for line in whole_lines if matches(line, pattern)]
    return LogPart(lines, start, start + len(data) - len(rest), _shown_rest(rest, pattern))


def last_lines(data: bytes, start: int, pattern: re.Pattern[str] | None, *, is_cut: bool = False) -> LogPart:
    """Return the last lines of ``data``, which begins at ``start``, where a line may have begun before.

    Such a line is left to a search of what is before it, unless there is no other.
    """
    end = start + len(data)
    whole_lines, rest = _split(data)
    begin = start
    if start and whole_lines and (len(whole_lines) > 1 or rest):
        begin += len(whole_lines.pop(0)) + 1
    found: list[bytes] = []
    position = end - len(rest)
    for line in reversed(whole_lines):
        if len(found) == _MOST_LINES:
            begin = position
            break
        position -= len(line) + 1
        if matches(line, pattern):
            found.append(line)
    lines = [shown_line(line) for line in reversed(found)]
    return LogPart(lines, begin, end - len(rest), _shown_rest(rest, pattern), is_cut)


def _split(data: bytes) -> tuple[list[bytes], bytes]:
    """Return the complete lines, without their ends, and the rest."""
    *lines, rest = data.split(b"\n")
    return lines, rest


def _shown_rest(rest: bytes, pattern: re.Pattern[str] | None) -> str:
    """Return the end of an unterminated line, which is the newest of it; "" where it does not match."""
    if not matches(rest, pattern):
        return ""
    plain = plain_line(rest)
    return plain if len(plain) <= LONGEST_LINE else f"…{plain[-LONGEST_LINE:]}"
