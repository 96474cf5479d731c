"""Text files that grow line by line, continued by another process after a crash."""

from __future__ import annotations

import csv
import io
import os
from pathlib import Path


def cut_to_whole_lines(path: Path, has_quotes: bool = False) -> str:
    """Remove what a process that died while writing left of a last line, and return the rest; "" for no file.

    Args:
        path: The file.
        has_quotes: Whether a line end between double quotes is part of a value, as in CSV.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return ""
    end = content.rfind(b"\n") + 1
    while has_quotes and end and content.count(b'"', 0, end) % 2:
        end = content.rfind(b"\n", 0, end - 1) + 1
    if end < len(content):
        os.truncate(path, end)
    return content[:end].decode("utf-8", "replace")


def read_csv(text: str) -> list[list[str]]:
    """Return the rows of CSV text, the header among them, whatever the length of a value."""
    # A list of numbers can be longer than what the module takes by default for a value.
    limit = csv.field_size_limit(len(text) + 1)
    try:
        return list(csv.reader(io.StringIO(text, newline="")))
    finally:
        csv.field_size_limit(limit)
