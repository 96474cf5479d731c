"""What a training loop does with its time, and what processes are doing: phases, steps, samples, stacks.

``import powertrain.trace as traceml`` serves a script that was written for TraceML. Each name is loaded when it is
first used, so that importing this package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from powertrain.diagnosis.so_far import final_summary, summary
    from powertrain.trace.recording.wrappers import (
        init,
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

#: Names that stand for what is said of records, which is no business of those who make them.
_OF_DIAGNOSIS = ("final_summary", "summary")
#: Other spellings, for people who come from TraceML.
_ALIASES = {"start": "init"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'powertrain.trace' has no attribute {name!r}")
    home = "powertrain.diagnosis.so_far" if name in _OF_DIAGNOSIS else "powertrain.trace.recording.wrappers"
    value = getattr(import_module(home), _ALIASES.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
