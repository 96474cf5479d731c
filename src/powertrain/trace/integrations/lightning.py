"""Lightning's Trainer, traced: ``Trainer(callbacks=[TraceCallback()])``, in a worker or elsewhere.

Importing this module imports Lightning, as ``lightning`` or as ``pytorch_lightning``.
"""

from __future__ import annotations

import functools
import sys
from importlib import import_module
from typing import Any

from powertrain.trace import init
from powertrain.trace.integrations.attaching import Attachment
from powertrain.trace.recording import current
from powertrain.trace.recording.phases import INSIDE

__all__ = ["TraceCallback", "TraceMLCallback", "init"]

_NAMES = ("lightning.pytorch", "pytorch_lightning")


def _callback_bases() -> tuple[Any, ...]:
    """Return ``Callback`` of each Lightning that this process has loaded, else of the first that is installed.

    Under its two names Lightning has two, and a Trainer may ask for its own.
    """
    loaded = tuple(module.Callback for name in _NAMES if (module := sys.modules.get(name)) is not None)
    if loaded:
        return loaded
    try:
        return (import_module(_NAMES[0]).Callback,)
    except ImportError as error:
        try:
            return (import_module(_NAMES[1]).Callback,)
        except ImportError:
            raise ImportError(
                f"Neither lightning nor pytorch_lightning can be imported ({error}), and "
                "this callback is for them alone. Install Lightning: pip install lightning."
            ) from error


class _Attached:
    """The hooks of a Trainer.

    A step is the time from one update of the weights to the next, for any number of batches and optimizers that
    takes; batches of a validation lie outside of steps.
    """

    def __init__(self) -> None:
        super().__init__()
        self._attachment = Attachment()
        self._strategy: Any = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self._attachment.begin()
            self._time_training_step(trainer.strategy)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._detach()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._detach()  # Lightning calls this instead of teardown

    def _time_training_step(self, strategy: Any) -> None:
        """Time ``training_step``, which Lightning calls within the optimizer's step."""
        plain = strategy.training_step

        @functools.wraps(plain)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            with current.current().phase(INSIDE):
                return plain(*args, **kwargs)

        self._restore_training_step()
        strategy.training_step = training_step
        self._strategy = strategy

    def _restore_training_step(self) -> None:
        strategy, self._strategy = self._strategy, None
        if strategy is not None:
            vars(strategy).pop("training_step", None)

    def _detach(self) -> None:
        self._restore_training_step()
        self._attachment.end()


#: Pass one to Lightning's Trainer. It has no cost beyond that of tracing.
TraceCallback: Any = type(
    "TraceCallback", (_Attached, *_callback_bases()), {"__module__": __name__, "__doc__": _Attached.__doc__}
)

#: Alias for users of TraceML.
TraceMLCallback = TraceCallback
