"""Checkpoint: a directory somewhere, as a value.

It is small: it has the directory's address and no data, so it can be passed around, compared and pickled at no cost.
The content of the directory is the user's own; Powertrain adds ``.metadata.json`` (the user's metadata) and, in a run's
storage, files whose names start with ``.powertrain-``.
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
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

from powertrain.checkpoint import cache
from powertrain.checkpoint import manifest as mf
from powertrain.checkpoint.cache import METADATA_NAME
from powertrain.checkpoint.manifest import BOOKKEEPING_PREFIX, LATER_METADATA_NAME, MANIFEST_NAMES
from powertrain.errors import CheckpointError
from powertrain.storage import Storage, open_storage
from powertrain.storage.addresses import strip_secrets, without_secrets
from powertrain.storage.base import LARGE_RECORD_BYTES_LIMIT, check_filesystem, own_address
from powertrain.values.arguments import as_path, as_text_keys

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

_C = TypeVar("_C", bound="Checkpoint")
#: The file that ``from_dict`` writes and ``to_dict`` reads.
DICT_NAME = "dict.pt"


class Checkpoint:
    """A directory that holds the state of a training run: on this machine, or in an object store.

    Nothing is read or copied when it is made.

    Args:
        path: A plain path, a ``file://``, ``s3://``, ``gs://`` or ``az://`` address, or, with ``filesystem``, a path of
            that.
        filesystem: A pyarrow or fsspec file system.

    Attributes:
        path: Where the directory is, as it was given (a local one as an absolute path), without credentials. Together
            with ``filesystem`` it names the same checkpoint again: ``Checkpoint(path, filesystem)``.

    Example::

        checkpoint = Checkpoint("s3://bucket/runs/digits/checkpoint_000004")
        with checkpoint.as_directory() as directory:
            model.load_state_dict(torch.load(os.path.join(directory, "model.pt")))
    """

    def __init__(self, path: str | os.PathLike[str], filesystem: Any = None) -> None:
        """Make the checkpoint of a directory. The class describes the arguments."""
        text = as_path(path, "Checkpoint(path=...)")
        check_filesystem(filesystem, "Checkpoint(filesystem=...)")
        if getattr(filesystem, "type_name", "") == "local":
            filesystem = None
        if own := own_address(filesystem, text):
            text, filesystem = own, None
        #: The given file system, None where the path suffices.
        self.given_filesystem = filesystem
        #: The directory on this machine, None for a remote checkpoint.
        self._directory: str | None = None
        if filesystem is not None:
            inside = open_storage(text, filesystem=filesystem).local_path(METADATA_NAME)
            self._directory = str(inside.parent) if inside is not None else None
        elif "://" not in text or text.startswith(("file:///", "file://localhost/")):
            text = unquote(urlsplit(text).path) if "://" in text else os.path.expanduser(text)
            text = self._directory = os.path.abspath(text)
        #: As ``path``, with the credentials that were given in it. Never shown.
        self.address: str = text
        self.path: str = strip_secrets(text) if "://" in text else text

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Return the checkpoint in a local directory. Nothing is copied; ``report`` does that.

        Args:
            path: The directory.

        Returns:
            The checkpoint.

        Example::

            report({"loss": loss}, Checkpoint.from_directory(directory))
        """
        return cls(path)

    @property
    def filesystem(self) -> FileSystem:
        """A pyarrow file system on which ``path``, and the paths below it, can be read unchanged."""
        from powertrain.checkpoint.filesystems import pyarrow_filesystem

        return pyarrow_filesystem(self.address if self._directory is None else None, self.given_filesystem)

    def to_directory(self, path: str | os.PathLike[str] | None = None) -> str:
        """Copy the checkpoint into a local directory.

        Files that are there already stay unless the checkpoint has one of the same name.

        Args:
            path: The directory; None for a new temporary one, which the caller removes.

        Returns:
            The path of the directory.

        Raises:
            CheckpointError: The checkpoint's directory does not exist, or is damaged.

        Example::

            directory = result.checkpoint.to_directory("exported")
        """
        self._require_directory()
        if path is not None:
            target = as_path(path, "Checkpoint.to_directory(path=...)")
            self._copy_to(target)
            return target
        target = tempfile.mkdtemp(prefix="powertrain-checkpoint-")
        try:
            self._copy_to(target)
        except BaseException:
            shutil.rmtree(target, ignore_errors=True)
            raise
        return target

    def _copy_to(self, target: str) -> None:
        if self._directory is None:
            cache.download(self._storage, target, shown=repr(self))
            return
        is_committed = self._is_committed()
        self._refuse_links(is_committed)
        shutil.copytree(
            self._directory, target, symlinks=is_committed, dirs_exist_ok=True, ignore=self._bookkeeping
        )
        if Path(self._directory, LATER_METADATA_NAME).is_file() and is_committed:
            Path(target, METADATA_NAME).write_text(json.dumps(self.get_metadata()), encoding="utf-8")

    @contextmanager
    def as_directory(self) -> Iterator[str]:
        """Yield the checkpoint's files as a local directory, for reading.

        It is the original itself when that is local. Otherwise it is a copy that all processes of this machine
        share, made by the first to come and removed by the last to leave.

        Yields:
            The path of the directory.

        Raises:
            CheckpointError: The checkpoint's directory does not exist, or is damaged.

        Example::

            with checkpoint.as_directory() as directory:
                state = torch.load(os.path.join(directory, "model.pt"))
        """
        self._require_directory()
        if self._directory is not None:
            self._refuse_links(self._is_committed())
            yield self._directory
        else:
            with cache.shared_copy(self._storage, shown=repr(self)) as directory:
                yield directory

    # -- metadata

    def get_metadata(self) -> dict[str, Any]:
        """Return the attached metadata.

        Returns:
            The metadata; empty when there is none.

        Raises:
            CheckpointError: The metadata cannot be read.

        Example::

            epoch = checkpoint.get_metadata().get("epoch", 0)
        """
        storage = self._storage
        try:
            try:
                content = cache.later_metadata(storage, repr(self))
            except FileNotFoundError:
                content = storage.get(METADATA_NAME, limit=LARGE_RECORD_BYTES_LIMIT)
        except FileNotFoundError:
            return {}
        except OSError as error:
            if self._directory is None:
                raise
            raise CheckpointError(
                f"The metadata of {self!r} cannot be read: {error.strerror or error}. Make the files in its directory "
                "readable, or use another checkpoint."
            ) from error
        try:
            return dict(json.loads(content))
        except (ValueError, TypeError, RecursionError) as error:
            raise CheckpointError(
                f"The metadata of {self!r} cannot be read: {METADATA_NAME} is not JSON ({error}). Write it "
                "again with set_metadata."
            ) from error

    def set_metadata(self, metadata: dict[str, Any]) -> None:
        """Attach metadata in place of earlier metadata.

        Committed files never change, so for a committed checkpoint it is kept in a file of its own.

        Args:
            metadata: A dict of JSON values.

        Raises:
            CheckpointError: A value has no form in JSON, or the checkpoint's directory does not exist.

        Example::

            checkpoint.set_metadata({"epoch": 3})
        """
        self._require_directory()
        as_text_keys(metadata, "Checkpoint.set_metadata()", CheckpointError)
        try:
            content = json.dumps(metadata)
            content.encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(
                f"This metadata cannot be attached to {self!r}: {error}. Use text, numbers, booleans, lists "
                "and dicts of them."
            ) from error
        if self._is_committed():
            self._storage.put(LATER_METADATA_NAME, mf.seal({"metadata": content}))
        else:
            self._storage.put(METADATA_NAME, content.encode())

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        """Merge metadata into the attached metadata.

        Args:
            metadata: A dict of JSON values; those of the same name are replaced.

        Raises:
            CheckpointError: A value has no form in JSON, or the attached metadata cannot be read.

        Example::

            checkpoint.update_metadata({"reviewed": True})
        """
        added = as_text_keys(metadata, "Checkpoint.update_metadata()", CheckpointError)
        self.set_metadata({**self.get_metadata(), **added})

    # -- dicts

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Checkpoint:
        """Return a checkpoint that holds one dict of tensors, numbers, text and containers of them.

        It lies in a temporary directory that is removed with the last reference in this process. Values that could not
        be loaded safely are refused here, not when they are needed.

        Args:
            data: The dict.

        Returns:
            The checkpoint, to be reported.

        Raises:
            CheckpointError: A value cannot be saved, or could not be loaded without running code from the file.

        Example::

            report({"loss": loss}, Checkpoint.from_dict({"model": model.state_dict(), "epoch": epoch}))
        """
        import torch

        if not isinstance(data, dict):
            raise CheckpointError(f"from_dict takes a dict, and was given a {type(data).__name__}.")
        checkpoint = temporary_checkpoint(cls)
        file = os.path.join(checkpoint.path, DICT_NAME)
        try:
            torch.save(data, file)
        except OSError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"This dict cannot be a checkpoint: {type(error).__name__}: {error}. Keep tensors, numpy arrays, "
                "numbers, text and containers of them."
            ) from error
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
        """Return the dict of a checkpoint made with ``from_dict``. No code from the file is run.

        Returns:
            The dict, with its tensors on the CPU.

        Raises:
            CheckpointError: The checkpoint was not made with ``from_dict``, or its file cannot be read.

        Example::

            model.load_state_dict(checkpoint.to_dict()["model"])
        """
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
        except Exception as error:  # torch passes on errors of its unpickler or zip reader
            raise CheckpointError(f"The dict of {self!r} cannot be read: {error}") from error
        return data

    # -- as a value

    _finalizer: Any = None

    @property
    def _storage(self) -> Storage:
        return open_storage(self.address, filesystem=self.given_filesystem)

    def _require_directory(self) -> None:
        """Raise for a missing local directory; a remote one is checked when it is read."""
        if self._directory is not None and not os.path.isdir(self._directory):
            found = "is a file" if os.path.exists(self._directory) else "does not exist"
            raise CheckpointError(
                f"The checkpoint's directory {self.path!r} {found}. Give the directory that holds its files."
            )

    def _is_committed(self) -> bool:
        for name in MANIFEST_NAMES:
            try:
                return mf.is_manifest(self._storage.get(name, limit=LARGE_RECORD_BYTES_LIMIT))
            except FileNotFoundError:
                continue
        return False

    def _refuse_links(self, is_committed: bool) -> None:
        """Raise :class:`CheckpointError` for a link in a committed checkpoint.

        A commit writes none, so another user who can write there has put it in, to have some file of this user's
        read. A user's own directory may have links.
        """
        if not is_committed:
            return
        for directory, directories, files in os.walk(self._directory or self.path):
            for name in (*directories, *files):
                if os.path.islink(os.path.join(directory, name)):
                    raise CheckpointError(
                        f"{os.path.join(directory, name)!r} is a symbolic link, and a committed checkpoint has none: "
                        "it was put there later. Restore the file from another copy, or use another checkpoint."
                    )

    def _bookkeeping(self, directory: str, names: list[str]) -> list[str]:
        """Return the files of a directory that are Powertrain's own, and not the user's."""
        if directory != self._directory or not self._is_committed():
            return []
        return [name for name in names if name in MANIFEST_NAMES or name.startswith(BOOKKEEPING_PREFIX)]

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
        return (type(self), (self.address, self.given_filesystem))


