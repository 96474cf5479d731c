"""Protection of a path from other users: owners, modes and links of every directory on the way to it.

A path is safe for this user when only the user and the administrator can replace any part of it. The administrator is
root, and the owner of ``/`` where root's files appear under another uid (a container with mapped users).
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

#: Symbolic links followed on the way to one path before it counts as a circle, as in the kernel.
_LINK_LIMIT = 40


def trusted_owners() -> frozenset[int]:
    """Return the uids whose files this user may rely on: their own, root's, and those of the owner of ``/``."""
    return frozenset({os.geteuid(), 0, os.stat("/").st_uid})


def is_writable_by_others(status: os.stat_result) -> bool:
    """Return True when other users may create or rename entries in a directory.

    A group counts as others unless it is root's, or the private group that many systems give each user (a gid that
    equals the uid).
    """
    if status.st_mode & stat.S_IWOTH:
        return True
    own_group = os.getegid() if os.getegid() == os.geteuid() else 0
    return bool(status.st_mode & stat.S_IWGRP) and status.st_gid not in (0, own_group)


def why_unsafe(path: str | Path) -> str:
    """Return the reason why another user could replace the file at ``path``, as part of a sentence; "" when none can.

    Every existing directory on the way must belong to a trusted owner. One that others can write to must be sticky, as
    ``/tmp`` is, and no symbolic link in it is followed. A part that does not exist yet ends the check.
    """
    trusted = trusted_owners()
    waiting = list(reversed(Path(os.path.abspath(path)).parts[1:]))
    current, is_open, links = Path("/"), False, 0
    while waiting:
        name = waiting.pop()
        here = current / name
        try:
            status = os.lstat(here)
        except OSError:
            return ""
        if stat.S_ISLNK(status.st_mode):
            links += 1
            if is_open:
                return f"{str(here)!r} is a symbolic link in a directory that other users can write to"
            if links > _LINK_LIMIT:
                return f"{str(here)!r} is a symbolic link that leads in a circle"
            target = Path(os.path.normpath(current / os.readlink(here)))
            waiting.extend(reversed(target.parts[1:]))
            current = Path("/")
            continue
        if status.st_uid not in trusted:
            return f"{str(here)!r} belongs to uid {status.st_uid}"
        is_open = is_writable_by_others(status)
        if is_open and not status.st_mode & stat.S_ISVTX:
            return f"{str(here)!r} can be written to by other users and has no sticky bit"
        current = here
    return ""


def why_not_private(path: str | Path) -> str:
    """Return why ``path`` is not a directory of this user alone, as :func:`why_unsafe` does; "" when it is.

    A directory that does not exist yet is private if its parents are safe.
    """
    if reason := why_unsafe(path):
        return reason
    try:
        status = os.lstat(path)
    except OSError:
        return ""
    if stat.S_ISLNK(status.st_mode):
        return f"{str(path)!r} is a symbolic link"
    if not stat.S_ISDIR(status.st_mode):
        return f"{str(path)!r} is not a directory"
    if status.st_uid != os.geteuid():
        return f"{str(path)!r} belongs to uid {status.st_uid}"
    return ""
