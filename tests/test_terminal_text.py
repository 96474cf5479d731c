"""Strings that others made, before they reach a terminal: nothing in them is obeyed, and nothing is lost unseen."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.hostile_run import HOSTILE, is_harmless

import powertrain
from powertrain.errors import ConfigError, StorageError, TrainingFailedError
from powertrain.run import events as ev
from powertrain.run.debugging.keyboard import _fit, _split_cut_sequence
from powertrain.terminal.end_card import end_card, end_rows
from powertrain.terminal.failures import failure_report
from powertrain.terminal.lines import Line, LineAssembler
from powertrain.terminal.narrator import Narrator
from powertrain.terminal.view import RunView, live_rows
from powertrain.text.loggers import module_logger
from powertrain.text.printable import (
    clean_output,
    escape_controls,
    escape_json,
    escape_lines,
    indent_continuation,
    reset_colours,
)

_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
_pieces = st.sampled_from(
    [
        "\x1b",
        "[",
        "]",
        "0;t",
        "31m",
        "2J",
        "\x9b",
        "\x9d",
        "\x07",
        "\\",
        "\x1b[0m",
        "\r",
        "\n",
        "\x08",
        "P",
        "m",
        "é",
    ]
)
_texts = st.one_of(st.text(), st.lists(_pieces).map("".join))


@given(_texts)
@example(HOSTILE)
def test_an_escaped_string_is_one_line_without_controls(text: str) -> None:
    shown = escape_controls(text)
    assert is_harmless(shown)
    assert "\n" not in shown
    assert escape_controls(shown) == shown


@given(_texts)
@example(HOSTILE)
def test_escaped_lines_keep_only_their_line_ends(text: str) -> None:
    assert is_harmless(escape_lines(text))
    first, *others = indent_continuation(text).split("\n")
    assert is_harmless(first)
    assert all(line.startswith("    ") for line in others)


@given(_texts)
@example(HOSTILE)
def test_output_of_a_rank_keeps_colours_and_nothing_else_that_a_terminal_obeys(text: str) -> None:
    shown = clean_output(text)
    assert is_harmless(_COLOUR.sub("", shown).replace("\t", ""))
    assert clean_output(shown) == shown


def test_colours_of_a_rank_stay_and_end_with_its_line() -> None:
    assert clean_output("\x1b[1;31mred\x1b[0m\tplain") == "\x1b[1;31mred\x1b[0m\tplain"
    assert reset_colours("\x1b[31mred\x1b[0m") == "\x1b[31mred\x1b[0m"
    assert reset_colours("\x1b[8mhidden") == "\x1b[8mhidden\x1b[0m"


@pytest.mark.parametrize(
    "sequence",
    ["\x1b[2J", "\x1b[1 q", "\x1b[>0c", "\x1b[?1049h", "\x1b]0;title\x07", "\x1b]8;;http://x\x1b\\", "\x1bPq\x1b\\",
     "\x1bc", "\x1b(0", "\x9b2J", "\x9d0;title\x9c", "\x1b]52;c;eA==\x07"],
)  # fmt: skip
def test_a_whole_sequence_goes_without_a_trace(sequence: str) -> None:
    assert clean_output(f"a{sequence}b") == "ab"
    assembler = LineAssembler()
    assert assembler.feed(f"a{sequence}b\n".encode()) == ["ab"]


def test_an_unfinished_title_does_not_swallow_what_comes_after_it() -> None:
    assert "\x1b" not in clean_output("\x1b]0;title")


@given(st.recursive(_texts, lambda inner: st.lists(inner) | st.dictionaries(_texts, inner), max_leaves=5))
@example([HOSTILE, "\U000e0001\u202e\x7f\x9b"])
def test_json_holds_the_same_values_after_its_controls_are_escaped(value: object) -> None:
    text = json.dumps(value, ensure_ascii=False, indent=2)
    assert json.loads(escape_json(text)) == value
    assert is_harmless(escape_json(text))


# --------------------------------------------------------------------------- where they are used


@pytest.mark.parametrize("error", [StorageError, ConfigError, TrainingFailedError])
def test_no_error_of_ours_carries_a_control_character(error: type[Exception]) -> None:
    assert is_harmless(str(error(f"The run {HOSTILE} cannot be read.\nSecond line.")))
    assert str(error("One.\nTwo.")) == "One.\nTwo."
    assert str(error("\x1b[31mred\x1b[0m")) == "red"


@pytest.mark.parametrize("logger", [logging.getLogger("powertrain"), module_logger("powertrain.wire.hub")])
def test_what_the_library_logs_is_safe_for_a_terminal(
    caplog: pytest.LogCaptureFixture, logger: logging.Logger
) -> None:
    with caplog.at_level(logging.WARNING, logger="powertrain"):
        logger.warning("The file %r holds %s", "a", HOSTILE)
        logger.warning("at s3://K:hidden@b/x")
    assert is_harmless(caplog.messages[0])
    assert "s3://K:...@b" in caplog.messages[1]


def test_every_module_has_a_logger_of_its_own_with_the_filter() -> None:
    source = Path(powertrain.__file__).parent
    users = {
        str(path.relative_to(source))
        for path in source.rglob("*.py")
        if "logging.getLogger(" in path.read_text("utf-8")
    }
    # The root of our loggers: its filter, its level.
    assert users == {"text/loggers.py", "errors.py", "driver/running.py"}


def test_no_line_about_a_run_carries_a_control_character_or_looks_like_another() -> None:
    view = RunView(name=HOSTILE, path=HOSTILE, engine=HOSTILE)
    narrator = Narrator(view, verbose=2)
    failure = ev.WorkerFailure(
        rank=0, kind="raised", summary=HOSTILE, error_type=HOSTILE, message=HOSTILE, traceback=HOSTILE, file=HOSTILE,
        function=HOSTILE, source=HOSTILE, host=HOSTILE,
    )  # fmt: skip
    facts = [
        ev.RunStarted(time=1, name=HOSTILE, lease=1, host=HOSTILE, pid=1, version=HOSTILE, engine=HOSTILE),
        ev.SlotsRequested(time=1, attempt=0, count=1),
        ev.SlotsWaited(time=1, attempt=0, granted=0, count=1, reason=HOSTILE),
        ev.AttemptStarted(time=1, attempt=0, world_size=1, first_row=1, checkpoint=HOSTILE, hosts=(HOSTILE,)),
        ev.WorkerStarted(time=1, attempt=0, rank=0, pid=1, host=HOSTILE),
        ev.Committed(time=9, attempt=0, row=1, checkpoint=HOSTILE),
        ev.CheckpointFailed(time=9, attempt=0, row=1, checkpoint=HOSTILE, reason=HOSTILE),
        ev.ValidationEnded(time=9, checkpoint=HOSTILE, row=1, status=HOSTILE, reason=HOSTILE),
        ev.Notified(time=9, attempt=0, ranks=(0,), reason=HOSTILE),
        ev.HangNoticed(
            time=9, attempt=0, row=1, ranks=(0,), waiting=(), seconds=9, message=HOSTILE, stacks=HOSTILE
        ),
        ev.Warned(time=9, message=HOSTILE),
        ev.Failed(time=9, attempt=0, failures=(failure,), decision="retry", reason=HOSTILE),
        ev.Failed(time=9, attempt=0, failures=(failure,), decision="give_up", reason=HOSTILE),
        ev.Ended(time=10, state="failed", reason=HOSTILE),
    ]
    lines: list[Line] = []
    for fact in facts:
        view.on_event(fact)
        lines += narrator.on_event(fact)
    view.on_row(1, {HOSTILE: HOSTILE}, 20.0)
    view.on_data(HOSTILE)
    lines += narrator.on_row(20.0)
    assert len(lines) > 12
    for line in lines:
        first, *others = line.plain().split("\n")
        assert is_harmless(first)
        assert not first.startswith("FORGED")
        assert all(is_harmless(other) and other.startswith(" ") for other in others)
    assert all(is_harmless(text) and "\n" not in text for _, text in end_rows(view)[1:])
    assert is_harmless(end_card(view))
    shown = [text for row in live_rows(view, 30.0, [(0, HOSTILE)]) for text, _ in row]
    assert all(is_harmless(text) and "\n" not in text for text in shown)
    assert is_harmless(failure_report([failure], HOSTILE, logs=HOSTILE))


def test_what_a_debugger_says_keeps_its_colours_and_cannot_overwrite_lines() -> None:
    assert (
        _fit("\x1b[32m> train.py\x1b[0m\r\nbar\rFORGED\x1b[2J\n")
        == "\x1b[32m> train.py\x1b[0m\nbar\nFORGED\n"
    )
    assert _split_cut_sequence("text\x1b[3") == ("text", "\x1b[3")
    assert _split_cut_sequence("text\x1b[31m") == ("text\x1b[31m", "")
