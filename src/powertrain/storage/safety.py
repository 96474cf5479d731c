"""Warnings about a storage place on this machine: its kind of file system, and its free space.

The kernel's table of mounts (``/proc/self/mountinfo``) is read in one place; the rules are functions of its text.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

#: File systems in memory: gone when the machine restarts.
_IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
#: File systems with a layer that a container writes to and takes along when it goes.
_LAYERED = frozenset(
    {"overlay", "overlayfs", "aufs", "unionfs", "fuse-overlayfs", "fuse.fuse-overlayfs", "shiftfs"}
)
_NETWORK = frozenset(
    re.findall(
        r"\w+",
        "nfs nfs4 cifs smb2 smb3 smbfs lustre gpfs beegfs ceph glusterfs afs 9p virtiofs pvfs2 orangefs ocfs2 gfs2 "
        "panfs wekafs daos quobyte ncpfs coda davfs",
    )
)
#: File systems of user space that lie on a disk of this machine all the same.
_LOCAL_FUSE = frozenset(
    {"fuseblk", "fuse.ntfs-3g", "fuse.ntfs", "fuse.exfat", "fuse.fuse-overlayfs", "fuse.encfs"}
)
#: Files that container runtimes leave, and words in the control groups of a container's first process.
_CONTAINER_FILES = ("/.dockerenv", "/run/.containerenv")
_CONTAINER_WORDS = re.compile(r"docker|kubepods|containerd|libpod|lxc|crio")

_GIB = 1 << 30


@dataclass(frozen=True)
class Mount:
    """One line of the table of mounts: mount point, kind, and source."""

    point: str
    kind: str
    source: str


def remarks_about(path: str | Path) -> list[str]:
    """Return one sentence for each reason why files at ``path`` may vanish too soon for a run."""
    mount = mount_of(path)
    return remarks_about_mount(os.fspath(path), mount, in_container()) if mount else []


def is_network_file_system(path: str | Path) -> bool:
    """Return True when ``path`` lies on a file system of other machines, where a rename or fsync costs a round trip."""
    mount = mount_of(path)
    return mount is not None and is_network_kind(mount.kind)


def free_bytes(path: str | Path) -> int:
    """Return bytes that this user can still write at ``path`` or, where it is not there yet, at its nearest parent."""
    return shutil.disk_usage(_nearest(path)).free


def space_remark(free: int, checkpoint_bytes: int, kept: int | None) -> str:
    """Return "" when ``free`` bytes hold the checkpoints still to come, else one sentence with the shortage.

    Called when the first checkpoint of ``checkpoint_bytes`` is written. ``kept`` is how many are kept at a time (None
    for all); one more is there while the oldest waits to be deleted.
    """
    more = 2 if kept is None else kept  # the kept ones and one being written, less the existing one
    needed = more * checkpoint_bytes
    if checkpoint_bytes <= 0 or free >= needed:
        return ""
    keeping = "All checkpoints are kept" if kept is None else f"{kept} are kept at a time"
    limit = "CheckpointConfig(num_to_keep=...)" if kept is None else "a smaller num_to_keep"
    return (
        f"The storage has {size_text(free)} free, and a checkpoint takes {size_text(checkpoint_bytes)}: there is room "
        f"for {free // checkpoint_bytes} more. {keeping}, and one more while it is being written, which takes at least "
        f"{size_text(needed)}. Free some space, or use {limit}."
    )


# --------------------------------------------------------------------------- judgements


def remarks_about_mount(path: str, mount: Mount, container: bool) -> list[str]:
    """As :func:`remarks_about`, for a mount that is known."""
    what_to_do = (
        "Choose a storage path on a disk or an object store that stays, or the run cannot be continued then."
    )
    if mount.kind in _IN_MEMORY:
        lifetime = "this container or the machine restarts" if container else "the machine restarts"
        return [
            f"The storage path {path!r} is in memory ({mount.kind} at {mount.point!r}): everything in it is gone when "
            f"{lifetime}. {what_to_do}"
        ]
    if mount.kind in _LAYERED or (container and mount.point == "/"):
        return [
            f"The storage path {path!r} is on the container's own disk ({mount.kind} at {mount.point!r}): everything "
            f"in it is gone when the container is removed. {what_to_do}"
        ]
    return []


def is_network_kind(kind: str) -> bool:
    """Return True for kinds of network file systems, judged by name."""
    if kind in _NETWORK:
        return True
    return (kind == "fuse" or kind.startswith("fuse.")) and kind not in _LOCAL_FUSE


def parse_mounts(table: str) -> list[Mount]:
    """Return the mounts of a ``mountinfo`` table in its order; lines that are none are passed over."""
    mounts = []
    for line in table.split("\n"):
        before, separator, after = line.partition(" - ")
        fields, rest = before.split(" "), after.split(" ")
        if separator and len(fields) >= 5 and len(rest) >= 2:
            mounts.append(Mount(_unescaped(fields[4]), rest[0], _unescaped(rest[1])))
    return mounts


def mount_at(path: str, mounts: Iterable[Mount]) -> Mount | None:
    """Return the mount that an absolute, resolved ``path`` lies on: the longest; of equals the last, which hides
    others."""
    found: Mount | None = None
    for mount in mounts:
        below = mount.point == "/" or path == mount.point or path.startswith(f"{mount.point}/")
        if below and (found is None or len(mount.point) >= len(found.point)):
            found = mount
    return found


def _unescaped(field: str) -> str:
    r"""The kernel writes space, tab, newline and backslash as ``\040`` and so on, byte by byte."""
    raw = re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8) & 0xFF]), os.fsencode(field))
    return os.fsdecode(raw)


def size_text(count: int) -> str:
    """Return a number of bytes as "8.0 MiB" or "1.5 GiB"."""
    return f"{count / _GIB:.1f} GiB" if count >= _GIB else f"{count / (1 << 20):.1f} MiB"


# --------------------------------------------------------------------------- looking


def mount_of(path: str | Path) -> Mount | None:
    """Return the mount that ``path``, which need not be there yet, lies on; None where the system has no such table."""
    try:
        table = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    except OSError:
        return None
    return mount_at(os.path.realpath(_nearest(path)), parse_mounts(table))


def in_container() -> bool:
    """Return True when this process seems to run in a container."""
    # Container runtimes write the first of these names in small letters.
    if any(os.environ.get(name) for name in ("container", "KUBERNETES_SERVICE_HOST")):
        return True
    if any(os.path.exists(path) for path in _CONTAINER_FILES):
        return True
    try:
        return bool(_CONTAINER_WORDS.search(Path("/proc/1/cgroup").read_text()))
    except OSError:
        return False


def _nearest(path: str | Path) -> str:
    """``path`` or the nearest directory above it that is there."""
    place = os.path.abspath(os.path.expanduser(path))
    while not os.path.exists(place):
        place = os.path.dirname(place)
    return place
