"""The log files of ranks: their names, their lines as plain text, and the last of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from powertrain.text.printable import clean_output, without_colours

_RANKS_LOG = re.compile(r"logs/attempt-(\d+)/rank-(\d+)\.log")
#: Characters of a line that is shown.
LONGEST_LINE = 4000
#: Logs whose ends are shown together, and bytes of the shortest end.
MOST_LOGS = 64
_LEAST_BYTES = 2000


@dataclass(frozen=True, order=True)
class LogFile:
    """The log of one rank in one attempt."""

    attempt: int
    rank: int
    key: str
    size: int


def log_at(key: str, size: int) -> LogFile | None:
    """Return the log that a key of a run's directory names; None for another file."""
    found = _RANKS_LOG.fullmatch(key)
    return LogFile(int(found[1]), int(found[2]), key, size) if found else None


def shown_line(line: bytes) -> str:
    """Return a line as plain text; of a progress bar the last state."""
    plain = plain_line(line)
    return plain if len(plain) <= LONGEST_LINE else f"{plain[:LONGEST_LINE]}…"


def plain_line(line: bytes) -> str:
    """Return all of a line as plain text; of a progress bar the last state."""
    text = line.decode("utf-8", "replace").rstrip("\r")
    return without_colours(clean_output(text[text.rfind("\r") + 1 :]))


def chosen_logs(logs: Iterable[LogFile], budget: int) -> tuple[list[LogFile], int]:
    """Return the logs whose ends are shown, and the bytes for each: those of the newest attempts, then lower ranks."""
    newest_first = sorted(logs, key=lambda log: (-log.attempt, log.rank))
    count = max(1, min(MOST_LOGS, budget // _LEAST_BYTES))
    chosen = newest_first[:count]
    return sorted(chosen), budget // max(1, len(chosen))


def log_ends(
    logs: Sequence[LogFile], read: Callable[[LogFile, int, int], bytes], budget: int
) -> list[dict[str, Any]]:
    """Return the last lines of logs by attempt and rank; ``is_cut`` where there are earlier ones.

    Args:
        logs: The log files of a run.
        read: Returns bytes of a file from an offset; raises ``FileNotFoundError`` for one that is gone.
        budget: Bytes of all of them together.
    """
    chosen, most = chosen_logs(logs, budget)
    found = []
    for log in chosen:
        start = max(0, log.size - most)
        try:
            data = read(log, start, log.size - start)
        except FileNotFoundError:  # removed meanwhile
            continue
        lines = data.split(b"\n")
        if start and len(lines) > 1:
            lines.pop(0)  # its begin is missing
        if not lines[-1]:
            lines.pop()
        shown = [shown_line(line) for line in lines]
        found.append({"attempt": log.attempt, "rank": log.rank, "lines": shown, "is_cut": start > 0})
    return found
