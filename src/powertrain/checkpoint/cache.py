"""Remote checkpoints as local directories: one download per node, shared by all its processes.

::

    {tmp}/powertrain-{uid}/checkpoints/
      3f…9a.lock     held while a user enters or leaves
      3f…9a.part/    a download under way, by the holder of the lock
      3f…9a/         a complete copy; each user holds a shared lock on the directory

The last user to leave removes the copy. Locks end with their process, so copies of a killed one are found unlocked, and
the next user removes them.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from powertrain.checkpoint import manifest as mf
from powertrain.checkpoint.manifest import LATER_METADATA_NAME, MANIFEST_NAMES, ManifestFile
from powertrain.errors import CheckpointError
from powertrain.storage import Entry, Storage
from powertrain.storage.base import LARGE_RECORD_BYTES_LIMIT
from powertrain.storage.local import digest_of
from powertrain.text.progress import ProgressBar

if sys.platform != "win32":
    import fcntl

#: Where the user's metadata lies in a checkpoint's directory (Ray's name for it).
METADATA_NAME = ".metadata.json"
#: Files that are fetched at the same time.
_AT_ONCE = 8


# --------------------------------------------------------------------------- downloading


def download(storage: Storage, target: str | Path, *, shown: str) -> None:
    """Write the checkpoint that lies in ``storage`` into ``target``, without Powertrain's own files.

    Where there is a manifest, only its files are fetched, and all must be as committed. Raises
    :class:`CheckpointError`, which calls the checkpoint ``shown``; a name that leads out is refused first.
    """
    entries = storage.list()
    files, later = _wanted(storage, entries, shown)
    top = Path(target)
    top.mkdir(parents=True, exist_ok=True)
    for file in files:
        if file.name.endswith("/"):
            (top / file.name).mkdir(parents=True, exist_ok=True)
    real = [file for file in files if not file.name.endswith("/")]
    with (
        ProgressBar(f"downloading {shown}", sum(file.size for file in real)) as bar,
        ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="powertrain-download") as fetchers,
    ):

        def fetch(file: ManifestFile) -> None:
            _fetch(storage, file, top, shown)
            bar.advance(file.size)

        for done in [fetchers.submit(fetch, file) for file in real]:
            done.result()
    if later:
        (top / METADATA_NAME).write_bytes(later)


def _wanted(storage: Storage, entries: list[Entry], shown: str) -> tuple[list[ManifestFile], bytes]:
    """Return the checkpoint's files, and its metadata where it was changed after the commit."""
    names = {entry.key for entry in entries}
    manifest = next((name for name in MANIFEST_NAMES if name in names), "")
    data = storage.get(manifest, limit=LARGE_RECORD_BYTES_LIMIT) if manifest else b""
    if mf.is_void(data):
        raise CheckpointError(f"{shown} was given up before it was committed. Use another checkpoint.")
    if not mf.is_manifest(data):
        files = [ManifestFile(name=entry.key, size=entry.size, xxh3="", rank=0) for entry in entries]
        for file in files:
            mf.check_file_name(file.name, shown)
        if not files:
            raise CheckpointError(f"{shown} does not exist: nothing lies there. Check the path.")
        return files, b""
    files = mf.decode(data, f"The manifest of {shown}").files
    return files, later_metadata(storage, shown) if LATER_METADATA_NAME in names else b""


def later_metadata(storage: Storage, shown: str) -> bytes:
    """Return the JSON of the metadata that was set after the commit; ``FileNotFoundError`` where none was."""
    data = storage.get(LATER_METADATA_NAME, limit=LARGE_RECORD_BYTES_LIMIT)
    return str(mf.unseal(data, f"The metadata of {shown}").get("metadata", "{}")).encode()


def _fetch(storage: Storage, file: ManifestFile, top: Path, shown: str) -> None:
    path = top / file.name
    try:
        storage.get_file(file.name, path)
    except FileNotFoundError as error:
        raise CheckpointError(f"The file {file.name!r} of {shown} is missing.") from error
    if not file.xxh3:
        return
    digest = digest_of(path)
    if (digest.size, digest.xxh3) != (file.size, file.xxh3):
        path.unlink()
        raise CheckpointError(
            f"The file {file.name!r} of {shown} has other content than was committed ({digest.size} bytes with xxh3 "
            f"{digest.xxh3}, not {file.size} with {file.xxh3}). Use another checkpoint."
        )


# --------------------------------------------------------------------------- sharing


@contextmanager
def shared_copy(storage: Storage, *, shown: str) -> Iterator[str]:
    """Yield the checkpoint in ``storage`` as a local directory that lasts for the context."""
    if sys.platform == "win32":
        with tempfile.TemporaryDirectory(prefix="powertrain-checkpoint-") as private:
            download(storage, private, shown=shown)
            yield private
        return
    root = _root()
    place = root / _identity(storage)
    with _locked(place.with_suffix(".lock")):
        _remove_unused(root, besides=place)
        if not place.is_dir():
            unfinished = place.with_suffix(".part")
            shutil.rmtree(unfinished, ignore_errors=True)
            try:
                download(storage, unfinished, shown=shown)
                unfinished.rename(place)
            except BaseException:
                shutil.rmtree(unfinished, ignore_errors=True)
                raise
        use = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(use, fcntl.LOCK_SH)
    try:
        yield str(place)
    finally:
        with _locked(place.with_suffix(".lock")) as lock:
            os.close(use)
            if _remove_if_unused(place):
                os.unlink(lock)


def _identity(storage: Storage) -> str:
    """Return a name for the content: another one once a different checkpoint lies at the same address."""
    entries = storage.list()
    what = hashlib.sha256(
        f"{storage.uri}\n{os.path.realpath(tempfile.gettempdir())}".encode(errors="surrogateescape")
    )
    for entry in entries:
        what.update(f"\n{entry.size} {entry.key}".encode(errors="surrogateescape"))
        if entry.key in (*MANIFEST_NAMES, LATER_METADATA_NAME):
            what.update(storage.get(entry.key, limit=LARGE_RECORD_BYTES_LIMIT))
    return what.hexdigest()[:32]


def _root() -> Path:
    """Return the directory of this user's copies, where no other user can change them."""
    from powertrain.storage.files.private_roots import log_notices, make_private, temporary_root

    root = make_private(temporary_root())
    log_notices()
    return make_private(root / "checkpoints")


@contextmanager
def _locked(path: Path, *, wait: bool = True) -> Iterator[Path]:
    """Hold the lock file ``path``, which may be unlinked by its holder. Raises ``BlockingIOError`` without ``wait``."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if _is_same_file(
                descriptor, path
            ):  # else it was unlinked while we waited, and excludes no other process
                yield path
                return
        finally:
            os.close(descriptor)


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _remove_if_unused(place: Path) -> bool:
    """Remove a copy unless it is in use. Its lock is held."""
    try:
        descriptor = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(place, ignore_errors=True)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)


def _remove_unused(root: Path, *, besides: Path) -> None:
    """Remove the copies of dead processes."""
    for lock in root.glob("*.lock"):
        place = lock.with_suffix("")
        if place == besides:
            continue
        try:
            with _locked(lock, wait=False):
                shutil.rmtree(lock.with_suffix(".part"), ignore_errors=True)
                if _remove_if_unused(place):
                    lock.unlink(missing_ok=True)
        except BlockingIOError:
            continue
