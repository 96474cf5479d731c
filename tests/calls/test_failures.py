"""An exception in a call, as it is raised by ``get``: a TaskError, and of the class that the call raised."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from powertrain.calls.failures import caused_by, failed, task_error
from powertrain.errors import PreemptedError, TaskError


class NotEnough(ValueError):
    """Has an attribute, and arguments that its ``__init__`` does not take."""

    def __init__(self, wanted: int, there: int) -> None:
        super().__init__(f"{wanted} wanted, {there} there")
        self.wanted = wanted


class Final(Exception):
    """No other class can derive from it."""

    def __init_subclass__(cls) -> None:
        raise TypeError("Final is final")


def sent(error: BaseException) -> Any:
    """Give what a call sends that raised ``error``, after its way to another process."""
    try:
        raise error
    except BaseException as caught:
        ok, failure = pickle.loads(failed(caught))
    assert not ok
    return failure


def received(error: BaseException) -> TaskError:
    failure = sent(error)
    return task_error(f"load failed:\n{failure.traceback}", failure.data)


def test_the_class_the_arguments_and_the_attributes_are_kept() -> None:
    error = received(NotEnough(3, 2))
    assert isinstance(error, TaskError)
    assert isinstance(error, NotEnough)
    assert (error.wanted, error.args) == (3, ("3 wanted, 2 there",))
    assert str(error).startswith("load failed:\nTraceback")
    assert "in sent" in str(error)
    assert type(error).__name__ == "TaskError(NotEnough)"
    assert type(error.cause) is type(error.__cause__) is NotEnough


@pytest.mark.parametrize(
    "error",
    [
        KeyError("weights"),
        FileNotFoundError(2, "No such file or directory", "/nowhere"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"),
        StopIteration(3),
        ZeroDivisionError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_of_pythons_own_keep_what_they_are_made_of(error: Exception) -> None:
    got: Any = received(error)
    assert isinstance(got, TaskError)
    assert isinstance(got, type(error))
    assert got.args == error.args
    assert getattr(got, "filename", None) == getattr(error, "filename", None)
    assert "Traceback" in str(got)


def test_an_error_with_an_argument_that_stays_behind_keeps_its_class() -> None:
    error = received(ValueError(lambda: None))
    assert isinstance(error, ValueError)
    assert "function" in error.args[0]


def test_it_can_be_pickled_and_copied() -> None:
    for again in (
        pickle.loads(pickle.dumps(received(NotEnough(3, 2)))),
        copy.copy(received(NotEnough(3, 2))),
    ):
        assert isinstance(again, NotEnough)
        assert str(again).startswith("load failed:\nTraceback")
    plain = pickle.loads(pickle.dumps(received(Final())))
    assert type(plain) is TaskError


def test_an_error_that_came_of_another_calls_error_has_the_class_of_that() -> None:
    error = received(received(NotEnough(3, 2)))
    assert isinstance(error, NotEnough)
    assert str(error).count("load failed:") == 2


@pytest.mark.parametrize(
    "error", [SystemExit(3), KeyboardInterrupt(), PreemptedError("leave"), Final("no"), Exception("any")]
)
def test_what_would_end_the_script_and_what_cannot_be_derived_from_is_a_plain_task_error(
    error: BaseException,
) -> None:
    got = received(error)
    assert type(got) is TaskError
    assert type(error).__name__ in str(got)


def test_a_class_that_is_not_known_here_is_a_plain_task_error() -> None:
    class Local(ValueError):
        pass

    failure = sent(Local("somewhere else"))
    got = task_error(failure.traceback, failure.data)
    assert type(got) is TaskError
    assert got.cause is None
    assert "Local: somewhere else" in str(got)


def test_an_error_of_a_cluster_keeps_its_class_without_being_sent() -> None:
    cause = NotEnough(3, 2)
    error = caused_by("A task failed.", cause)
    assert isinstance(error, NotEnough)
    assert (error.cause, str(error)) == (cause, "A task failed.")
