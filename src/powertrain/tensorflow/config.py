"""TensorflowConfig: how the workers of a TensorflowTrainer are connected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from powertrain.backend import BackendConfig
from powertrain.config.checks import Config


@dataclass(frozen=True, repr=False)
class TensorflowConfig(Config, BackendConfig):
    """Connection of TensorFlow's workers. There is nothing to choose.

    Example:
        >>> TensorflowTrainer(train, tensorflow_config=TensorflowConfig())
    """

    uses_torch: ClassVar[bool] = False
    #: TensorFlow starts threads when it is imported, so it must not be imported before a fork.
    preload: ClassVar[Sequence[str] | None] = ()

    @property
    def backend_cls(self) -> type[Any]:
        """The backend that connects the workers."""
        from powertrain.tensorflow.backend import TensorflowBackend

        return TensorflowBackend
