"""Checkpoint: a directory somewhere, as a value.

It is small: it says where the directory is and carries no data, so it can be passed around, compared and
pickled for nothing. What lies in the directory is the user's own; Powertrain adds ``.metadata.json`` (the
user's metadata) and, in a run's storage, ``MANIFEST.json`` and files whose names start with ``.powertrain-``.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from powertrain.checkpoint import cache
from powertrain.checkpoint import manifest as mf
from powertrain.checkpoint.cache import METADATA_NAME
from powertrain.checkpoint.manifest import BOOKKEEPING_PREFIX, LATER_METADATA_NAME, MANIFEST_NAME
from powertrain.errors import CheckpointError
from powertrain.storage import Storage, open_storage
from powertrain.storage.addresses import without_secrets

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

#: The file that ``from_dict`` writes and ``to_dict`` reads.
DICT_NAME = "dict.pt"


class Checkpoint:
    """A directory that holds the state of a training run: on this machine, or in an object store.

    Attributes:
        path: Where the directory is, as it was given (a local one as an absolute path).
    """

    def __init__(self, path: str | os.PathLike[str], filesystem: Any = None) -> None:
        """``path`` is a plain path, a ``file://``, ``s3://``, ``gs://`` or ``az://`` address, or, with a pyarrow or
        fsspec ``filesystem``, a path of that."""
        text = os.fspath(path)
        if getattr(filesystem, "type_name", "") == "local":
            filesystem = None
        #: The file system that was given, None where the path says it all.
        self.given_filesystem = filesystem
        #: The directory on this machine, None for a remote checkpoint.
        self._directory: str | None = None
        if filesystem is not None:
            inside = open_storage(text, filesystem=filesystem).local_path(METADATA_NAME)
            self._directory = str(inside.parent) if inside is not None else None
        elif "://" not in text or text.startswith(("file:///", "file://localhost/")):
            text = unquote(urlsplit(text).path) if "://" in text else os.path.expanduser(text)
            text = self._directory = os.path.abspath(text)
        self.path: str = text

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """The checkpoint in a local directory. Nothing is copied; ``report`` does that."""
        return cls(path)

    @property
    def filesystem(self) -> FileSystem:
        """A pyarrow file system on which ``path``, and what lies below it, can be read as it stands."""
        from powertrain.checkpoint.filesystems import pyarrow_filesystem

        return pyarrow_filesystem(self.path if self._directory is None else None, self.given_filesystem)

    def to_directory(self, path: str | os.PathLike[str] | None = None) -> str:
        """Copy the checkpoint into ``path`` (a new temporary directory by default) and return that path.

        Files that are there already stay unless the checkpoint has one of the same name.
        """
        self._require_directory()
        target = os.fspath(path) if path is not None else tempfile.mkdtemp(prefix="powertrain-checkpoint-")
        if self._directory is None:
            cache.download(self._storage, target, shown=repr(self))
            return target
        shutil.copytree(self._directory, target, dirs_exist_ok=True, ignore=self._bookkeeping)
        if Path(self._directory, LATER_METADATA_NAME).is_file() and self._is_committed():
            Path(target, METADATA_NAME).write_text(json.dumps(self.get_metadata()), encoding="utf-8")
        return target

    @contextmanager
    def as_directory(self) -> Iterator[str]:
        """The checkpoint's files as a local directory, for reading.

        It is the original itself when that is local. Otherwise it is a copy that all processes of this machine
        share, made by the first to come and removed by the last to leave.
        """
        self._require_directory()
        if self._directory is not None:
            yield self._directory
        else:
            with cache.shared_copy(self._storage, shown=repr(self)) as directory:
                yield directory

    # -- metadata

    def get_metadata(self) -> dict[str, Any]:
        """What was attached to the checkpoint; empty when nothing was."""
        storage = self._storage
        try:
            try:
                content = cache.later_metadata(storage, repr(self))
            except FileNotFoundError:
                content = storage.get(METADATA_NAME)
        except FileNotFoundError:
            return {}
        try:
            return dict(json.loads(content))
        except ValueError as error:
            raise CheckpointError(
                f"The metadata of {self!r} cannot be read: {METADATA_NAME} is not JSON ({error}). Write it "
                "again with set_metadata."
            ) from error

    def set_metadata(self, metadata: dict[str, Any]) -> None:
        """Attach ``metadata`` (values that JSON can say), replacing what was attached.

        What was committed never changes, so for a committed checkpoint it is kept in a file of its own.
        """
        self._require_directory()
        try:
            content = json.dumps(metadata)
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"This metadata cannot be attached to {self!r}: {error}. Use text, numbers, booleans, lists "
                "and dicts of them."
            ) from error
        if self._is_committed():
            self._storage.put(LATER_METADATA_NAME, mf.seal({"metadata": content}))
        else:
            self._storage.put(METADATA_NAME, content.encode())

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        """Attach ``metadata`` on top of what is attached."""
        self.set_metadata({**self.get_metadata(), **metadata})

    # -- dicts

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Checkpoint:
        """A checkpoint that holds one dict of tensors, numbers, text and containers of them.

        It lies in a temporary directory that goes when the last reference in this process does. What could
        not be read back safely is refused here, not when it is needed.
        """
        import torch

        if not isinstance(data, dict):
            raise CheckpointError(f"from_dict takes a dict, and was given a {type(data).__name__}.")
        directory = tempfile.mkdtemp(prefix="powertrain-checkpoint-")
        checkpoint = cls(directory)
        checkpoint._finalizer = weakref.finalize(checkpoint, _remove_own, directory, os.getpid())
        file = os.path.join(directory, DICT_NAME)
        torch.save(data, file)
        with torch.serialization.safe_globals(_plain_numpy()):
            refused = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        if refused:
            raise CheckpointError(
                f"This dict cannot be a checkpoint: it holds objects of {', '.join(sorted(refused))}, which "
                "can only be read back by running code from the file. Keep tensors, numpy arrays, numbers, "
                "text and containers of them (of an object, its state dict), or use from_directory."
            )
        return checkpoint

    def to_dict(self) -> dict[str, Any]:
        """The dict of a checkpoint made with ``from_dict``. No code from the file is run."""
        import torch

        try:
            local = self._storage.local_path(DICT_NAME)
            file: Any = local if local is not None else io.BytesIO(self._storage.get(DICT_NAME))
            if local is not None and not local.is_file():
                raise FileNotFoundError(DICT_NAME)
        except FileNotFoundError:
            raise CheckpointError(
                f"{self!r} was not made with from_dict: it has no {DICT_NAME}. Read its files with "
                "as_directory()."
            ) from None
        try:
            with torch.serialization.safe_globals(_plain_numpy()):
                data: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises whatever its unpickler or zip reader met
            raise CheckpointError(f"The dict of {self!r} cannot be read: {error}") from error
        return data

    # -- as a value

    _finalizer: Any = None

    @property
    def _storage(self) -> Storage:
        return open_storage(self.path, filesystem=self.given_filesystem)

    def _require_directory(self) -> None:
        """A local one must be there; of a remote one that is found out when it is read."""
        if self._directory is not None and not os.path.isdir(self._directory):
            found = "is a file" if os.path.exists(self._directory) else "does not exist"
            raise CheckpointError(
                f"The checkpoint's directory {self.path!r} {found}. Give the directory that holds its files."
            )

    def _is_committed(self) -> bool:
        try:
            return mf.is_manifest(self._storage.get(MANIFEST_NAME))
        except FileNotFoundError:
            return False

    def _bookkeeping(self, directory: str, names: list[str]) -> list[str]:
        """Which files of a directory are Powertrain's own, and not part of what the user saved."""
        if directory != self._directory or not self._is_committed():
            return []
        return [name for name in names if name == MANIFEST_NAME or name.startswith(BOOKKEEPING_PREFIX)]

    def __repr__(self) -> str:
        return f"Checkpoint(path={without_secrets(self.path)!r})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Checkpoint):
            return NotImplemented
        if self._directory is None and self.given_filesystem != other.given_filesystem:
            return False
        return self._place() == other._place()

    def __hash__(self) -> int:
        return hash(self._place())

    def _place(self) -> str:
        return os.path.realpath(self._directory) if self._directory is not None else self.path.rstrip("/")

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.path, self.given_filesystem))


