"""Lightning: ``Trainer(callbacks=[TuneReportCheckpointCallback()])`` in a training function.

Importing this module imports Lightning, as ``lightning`` or as ``pytorch_lightning``.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from importlib import import_module
from typing import Any

from powertrain.errors import ConfigError
from powertrain.frameworks.reporting import as_names, check_filename, file_checkpoint
from powertrain.text.loggers import module_logger
from powertrain.values.arguments import as_flag, plain_scalar, shorten
from powertrain.worker import context

__all__ = ["TuneCallback", "TuneReportCallback", "TuneReportCheckpointCallback"]

logger = module_logger(__name__)

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def _load_bases() -> tuple[type, ...]:
    """Return ``Callback`` of each Lightning that is loaded, else of the first that is installed.

    Its two packages have one each, and the Trainer of one does not know that of the other.
    """
    loaded = tuple(module.Callback for name in _PACKAGES if (module := sys.modules.get(name)) is not None)
    if loaded:
        return loaded
    problems = []
    for name in _PACKAGES:
        try:
            return (import_module(name).Callback,)
        except ImportError as error:
            problems.append(str(error))
    raise ImportError(
        f"Neither lightning nor pytorch_lightning can be imported ({'; '.join(problems)}), and there is nothing else "
        "that these callbacks could be given to. Install Lightning: pip install lightning."
    )


_BASES = _load_bases()
_HOOKS = frozenset(
    name for base in _BASES for name in dir(base) if name.startswith("on_") and callable(getattr(base, name))
)
#: The base class of the callbacks, created here because it depends on the loaded packages.
_LightningCallback: Any = type("_LightningCallback", _BASES, {"__module__": __name__})


class TuneCallback(_LightningCallback):  # type: ignore[misc]
    """Base class of callbacks that act at chosen hooks. Subclasses define ``_handle``.

    Args:
        on: Names of hooks of Lightning's callbacks without "on_", such as "validation_end" or "train_epoch_end".
    """

    def __init__(self, on: str | list[str] = "validation_end") -> None:
        super().__init__()
        chosen = [on] if isinstance(on, str) else list(on)
        for hook in chosen:
            if f"on_{hook}" not in _HOOKS:
                raise ConfigError(
                    f"{type(self).__name__}(on={shorten(hook)}) is no hook of Lightning's callbacks. Choose of "
                    f"{', '.join(sorted(name[3:] for name in _HOOKS))}."
                )
        self._on = [f"on_{hook}" for hook in chosen]
        for name in self._on:
            # Set on the instance: hooks that were not chosen cost nothing, and those of a subclass stay.
            setattr(self, name, self._called)

    def _called(self, trainer: Any, pl_module: Any = None, *args: Any, **kwargs: Any) -> None:
        self._handle(trainer=trainer, pl_module=pl_module)

    def _handle(self, trainer: Any, pl_module: Any) -> None:
        """Handle one of the chosen hooks."""
        raise NotImplementedError


class TuneReportCheckpointCallback(TuneCallback):
    """Reports logged metrics, and checkpoints of the Trainer, at chosen hooks.

    Sanity checks before the training are passed over.

    Args:
        metrics: Metrics to report: a name, a list of names, or a dict from the reported name to that of
            ``trainer.callback_metrics``. By default all.
        filename: The name of the Trainer's file in a checkpoint.
        save_checkpoints: Whether each report has a checkpoint.
        on: Names of hooks of Lightning's callbacks without "on_", such as "validation_end" or "train_epoch_end".

    Example::

        trainer = lightning.Trainer(callbacks=[TuneReportCheckpointCallback({"loss": "val_loss"}, on="validation_end")])
    """

    def __init__(
        self,
        metrics: str | list[str] | dict[str, str] | None = None,
        filename: str = "checkpoint",
        save_checkpoints: bool = True,
        on: str | list[str] = "validation_end",
    ) -> None:
        super().__init__(on=on)
        name = type(self).__name__
        self._names = as_names(metrics, name)
        self._filename = check_filename(filename, name)
        self._save_checkpoints = as_flag(save_checkpoints, f"{name}(save_checkpoints=...)", ConfigError)
        self._missing_said: set[str] = set()

    def _handle(self, trainer: Any, pl_module: Any) -> None:
        metrics = {} if trainer.sanity_checking else self._choose(trainer.callback_metrics)
        if not metrics:
            return
        checkpoint: Any = nullcontext(None)
        if self._save_checkpoints:
            checkpoint = file_checkpoint(self._filename, trainer.save_checkpoint)
        with checkpoint as saved:
            context.report(metrics, checkpoint=saved)

    def _choose(self, logged: Any) -> dict[str, Any]:
        if self._names is None:
            return {name: plain_scalar(value) for name, value in logged.items()}
        self._say_missing([name for name in self._names.values() if name not in logged], list(logged))
        return {
            reported: plain_scalar(logged[name]) for reported, name in self._names.items() if name in logged
        }

    def _say_missing(self, missing: list[str], logged: list[str]) -> None:
        for name in missing:
            if name not in self._missing_said:
                self._missing_said.add(name)
                logger.warning(
                    "%s(metrics=...) names %r, which is not logged and therefore not reported. Logged are %s.",
                    type(self).__name__,
                    name,
                    ", ".join(map(repr, logged)) or "no metrics",
                )


class TuneReportCallback(TuneReportCheckpointCallback):
    """Report logged metrics at chosen hooks, without checkpoints.

    Args:
        metrics: As for :class:`TuneReportCheckpointCallback`.
        on: As for :class:`TuneReportCheckpointCallback`.
    """

    def __init__(
        self,
        metrics: str | list[str] | dict[str, str] | None = None,
        on: str | list[str] = "validation_end",
    ) -> None:
        super().__init__(metrics=metrics, save_checkpoints=False, on=on)
