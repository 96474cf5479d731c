"""JSON text with a hash of itself in its last line, so that a changed byte is found.

::

    {
     "name": "run",
     "seal": "<xxh3-128 of everything before this line's comma, 32 hexadecimal digits>"
    }

Files of versions that wrote no seal have no such line. One byte that changes in the line itself leaves the content as
it was, so such a file can be read as one without a seal.
"""

from __future__ import annotations

import re

import xxhash

from powertrain.errors import StorageError

_SEAL = re.compile(rb',\n *"seal": "([0-9a-f]{32})"\n}\n?\Z')


class DamagedError(StorageError):
    """A stored value, or a part of it, was changed or damaged. ``key`` names it where it is known."""

    def __init__(self, message: str, key: str = "") -> None:
        super().__init__(message)
        self.key = key


def seal_json(text: bytes) -> bytes:
    """Add the seal to an indented JSON object that has at least one field.

    Args:
        text: The object as ``json.dumps(..., indent=...)`` writes it, with or without a line break at its end.

    Returns:
        The same object with the field "seal" as its last one, and a line break.
    """
    body = text.rstrip(b"\n").removesuffix(b"\n}")
    second_line = body[body.index(b"\n") + 1 :]
    indent = second_line[: len(second_line) - len(second_line.lstrip(b" "))]
    digest = xxhash.xxh3_128_hexdigest(body).encode()
    return body + b",\n" + indent + b'"seal": "' + digest + b'"\n}\n'


def check_seal(data: bytes) -> bool:
    """Return True for sealed ``data``; False for a file of a version without seals, or with a damaged seal.

    Raises:
        DamagedError: The content does not match its seal.
    """
    found = _SEAL.search(data)
    if found is None:
        return False
    if found[1] != xxhash.xxh3_128_hexdigest(data[: found.start()]).encode():
        raise DamagedError("its content does not match the hash in its last line")
    return True
