"""What a training loop does with its time, and what processes are doing: phases, steps, samples, stacks.

``import powertrain.trace as traceml`` serves a script that was written for TraceML. Each name is loaded when it is
first used, so that importing this package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from powertrain.trace.wrappers import (
        init,
        trace_step,
        wrap_backward,
        wrap_dataloader_fetch,
        wrap_forward,
        wrap_h2d,
        wrap_optimizer,
    )

#: Where each public name lives.
_HOMES = {
    "powertrain.trace.wrappers": (
        "init",
        "trace_step",
        "wrap_backward",
        "wrap_dataloader_fetch",
        "wrap_forward",
        "wrap_h2d",
        "wrap_optimizer",
    ),
}
_NAMES = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "init",
    "trace_step",
    "wrap_backward",
    "wrap_dataloader_fetch",
    "wrap_forward",
    "wrap_h2d",
    "wrap_optimizer",
]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'powertrain.trace' has no attribute {name!r}")
    value = getattr(import_module(_NAMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
