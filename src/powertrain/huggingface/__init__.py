"""Hugging Face libraries in training functions. Importing this package imports none of them.

:mod:`powertrain.huggingface.transformers` is for the ``Trainer`` of Transformers. ``TransformersTrainer`` is here too,
where older programs for Ray Train look for it. Accelerate needs nothing of ours: see docs/transformers.md.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from powertrain.huggingface import transformers as transformers
    from powertrain.huggingface.transformers.trainer import TransformersTrainer

__all__ = ["TransformersTrainer"]


def __getattr__(name: str) -> Any:
    if name == "transformers":
        return import_module("powertrain.huggingface.transformers")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = getattr(import_module("powertrain.huggingface.transformers"), name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "transformers"})
