"""What a metric may be, and how it becomes plain data without stopping the GPU."""

from __future__ import annotations

import math
import sys
from typing import Any

from powertrain.errors import ReportError

#: Kinds that need no look at the value.
_CHEAP = frozenset({float, bool, type(None)})
#: Whole numbers the wire can carry.
_LEAST, _MOST = -(2**63), 2**64 - 1


class Pending:
    """A number on its way from a GPU: readable once ``event`` has happened."""

    __slots__ = ("_event", "_host")

    def __init__(self, tensor: Any) -> None:
        torch = sys.modules["torch"]
        self._host = torch.empty((), dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor.detach().reshape(()), non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def wait(self) -> Any:
        """The number; NaN where the GPU has failed, which the user's own next call will say in its own words."""
        try:
            self._event.synchronize()
            return self._host.item()
        except RuntimeError:
            return math.nan


class PendingMetrics(dict[str, Any]):
    """Metrics that hold at least one :class:`Pending`."""


def normalise(metrics: Any) -> dict[str, Any]:
    """A copy of ``metrics`` as plain data, later changes by the caller excluded. Never waits for a GPU.

    Raises :class:`ReportError`, naming the key, for anything that is not a JSON-like value, a numpy scalar or a
    tensor with one element.
    """
    if type(metrics) is dict:
        for key, value in metrics.items():
            kind = type(value)
            if type(key) is not str or not key.isascii():
                break
            if kind not in _CHEAP and not (kind is int and _LEAST <= value <= _MOST):
                break
        else:
            return metrics.copy()
    if not hasattr(metrics, "items"):
        raise ReportError(
            f"report() takes a dict of metrics, not {type(metrics).__name__}. Write report({{'loss': loss}})."
        )
    found_pending: list[bool] = []
    try:
        plain = {_key(key): _plain(value, str(key), found_pending) for key, value in metrics.items()}
    except RecursionError:
        raise ReportError(
            "The metrics are nested too deeply, or contain themselves. Report numbers, or lists and dicts a few "
            "levels deep."
        ) from None
    return PendingMetrics(plain) if found_pending else plain


def is_pending(metrics: dict[str, Any]) -> bool:
    return type(metrics) is PendingMetrics


def resolve(metrics: dict[str, Any]) -> dict[str, Any]:
    """The same metrics with every pending number waited for."""
    return {key: _resolved(value) for key, value in metrics.items()}


def _key(key: Any) -> str:
    if isinstance(key, str):
        return _text(key)
    if isinstance(key, (int, float, bool)):
        return str(key)
    raise ReportError(f"A metric's name must be a string, not {type(key).__name__} ({key!r}).")


def _plain(value: Any, where: str, found_pending: list[bool]) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, (int, float, str)):  # subclasses too: enums, numpy's float64
        return _base(value, where)
    if isinstance(value, dict):
        return {_key(k): _plain(v, f"{where}/{k}", found_pending) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v, f"{where}[{i}]", found_pending) for i, v in enumerate(value)]
    if _is_tensor(value):
        return _scalar(value, where, found_pending)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.floating):
        return float(value)
    if numpy is not None and isinstance(value, (numpy.generic, numpy.ndarray)) and value.dtype.kind in "biuf":
        return _plain(value.item() if value.size == 1 else value.tolist(), where, found_pending)
    if numpy is not None and isinstance(value, (numpy.str_, numpy.ndarray)) and value.dtype.kind == "U":
        return _plain(value.tolist(), where, found_pending)
    raise ReportError(
        f"The metric {where!r} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be kept. Report "
        "numbers, strings, booleans, None, lists and dicts of them, numpy values or tensors with one element."
    )


def _base(value: int | float | str, where: str) -> int | float | str:
    """The plain value inside; what its own conversions say (an enum's name, say) does not count."""
    if isinstance(value, str):
        return _text(str.__str__(value))
    if isinstance(value, float):
        return float.__float__(value)
    number = int.__int__(value)
    if not _LEAST <= number <= _MOST:
        raise ReportError(
            f"The metric {where!r} is a whole number of {number.bit_length()} bits; at most 64 can be kept. Report it "
            "as a float or as text."
        )
    return number


def _text(text: str) -> str:
    """``text`` as UTF-8 can carry it: half characters, as undecodable file names have, are written out."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _scalar(tensor: Any, where: str, found_pending: list[bool]) -> Any:
    if tensor.numel() != 1:
        raise ReportError(
            f"The metric {where!r} is a tensor of shape {tuple(tensor.shape)}; a metric is one number. Report "
            "tensor.mean(), tensor.tolist() or a single element."
        )
    if tensor.is_cuda:
        found_pending.append(True)
        return Pending(tensor)
    return _plain(tensor.item(), where, found_pending)


def _resolved(value: Any) -> Any:
    if isinstance(value, Pending):
        return value.wait()
    if isinstance(value, dict):
        return {key: _resolved(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_resolved(entry) for entry in value]
    return value
