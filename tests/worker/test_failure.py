"""How an error is described: the user's own line, the cause apart from its echoes, and always sendable."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from powertrain.errors import ReportError
from powertrain.trace.stacks.frames import OURS
from powertrain.wire.values import ErrorReport
from powertrain.worker import failure
from powertrain.worker.values import normalise


def described(function: Callable[[], Any]) -> ErrorReport:
    try:
        function()
    except BaseException as error:
        return failure.describe(error)
    raise AssertionError("it did not raise")


def test_the_frame_is_the_users_own_though_a_library_raised() -> None:
    def user() -> None:
        json.loads("{")  # the user's line

    report = described(user)
    assert (report.type, report.function) == ("json.decoder.JSONDecodeError", "user")
    assert report.file == __file__
    assert report.source == 'json.loads("{")  # the user\'s line'
    assert report.line == user.__code__.co_firstlineno + 1


def test_the_frame_is_the_users_own_though_we_raised() -> None:
    report = described(lambda: normalise(3.0))
    assert report.type == "powertrain.errors.ReportError"
    assert report.file == __file__
    assert "normalise" in report.source


def test_frames_of_ours_before_the_users_are_left_out_of_the_traceback() -> None:
    def user() -> None:
        raise ValueError("mine")

    from powertrain.engine.local.server import call_entry

    module = type(os)("made_up_for_this_test")
    vars(module)["entry"] = lambda _: user()
    import sys

    sys.modules[module.__name__] = module
    try:
        report = described(lambda: call_entry("made_up_for_this_test:entry", b""))
    finally:
        del sys.modules[module.__name__]
    assert report.function == "user"
    assert report.traceback.rstrip().endswith("ValueError: mine")


def test_a_project_whose_path_begins_like_ours_is_not_taken_for_ours(tmp_path: Path) -> None:
    beside_ours = OURS.rstrip(os.sep) + "_project" + os.sep + "train.py"
    code = compile("def train():\n    raise KeyError('x')\n", beside_ours, "exec")
    names: dict[str, Any] = {}
    exec(code, names)
    assert described(names["train"]).file == beside_ours


def test_the_line_of_a_notebook_cell_is_known_from_its_source() -> None:
    text = textwrap.dedent("""\
        def train():
            value = 1
            return value / 0
    """)
    names: dict[str, Any] = {}
    exec(compile(text, "<cell 7>", "exec"), names)
    assert described(names["train"]).source == ""
    failure.remember_sources({"<cell 7>": text})
    report = described(names["train"])
    assert (report.file, report.line, report.source) == ("<cell 7>", 3, "return value / 0")
    assert "return value / 0" in report.traceback


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_an_error_that_cannot_be_shown_is_still_described() -> None:
    def user() -> None:
        raise Unspeakable

    report = described(user)
    assert report.type.endswith("Unspeakable")
    assert "cannot be shown" in report.message


def test_a_file_name_that_is_no_text_does_not_keep_the_error_from_travelling() -> None:
    report = described(lambda: os.stat(b"/no/such/\xff"))
    assert "/no/such/" in report.message
    raised = described(lambda: os.stat("/no/such/\udcff"))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(raised), type=ErrorReport) == raised


def _dist_error() -> BaseException:
    import torch.distributed

    return torch.distributed.DistBackendError(
        "NCCL error: remote process exited or there was a network error"
    )


class XGBoostError(ValueError):
    """As xgboost names it."""


class LightGBMError(Exception):
    """As lightgbm names it."""


class OpError(Exception):
    """As tensorflow names it."""


class UnavailableError(OpError):
    """As tensorflow names it."""


#: Parts of messages that JAX 0.10 and TensorFlow 2.21 raise on a rank when another one has died.
JAX_GLOO = "[external/gloo/gloo/transport/tcp/pair.cc:547]"
TENSORFLOW_ABORTED = (
    "Collective ops is aborted by: Error reported from /job:worker/task:1: The following tasks are unhealthy"
)


@pytest.mark.parametrize(
    ("make", "echo"),
    [
        (lambda: RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:39821"), True),
        (lambda: ConnectionResetError(104, "Connection reset by peer"), True),
        (lambda: BrokenPipeError(32, "Broken pipe"), True),
        (_dist_error, True),
        (lambda: ValueError("connection closed by peer"), False),
        (lambda: XGBoostError("/w/src/collective/result.cc:83: - Ring Allreduce failed."), True),
        (lambda: XGBoostError("Check failed: label has NaN"), False),
        (lambda: LightGBMError("Socket recv error, Connection reset by peer (code: 104)"), True),
        (lambda: LightGBMError("Label should be in [0, 3)"), False),
        (lambda: ValueError(f"UNKNOWN: Gloo all-reduce failed: {JAX_GLOO} Connection closed by peer"), True),
        (lambda: ValueError(f"UNKNOWN: Gloo all-reduce failed: {JAX_GLOO} Connection reset by peer"), True),
        (lambda: UnavailableError(f"Graph execution error:\n\n{TENSORFLOW_ABORTED}"), True),
        (
            lambda: UnavailableError("Collective ops is aborted by: Socket closed\nAdditional GRPC error"),
            True,
        ),
        (lambda: UnavailableError("Collective ops is aborted by: Input is not invertible."), False),
        (lambda: UnavailableError("Graph execution error:\n\nno such file"), False),
        (lambda: RuntimeError("CUDA out of memory"), False),
        (lambda: RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (lambda: KeyboardInterrupt(), False),
        (lambda: FileNotFoundError(2, "No such file"), False),
        (lambda: ReportError("x"), False),
    ],
)
def test_an_echo_of_another_ranks_end_is_distinguished_from_a_cause(
    make: Callable[[], BaseException], echo: bool
) -> None:
    assert failure.is_echo(make()) is echo


def test_an_error_raised_from_an_echo_is_an_echo_and_one_raised_beside_it_is_not() -> None:
    def wrapped() -> None:
        try:
            raise RuntimeError("Connection closed by peer")
        except RuntimeError as error:
            raise ValueError("training failed") from error

    def beside() -> None:
        try:
            raise RuntimeError("Connection closed by peer")
        except RuntimeError:
            raise ValueError("a fault in the handler") from None

    assert described(wrapped).secondary
    assert not described(beside).secondary
