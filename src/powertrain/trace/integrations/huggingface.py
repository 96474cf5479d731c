"""Hugging Face's Trainer, traced: ``Trainer(..., callbacks=[TraceCallback()])``, in a worker or elsewhere.

Importing this module imports transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from powertrain.trace import init
from powertrain.trace.integrations.attaching import Attachment

__all__ = ["TraceCallback", "TraceMLTrainerCallback", "init"]


def _callback_base() -> Any:
    try:
        return import_module("transformers").TrainerCallback
    except ImportError as error:
        raise ImportError(
            f"transformers cannot be imported ({error}), and this callback is for it "
            "alone. Install it: pip install transformers."
        ) from error


class _Attached:
    """The hooks of a Trainer.

    A step is the time from one update of the weights to the next; batches of an evaluation lie outside of steps.
    """

    def __init__(self) -> None:
        super().__init__()
        self._attachment = Attachment()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._attachment.begin()  # also ends an attachment that a failed training left open

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._attachment.end()


#: Pass one to Hugging Face's Trainer. It has no cost beyond that of tracing.
TraceCallback: Any = type(
    "TraceCallback", (_Attached, _callback_base()), {"__module__": __name__, "__doc__": _Attached.__doc__}
)

#: Alias for users of TraceML.
TraceMLTrainerCallback = TraceCallback
