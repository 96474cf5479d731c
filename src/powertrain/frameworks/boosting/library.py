"""A library of boosted trees: how its models are read, and how many rounds they have."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from powertrain.errors import CheckpointError
from powertrain.frameworks.library import Library

if TYPE_CHECKING:
    from powertrain.checkpoint.checkpoint import Checkpoint


@dataclass(frozen=True)
class BoostingLibrary(Library):
    """A library whose models are boosters, each saved as one file."""

    #: Its name, as its users write it.
    title: str
    #: The usual name of a model's file in a checkpoint.
    filename: str

    def read_booster(self, path: str) -> Any:
        """Return the booster of a file. Raises the library's own error."""
        raise NotImplementedError

    def count_rounds(self, booster: Any) -> int:
        """Return how many rounds a booster was trained for."""
        raise NotImplementedError

    def load_model(self, checkpoint: Checkpoint, filename: str, needed_by: str) -> Any:
        """Return the booster of a checkpoint.

        Args:
            checkpoint: The checkpoint.
            filename: The name of the model's file in it.
            needed_by: What needs the library, for the error where it is not installed.

        Raises:
            CheckpointError: The checkpoint has no such file, or no model of this library is in it.
            ImportError: The library is not installed.
        """
        self.load(needed_by)
        with checkpoint.as_directory() as directory:
            path = os.path.join(directory, filename)
            if not os.path.isfile(path):
                found = sorted(name for name in os.listdir(directory) if not name.startswith("."))
                raise CheckpointError(
                    f"{checkpoint!r} has no {filename}; it has {', '.join(found) or 'no files'}. Give a checkpoint "
                    f"that {self.title}'s ReportCallback has reported, or the name of its file: "
                    "ReportCallback.get_model(checkpoint, filename=...)."
                )
            try:
                return self.read_booster(path)
            except Exception as error:
                raise CheckpointError(
                    f"{filename} of {checkpoint!r} is not a model that {self.title} can read: {error}"
                ) from error
