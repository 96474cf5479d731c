"""References to values that exist, or are being made, and waiting for some of them."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import cloudpickle

from powertrain.calls.failures import caused_by, task_error

#: Notified when any reference of this process is done.
_any_done = threading.Condition()
_R = TypeVar("_R", bound="Reference")


class Reference:
    """A value of this machine that is being made: :func:`powertrain.get` waits for it."""

    def __init__(self, name: str) -> None:
        """``name`` is used in messages."""
        self._name = name
        self._done = threading.Event()
        self._problem = ""
        #: Why ``_problem`` came about, where that is an exception.
        self._cause: BaseException | None = None
        #: ``(True, value)`` or ``(False, Failure)``, pickled.
        self._result: bytes | None = None

    @property
    def is_done(self) -> bool:
        """Return True when there is a value, or never will be one."""
        return self._done.is_set()

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the value and open it.

        Raises:
            TaskError: The call failed. It is of the class of the exception too, where this process has that.
            TimeoutError: It takes longer than ``timeout`` seconds.
        """
        if not self._done.wait(timeout):
            raise TimeoutError(
                f"{self._name} has not ended within {round(timeout or 0.0, 3):g} s{self._why_late()}."
            )
        if self._result is None:
            raise caused_by(f"{self._name} {self._problem}.", self._cause)
        ok, value = pickle.loads(self._result)
        if not ok:
            raise task_error(f"{self._name} failed:\n{value.traceback}", value.data)
        return value

    def wait(self) -> None:
        """Wait until it is done, however long that takes."""
        self._done.wait()

    def set_outcome(self, result: bytes | None, problem: str = "") -> None:
        """Set the outcome: ``(True, value)`` or ``(False, Failure)``, pickled; None and the reason where there is
        none."""
        self._result, self._problem = result, problem
        with _any_done:
            self._done.set()
            _any_done.notify_all()

    def _why_late(self) -> str:
        """Return the reason for its wait before the start, as the end of a sentence."""
        return ""

    def __reduce__(self) -> Any:
        """Return a copy of the value, for a function that is called with the reference inside of another object."""
        return (PutReference.of, (self.result(),))


class PutReference(Reference):
    """A value that was there when the reference was made."""

    @classmethod
    def of(cls, value: Any) -> PutReference:
        """Copy ``value``: later changes by the caller are not seen."""
        reference = cls("put")
        reference.set_outcome(cloudpickle.dumps((True, value)))
        return reference


def wait_for(refs: Sequence[_R], count: int, timeout: float | None) -> tuple[list[_R], list[_R]]:
    """Wait until ``count`` of the references are done, at most ``timeout`` seconds.

    Returns:
        At most ``count`` that are done, and all others, both in the given order.
    """
    until = None if timeout is None else time.monotonic() + timeout
    with _any_done:
        while sum(ref.is_done for ref in refs) < count:
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                break
            _any_done.wait(left)
    ready = [ref for ref in refs if ref.is_done][:count]
    chosen = set(map(id, ready))
    return ready, [ref for ref in refs if id(ref) not in chosen]


def references_in(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether an argument is a reference. References inside of lists and dicts are passed on as they are."""
    return any(isinstance(value, Reference) for value in (*args, *kwargs.values()))


def with_values(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments with the values of references in place of them; waits for those."""
    resolve: Callable[[Any], Any] = lambda value: value.result() if isinstance(value, Reference) else value  # noqa: E731
    return [resolve(value) for value in args], {name: resolve(value) for name, value in kwargs.items()}
