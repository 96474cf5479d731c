"""Content of pages as bytes of JSON, and names of runs in addresses. Pure."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import quote

import msgspec

from powertrain.text.printable import escape_lines


def id_of(name: str) -> str:
    """Return the name of a run for addresses; names of files need not be text."""
    return quote(os.fsencode(name), safe="/")


def encoded(content: Any) -> bytes:
    """Return a value as JSON; NaN and infinities are null, and texts have no control characters but line ends."""
    return msgspec.json.encode(_shown(msgspec.to_builtins(content, enc_hook=str)))


def _shown(value: Any) -> Any:
    if isinstance(value, str):
        return escape_lines(value)
    if isinstance(value, dict):
        return {escape_lines(str(key)): _shown(item) for key, item in value.items()}
    if isinstance(value, list) and value and type(value[0]) in (int, float):
        return value  # the arrays of charts
    return [_shown(item) for item in value] if isinstance(value, (list, tuple)) else value
