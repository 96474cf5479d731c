"""LightGBMCheckpoint: a checkpoint that holds one booster, as in Ray Train."""

from __future__ import annotations

from typing import TYPE_CHECKING

from powertrain.checkpoint.checkpoint import Checkpoint
from powertrain.frameworks.model_checkpoint import saved_model

if TYPE_CHECKING:
    from lightgbm import Booster


class LightGBMCheckpoint(Checkpoint):
    """A :class:`~powertrain.Checkpoint` with one booster in the file ``model.txt``.

    Example:
        >>> checkpoint = LightGBMCheckpoint.from_model(booster)
        >>> booster = checkpoint.get_model()
    """

    MODEL_FILENAME = "model.txt"

    @classmethod
    def from_model(
        cls, booster: Booster, *, preprocessor: None = None, path: str | None = None
    ) -> LightGBMCheckpoint:
        """Return a checkpoint that holds a booster.

        Args:
            booster: The model.
            preprocessor: Only None: Ray Data's preprocessors are not supported.
            path: An empty directory to write to; by default a temporary one that is removed with the last reference to
                the checkpoint in this process.

        Raises:
            CheckpointError: ``path`` is no directory, or a preprocessor is given.
        """
        return saved_model(cls, cls.MODEL_FILENAME, booster.save_model, path, preprocessor)

    def get_model(self) -> Booster:
        """Return the booster."""
        from powertrain.lightgbm.callback import ReportCallback

        return ReportCallback.get_model(self, self.MODEL_FILENAME)

    def get_preprocessor(self) -> None:
        """Return None: Ray Data's preprocessors are not supported."""
