"""The ``Trainer`` of Hugging Face Transformers in a training function.

Its checkpoints become checkpoints of the run, a restart resumes from them, and shards of the run's datasets can be
given to it as datasets. Importing this package does not import transformers: each name is loaded when it is first
used. ``RayTrainReportCallback`` is Ray Train's name for :class:`ReportCallback`.

Example::

    from powertrain.huggingface.transformers import ReportCallback, prepare_trainer

    def train_func(config):
        trainer = transformers.Trainer(model=model, args=args, train_dataset=rows, callbacks=[ReportCallback()])
        prepare_trainer(trainer).train()
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from powertrain.huggingface.transformers.callback import RayTrainReportCallback, ReportCallback
    from powertrain.huggingface.transformers.prepare import prepare_trainer
    from powertrain.huggingface.transformers.trainer import TransformersTrainer

__all__ = ["RayTrainReportCallback", "ReportCallback", "TransformersTrainer", "prepare_trainer"]

_HOMES = {
    "RayTrainReportCallback": "callback",
    "ReportCallback": "callback",
    "TransformersTrainer": "trainer",
    "prepare_trainer": "prepare",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
