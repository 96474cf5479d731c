"""Printing for all verbs: strings of a run directory are shown, and their control sequences never obeyed.

A verb prints lines, messages, JSON or a table with these functions and nothing else. The only escape sequences that
come out are colours and :func:`print_status`'s own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec
import typer

from powertrain.lookup.summaries import INTERRUPTED, UNREADABLE
from powertrain.text.printable import escape_controls, escape_json, escape_lines, indent_continuation
from powertrain.text.redaction import redact

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

_CLEAR_LINE = "\r\x1b[K"


def print_line(text: str, *, err: bool = False) -> None:
    """Print one line: line ends in ``text`` are shown as escapes."""
    _echo(escape_controls(redact(text)), err=err)


def print_with_token(text: str) -> None:
    """Print one line on standard error with a token that was made for the user to see."""
    _echo(escape_controls(text), err=True)


def print_lines(lines: Iterable[str]) -> None:
    """Print each of ``lines`` as one line."""
    for line in lines:
        print_line(line)


def print_message(text: str, *, err: bool = False) -> None:
    """Print a message of one or more lines, those after the first indented."""
    _echo(indent_continuation(redact(text)), err=err)


def print_text(text: str, *, end: str = "\n") -> None:
    """Print text of many lines that was made for people: a report, kept stacks, a manifest."""
    _echo(escape_lines(text), end=end)


def print_json(content: Any) -> None:
    """Print a value as indented JSON, with control characters as escapes."""
    try:
        encoded = msgspec.json.encode(content, enc_hook=str)
    except UnicodeEncodeError:  # the name of a file that is not text
        encoded = msgspec.json.encode(_encodable(msgspec.to_builtins(content, enc_hook=str)))
    _echo(escape_json(msgspec.json.format(encoded, indent=2).decode()))


def print_status(text: str) -> None:
    """Replace the line that stands at the cursor of standard error by ``text``; "" clears it."""
    _echo(_CLEAR_LINE + escape_controls(text), err=True, end="")


def cell(text: str) -> Text:
    """A table's cell that shows ``text`` literally: neither markup nor control characters have an effect."""
    from rich.text import Text

    return Text(escape_controls(text), overflow="fold")


def print_table(table: Table, width: int | None = None) -> None:
    """Print a table whose cells were made with :func:`cell`, or are as harmless; ``width`` is that of the terminal."""
    from rich.console import Console

    Console(highlight=False, markup=False, emoji=False, width=width).print(table)


def style_of(state: str) -> str:
    """The colour of a state; "" for the terminal's own."""
    colours = {
        "failed": "red",
        UNREADABLE: "red",
        INTERRUPTED: "yellow",
        "preempted": "yellow",
        "training": "green",
    }
    return colours.get(state, "")


def _echo(text: str, *, err: bool = False, end: str = "\n") -> None:
    stream = sys.stderr if err else sys.stdout
    encoding = getattr(stream, "encoding", None) or "utf-8"
    typer.echo(text.encode(encoding, "backslashreplace").decode(encoding) + end, err=err, nl=False)


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    return [_encodable(item) for item in value] if isinstance(value, (list, tuple)) else value
