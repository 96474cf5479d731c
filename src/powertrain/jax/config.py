"""JaxConfig: how the processes of a JaxTrainer are connected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from powertrain.backend import BackendConfig
from powertrain.config.checks import Config, flag, only, option


@dataclass(frozen=True, repr=False)
class JaxConfig(Config, BackendConfig):
    """Connection of JAX's processes.

    Example:
        >>> JaxTrainer(train, jax_config=JaxConfig(use_gpu=True), scaling_config=ScalingConfig(2, use_gpu=True))
    """

    uses_torch: ClassVar[bool] = False
    #: Only what JAX itself is built on: XLA starts threads, and a fork of a process that has them hangs.
    preload: ClassVar[Sequence[str] | None] = ("numpy", "ml_dtypes", "opt_einsum", "powertrain.jax.backend")

    use_tpu: bool = option(
        False, only(False, why="TPUs are not supported", fix="Use CPUs, or use_gpu=True with GPUs.")
    )
    """Only False: TPUs are not supported."""

    use_gpu: bool = option(False, flag)
    """Compute on GPUs: sets JAX_PLATFORMS to "cuda" in the workers, unless it is set already."""

    @property
    def backend_cls(self) -> type[Any]:
        """The backend that connects the processes."""
        from powertrain.jax.backend import JaxBackend

        return JaxBackend
