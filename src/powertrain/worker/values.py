"""What a metric may be, and how it becomes plain data without stopping the GPU."""

from __future__ import annotations

import sys
from typing import Any

from powertrain.errors import ReportError

_PLAIN = frozenset({float, int, str, bool, type(None)})


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
        self._event.synchronize()
        return self._host.item()


class PendingMetrics(dict[str, Any]):
    """Metrics that hold at least one :class:`Pending`."""


def normalise(metrics: Any) -> dict[str, Any]:
    """A copy of ``metrics`` as plain data, later changes by the caller excluded. Never waits for a GPU.

    Raises :class:`ReportError`, naming the key, for anything that is not a JSON-like value, a numpy scalar or a
    tensor with one element.
    """
    if type(metrics) is dict:
        for key, value in metrics.items():
            if type(value) not in _PLAIN or type(key) is not str:
                break
        else:
            return metrics.copy()
    if not hasattr(metrics, "items"):
        raise ReportError(
            f"report() takes a dict of metrics, not {type(metrics).__name__}. Write report({{'loss': loss}})."
        )
    found_pending: list[bool] = []
    plain = {_key(key): _plain(value, str(key), found_pending) for key, value in metrics.items()}
    return PendingMetrics(plain) if found_pending else plain


def is_pending(metrics: dict[str, Any]) -> bool:
    return type(metrics) is PendingMetrics


def resolve(metrics: dict[str, Any]) -> dict[str, Any]:
    """The same metrics with every pending number waited for."""
    return {key: _resolved(value) for key, value in metrics.items()}


def _key(key: Any) -> str:
    if isinstance(key, str):
        return key
    if isinstance(key, (int, float, bool)):
        return str(key)
    raise ReportError(f"A metric's name must be a string, not {type(key).__name__} ({key!r}).")


def _plain(value: Any, where: str, found_pending: list[bool]) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, (bool, int, float, str)):  # subclasses: enums, numpy's float64
        return value.item() if hasattr(value, "item") else _base(value)
    if isinstance(value, dict):
        return {_key(k): _plain(v, f"{where}/{k}", found_pending) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v, f"{where}[{i}]", found_pending) for i, v in enumerate(value)]
    if _is_tensor(value):
        return _scalar(value, where, found_pending)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return _plain(value.item(), where, found_pending)
    if numpy is not None and isinstance(value, numpy.ndarray):
        return value.item() if value.size == 1 else value.tolist()
    raise ReportError(
        f"The metric {where!r} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be kept. Report "
        "numbers, strings, booleans, None, lists and dicts of them, numpy values or tensors with one element."
    )


def _base(value: Any) -> Any:
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value


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
    return tensor.item()


def _resolved(value: Any) -> Any:
    if isinstance(value, Pending):
        return value.wait()
    if isinstance(value, dict):
        return {key: _resolved(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_resolved(entry) for entry in value]
    return value
