"""Reports from ``model.fit(..., callbacks=[ReportCheckpointCallback()])``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from powertrain.checkpoint.checkpoint import Checkpoint
from powertrain.errors import ConfigError
from powertrain.frameworks.reporting import as_names
from powertrain.tensorflow.checkpoint import MODEL_FILENAME
from powertrain.tensorflow.library import TENSORFLOW
from powertrain.values.arguments import shorten
from powertrain.worker import context

KerasCallback: Any = TENSORFLOW.load("ReportCheckpointCallback").keras.callbacks.Callback

#: Hooks of Keras, without "on_".
_EVENTS = tuple(
    f"{part}_{edge}"
    for part in ("epoch", "train_batch", "test_batch", "predict_batch", "train", "test", "predict")
    for edge in ("begin", "end")
)


class ReportCheckpointCallback(KerasCallback):  # type: ignore[misc]
    """Report the logs of Keras, and checkpoints of the model.

    Every rank reports; every rank saves the model, which may be a collective, and rank 0's is the checkpoint.

    Args:
        checkpoint_on: The events of Keras, without "on_", at which a checkpoint is saved: a name or a list of names.
            Metrics are reported with it. [] for no checkpoints.
        report_metrics_on: The events at which metrics are reported.
        metrics: Metrics to report: a name, a list of names, or a dict from the reported name to Keras's. By default
            all.

    Raises:
        ConfigError: An event or the metrics have a wrong value.

    Example:
        >>> model.fit(batches, epochs=3, callbacks=[ReportCheckpointCallback(metrics={"loss": "val_loss"})])
    """

    def __init__(
        self,
        checkpoint_on: str | list[str] = "epoch_end",
        report_metrics_on: str | list[str] = "epoch_end",
        metrics: str | list[str] | dict[str, str] | None = None,
    ) -> None:
        super().__init__()
        self._checkpoint_on = _events(checkpoint_on, "checkpoint_on")
        self._report_on = _events(report_metrics_on, "report_metrics_on")
        self._names = as_names(metrics, "ReportCheckpointCallback")

    def _on(self, event: str, logs: Mapping[str, Any] | None) -> None:
        """An event of Keras."""
        if event not in self._checkpoint_on and event not in self._report_on:
            return
        metrics = self._chosen(logs or {})
        if event not in self._checkpoint_on:
            context.report(metrics)
            return
        with context.checkpoint_dir() as directory:
            self.model.save(os.path.join(directory, MODEL_FILENAME))
            is_first = context.get_context().get_world_rank() == 0
            context.report(metrics, checkpoint=Checkpoint.from_directory(directory) if is_first else None)

    def _chosen(self, logs: Mapping[str, Any]) -> dict[str, Any]:
        if self._names is None:
            return dict(logs)
        if missing := [name for name in self._names.values() if name not in logs]:
            raise ConfigError(
                f"ReportCheckpointCallback(metrics=...) names {missing[0]!r}, and Keras has logged "
                f"{', '.join(map(repr, logs)) or 'nothing'}. Name one of these, or give it to "
                "model.compile(metrics=...)."
            )
        return {reported: logs[name] for reported, name in self._names.items()}

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Handle the hook of Keras."""
        self._on("epoch_begin", logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Handle the hook of Keras."""
        self._on("epoch_end", logs)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Handle the hook of Keras."""
        self._on("train_batch_begin", logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Handle the hook of Keras."""
        self._on("train_batch_end", logs)

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Handle the hook of Keras."""
        self._on("test_batch_begin", logs)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """Handle the hook of Keras."""
        self._on("test_batch_end", logs)

    def on_predict_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Handle the hook of Keras."""
        self._on("predict_batch_begin", logs)

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        """Handle the hook of Keras."""
        self._on("predict_batch_end", logs)

    def on_train_begin(self, logs: Any = None) -> None:
        """Handle the hook of Keras."""
        self._on("train_begin", logs)

    def on_train_end(self, logs: Any = None) -> None:
        """Handle the hook of Keras."""
        self._on("train_end", logs)

    def on_test_begin(self, logs: Any = None) -> None:
        """Handle the hook of Keras."""
        self._on("test_begin", logs)

    def on_test_end(self, logs: Any = None) -> None:
        """Handle the hook of Keras."""
        self._on("test_end", logs)

    def on_predict_begin(self, logs: Any = None) -> None:
        """Handle the hook of Keras."""
        self._on("predict_begin", logs)

    def on_predict_end(self, logs: Any = None) -> None:
        """Handle the hook of Keras."""
        self._on("predict_end", logs)


def _events(given: Any, argument: str) -> tuple[str, ...]:
    names = (given,) if isinstance(given, str) else given
    if isinstance(names, (list, tuple)) and all(name in _EVENTS for name in names):
        return tuple(names)
    raise ConfigError(
        f"ReportCheckpointCallback({argument}={shorten(given)}) takes one of {', '.join(_EVENTS)}, or a list of them."
    )
