"""Runtime directories of a run on this machine, removed however the run ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from powertrain.engine.local import claims, locks
from powertrain.storage.files.descriptors import remove_quietly
from powertrain.storage.files.private_roots import remove_empty_parents, runtime_root

#: The runtime directories of this process, each with the descriptor that holds its lock.
_held: dict[Path, int] = {}


def make_directory_of_run(name: str, root: Path) -> Path:
    """Make a runtime directory in ``root``, which only one run has; otherwise as :func:`make_runtime_directory`."""
    directory = Path(tempfile.mkdtemp(prefix=f"{name[:24]}-{os.getpid()}-", dir=root))
    descriptor = _held[directory] = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return directory


def make_runtime_directory(name: str, root: Path | None = None) -> Path:
    """Make a fresh directory of one run, readable by this user only, and sweep abandoned ones.

    It is this process's until :func:`remove_runtime_directory`: a lock on it marks it as in use for processes that
    cannot see this one, such as those in another container. ``root`` is the user's runtime directory by default.
    """
    root = root or runtime_root()
    with locks.locked_directory(root):  # no sweep comes between its making and its lock
        _sweep(root)
        claims.sweep(root)
        return make_directory_of_run(name, root)


def remove_runtime_directory(directory: Path) -> None:
    """Remove a directory from :func:`make_runtime_directory`, and its root where it is then empty and not the
    default."""
    remove_quietly(directory)
    locks.let_go(_held.pop(directory))
    if directory.parent != runtime_root():
        remove_empty_parents(directory)


#: Waits for a line, or for the end of the process that would write it. The others are removed only in the second case.
_KEEPER = 'trap "" INT TERM HUP; if read _; then exec rm -rf -- "$0"; else exec rm -rf -- "$0" "$@"; fi'


@contextlib.contextmanager
def removed_at_the_end(directory: Path, *others: str) -> Iterator[None]:
    """Remove ``directory`` when the block ends, or when this process does, however it does; then the others too.

    For engines without a server to do it: a shell waits at a pipe that only this process holds open.
    """
    keeper = subprocess.Popen(
        ["/bin/sh", "-c", _KEEPER, str(directory), *filter(None, others)],
        stdin=subprocess.PIPE,
        start_new_session=True,
        close_fds=True,
    )
    assert keeper.stdin is not None
    try:
        yield
    finally:
        with contextlib.suppress(BrokenPipeError):
            keeper.stdin.write(b"\n")  # closing is not enough while a forked child has the pipe as well
            keeper.stdin.close()
        keeper.wait()
        locks.let_go(_held.pop(directory))


def find_abandoned(root: Path) -> list[Path]:
    """Return the runtime directories in ``root`` that are this user's and that no process holds."""
    if not root.is_dir():
        return []
    with locks.locked_directory(root):  # one that is just being made is not locked yet
        return [entry for entry in _unheld(root) if entry.lstat().st_uid == os.geteuid()]


def remove_abandoned(root: Path) -> None:
    """Remove what :func:`find_abandoned` returns."""
    if root.is_dir():
        with locks.locked_directory(root):
            _sweep(root)


def _sweep(root: Path) -> None:
    """Remove the runtime directories in ``root`` that are this user's and that no process holds."""
    for entry in _unheld(root):
        remove_quietly(entry, owner=os.geteuid())


def _unheld(root: Path) -> Iterator[Path]:
    """Yield the directories of runs that no process holds; each is locked while it is handled."""
    for entry in sorted(root.iterdir()):
        owner = entry.name.rsplit("-", 2)[1:2]
        if not (owner and owner[0].isdigit()):
            continue
        with contextlib.suppress(OSError):
            descriptor = os.open(entry, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield entry
            finally:
                os.close(descriptor)
