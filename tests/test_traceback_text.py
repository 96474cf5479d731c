"""Tracebacks that people read: their own frames stay, ours are folded to one line."""

from __future__ import annotations

import os
import textwrap
import traceback
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import powertrain
from powertrain.errors import WorkerFailedError
from powertrain.run.events import WorkerFailure
from powertrain.terminal.failures import failure_report
from powertrain.text.tracebacks import OURS, TracebackFolder, fold_traceback, is_ours, users_frames

TORCH = "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
USER = "/home/me/train.py"
FILES = {"ours": f"{OURS}worker/main.py", "torch": TORCH, "user": USER}


def text_of(*kinds: str, error: str = "RuntimeError: no") -> str:
    """A traceback of frames of these kinds, the outermost first."""
    lines = ["Traceback (most recent call last):"]
    for number, kind in enumerate(kinds):
        lines += [
            f'  File "{FILES[kind]}", line {number + 1}, in {kind}_{number}',
            f"    {kind}_{number + 1}()",
        ]
        lines += ["    ^^^^^^^^"] if kind != "user" else []
    return "\n".join([*lines, error])


def shape_of(text: str) -> list[str]:
    """What a folded traceback shows: names of functions, and folds."""
    lines = [line.strip() for line in text.splitlines()[1:-1]]
    return [line.rpartition(" in ")[2] for line in lines if line.startswith(("File", "..."))]


@pytest.mark.parametrize(
    ("kinds", "shape"),
    [
        ("ours user", ["... 1 frame of powertrain", "user_1"]),
        (
            "ours user ours torch torch ours",
            ["... 1 frame of powertrain", "user_1", "... 4 frames of powertrain"],
        ),
        ("user torch ours torch", ["user_0", "torch_1", "... 1 frame of powertrain", "torch_3"]),
        ("user ours user torch", ["user_0", "... 1 frame of powertrain", "user_2", "torch_3"]),
        ("user torch", ["user_0", "torch_1"]),
        ("ours torch", ["ours_0", "torch_1"]),
    ],
)
def test_frames_of_ours_become_one_line_and_the_users_stay(kinds: str, shape: list[str]) -> None:
    assert shape_of(fold_traceback(text_of(*kinds.split()))) == shape


def test_the_chain_of_causes_is_folded_block_by_block() -> None:
    cause = text_of("user", "ours", error="KeyError: 'x'")
    chained = f"{cause}\n\nDuring handling of the above exception, another one occurred:\n\n{text_of('ours', 'user')}"
    assert fold_traceback(chained).count("... 1 frame of powertrain") == 2
    assert "KeyError: 'x'\n\nDuring handling" in fold_traceback(chained)


def test_repeated_frames_are_counted() -> None:
    repeated = text_of("user", "ours").replace("    ^^^^^^^^", "    [Previous line repeated 996 more times]")
    assert "  ... 997 frames of powertrain" in fold_traceback(repeated)


def test_a_package_installed_on_another_machine_is_ours_too() -> None:
    assert is_ours("/opt/env/lib/python3.12/site-packages/powertrain/worker/main.py")
    assert not is_ours("/home/me/powertrain/train.py")
    assert not is_ours(OURS.rstrip(os.sep) + "_project/train.py")


def test_lines_that_are_no_traceback_pass_at_once() -> None:
    folder = TracebackFolder()
    assert folder.feed(["epoch 1", "  loss 0.5"]) == ["epoch 1", "  loss 0.5"]
    assert folder.feed(["Traceback (most recent call last):", "  File x"]) == []
    assert folder.finish() == ["Traceback (most recent call last):", "  File x"]


LINES = st.lists(
    st.one_of(
        st.text(alphabet='ab :"/,', max_size=12),
        st.sampled_from(
            [
                line
                for kinds in ("user ours", "ours torch user")
                for line in text_of(*kinds.split()).split("\n")
            ]
        ),
    ),
    max_size=30,
)


@given(LINES, st.integers(1, 5))
def test_the_same_lines_are_shown_however_they_arrive(lines: list[str], size: int) -> None:
    folder = TracebackFolder()
    shown = [
        line for start in range(0, len(lines), size) for line in folder.feed(lines[start : start + size])
    ]
    shown += folder.finish()
    assert "\n".join(shown) == fold_traceback("\n".join(lines)) or not lines


@given(LINES)
def test_only_frames_are_left_out(lines: list[str]) -> None:
    """Whatever is neither in a frame of a library's nor of ours is still there, in its order."""
    shown = fold_traceback("\n".join(lines)).split("\n")
    kept = iter(shown)
    theirs = [line for line in lines if "user_" in line or not line.startswith(" ")]
    assert all(line in kept for line in theirs)


def failure_of(error: BaseException) -> WorkerFailure:
    text = "".join(traceback.format_exception(error))
    frame = users_frames(text)[-1]
    return WorkerFailure(
        rank=0,
        kind="raised",
        summary="rank 0 raised ReportError",
        error_type=type(error).__name__,
        message=str(error),
        traceback=text,
        file=frame.file,
        line=frame.line,
        function=frame.function,
    )


def user_code() -> dict[str, Any]:
    names: dict[str, Any] = {"powertrain": powertrain}
    source = textwrap.dedent("""\
        def inner():
            powertrain.trace.wrap_forward(1)

        def outer():
            inner()
    """)
    exec(compile(source, USER, "exec"), names)
    return names


def test_the_error_of_a_rank_shows_the_users_frames_and_keeps_the_full_traceback() -> None:
    with pytest.raises(Exception) as caught:
        user_code()["outer"]()
    failed = WorkerFailedError(failure_of(caught.value))
    assert "of powertrain" in str(failed)
    assert OURS not in str(failed)
    assert OURS in failed.traceback
    assert f'File "{USER}", line 2, in inner' in str(failed)


def test_the_error_of_fit_names_the_lines_that_called_the_one_that_failed() -> None:
    with pytest.raises(Exception) as caught:
        user_code()["outer"]()
    lines = failure_report([failure_of(caught.value)]).splitlines()
    at = lines.index(f"  at {USER}:2 in inner")
    assert lines[at + 1] == f"  called from {USER}:5 in outer"
