"""TensorflowCheckpoint: a checkpoint that holds one Keras model, as in Ray Train."""

from __future__ import annotations

import os
import shutil
from typing import Any

from powertrain.checkpoint.checkpoint import Checkpoint
from powertrain.errors import CheckpointError
from powertrain.frameworks.model_checkpoint import saved_model
from powertrain.tensorflow.library import TENSORFLOW

#: The file that holds a model, where the checkpoint's metadata name no other.
MODEL_FILENAME = "model.keras"


class TensorflowCheckpoint(Checkpoint):
    """A :class:`~powertrain.Checkpoint` with one Keras model.

    Example:
        >>> checkpoint = TensorflowCheckpoint.from_model(model)
        >>> model = checkpoint.get_model()
    """

    MODEL_FILENAME_KEY = "_model_filename"

    @classmethod
    def from_model(cls, model: Any, *, preprocessor: None = None) -> TensorflowCheckpoint:
        """Return a checkpoint that holds a Keras model.

        It lies in a temporary directory that is removed with the last reference to it in this process.

        Args:
            model: The model.
            preprocessor: Only None: keep a preprocessor in the metadata.

        Returns:
            The checkpoint, to be reported.

        Example::

            report({"loss": loss}, TensorflowCheckpoint.from_model(model))
        """
        return cls._saved(MODEL_FILENAME, model.save, preprocessor)

    @classmethod
    def from_h5(cls, file_path: str, *, preprocessor: None = None) -> TensorflowCheckpoint:
        """Return a checkpoint with a copy of a model in the H5 format.

        Args:
            file_path: The file, whose name ends with ".h5".
            preprocessor: Only None: keep a preprocessor in the metadata.

        Raises:
            CheckpointError: There is no such file.
        """
        if not os.path.isfile(file_path) or not file_path.endswith(".h5"):
            raise CheckpointError(f"file_path={file_path!r} is not a file that ends with '.h5'.")
        name = os.path.basename(file_path)
        return cls._saved(name, lambda path: shutil.copyfile(file_path, path), preprocessor)

    @classmethod
    def from_saved_model(cls, dir_path: str, *, preprocessor: None = None) -> TensorflowCheckpoint:
        """Return a checkpoint with a copy of a model in the SavedModel format.

        Args:
            dir_path: The directory of the model.
            preprocessor: Only None: keep a preprocessor in the metadata.

        Raises:
            CheckpointError: There is no such directory.
        """
        if not os.path.isdir(dir_path):
            raise CheckpointError(f"dir_path={dir_path!r} is not a directory of a SavedModel.")
        return cls._saved("saved_model", lambda path: shutil.copytree(dir_path, path), preprocessor)

    @classmethod
    def _saved(cls, name: str, write: Any, preprocessor: Any) -> TensorflowCheckpoint:
        checkpoint = saved_model(cls, name, write, None, preprocessor)
        checkpoint.update_metadata({cls.MODEL_FILENAME_KEY: name})
        return checkpoint

    def get_model(self) -> Any:
        """Return the Keras model. What Keras refuses to load because it would run code stays refused.

        Raises:
            CheckpointError: The checkpoint holds no model.
            ImportError: tensorflow is not installed.

        Returns:
            The model.

        Example::

            model = TensorflowCheckpoint(result.checkpoint.path).get_model()
        """
        tf = TENSORFLOW.load("TensorflowCheckpoint.get_model")
        name = self.get_metadata().get(self.MODEL_FILENAME_KEY, MODEL_FILENAME)
        with self.as_directory() as directory:
            path = os.path.join(directory, os.path.basename(name))
            if not os.path.exists(path):
                raise CheckpointError(
                    f"{self!r} has no {name}. Make it with TensorflowCheckpoint.from_model, or read its files with "
                    "as_directory()."
                )
            return tf.keras.models.load_model(path)

    def get_preprocessor(self) -> None:
        """Return None: preprocessors are kept in the metadata."""
