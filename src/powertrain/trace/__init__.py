"""Tracing of training loops and processes: phases, steps, samples, stacks.

``import powertrain.trace as traceml`` serves a script that was written for TraceML. Each name is loaded when it is
first used, so that importing this package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from powertrain.diagnosis.script import init
    from powertrain.diagnosis.so_far import final_summary, summary
    from powertrain.trace.recording.wrappers import (
        trace_step,
        wrap_backward,
        wrap_dataloader_fetch,
        wrap_forward,
        wrap_h2d,
        wrap_optimizer,
    )

    start = init

__all__ = [
    "final_summary",
    "init",
    "start",
    "summary",
    "trace_step",
    "wrap_backward",
    "wrap_dataloader_fetch",
    "wrap_forward",
    "wrap_h2d",
    "wrap_optimizer",
]

#: The module of each name. The findings of a script belong to the diagnosis, which reads these records.
_HOMES = {
    "final_summary": "powertrain.diagnosis.so_far",
    "init": "powertrain.diagnosis.script",
    "summary": "powertrain.diagnosis.so_far",
}
#: Other spellings, for users of TraceML.
_ALIASES = {"start": "init"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'powertrain.trace' has no attribute {name!r}")
    real = _ALIASES.get(name, name)
    value = getattr(import_module(_HOMES.get(real, "powertrain.trace.recording.wrappers")), real)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
