"""An exception as plain data, and the exception again in another process, without pickle.

Only classes that the other process has loaded are used. Neither their ``__init__`` nor their ``__new__`` runs: an
instance is made by their builtin base class, and gets the arguments and attributes that were sent. An exception that
cannot be rebuilt so is replaced by one of the same class name.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterable
from typing import Any

import msgspec

from powertrain.errors import WorkerFailedError
from powertrain.text.errors import message_of, sendable
from powertrain.values.kinds import NoPlainForm, decoded, encoded, is_small, known_class

#: Bytes of the arguments and attributes of one exception, and exceptions in a chain of causes.
_MOST_BYTES, _LONGEST_CHAIN = 32 * 1024, 8


class ExceptionData(msgspec.Struct, frozen=True, kw_only=True):
    """One exception: its class by name, its ``args`` and attributes, and the exception that it was raised from."""

    module: str
    name: str
    arguments: bytes
    attributes: bytes
    cause: ExceptionData | None = None
    #: True where the cause was being handled, and not named with ``raise ... from``.
    implicit: bool = False


def cause_of(error: BaseException) -> tuple[BaseException | None, bool]:
    """Return the cause of an exception, as its traceback shows it, and whether it is implicit."""
    if error.__cause__ is not None:
        return error.__cause__, False
    return (None if error.__suppress_context__ else error.__context__), True


def data_of(error: BaseException, depth: int = 0) -> ExceptionData | None:
    """Return an exception as data; None where its arguments have no exact plain form, or are large."""
    try:
        kind = type(error)
        arguments, attributes = encoded(_arguments(error), _leaf), _encoded_attributes(error)
        if len(arguments) + len(attributes) > _MOST_BYTES:
            return None
        cause, implicit = cause_of(error)
        return ExceptionData(
            module=kind.__module__,
            name=kind.__qualname__,
            arguments=arguments,
            attributes=attributes,
            cause=data_of(cause, depth + 1) if cause is not None and depth < _LONGEST_CHAIN else None,
            implicit=implicit,
        )
    except Exception:  # of an exception whose attributes are the user's code
        return None


def named_data_of(error: BaseException) -> ExceptionData | None:
    """Return only the class and the text of an exception, for one whose arguments have no plain form."""
    try:
        return ExceptionData(
            module=type(error).__module__,
            name=type(error).__qualname__,
            arguments=encoded((message_of(error),), _leaf),
            attributes=encoded({}, _leaf),
        )
    except Exception:
        return None


def exceptions_of(failures: Iterable[Any], *, trusted: bool = True) -> dict[int, BaseException]:
    """Return the exception of each failed rank by rank, each with its ``failure``.

    Args:
        failures: Values of :class:`~powertrain.run.events.WorkerFailure`.
        trusted: False for failures that others may have written: only builtin classes are rebuilt then.
    """
    return {failure.rank: _exception_of(failure, trusted) for failure in failures}


def _exception_of(failure: Any, trusted: bool) -> BaseException:
    if failure.exception is None:
        return stand_in_for(failure)
    try:
        error = rebuilt(failure.exception, trusted=trusted)
        text = message_of(error)
        # A hint about the cause may follow the message: on a line of its own, or in parentheses.
        if failure.message != text and not failure.message.startswith((f"{text}\n", f"{text} (")):
            return stand_in_for(failure)
        error.failure = failure  # type: ignore[attr-defined]
        return error
    except Exception:
        return stand_in_for(failure)


def rebuilt(data: ExceptionData, *, trusted: bool = True) -> BaseException:
    """Return an exception of the class and with the arguments of the described one.

    Raises:
        NoPlainForm: This process does not have the class, or it cannot be made of these arguments.
    """
    kind: type[BaseException] = known_class(
        data.module, data.name, lambda found: issubclass(found, BaseException)
    )
    if kind is not _base_of(kind) and not trusted:
        raise NoPlainForm(
            f"is a {data.module}.{data.name}, which is only rebuilt in the process that trained"
        )
    error = _made(kind, _base_of(kind), decoded(data.arguments), decoded(data.attributes))
    if data.cause is not None:
        cause = _cause(data.cause, trusted)
        if data.implicit:
            error.__context__ = cause
        else:
            error.__cause__ = cause
    return error


def derived(kind: Any, error: BaseException) -> Any:
    """Return an exception of ``kind``, which derives from the class of ``error``, with its arguments and attributes."""
    return _made(kind, _base_of(type(error)), _arguments(error), vars(error))


def _base_of(kind: type[BaseException]) -> type[BaseException]:
    """Return the builtin class that ``kind`` derives from, or is."""
    base: type[BaseException] = next(
        parent for parent in kind.__mro__ if getattr(builtins, parent.__name__, None) is parent
    )
    return base


def _made(kind: type[BaseException], base: Any, arguments: Any, attributes: dict[str, Any]) -> BaseException:
    error: BaseException = base.__new__(kind, *arguments)
    base.__init__(error, *arguments)
    error.__dict__.update(attributes)
    return error


def _cause(data: ExceptionData, trusted: bool) -> BaseException | None:
    try:
        return rebuilt(data, trusted=trusted)
    except Exception:  # the text of the failure names it
        return None


def stand_in_for(failure: Any) -> WorkerFailedError:
    """Return a :class:`WorkerFailedError` whose class is named as the rank's exception."""
    name = failure.error_type.rpartition(".")[2]
    if not name.isidentifier():
        return WorkerFailedError(failure)
    kind: type[WorkerFailedError] = type(
        name, (WorkerFailedError,), {"__reduce__": lambda self: (stand_in_for, (self.failure,))}
    )
    return kind(failure)


def _arguments(error: BaseException) -> tuple[Any, ...]:
    """Return ``args``, and for an OSError also the names of files, which are not in them."""
    if isinstance(error, OSError) and error.filename is not None and len(error.args) == 2:
        names = [error.filename] if error.filename2 is None else [error.filename, None, error.filename2]
        return (*error.args, *names)
    return error.args


def _encoded_attributes(error: BaseException) -> bytes:
    """Return the attributes that have an exact plain form, without the others."""
    kept = {}
    for name, value in vars(error).items():
        try:
            encoded(value, _leaf)
        except Exception:
            continue
        kept[name] = value
    return encoded(kept, _leaf)


def _leaf(value: Any) -> Any:
    if isinstance(value, str):
        return sendable(str.__str__(value))
    if value is None or type(value) in (bool, float) or (type(value) is int and is_small(value)):
        return value
    raise NoPlainForm(f"is a {type(value).__qualname__}")
