"""Checkpoint: a directory somewhere, as a value.

It is small: it says where the directory is and carries no data, so it can be passed around, compared and
pickled for nothing. What lies in the directory is the user's own; Powertrain adds ``.metadata.json`` (the
user's metadata) and, in a run's storage, ``MANIFEST.json``.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from powertrain.checkpoint.manifest import MANIFEST_NAME, is_manifest
from powertrain.errors import CheckpointError

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

#: Where metadata lies in a checkpoint's directory (Ray's name for it).
METADATA_NAME = ".metadata.json"
#: The file that ``from_dict`` writes and ``to_dict`` reads.
DICT_NAME = "dict.pt"


class Checkpoint:
    """A directory that holds the state of a training run.

    Attributes:
        path: Where the directory is.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path: str = os.path.abspath(os.path.expanduser(os.fspath(path)))

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """The checkpoint in a local directory. Nothing is copied; ``report`` does that."""
        return cls(path)

    @property
    def filesystem(self) -> FileSystem:
        """The pyarrow file system on which ``path`` is."""
        from pyarrow.fs import LocalFileSystem

        return LocalFileSystem()

    def to_directory(self, path: str | os.PathLike[str] | None = None) -> str:
        """Copy the checkpoint into ``path`` (a new temporary directory by default) and return that path.

        Files that are there already stay unless the checkpoint has one of the same name.
        """
        self._require_directory()
        target = os.fspath(path) if path is not None else tempfile.mkdtemp(prefix="powertrain-checkpoint-")
        shutil.copytree(self.path, target, dirs_exist_ok=True, ignore=self._bookkeeping)
        return target

    @contextmanager
    def as_directory(self) -> Iterator[str]:
        """The checkpoint's files as a local directory, for reading: the original itself when it is local."""
        self._require_directory()
        yield self.path

    # -- metadata

    def get_metadata(self) -> dict[str, Any]:
        """What was attached to the checkpoint; empty when nothing was."""
        try:
            content = Path(self.path, METADATA_NAME).read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            return {}
        try:
            metadata = json.loads(content)
        except ValueError as error:
            raise CheckpointError(
                f"The metadata of {self!r} cannot be read: {METADATA_NAME} is not JSON ({error}). Write it "
                "again with set_metadata."
            ) from error
        return dict(metadata)

    def set_metadata(self, metadata: dict[str, Any]) -> None:
        """Attach ``metadata`` (values that JSON can say), replacing what was attached."""
        self._require_directory()
        try:
            content = json.dumps(metadata)
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"This metadata cannot be attached to {self!r}: {error}. Use text, numbers, booleans, lists "
                "and dicts of them."
            ) from error
        unfinished = Path(self.path, f"{METADATA_NAME}.{os.getpid()}")
        unfinished.write_text(content, encoding="utf-8")
        os.replace(unfinished, Path(self.path, METADATA_NAME))

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

        file = Path(self.path, DICT_NAME)
        if not file.is_file():
            raise CheckpointError(
                f"{self!r} was not made with from_dict: it has no {DICT_NAME}. Read its files with "
                "as_directory()."
            )
        try:
            with torch.serialization.safe_globals(_plain_numpy()):
                data: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises whatever its unpickler or zip reader met
            raise CheckpointError(f"The dict of {self!r} cannot be read: {error}") from error
        return data

    # -- as a value

    _finalizer: Any = None

    def _require_directory(self) -> None:
        if not os.path.isdir(self.path):
            found = "is a file" if os.path.exists(self.path) else "does not exist"
            raise CheckpointError(
                f"The checkpoint's directory {self.path!r} {found}. Give the directory that holds its files."
            )

    def _bookkeeping(self, directory: str, names: list[str]) -> list[str]:
        """Which files of a directory are Powertrain's own, and not part of what the user saved."""
        if directory != self.path or MANIFEST_NAME not in names:
            return []
        return [MANIFEST_NAME] if is_manifest(Path(directory, MANIFEST_NAME).read_bytes()) else []

    def __repr__(self) -> str:
        return f"Checkpoint(path={self.path!r})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Checkpoint):
            return NotImplemented
        return os.path.realpath(self.path) == os.path.realpath(other.path)

    def __hash__(self) -> int:
        return hash(os.path.realpath(self.path))

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.path,))


def _remove_own(directory: str, owner: int) -> None:
    if os.getpid() == owner:  # a forked child has a copy of the object, not the directory
        shutil.rmtree(directory, ignore_errors=True)


def _plain_numpy() -> list[Any]:
    """numpy's own constructors of arrays and scalars, which run no code from a file."""
    import numpy

    core = getattr(numpy, "_core", None) or numpy.core
    dtypes = [type(numpy.dtype(code)) for code in "?bhilqBHILQefdgFD"]
    return [core.multiarray._reconstruct, core.multiarray.scalar, numpy.ndarray, numpy.dtype, *dtypes]
