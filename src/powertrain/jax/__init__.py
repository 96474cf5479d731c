"""JAX: the trainer and its config.

Importing this package does not import jax: each name is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from powertrain.jax.config import JaxConfig
    from powertrain.jax.trainer import JaxTrainer

__all__ = ["JaxConfig", "JaxTrainer"]

_HOMES = {"JaxConfig": "powertrain.jax.config", "JaxTrainer": "powertrain.jax.trainer"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
