"""TorchCheckpoint: a checkpoint that holds one model, as in Ray Train."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from powertrain.checkpoint.checkpoint import Checkpoint, temporary_checkpoint
from powertrain.errors import CheckpointError

#: DistributedDataParallel's prefix of the names of parameters.
_PREFIX = "module."


class TorchCheckpoint(Checkpoint):
    """A :class:`~powertrain.Checkpoint` with one model in the file ``model.pt``.

    Example:
        >>> checkpoint = TorchCheckpoint.from_state_dict(model.state_dict())
        >>> model = checkpoint.get_model(Net())
    """

    MODEL_FILENAME = "model.pt"

    @classmethod
    def from_state_dict(cls, state_dict: Mapping[str, Any], *, preprocessor: None = None) -> TorchCheckpoint:
        """Return a checkpoint that holds the state dict of a model, without the names that DDP adds.

        It lies in a temporary directory that is removed with the last reference to it in this process.

        Args:
            state_dict: The result of ``model.state_dict()``.
            preprocessor: Only None: keep a preprocessor in the metadata.
        """
        _refuse_preprocessor(preprocessor)
        return cls._saved({name.removeprefix(_PREFIX): value for name, value in state_dict.items()})

    @classmethod
    def from_model(cls, model: torch.nn.Module, *, preprocessor: None = None) -> TorchCheckpoint:
        """Return a checkpoint that holds a whole model, pickled. Prefer :meth:`from_state_dict`.

        Args:
            model: The model.
            preprocessor: Only None: keep a preprocessor in the metadata.
        """
        _refuse_preprocessor(preprocessor)
        return cls._saved(model)

    @classmethod
    def _saved(cls, content: Any) -> TorchCheckpoint:
        checkpoint = temporary_checkpoint(cls)
        torch.save(content, os.path.join(checkpoint.path, cls.MODEL_FILENAME))
        return checkpoint

    def get_model(self, model: torch.nn.Module | None = None, *, trust: bool = False) -> torch.nn.Module:
        """Return the model.

        Args:
            model: A model to load the state dict into; not used where the checkpoint holds a whole model.
            trust: Open a whole model that is pickled. That runs code from the file.

        Raises:
            CheckpointError: The checkpoint holds no model, or one that cannot be opened like this.
        """
        content = self._load(trust)
        if isinstance(content, torch.nn.Module):
            return content
        if model is None:
            raise CheckpointError(
                f"{self!r} holds a state dict. Pass the model that it belongs to: get_model(Net())."
            )
        model.load_state_dict(content)
        return model

    def get_preprocessor(self) -> None:
        """Return None: preprocessors are kept in the metadata."""

    def _load(self, trust: bool) -> Any:
        with self.as_directory() as directory:
            file = os.path.join(directory, self.MODEL_FILENAME)
            if not os.path.exists(file):
                raise CheckpointError(
                    f"{self!r} has no {self.MODEL_FILENAME}. Make it with TorchCheckpoint.from_state_dict, or read its "
                    "files with as_directory()."
                )
            try:
                return torch.load(
                    file, map_location="cpu", weights_only=not (trust or self._is_of_this_process)
                )
            except Exception as error:
                raise CheckpointError(
                    f"The model of {self!r} cannot be read: {type(error).__name__}: {error}. A whole model is opened "
                    "with get_model(trust=True), which runs code from the file."
                ) from error

    @property
    def _is_of_this_process(self) -> bool:
        """Return whether this process wrote the file itself."""
        return self._finalizer is not None


def _refuse_preprocessor(preprocessor: Any) -> None:
    if preprocessor is not None:
        raise CheckpointError(
            f"preprocessor={type(preprocessor).__name__} cannot be kept in a checkpoint here. Keep it in the metadata: "
            "checkpoint.update_metadata({'preprocessor': preprocessor.serialize()})."
        )
