"""Errors of calls: an exception in another process, as one here that is a :class:`TaskError` and of its own class too.

The exception travels as data and is rebuilt by :mod:`powertrain.values.exceptions`: none of it is unpickled, and only
classes that this process has loaded are used. Where that fails a plain :class:`TaskError` has its traceback as text.
"""

from __future__ import annotations

import traceback
from typing import Any, NamedTuple

import cloudpickle

from powertrain.errors import TaskError
from powertrain.text.redaction import fit_to_show
from powertrain.values.exceptions import ExceptionData, data_of, derived, named_data_of, rebuilt


class Failure(NamedTuple):
    """The failure that a call sends in place of a value."""

    traceback: str
    data: ExceptionData | None


def failed(error: BaseException) -> bytes:
    """Return ``(False, Failure)``, pickled; while ``error`` is being handled."""
    # A call that failed because of another call, whose value it requested, has the class of that failure.
    named = error.cause if isinstance(error, TaskError) and error.cause is not None else error
    pickled: bytes = cloudpickle.dumps((False, Failure(traceback.format_exc(), _as_data(named))))
    return pickled


def task_error(message: str, data: ExceptionData | None) -> TaskError:
    """Return the error to raise for a call: of the class that was raised there too, where that can be rebuilt."""
    if data is not None:
        try:
            return caused_by(message, rebuilt(data), data)
        except Exception:  # the message names it
            pass
    return TaskError(message)


def caused_by(message: str, cause: BaseException | None, data: ExceptionData | None = None) -> TaskError:
    """Return an error that is of the class of ``cause``, with its arguments and attributes, and a TaskError.

    Args:
        message: Its text.
        cause: The exception that was raised in the call. One that ends processes, such as ``SystemExit``, or whose
            class cannot be derived from, gives a plain TaskError.
        data: ``cause`` as data, if available already.
    """
    error = TaskError(message)
    # An exception that ends a process there must not end this one.
    can_be_caught = isinstance(cause, Exception) and not isinstance(cause, (SystemExit, KeyboardInterrupt))
    if can_be_caught and not isinstance(error, type(cause)):
        try:
            error = _of_both(message, cause, data or _as_data(cause))
        except Exception:  # a class that allows no others to derive from it
            error = TaskError(message)
    error.cause = cause
    error.__cause__ = cause
    return error


def _as_data(error: Any) -> ExceptionData | None:
    return data_of(error) or named_data_of(error)


def _of_both(message: str, cause: Any, data: ExceptionData | None) -> TaskError:
    kind = type(cause)
    shown = fit_to_show(message)
    members: dict[str, Any] = {
        "__module__": TaskError.__module__,
        "__doc__": f"A call failed with {kind.__name__}.",
        "__str__": lambda _: shown,
        "__repr__": lambda self: f"{type(self).__name__}({shown!r})",
        "__reduce__": lambda _: (task_error, (message, data)),
    }
    both = type(f"TaskError({kind.__name__})", (TaskError, kind), members)
    error: TaskError = derived(both, cause)
    return error
