"""The checkpoints of one run: what is committed, what to go on from, what to delete."""

from __future__ import annotations

from collections.abc import Callable

from powertrain.checkpoint import commit, retention
from powertrain.checkpoint.checkpoint import Checkpoint
from powertrain.checkpoint.manifest import Manifest
from powertrain.config import CheckpointConfig
from powertrain.errors import CheckpointError, PowertrainError
from powertrain.run.attempt import Attempt
from powertrain.run.rows import Row
from powertrain.storage import Storage


class Checkpoints:
    """Commits and deletes for the controller. Trouble with storage is told, never raised."""

    def __init__(
        self,
        storage: Storage,
        lease: int,
        config: CheckpointConfig,
        newest: Manifest | None,
        tell: Callable[[str], None],
    ) -> None:
        self._storage, self._lease, self._config, self._tell = storage, lease, config, tell
        #: The newest committed and verified one.
        self.newest = newest
        self._kept = commit.committed(storage)

    def newest_path(self) -> str:
        """Where the newest one lies; "" for none."""
        return self.newest_value().path if self.newest is not None else ""

    def newest_value(self) -> Checkpoint:
        assert self.newest is not None
        return commit.checkpoint_of(self._storage, self.newest)

    def commit(self, attempt: Attempt, row: Row) -> Manifest | None:
        """Write the manifest of a row all of whose parts are durable; None where that failed."""
        metrics = row.metrics[0] if row.metrics and row.metrics[0] is not None else {}
        try:
            manifest = commit.commit(
                self._storage,
                name=next(iter(row.parts.values())).checkpoint,
                row=row.number,
                attempt=attempt.number,
                parts=row.parts,
                metrics=metrics,
                world_size=attempt.world_size,
                lease=self._lease,
                parent=self.newest.name if self.newest else "",
                extras={key: value for part in row.parts.values() for key, value in part.extras.items()},
                tell=self._tell,
            )
        except (OSError, PowertrainError) as error:
            self._tell(f"The checkpoint of row {row.number} could not be committed: {error}")
            return None
        self.newest = manifest
        self._kept.append(manifest)
        return manifest

    def discard_old(self, pinned_row: int) -> None:
        """Delete what retention does not keep, but never the one of ``pinned_row``."""
        for name in retention.to_delete(
            self._kept,
            num_to_keep=self._config.num_to_keep,
            score_attribute=self._config.checkpoint_score_attribute,
            score_order=self._config.checkpoint_score_order,
            pinned=frozenset(m.name for m in self._kept if m.row == pinned_row),
        ):
            self._kept = [m for m in self._kept if m.name != name]
            try:
                commit.discard(self._storage, name)
            except (OSError, CheckpointError) as error:
                self._tell(f"The checkpoint {name} is no longer needed but could not be deleted: {error}")
