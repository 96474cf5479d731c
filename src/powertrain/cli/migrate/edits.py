"""Changes of a program's text at the positions of its syntax tree: all else stays byte for byte. Pure."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass

#: Line ends of Python: unlike ``str.splitlines`` none of Unicode's, and no form feed.
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n|$)")


@dataclass(frozen=True, order=True)
class Edit:
    """The text between two positions is replaced."""

    start: int
    end: int
    text: str


class SourceText:
    """A program's text, with positions of the syntax tree (lines, and bytes of UTF-8) as positions in it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._lines = [match for match in _LINE.finditer(text) if match[0] or match.start() == len(text)]

    def position(self, line: int, column: int) -> int:
        """Return the position of a byte in a line, the first of which is 1."""
        match = self._lines[line - 1]
        before = match[0].encode("utf-8", "surrogatepass")[:column]
        return match.start() + len(before.decode("utf-8", "surrogatepass"))

    def span(self, first: ast.expr | ast.stmt | ast.alias, last: ast.expr | None = None) -> tuple[int, int]:
        """Return where a node begins, and where it or ``last`` ends."""
        end = last if last is not None else first
        assert end.end_lineno is not None
        assert end.end_col_offset is not None
        return (
            self.position(first.lineno, first.col_offset),
            self.position(end.end_lineno, end.end_col_offset),
        )

    def line_of(self, position: int) -> re.Match[str]:
        """Return the line that a position is in."""
        return next(one for one in reversed(self._lines) if one.start() <= position)

    def indent_before(self, position: int) -> str | None:
        """Return the white space before a position in its line; None where there is more than that."""
        before = self.text[self.line_of(position).start() : position]
        return before if not before.strip(" \t\f") else None

    def ends_line(self, position: int) -> bool:
        """Return True when nothing but a comment follows in the line."""
        rest = self.text[position : self.line_of(position).end()].strip()
        return not rest or rest.startswith("#")

    def newline_at(self, position: int) -> str:
        """Return the line end of the line, or that of the first line where it has none."""
        for match in (self.line_of(position), self._lines[0]):
            ending = match[0][len(match[0].rstrip("\r\n")) :]
            if ending:
                return ending
        return "\n"


def apply_edits(text: str, edits: Iterable[Edit]) -> str:
    """Return the text after all changes, which do not overlap."""
    pieces, position = [], 0
    for edit in sorted(set(edits)):
        assert edit.start >= position, "changes overlap"
        pieces += [text[position : edit.start], edit.text]
        position = edit.end
    return "".join([*pieces, text[position:]])
