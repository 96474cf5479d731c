"""Lines of the logs of ranks, the newest, with search, and those that were added since."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from powertrain.lookup.finding import FoundRun
from powertrain.lookup.log_files import LogFile, LogFiles
from powertrain.lookup.log_lines import LineSplitter, last_matching, matches, start_of_last
from powertrain.text.printable import clean_output, without_colours
from powertrain.ui.queries import BadQuery, whole

#: Lines of one reply, bytes that are searched for them, and characters of a line.
_MOST_LINES = 500
_MOST_BYTES = 1 << 20
_LONGEST = 4000


def log_page(found: FoundRun, query: Mapping[str, str]) -> dict[str, Any]:
    """Return lines of one rank's log.

    With ``after``, those after that offset; else the last ones. ``search`` is a text that lines contain, whatever the
    case.
    """
    with closing(LogFiles(found)) as files:
        there = files.list()
        attempts = sorted({log.attempt for log in there})
        attempt = whole(query["attempt"], "attempt") if query.get("attempt") else max(attempts, default=0)
        ranks = [log.rank for log in there if log.attempt == attempt]
        rank = whole(query["rank"], "rank") if query.get("rank") else min(ranks, default=0)
        chosen = next((log for log in there if (log.attempt, log.rank) == (attempt, rank)), None)
        shown: dict[str, Any] = {"attempts": attempts, "ranks": ranks, "attempt": attempt, "rank": rank}
        lines, offset = ([], 0) if chosen is None else _lines(files, chosen, query)
        return {**shown, "has_log": chosen is not None, "lines": lines, "offset": offset}


def _lines(files: LogFiles, log: LogFile, query: Mapping[str, str]) -> tuple[list[str], int]:
    search = query.get("search", "")
    if len(search) > 200:
        raise BadQuery("search has more than 200 characters")
    pattern = re.compile(re.escape(search), re.IGNORECASE) if search else None
    with contextlib.suppress(FileNotFoundError), files.open(log) as file:
        if query.get("after"):
            start = min(whole(query["after"], "after"), log.size)
        elif pattern is not None:
            found, offset = last_matching(file, _MOST_LINES, pattern)
            return [shown_line(line) for line in found], offset
        else:
            start = start_of_last(file, _MOST_LINES)
        file.seek(start)
        data = file.read(_MOST_BYTES)
        complete = data[: data.rfind(b"\n") + 1] or (data if len(data) == _MOST_BYTES else b"")
        lines = [line for line in LineSplitter().feed(complete) if matches(line, pattern)]
        return [shown_line(line) for line in lines], start + len(complete)
    return [], 0


def shown_line(line: bytes) -> str:
    """Return a line as plain text; of a progress bar the last state."""
    text = line.decode("utf-8", "replace").rstrip("\r")
    plain = without_colours(clean_output(text[text.rfind("\r") + 1 :]))
    return plain if len(plain) <= _LONGEST else f"{plain[:_LONGEST]}…"
