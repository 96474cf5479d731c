"""``TorchConfig``: the set-up of torch's process group."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from powertrain.backend import TORCH_PRELOAD, BackendConfig
from powertrain.config.checks import Config, Refusal, did_you_mean, one_of, option, optional, positive, text
from powertrain.text.reprs import short_repr as _short

TORCH_BACKENDS = ("gloo", "nccl", "mpi", "ucc", "xccl", "hccl")


def _torch_backend(value: Any) -> str:
    """Check a process group backend of torch or registered with it, or a list such as "cpu:gloo,cuda:nccl"."""
    given = text(value)
    known = set(TORCH_BACKENDS)
    distributed: Any = sys.modules.get("torch.distributed")
    known.update(getattr(getattr(distributed, "Backend", None), "backend_list", ()))
    for part in given.split(","):
        device, colon, name = part.rpartition(":")
        if name.lower() not in known or (colon and not device):
            raise Refusal(
                f"{_short(name)} is not a process group backend",
                f"{did_you_mean(name, sorted(known))}Use one of {', '.join(sorted(known))}, or by device as "
                "in 'cpu:gloo,cuda:nccl'. One that a plugin registers is known after the plugin is imported.",
            )
    return given


@dataclass(frozen=True, repr=False)
class TorchConfig(Config, BackendConfig):
    """Set-up of torch's process group.

    Raises :class:`~powertrain.errors.ConfigError` for a wrong value.

    Example::

        TorchTrainer(train_func, torch_config=TorchConfig(backend="gloo", timeout_s=600))
    """

    preload: ClassVar[Sequence[str] | None] = TORCH_PRELOAD
    """Modules imported by the process that workers are forked from."""

    backend: str | None = option(None, optional(_torch_backend))
    """The process group's backend; None is nccl with GPUs and gloo without."""

    init_method: Literal["env", "tcp"] = option("env", one_of("env", "tcp"))
    """The rendezvous of ranks. ``"env"`` names a port in MASTER_ADDR and MASTER_PORT, as torchrun does. With workers on
    several nodes rank 0 serves torch's store there; where all are on one node they meet through a file that only the
    run's user can open, and nothing listens at the port, which is reserved for user code that serves something there.
    ``"tcp"`` always serves the store on a TCP port, which torch does not protect from other users, and sets no
    variables."""

    timeout_s: float = option(1800, positive)
    """Seconds after which a collective that does not complete is an error."""

    @property
    def backend_cls(self) -> type[Any]:
        """The backend that sets up the process group."""
        from powertrain.torch.backend import TorchBackend  # loads torch

        return TorchBackend
