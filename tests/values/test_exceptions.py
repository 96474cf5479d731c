"""What a rank raised, as an exception of the same class in the driver, and never by running code from the data."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from powertrain.errors import ReportError, WorkerFailedError
from powertrain.run.events import WorkerFailure
from powertrain.run.health.failures import reported
from powertrain.terminal.failures import failure_report
from powertrain.values.exceptions import exceptions_of
from powertrain.wire.values import ErrorReport
from powertrain.worker.failure import describe


class OwnError(RuntimeError):
    """Has an ``__init__`` that cannot be called with its ``args``."""

    made = 0

    def __init__(self, code: int, *, hint: str) -> None:
        super().__init__(f"code {code}")
        self.code, self.hint, self.handle = code, hint, open
        OwnError.made += 1


class ObjectError(Exception):
    """Its message needs an attribute that cannot come along."""

    def __init__(self) -> None:
        self.value = object()

    def __str__(self) -> str:
        return f"value {self.value}"


def failure_of(raises: Callable[[], Any], hint: str = "") -> WorkerFailure:
    """The failure of rank 1 that raised, after its way through the wire and the journal."""
    try:
        raises()
    except BaseException as error:
        sent = msgspec.msgpack.decode(msgspec.msgpack.encode(describe(error, hint)), type=ErrorReport)
        kept = msgspec.json.encode(reported(1, sent, "raised"))
        return msgspec.json.decode(kept, type=WorkerFailure)
    raise AssertionError("it did not raise")


def raised_again(raises: Callable[[], Any], **options: Any) -> Any:
    return exceptions_of([failure_of(raises)], **options)[1]


def fail(error: BaseException) -> Callable[[], Any]:
    def raises() -> None:
        raise error

    return raises


@pytest.mark.parametrize(
    "error",
    [
        ValueError("shard 7 is empty"),
        KeyError("x"),
        KeyError(("a", 1)),
        FileNotFoundError(2, "No such file or directory", "data.csv"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        SystemExit(3),
        ReportError("bad"),
        json.JSONDecodeError("bad", "doc", 1),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_a_rank_raised_is_an_exception_of_the_same_class(error: BaseException) -> None:
    again = raised_again(fail(error))
    failure = again.failure
    assert type(again) is type(error)
    assert (str(again), again.args) == (str(error), error.args)
    assert failure.rank == 1
    assert "raised_again" not in failure.traceback


def test_attributes_of_an_exception_come_along_and_its_init_does_not_run() -> None:
    error = OwnError(5, hint="look again")
    made = OwnError.made
    again = raised_again(fail(error))
    assert type(again) is OwnError
    assert (again.code, again.hint, OwnError.made) == (5, "look again", made)
    assert not hasattr(again, "handle")


def test_an_error_that_got_a_hint_is_still_of_its_class() -> None:
    def raises() -> None:
        os.stat("data/train.csv")

    (error,) = exceptions_of([failure_of(raises, "'data/train.csv' is a relative path.")]).values()
    assert type(error) is FileNotFoundError
    assert "is a relative path" in error.failure.message  # type: ignore[attr-defined]


def test_the_fields_of_an_os_error_are_there() -> None:
    again = raised_again(lambda: os.stat("/nowhere/at/all"))
    assert (again.errno, again.filename) == (2, "/nowhere/at/all")


@pytest.mark.parametrize(
    "raises",
    [
        fail(type("LocalError", (Exception,), {"__module__": "not_in_the_driver"})("lost")),
        fail(ValueError(object())),
        fail(ValueError("x" * 100_000)),
        fail(ObjectError()),
    ],
    ids=["unknown class", "object as argument", "too large", "message of an object"],
)
def test_what_cannot_be_rebuilt_has_a_stand_in_of_the_same_name(raises: Any) -> None:
    again = raised_again(raises)
    assert isinstance(again, WorkerFailedError)
    assert type(again).__name__ == again.failure.error_type.rpartition(".")[2]
    copy = pickle.loads(pickle.dumps(again))
    assert (type(copy).__name__, str(copy)) == (type(again).__name__, str(again))


def test_failures_from_a_directory_are_rebuilt_of_pythons_own_classes_only() -> None:
    assert type(raised_again(fail(ValueError("x")), trusted=False)) is ValueError
    stand_in = raised_again(fail(OwnError(1, hint="")), trusted=False)
    assert (type(stand_in).__name__, type(stand_in) is OwnError) == ("OwnError", False)


def test_a_rank_that_did_not_raise_has_no_exception_of_its_own() -> None:
    killed = WorkerFailure(rank=0, kind="signal", summary="rank 0 was killed by SIGKILL")
    assert type(exceptions_of([killed])[0]) is WorkerFailedError


@pytest.mark.parametrize(
    ("module", "name"), [("os", "system"), ("subprocess", "Popen"), ("nowhere", "Error")]
)
def test_a_forged_class_is_not_used(module: str, name: str) -> None:
    failure = failure_of(fail(ValueError("x")))
    assert failure.exception is not None
    forged = msgspec.structs.replace(failure.exception, module=module, name=name)
    again = exceptions_of([msgspec.structs.replace(failure, exception=forged)])[1]
    assert (type(again).__name__, isinstance(again, WorkerFailedError)) == ("ValueError", True)


def chained() -> None:
    try:
        try:
            os.environ["NOT_SET_ANYWHERE"]
        except KeyError as error:
            raise ValueError("the config is incomplete") from error
    except ValueError:
        raise RuntimeError("cannot train")  # noqa: B904  the cause is implicit


def test_the_causes_of_an_error_are_chained_and_in_its_text() -> None:
    again = raised_again(chained)
    assert type(again.__context__) is ValueError
    assert type(again.__context__.__cause__) is KeyError
    text = failure_report([again.failure])
    assert "while handling ValueError: the config is incomplete (" in text
    assert "caused by KeyError: 'NOT_SET_ANYWHERE' (" in text
    assert os.path.basename(__file__) in text


def test_secrets_do_not_come_along() -> None:
    again = raised_again(fail(ValueError("s3://user:hunter2@bucket/run is gone")))
    assert "hunter2" not in str(again)
    assert type(again) is ValueError
