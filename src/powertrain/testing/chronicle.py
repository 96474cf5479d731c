"""Record of the changes that the processes of one run made to storage, in their order.

A chronicle is a directory. All processes append to one file in it, one record a ``write``, so the order of the records
is the order of the events, whichever process they came from. It lies outside the storage it tells of.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Union

import msgspec

_LOG = "chronicle.jsonl"


class Name(msgspec.Struct, frozen=True):
    """One name in a directory, or below one: ``path`` is relative and uses "/"."""

    path: str
    #: Which file it stands for: device, inode and birth, so that a reused inode is another file.
    file: str
    #: "file", "directory" or "link".
    kind: str = "file"
    #: Where a link leads.
    leads_to: str = ""


class Crossing(msgspec.Struct, frozen=True, tag="crossing", kw_only=True):
    """A process is about to take a step that changes storage."""

    role: str
    pid: int
    kind: str
    target: str
    #: How many steps this process has taken with this one, from 1.
    number: int
    #: Seconds on the clock that all processes of a machine share.
    at: float = msgspec.field(default_factory=time.monotonic)
    #: Every name below the watched directory right now; None where none is watched.
    names: list[Name] | None = None


class Fired(msgspec.Struct, frozen=True, tag="fired", kw_only=True):
    """Fault number ``fault`` of the script, from 0, happened at this step."""

    fault: int
    role: str
    pid: int
    kind: str
    target: str


class FileFlushed(msgspec.Struct, frozen=True, tag="file", kw_only=True):
    """A file's content went to the disk; ``content`` names the copy of it in the chronicle."""

    file: str
    content: str


class DirectoryFlushed(msgspec.Struct, frozen=True, tag="directory", kw_only=True):
    """A directory's names went to the disk. ``path`` is relative to the watched directory, "" for itself."""

    file: str
    path: str
    names: list[Name]


class Note(msgspec.Struct, frozen=True, tag="note", kw_only=True):
    """A remark of the program under test about this moment."""

    pid: int
    text: str
    at: float = msgspec.field(default_factory=time.monotonic)


Record = Union[Crossing, Fired, FileFlushed, DirectoryFlushed, Note]

_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Record)


def append(directory: Path, record: Record) -> None:
    """Add one record. It stays when this process is killed right after."""
    descriptor = os.open(directory / _LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # A line end before it too: the record of a process that was killed here may have been cut short.
        os.write(descriptor, b"\n" + msgspec.json.encode(record) + b"\n")
    finally:
        os.close(descriptor)


def read(directory: str | Path) -> list[Record]:
    """All whole records, oldest first; none where nothing has happened yet."""
    try:
        lines = Path(directory, _LOG).read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    return [record for line in lines if line for record in _decoded(line)]


def _decoded(line: bytes) -> list[Record]:
    try:
        return [_decoder.decode(line)]
    except msgspec.DecodeError:
        return []  # cut short by a kill, or still being written
