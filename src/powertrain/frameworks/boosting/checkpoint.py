"""Checkpoints that hold one booster, as in Ray Train."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from powertrain.checkpoint.checkpoint import Checkpoint
from powertrain.frameworks.model_checkpoint import saved_model

if TYPE_CHECKING:
    from powertrain.frameworks.boosting.library import BoostingLibrary

_CheckpointT = TypeVar("_CheckpointT", bound="BoosterCheckpoint")


class BoosterCheckpoint(Checkpoint):
    """A :class:`~powertrain.Checkpoint` with one booster in one file."""

    library: ClassVar[BoostingLibrary]
    MODEL_FILENAME: ClassVar[str]

    @classmethod
    def from_model(
        cls: type[_CheckpointT], booster: Any, *, preprocessor: None = None, path: str | None = None
    ) -> _CheckpointT:
        """Return a checkpoint that holds a booster.

        Args:
            booster: The model.
            preprocessor: Only None: keep a preprocessor in the metadata.
            path: An empty directory to write to; by default a temporary one that is removed with the last reference to
                the checkpoint in this process.

        Raises:
            CheckpointError: ``path`` is no directory, or a preprocessor is given.
        """
        return saved_model(cls, cls.MODEL_FILENAME, booster.save_model, path, preprocessor)

    def get_model(self) -> Any:
        """Return the booster.

        Raises:
            CheckpointError: The checkpoint holds none.
            ImportError: The library is not installed.
        """
        return self.library.load_model(self, self.MODEL_FILENAME, f"{type(self).__name__}.get_model")

    def get_preprocessor(self) -> None:
        """Return None: preprocessors are kept in the metadata."""
