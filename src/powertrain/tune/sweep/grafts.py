"""Copying of a checkpoint from one trial to another, which then continues from it: PBT's exploit step."""

from __future__ import annotations

import os
import tempfile
import time
from typing import TYPE_CHECKING

from powertrain.checkpoint import commit, committed
from powertrain.checkpoint.cache import METADATA_NAME
from powertrain.errors import CheckpointError

if TYPE_CHECKING:
    from powertrain.checkpoint.chain import Chain
    from powertrain.checkpoint.manifest import Manifest
    from powertrain.storage import Storage

#: Maximum number of source checkpoints to try: one that its run removes meanwhile is replaced by a newer one.
_TRIES = 5


class Graft:
    """A checkpoint of another trial to continue from.

    Args:
        source: The storage of the other trial's run.
        row: The row that the trial has reached, which its copy of the checkpoint belongs to.
        source_row: The row that the source had reached when it was chosen: the newest checkpoint up to it is used, or
            the newest of all if none of those is left.
    """

    def __init__(self, source: Storage, row: int, source_row: int) -> None:
        self._source, self._row, self._source_row = source, row, source_row
        #: The reason why nothing was copied; "" on success.
        self.problem = ""

    def apply(self, storage: Storage, chain: Chain) -> None:
        """Commit a copy of the source's newest checkpoint to a run whose lease is held."""
        for _ in range(_TRIES):
            there = committed.committed(self._source)
            if not there:
                self.problem = "there is no checkpoint yet"
                return
            manifest = ([one for one in there if one.row <= self._source_row] or there)[-1]
            try:
                self._copy(manifest, storage, chain)
                return
            except FileNotFoundError as error:  # its run has replaced it with a newer one
                self.problem = f"the checkpoint {manifest.name} was removed while it was copied ({error})"
        raise CheckpointError(
            f"The checkpoint of {self._source.uri!r} could not be copied {_TRIES} times: {self.problem}. Keep more of "
            "them with CheckpointConfig(num_to_keep=...)."
        )

    def _copy(self, manifest: Manifest, storage: Storage, chain: Chain) -> None:
        name = f"checkpoint_{self._row:06d}-exploit-{time.time_ns():x}"
        files = [file for file in manifest.files if file.name != METADATA_NAME]
        for file in files:
            if not file.name.endswith("/"):  # an empty directory
                self._copy_file(
                    f"checkpoints/{manifest.name}/{file.name}", storage, f"checkpoints/{name}/{file.name}"
                )
        commit.commit(
            storage,
            chain,
            name=name,
            row=self._row,
            attempt=manifest.attempt,
            files=files,
            metrics=manifest.metrics,
            world_size=manifest.world_size,
            metadata=manifest.metadata,
            extras=manifest.extras,
            elsewhere=manifest.elsewhere,
        )
        self.problem = ""

    def _copy_file(self, key: str, storage: Storage, own_key: str) -> None:
        path = self._source.local_path(key)
        if path is not None:
            storage.put_file(own_key, path)
            return
        with tempfile.TemporaryDirectory() as directory:
            copy = os.path.join(directory, "file")
            self._source.get_file(key, copy)
            storage.put_file(own_key, copy)
