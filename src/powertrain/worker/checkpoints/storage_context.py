"""Paths of a run in its storage, for loops that upload by themselves: ``get_context().get_storage()``.

The object is the storage path as text, so that code which joins paths to it keeps working, and also has the attributes
of Ray Train's ``StorageContext``.
"""

from __future__ import annotations

import os
import pickle
from functools import cached_property
from typing import TYPE_CHECKING, Any

from powertrain.errors import ReportError
from powertrain.text.redaction import strip_secrets
from powertrain.values.arguments import shorten

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

    from powertrain.checkpoint.checkpoint import Checkpoint

#: Reserved names in a run's directory, not available to a user's checkpoint.
_OWN_NAMES = frozenset(
    [
        "checkpoints",
        "commits",
        "data",
        "datasets",
        "final_summary.json",
        "hangs",
        "journal",
        "lease",
        "logs",
        "metrics",
        "profiles",
        "report.html",
        "return_value.pickle",
        "run.json",
        "stacks",
        "telemetry",
        "trace",
        "trainer.pickle",
        "trainer.signature",
    ]
)


class StorageContext(str):
    """The storage path of the run, with its parts. Prints and compares as the path, without credentials.

    Attributes:
        experiment_dir_name: The name of the run, which is its directory below the storage path.
    """

    experiment_dir_name: str
    _address: str
    _given: bytes

    def __new__(cls, storage_path: str, run_name: str, filesystem: bytes = b"") -> StorageContext:
        """Create the context. ``filesystem`` is the pickled file system that the user passed; b"" for none."""
        self = super().__new__(cls, strip_secrets(storage_path) if "://" in storage_path else storage_path)
        self.experiment_dir_name, self._address, self._given = run_name, storage_path, filesystem
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (StorageContext, (self._address, self.experiment_dir_name, self._given))

    @cached_property
    def _user_filesystem(self) -> Any:
        return pickle.loads(self._given) if self._given else None

    @cached_property
    def storage_filesystem(self) -> FileSystem:
        """The pyarrow file system of the storage; it has the credentials."""
        from powertrain.checkpoint.filesystems import pyarrow_filesystem

        is_remote = "://" in self._address and not self._address.startswith("file://")
        return pyarrow_filesystem(self._address if is_remote else None, self._user_filesystem)

    @cached_property
    def storage_fs_path(self) -> str:
        """The storage path on ``storage_filesystem``: "bucket/prefix" for an object store, without scheme."""
        if self._user_filesystem is not None:
            return self._address.rstrip("/")
        from powertrain.checkpoint.filesystems import plain_path
        from powertrain.storage import open_storage

        local = open_storage(self._address).local_path("x")
        return str(local.parent) if local is not None else plain_path(self._address)

    @property
    def experiment_fs_path(self) -> str:
        """The run's directory on ``storage_filesystem``."""
        return f"{self.storage_fs_path}/{self.experiment_dir_name}"

    @property
    def trial_fs_path(self) -> str:
        """The run's directory on ``storage_filesystem``: a trial of a sweep is an ordinary run."""
        return self.experiment_fs_path

    @property
    def local_working_directory(self) -> str:
        """The working directory of this rank."""
        return os.getcwd()

    def build_checkpoint_path_from_name(self, checkpoint_name: str) -> str:
        """Return the path in the run's directory for a checkpoint of this name that the loop writes by itself.

        Report it with ``CheckpointUploadMode.NO_UPLOAD``, or with a ``checkpoint_upload_fn`` that returns it.

        Args:
            checkpoint_name: The name of the directory.

        Returns:
            A path on ``storage_filesystem``; for S3 ``f"s3://{path}"`` is its address.

        Raises:
            ReportError: The name is empty, leads out of the run's directory, or is reserved.
        """
        name = os.fspath(checkpoint_name)
        parts = name.split("/")
        if not name or any(part in ("", ".", "..") for part in parts):
            raise ReportError(
                f"build_checkpoint_path_from_name({shorten(checkpoint_name)}) is not the name of a directory in the "
                "run's. Give a name such as 'epoch-1'."
            )
        if parts[0] in _OWN_NAMES or parts[0].startswith("."):
            raise ReportError(
                f"build_checkpoint_path_from_name({shorten(checkpoint_name)}) has a name that the run uses for its own "
                "files. Give another, such as 'epoch-1'."
            )
        return f"{self.experiment_fs_path}/{name}"

    def extract_checkpoint_dir_name_from_path(self, checkpoint_path: str) -> str:
        """Return the name of a path made by :meth:`build_checkpoint_path_from_name`.

        Raises:
            ReportError: The path is not in the run's directory.
        """
        top = f"{self.experiment_fs_path}/"
        if not checkpoint_path.startswith(top):
            raise ReportError(
                f"The checkpoint path {shorten(checkpoint_path)} is not in the run's directory "
                f"{self.experiment_fs_path!r}."
            )
        return checkpoint_path.removeprefix(top)

    def persist_current_checkpoint(self, checkpoint: Checkpoint, checkpoint_dir_name: str) -> Checkpoint:
        """Copy a checkpoint into the run's directory, and return the copy. The original is not changed.

        For a ``checkpoint_upload_fn`` with work before or after the upload::

            def upload(checkpoint, name):
                return get_context().get_storage().persist_current_checkpoint(checkpoint, name)

        Args:
            checkpoint: The checkpoint to copy.
            checkpoint_dir_name: As in :meth:`build_checkpoint_path_from_name`.
        """
        from powertrain.checkpoint.checkpoint import Checkpoint
        from powertrain.storage import open_storage

        path = self.build_checkpoint_path_from_name(checkpoint_dir_name)
        target = open_storage(path, filesystem=self._user_filesystem or self._remote)
        with checkpoint.as_directory() as directory:
            for parent, _, names in os.walk(directory):
                for name in names:
                    file = os.path.join(parent, name)
                    target.put_file(os.path.relpath(file, directory), file)
        return Checkpoint(path, self._user_filesystem or self._remote)

    @property
    def _remote(self) -> FileSystem | None:
        """Return the file system of an object store; None for local paths."""
        return self.storage_filesystem if getattr(self.storage_filesystem, "handler", None) else None