class ReportedCheckpointStatus(Enum):
    """What is known about a checkpoint beyond that it is committed."""

    #: Committed, and nobody asked for a validation.
    COMMITTED = "COMMITTED"
    #: Committed; its validation waits or runs.
    PENDING_VALIDATION = "PENDING_VALIDATION"
    #: Its validation came to an end, and its metrics are among the checkpoint's.
    VALIDATED = "VALIDATED"
    #: Its validation took too long and was given up.
    VALIDATION_TIMEOUT = "VALIDATION_TIMEOUT"
    #: Its validation failed. The checkpoint itself is as good as before.
    VALIDATION_FAILED = "VALIDATION_FAILED"


@dataclass
class ReportedCheckpoint:
    """A committed checkpoint, the metrics reported with it (and found by its validation), and its status."""

    checkpoint: Checkpoint
    metrics: dict[str, Any]
    status: ReportedCheckpointStatus = ReportedCheckpointStatus.COMMITTED


def _remove_own(directory: str, owner: int) -> None:
    if os.getpid() == owner:  # a forked child has a copy of the object, not the directory
        shutil.rmtree(directory, ignore_errors=True)


def _plain_numpy() -> list[Any]:
    """numpy's own constructors of arrays and scalars, which run no code from a file."""
    import numpy

    core = getattr(numpy, "_core", None) or numpy.core
    dtypes = [type(numpy.dtype(code)) for code in "?bhilqBHILQefdgFD"]
    return [core.multiarray._reconstruct, core.multiarray.scalar, numpy.ndarray, numpy.dtype, *dtypes]
