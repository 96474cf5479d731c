"""Launch files of a node agent: packed by the driver, unpacked on the node, readable by their owner only."""

from __future__ import annotations

import errno
import fcntl
import io
import itertools
import os
import secrets
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from powertrain.storage.files.descriptors import remove_quietly

#: Where a node has the files that came with the run below its runtime directory: those of the launch directory, and of
#: the script's own.
LAUNCH, SCRIPT = "launch", "script"
#: Limits for shipping a launch directory: the size of a file, the number of files, and their total size.
_LARGEST_FILE, _MOST_FILES, _MOST_BYTES = 32 * 2**20, 5000, 200 * 2**20
#: The file by which nodes know the driver's own runtime directory.
_TOKEN = "driver"
#: The file by whose lock a driver has its directory of data blocks (``data/scratch.py``).
_OWNER = "owner.lock"
#: The attempts to lock a locked directory, and seconds between them: a sweep holds it for a moment only.
_TRIES, _TRY_EVERY = 3, 0.01


def hold(path: Path) -> tuple[int, bool]:
    """Make a directory and take a shared lock on it: other runs sweep unlocked directories.

    Never waits for a lock. Returns a descriptor, and True where the driver holds the directory exclusively.
    """
    for tries_left in reversed(range(_TRIES)):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:  # a sweep was faster
            if tries_left:
                continue
            raise
        is_drivers = not lock(descriptor, fcntl.LOCK_SH)
        if not tries_left or not (is_drivers or _was_removed(path, descriptor)):
            return descriptor, is_drivers or _has_owner(path)
        os.close(descriptor)
        time.sleep(_TRY_EVERY)
    raise AssertionError("the last try returns or raises")


def lock(descriptor: int, kind: int) -> bool:
    """Return False where another lock is in the way. On a file system without locks always succeeds."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # some network file systems
        return True
    return True


def _was_removed(path: Path, descriptor: int) -> bool:
    try:
        return not os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return True


def _has_owner(path: Path) -> bool:
    """Return True for a directory of data blocks whose driver lives."""
    try:
        descriptor = os.open(path / _OWNER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not lock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def fresh(runtime_dir: str, place: str) -> Path:
    """Return an empty directory for shipped files; with another name where another agent has the same."""
    target = Path(runtime_dir, place)
    try:
        target.mkdir(mode=0o700)
    except FileExistsError:
        return Path(tempfile.mkdtemp(prefix=f"{place}-", dir=runtime_dir))
    return target


def unpack_at(target: Path, archive: bytes) -> None:
    """Unpack ``archive`` at ``target`` atomically; an existing directory stays."""
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=".", dir=target.parent))
    try:
        extract(archive, unfinished)
        unfinished.rename(target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # another agent was first
            raise
    finally:
        remove_quietly(unfinished)


def extract(archive: bytes, target: Path) -> None:
    with zipfile.ZipFile(io.BytesIO(archive)) as content:
        content.extractall(target)


class _Token(msgspec.Struct, frozen=True):
    nonce: str
    #: The driver's launch directory and that of its script, by their names on nodes: the path, and its identity.
    places: dict[str, tuple[str, str]]


def write_token(runtime_dir: str) -> str:
    """Mark a run's runtime directory as that of this process, the driver, and return the mark.

    A node that finds the mark shares the runtime directory. The mark itself names the script's launch directory and its
    own, so that nodes know whether they share these: a node may share any of the three alone.
    """
    from powertrain.functions import script_directory

    places = {
        place: (path, _identity(path))
        for place, path in ((LAUNCH, os.getcwd()), (SCRIPT, script_directory()))
    }
    token = msgspec.json.encode(_Token(secrets.token_hex(16), places)).decode()
    Path(runtime_dir, _TOKEN).write_text(token)
    return token


def places_here(token: str) -> set[str]:
    """Return those of :data:`LAUNCH` and :data:`SCRIPT` that this machine has as the very directories of the driver."""
    try:
        places = msgspec.json.decode(token, type=_Token).places
    except msgspec.MsgspecError:
        return set()
    return {place for place, (path, which) in places.items() if not path or which == _identity(path) != ""}


def _identity(directory: str) -> str:
    """Which directory this is of all that the kernels of this cluster have; "" where it is not there.

    The kernel and not the machine's name: containers of one machine have names and file systems of their own, and a
    directory that they share is the same to their kernel. Of two machines it is not, also if both mount it.
    """
    try:
        found = os.stat(directory)
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
    return f"{kernel}:{found.st_dev}:{found.st_ino}"


def read_token(runtime_dir: str) -> str:
    """Return the mark of a runtime directory; "" where it is not there."""
    try:
        return Path(runtime_dir, _TOKEN).read_text()
    except OSError:
        return ""


def pack(directory: str) -> bytes:
    """Return an archive of all that is in ``directory``."""
    return _archive(directory, [str(path) for path in sorted(Path(directory).rglob("*")) if path.is_file()])


def pack_modules(directory: str) -> bytes:
    """Return an archive of the files that modules of ``directory`` may need, without hidden ones, environments and
    caches.

    A launch directory may hold anything. Large files are left out; of a directory with too many or too much only the
    modules that lie in it directly come along.
    """
    files = list(itertools.islice(_shipped_files(directory), _MOST_FILES + 1))
    if len(files) > _MOST_FILES or sum(map(os.path.getsize, files)) > _MOST_BYTES:
        files = [str(path) for path in sorted(Path(directory).glob("*.py"))]
    return _archive(directory, files)


def _archive(directory: str, files: Sequence[str]) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(
        content, "w", zipfile.ZIP_DEFLATED, compresslevel=1, strict_timestamps=False
    ) as archive:
        for path in files:
            archive.write(path, os.path.relpath(path, directory))
    return content.getvalue()


def _shipped_files(directory: str) -> Iterator[str]:
    for folder, folders, files in os.walk(directory):
        folders[:] = sorted(name for name in folders if _is_shipped(os.path.join(folder, name)))
        for name in sorted(files):
            path = os.path.join(folder, name)
            if not name.startswith(".") and os.path.isfile(path) and os.path.getsize(path) <= _LARGEST_FILE:
                yield path


def _is_shipped(folder: str) -> bool:
    name = os.path.basename(folder)
    return not (
        name.startswith(".") or name == "__pycache__" or os.path.exists(os.path.join(folder, "pyvenv.cfg"))
    )
