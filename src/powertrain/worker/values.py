"""Conversion of metrics to plain data without stopping the GPU.

A value never ends training: one that cannot be kept is dropped, and the user is warned.
"""

from __future__ import annotations

import contextlib
import enum
import math
import sys
import warnings
from collections.abc import Callable
from typing import Any

from powertrain.errors import ReportError
from powertrain.text.errors import describe_error
from powertrain.values.arguments import has_attribute, shorten
from powertrain.values.kinds import LEAST_INT, MOST_INT, NoPlainForm, encoded, is_small, plain_form

#: Kinds that need no look at the value.
_CHEAP = frozenset({float, bool, type(None)})
#: Elements of a tensor that is kept as a list.
MOST_ELEMENTS = 10_000
#: Metrics that are named in warnings of one rank.
MOST_WARNINGS = 20
#: Called with the path of a value that is dropped, and why, as the end of a sentence.
Drop = Callable[[str, str], None]


class PendingValues:
    """Numbers on their way from a GPU: readable once ``event`` has happened."""

    __slots__ = ("_event", "_host")

    def __init__(self, tensor: Any) -> None:
        torch = sys.modules["torch"]
        shape = () if tensor.numel() == 1 else tensor.shape
        self._host = torch.empty(shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor.detach().reshape(shape), non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def wait(self) -> Any:
        """Return the numbers; NaN where the GPU has failed, which the user's own next call will raise."""
        try:
            self._event.synchronize()
            return self._host.tolist()  # of a tensor without dimensions: the number
        except RuntimeError:
            return math.nan


class PendingMetrics(dict[str, Any]):
    """Metrics that hold at least one :class:`PendingValues`."""


def warn_of_dropped(where: str, why: str) -> None:
    """Warn in the log of this process that a value was dropped."""
    warnings.warn(dropped_message(where, why), stacklevel=2)


def dropped_message(where: str, why: str) -> str:
    """Return the warning about a value that was dropped."""
    return (
        f"The metric {where!r} {why}, so it was left out; the training continues. Report numbers, text, dates, enums, "
        "paths, dataclasses, small tensors, or lists, sets and dicts of them."
    )


class DroppedValues:
    """Warns of values that are dropped, once for each metric. Called as a :data:`Drop`."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._named: set[str] = set()

    def __call__(self, where: str, why: str) -> None:
        if where in self._named or len(self._named) > MOST_WARNINGS:
            return
        self._named.add(where)
        if len(self._named) > MOST_WARNINGS:
            self._warn(
                "More metrics cannot be stored. They are left out as well, without a warning for each."
            )
        else:
            self._warn(dropped_message(where, why))


def normalise(metrics: Any, drop: Drop = warn_of_dropped) -> dict[str, Any]:
    """Return a copy of ``metrics`` as plain data, later changes by the caller excluded. Never waits for a GPU.

    Args:
        metrics: What the user reported.
        drop: Called for each value that cannot be kept.

    Raises:
        ReportError: ``metrics`` is not a mapping, or cannot be read at all.
    """
    return read(metrics, drop)[0]


def read(
    metrics: Any, drop: Drop, *, with_originals: bool = False
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the result of :func:`normalise`, and by name the objects among it, as
    :func:`powertrain.values.kinds.encoded` has them; of the latter none unless ``with_originals``."""
    if type(metrics) is dict:
        for key, value in metrics.items():
            kind = type(value)
            if type(key) is not str or not key.isascii():
                break
            if kind not in _CHEAP and not (kind is int and LEAST_INT <= value <= MOST_INT):
                break
        else:
            return metrics.copy(), {}
    if not has_attribute(metrics, "items"):
        raise ReportError(
            f"report() takes a dict of metrics, not {type(metrics).__name__}. Write report({{'loss': loss}})."
        )
    try:
        entries = list(metrics.items())
        reading = _Reading(drop)
        plain = dict(reading.entries(entries, ""))
    except Exception as error:  # of a mapping of the user's own
        raise ReportError(
            f"The metrics could not be read: {describe_error(error)}. Report a plain dict of numbers."
        ) from error
    originals = reading.originals(entries) if with_originals else {}
    return (PendingMetrics(plain) if reading.found_pending else plain), originals


def is_pending(metrics: dict[str, Any]) -> bool:
    return type(metrics) is PendingMetrics


def resolve(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return the same metrics with every pending number resolved."""
    return {key: _resolved(value) for key, value in metrics.items()}


class _Reading:
    """One report on its way to plain data."""

    def __init__(self, drop: Drop) -> None:
        self._drop = drop
        self.found_pending = False
        #: True once an object was seen whose plain form is of another type.
        self._found_object = False
        #: Names of metrics that hold such objects.
        self._with_objects: set[str] = set()

    def entries(self, items: list[tuple[Any, Any]], where: str) -> list[tuple[str, Any]]:
        """Return the entries of a dict, without those that cannot be kept."""
        kept = []
        for key, value in items:
            path = f"{where}/{_shown(key)}" if where else _shown(key)
            if not where:
                self._found_object = False
            try:
                kept.append((_name(key), self.plain(value, path)))
            except NoPlainForm as error:
                self._drop(path, str(error))
            except RecursionError:
                if where:
                    raise
                self._drop(path, "is nested too deeply, or contains itself")
            except Exception as error:  # of a value of the user's own, or of the GPU
                self._drop(path, f"could not be read ({describe_error(error)})")
            else:
                if not where and self._found_object:
                    self._with_objects.add(kept[-1][0])
        return kept

    def originals(self, items: list[tuple[Any, Any]]) -> dict[str, bytes]:
        """Return by name the metrics that hold objects, encoded; those that cannot be encoded have their plain form
        only."""
        found = {}
        for key, value in items if self._with_objects else ():
            with contextlib.suppress(Exception):
                if (name := _name(key)) in self._with_objects:
                    found[name] = encoded(value, self._plain_leaf)
        return found

    def plain(self, value: Any, where: str) -> Any:
        """Return the plain form; raises :class:`NoPlainForm` where there is none."""
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, (int, float, str)) and not isinstance(value, enum.Enum):
            return self._base(value)  # subclasses too, such as numpy's float64
        if isinstance(value, dict):
            return dict(self.entries(list(value.items()), where))
        if isinstance(value, (list, tuple)):
            self._found_object |= isinstance(value, tuple)
            return [self.plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
        if _is_tensor(value):
            return self._tensor(value, where)
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, (numpy.generic, numpy.ndarray)):
            return self._of_numpy(value, where)
        self._found_object = True
        plain = plain_form(value, lambda part: self.plain(part, where))
        return _text(plain) if type(plain) is str else plain

    def _plain_leaf(self, value: Any) -> Any:
        """Return the plain form of a part of an object that is rebuilt; values still on a GPU cannot be part of one."""
        leaf = _Reading(self._drop)
        plain = leaf.plain(value, "")
        if leaf.found_pending:
            raise NoPlainForm("is on a GPU")
        return plain

    def _base(self, value: int | float | str) -> int | float | str:
        """Return the plain value inside, whatever the conversions of a subclass return."""
        if isinstance(value, str):
            return _text(str.__str__(value))
        if isinstance(value, float):
            return float.__float__(value)
        if is_small(value):
            return int.__int__(value)
        self._found_object = True
        return str(plain_form(value, lambda part: part))

    def _tensor(self, tensor: Any, where: str) -> Any:
        count = tensor.numel()
        if count > MOST_ELEMENTS or (count != 1 and hasattr(tensor, "full_tensor")):
            raise NoPlainForm(
                f"is a tensor of shape {tuple(tensor.shape)}; at most {MOST_ELEMENTS:,} elements of one process can "
                "be kept"
            )
        if tensor.is_cuda and tensor.is_complex():
            raise NoPlainForm("is a tensor of complex numbers on a GPU")
        if tensor.is_cuda:
            self.found_pending = True
            return PendingValues(tensor)
        return self.plain(tensor.item() if count == 1 else tensor.detach().tolist(), where)

    def _of_numpy(self, value: Any, where: str) -> Any:
        numpy = sys.modules["numpy"]
        if isinstance(value, numpy.floating):
            return float(value)
        kind = value.dtype.kind
        if kind in "biuf":
            return self.plain(value.item() if value.size == 1 else value.tolist(), where)
        if kind == "m":
            return (value / numpy.timedelta64(1, "s")).tolist()
        if kind == "M":
            return numpy.datetime_as_string(value).tolist()
        if kind in "UcSO":
            return self.plain(value.tolist(), where)
        raise NoPlainForm(f"is an array of {value.dtype}")


def _name(key: Any) -> str:
    """Return a metric's name; raises :class:`NoPlainForm` for keys that cannot be one."""
    if isinstance(key, str):
        return _text(str.__str__(key))
    if isinstance(key, (int, float)):
        return str(key)
    raise NoPlainForm(f"has a name of type {type(key).__name__}, not a string")


def _shown(key: Any) -> str:
    """Return a key as it is named in warnings."""
    return _text(str.__str__(key)) if isinstance(key, str) else shorten(key)


def _text(text: str) -> str:
    """``text`` as UTF-8 can carry it: half characters, as undecodable file names have, are written out."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _resolved(value: Any) -> Any:
    if isinstance(value, PendingValues):
        return value.wait()
    if isinstance(value, dict):
        return {key: _resolved(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_resolved(entry) for entry in value]
    return value
