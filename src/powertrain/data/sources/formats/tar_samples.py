"""Samples of a WebDataset: members of a tar file with the same name before its first dot, one after the other. Pure."""

from __future__ import annotations

import fnmatch
import io
import json
import re
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_KEY_AND_EXTENSION = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")
#: Endings of members, as Ray Data decodes them.
IMAGES = frozenset({"jpg", "jpeg", "png", "ppm", "pgm", "pbm", "pnm"})
_TEXT, _NUMBERS = frozenset({"txt", "text"}), frozenset({"cls", "cls2"})
_UNSAFE = frozenset({"pt", "pth", "pickle", "pkl"})
#: A member starts at a multiple of so many bytes.
_UNIT = 512
_CUT_OFF = "is not complete: the file was cut off"
_BROKEN = "has a broken header: the file is damaged, or not a tar file"

Patterns = Sequence[str] | Callable[[str], bool] | None


@dataclass(frozen=True)
class TarSelection:
    """Which members are read, under which names: Ray Data's arguments."""

    fileselect: Patterns = None
    filerename: Callable[[str], str] | Sequence[Callable[[str], str]] | None = None
    suffixes: Patterns = None

    def renamed(self, name: str) -> str:
        """Return the name of a member after the user's functions."""
        given = self.filerename
        for rename in [] if given is None else [given] if callable(given) else given:
            name = rename(name)
            if not isinstance(name, str):
                raise ValueError(f"filerename returned a {type(name).__name__} and not a name")
        return name


def matches(name: str, patterns: Patterns) -> bool:
    """Return whether a suffix or a name is one of those wanted: literal ones, or patterns with "*" and "?"."""
    if patterns is None:
        return True
    if callable(patterns):
        return bool(patterns(name))
    return any(
        fnmatch.fnmatch("." + name, each) if "*" in each or "?" in each else each in (name, "." + name)
        for each in patterns
    )


@dataclass(frozen=True)
class TarMember:
    """A regular file in a tar archive: the offset of its header, its key and extension, its bytes."""

    offset: int
    key: str
    extension: str
    content: bytes


def whole_members(data: bytes, selection: TarSelection) -> tuple[list[TarMember], int, str]:
    """Return the members in ``data``, the offset behind the last whole one, and what is wrong there, "" for nothing.

    Members without a dot in their name, directories and links are left out.
    """
    found: list[TarMember] = []
    end = 0
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:", errorlevel=2) as archive:
            for info in archive:
                if info.isreg() and info.offset_data + info.size > len(data):
                    return found, end, _CUT_OFF
                found += _members(archive, info, selection)
                end = min(archive.offset, len(data))
    except tarfile.TarError:
        return found, end, _BROKEN if _is_broken(data, end) else _CUT_OFF
    # Python's reader takes a broken header for the end of the archive.
    rest = data[end:].strip(b"\0")
    return found, end, "" if not rest else _BROKEN if _is_broken(data, end) else _CUT_OFF


def has_broken_header(problem: str) -> bool:
    """Return whether a problem of :func:`whole_members` stays, however many bytes follow."""
    return problem == _BROKEN


def _is_broken(data: bytes, place: int) -> bool:
    header = data[place : place + _UNIT]
    if len(header) < _UNIT or not header.strip(b"\0"):
        return False
    try:
        tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
    except tarfile.TarError:
        return True
    return False


def _members(archive: tarfile.TarFile, info: tarfile.TarInfo, selection: TarSelection) -> Iterator[TarMember]:
    if not info.isreg():
        return
    name = selection.renamed(info.name)
    split = _KEY_AND_EXTENSION.match(name)
    if split is None or not matches(name, selection.fileselect):
        return
    opened = archive.extractfile(info)
    yield TarMember(info.offset, split[1], split[2], b"" if opened is None else opened.read())


def samples(members: Sequence[TarMember], selection: TarSelection) -> list[tuple[str, dict[str, bytes]]]:
    """Return (key, contents by extension) of each sample."""
    found: list[tuple[str, dict[str, bytes]]] = []
    for member in members:
        if not found or found[-1][0] != member.key:
            found.append((member.key, {}))
        contents = found[-1][1]
        if member.extension in contents:
            raise ValueError(f"the sample {member.key!r} has two members {member.extension!r}")
        if matches(member.extension, selection.suffixes):
            contents[member.extension] = member.content
    return found


def decoded(extension: str, content: bytes) -> Any:
    """Return the value of a member by its ending; images stay encoded here. Raises ``ValueError``."""
    kind = extension.rpartition(".")[2]
    if kind in _TEXT:
        return content.decode()
    if kind in _NUMBERS:
        return int(content.decode())
    if kind == "json":
        return json.loads(content)
    if kind == "npy":
        import numpy as np

        return np.load(io.BytesIO(content), allow_pickle=False)
    if kind == "mp":
        try:
            import msgpack
        except ImportError as error:
            raise ValueError(
                f"members {extension!r} hold MessagePack, and the package msgpack is not installed: "
                "pip install msgpack"
            ) from error
        return msgpack.unpackb(content, raw=False)
    if kind in _UNSAFE:
        raise ValueError(
            f"members {extension!r} are pickles, and opening one runs code of the file; give decoder=None, or a "
            "decoder of your own for files that you trust"
        )
    return content