class ReportedCheckpointStatus(Enum):
    """The validation status of a committed checkpoint."""

    #: Committed, without a requested validation.
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
    """A committed checkpoint of a run, with its metrics and its status.

    Attributes:
        checkpoint: The checkpoint.
        metrics: The metrics reported with it, and those found by its validation.
        status: The status of its validation.

    Example::

        best = min(get_all_reported_checkpoints(), key=lambda reported: reported.metrics["loss"])
    """

    checkpoint: Checkpoint
    metrics: dict[str, Any]
    status: ReportedCheckpointStatus = ReportedCheckpointStatus.COMMITTED


def temporary_checkpoint(kind: type[_C]) -> _C:
    """Return a checkpoint of an empty temporary directory that is removed with its last reference in this process."""
    directory = tempfile.mkdtemp(prefix="powertrain-checkpoint-")
    checkpoint = kind(directory)
    checkpoint._finalizer = weakref.finalize(checkpoint, _remove_own, directory, os.getpid())
    return checkpoint


def _remove_own(directory: str, owner: int) -> None:
    if os.getpid() == owner:  # a forked child has a copy of the object, not the directory
        shutil.rmtree(directory, ignore_errors=True)


def _plain_numpy() -> list[Any]:
    """Return numpy's own constructors of arrays and scalars, which run no code from a file."""
    import numpy

    core = getattr(numpy, "_core", None) or numpy.core
    dtypes = [type(numpy.dtype(code)) for code in "?bhilqBHILQefdgFD"]
    return [core.multiarray._reconstruct, core.multiarray.scalar, numpy.ndarray, numpy.dtype, *dtypes]
