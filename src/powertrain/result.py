"""Result: what ``fit`` returns, or what a run directory says."""

from __future__ import annotations

import os
import pickle
from functools import cached_property
from typing import TYPE_CHECKING, Any

from powertrain.checkpoint import commit, retention
from powertrain.checkpoint.checkpoint import Checkpoint
from powertrain.checkpoint.manifest import Manifest
from powertrain.errors import ConfigError, StorageError, TrainingFailedError
from powertrain.run import journal
from powertrain.run import metrics as metrics_store
from powertrain.run.lifecycle import RunState
from powertrain.storage import Storage, open_storage
from powertrain.storage.addresses import without_secrets
from powertrain.worker.shards import DataPosition, positions_in, readable

if TYPE_CHECKING:
    import pandas as pd
    from pyarrow.fs import FileSystem

    from powertrain.diagnosis.finding import Finding

#: Seconds for which storage that does not answer is asked again.
_READ_WITHIN = 60.0


class Result:
    """How a run ended and what it left. What is large is read from the run's directory when it is asked for."""

    def __init__(
        self,
        *,
        path: str,
        state: str,
        reason: str = "",
        metrics: dict[str, Any] | None = None,
        error: TrainingFailedError | None = None,
        value: bytes = b"",
        storage_filesystem: Any = None,
    ) -> None:
        #: The run's directory: a path or an address, on the file system that was given or the one it names.
        self.path = path
        self._given_filesystem = storage_filesystem
        #: "finished", "stopped", "failed", "preempted", or what the run is doing now; and why.
        self.state = state
        self.reason = reason
        #: Exactly the dict that rank 0 reported last; None when it never did.
        self.metrics = metrics
        #: What ``fit`` raised, None after a good end.
        self.error = error
        self._value = value

    @classmethod
    def from_path(cls, path: str | os.PathLike[str], storage_filesystem: Any = None) -> Result:
        """The result of the run in this directory, whoever ran it and however it ended.

        ``path`` is a plain path or an address such as ``s3://bucket/runs/name``, or, with a pyarrow or fsspec file
        system, a path of that.
        """
        storage = open_storage(os.fspath(path), filesystem=storage_filesystem, timeout=_READ_WITHIN)
        events = journal.read(storage)
        if not events:
            raise StorageError(
                f"{without_secrets(os.fspath(path))!r} holds no run: there is no journal in it. Give the directory "
                "of one run, which is storage_path/name."
            )
        state = journal.replay(events)
        return cls(
            path=os.fspath(path),
            state=state.state,
            reason=state.reason,
            metrics=metrics_store.last_of_rank(storage, state, 0) or None,
            storage_filesystem=storage_filesystem,
        )

    @property
    def _storage(self) -> Storage:
        return open_storage(self.path, filesystem=self._given_filesystem, timeout=_READ_WITHIN)

    @cached_property
    def _run_state(self) -> RunState:
        return journal.replay(journal.read(self._storage))

    @cached_property
    def _manifests(self) -> list[Manifest]:
        """The oldest first, with the metrics of their validations."""
        return commit.with_validations(commit.committed(self._storage), commit.validations(self._storage))

    @cached_property
    def return_value(self) -> Any:
        """What rank 0's function returned. Opened here, when it is asked for, and nowhere else."""
        return pickle.loads(self._value) if self._value else None

    @property
    def metrics_dataframe(self) -> pd.DataFrame:
        """Every point of every rank that is part of the run's history, abandoned ones left out."""
        return metrics_store.dataframe(self._storage, self._run_state)

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The newest committed checkpoint."""
        return commit.checkpoint_of(self._storage, self._manifests[-1]) if self._manifests else None

    @property
    def data_positions(self) -> dict[str, DataPosition]:
        """By dataset how far it had been read at the newest committed checkpoint, and so where the run would go on."""
        return readable(positions_in(self._manifests[-1].extras)) if self._manifests else {}

    @property
    def best_checkpoints(self) -> list[tuple[Checkpoint, dict[str, Any]]]:
        """Every checkpoint that was kept, with its metrics (those of its validation too), oldest first."""
        return [(commit.checkpoint_of(self._storage, m), dict(m.metrics)) for m in self._manifests]

    def get_best_checkpoint(self, metric: str, mode: str) -> Checkpoint | None:
        """The kept checkpoint with the greatest ("max") or smallest ("min") value of ``metric``."""
        if mode not in ("min", "max"):
            raise ConfigError(
                f"mode={mode!r} is neither 'min' nor 'max'. Say which values of {metric!r} are better."
            )
        best = retention.best(self._manifests, metric, mode)
        return commit.checkpoint_of(self._storage, best) if best is not None else None

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """What is wrong with how the run spends its time, the weightiest first: what ``final_summary.json`` says, or
        what follows from its record where it did not come to an end. Empty where nothing was recorded."""
        from powertrain.diagnosis import final

        report = final.report_of(self._storage, self._run_state.name)
        return report.findings if report is not None else ()

    @property
    def filesystem(self) -> FileSystem:
        """A pyarrow file system on which ``path``, and what lies below it, can be read as it stands."""
        return Checkpoint(self.path, self._given_filesystem).filesystem

    def __repr__(self) -> str:
        fields = [
            f"state={self.state!r}",
            f"metrics={self.metrics!r}",
            f"path={without_secrets(self.path)!r}",
        ]
        if self.checkpoint is not None:
            fields.append(f"checkpoint={self.checkpoint!r}")
        if self.error is not None:
            fields.append(f"error={str(self.error).splitlines()[0]!r}")
        return f"Result({', '.join(fields)})"
