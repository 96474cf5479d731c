"""Results constructed directly, with the arguments of Ray Train's constructor: they need no run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from powertrain.checkpoint.checkpoint import Checkpoint
from powertrain.checkpoint.manifest import Manifest


@dataclass(frozen=True)
class GivenContents:
    """The arguments of the constructor that a run's directory has otherwise."""

    checkpoint: Checkpoint | None = None
    #: A pandas DataFrame, or None.
    metrics_dataframe: Any = None
    best_checkpoints: list[tuple[Checkpoint, dict[str, Any]]] | None = None
    return_value: Any = None

    def manifests(self) -> list[Manifest]:
        """Return a manifest with the metrics of each of the best checkpoints; its row is the index in that list."""
        return [
            Manifest(
                name=str(index),
                row=index,
                attempt=0,
                metrics=dict(metrics),
                world_size=1,
                lease=0,
                parent="",
                created=0.0,
                files=[],
            )
            for index, (_, metrics) in enumerate(self.best_checkpoints or [])
        ]

    def checkpoint_of(self, manifest: Manifest) -> Checkpoint:
        """Return the checkpoint that one of :meth:`manifests` stands for."""
        assert self.best_checkpoints is not None
        return self.best_checkpoints[manifest.row][0]
