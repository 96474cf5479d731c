"""The terminal: what is folded, what is said, and that saying it never hurts a run."""

from __future__ import annotations

import io
import itertools
import os
import pty
import select
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powertrain.run import events as ev
from powertrain.terminal import end_card, failures, screen
from powertrain.terminal import lines as terminal_lines
from powertrain.terminal import text as terminal_text
from powertrain.terminal import view as terminal_view
from powertrain.terminal.lines import Line, LineAssembler
from powertrain.terminal.narrator import Narrator
from powertrain.terminal.screen import Terminal
from powertrain.terminal.view import RunView

# --------------------------------------------------------------------------- facts to fold


def run_started(at: float = 0.01, **more: Any) -> ev.RunStarted:
    return ev.RunStarted(
        time=at, name="digits", lease=1, host="here", pid=7, version="0.1", engine="local", **more
    )


def startup_measured(workers: int = 2, **more: Any) -> ev.StartupMeasured:
    fields: dict[str, Any] = {
        "time": 2.6,
        "attempt": 0,
        "rank": 1,
        "seconds": 2.5,
        "world_size": workers,
        "path": {"slots": 0.1, "process group": 1.9, "data": 0.45, "first step": 0.05},
        "ranks": tuple(range(workers)),
        "phases": {"process group": (1.9,) * workers, "data": tuple(0.45 * rank for rank in range(workers))},
    }
    return ev.StartupMeasured(**{**fields, **more})


def starting_facts(workers: int = 2, attempt: int = 0, first_row: int = 1, at: float = 0.0) -> list[ev.Event]:
    return [
        ev.SlotsRequested(time=at + 0.1, attempt=attempt, count=workers),
        ev.AttemptStarted(time=at + 0.2, attempt=attempt, world_size=workers, first_row=first_row),
        *(
            ev.WorkerStarted(time=at + 0.3, attempt=attempt, rank=rank, pid=100 + rank, host="here")
            for rank in range(workers)
        ),
        ev.TrainingStarted(time=at + 2.2, attempt=attempt),
        startup_measured(workers, attempt=attempt, time=at + 2.6),
    ]


def trained_view(*extra: ev.Event) -> RunView:
    view = RunView(name="digits", path="/runs/digits")
    for event in [run_started(), *starting_facts(), *extra]:
        view.on_event(event)
    return view


def raised(rank: int = 1, **more: Any) -> ev.WorkerFailure:
    fields: dict[str, Any] = {
        "kind": "raised",
        "summary": f"rank {rank} raised ValueError: bad label 7",
        "error_type": "ValueError",
        "message": "bad label 7",
        "file": "train.py",
        "line": 42,
        "function": "train_func",
        "source": "    loss = criterion(out, y)",
        "row": 12,
        "after": 3.4,
    }
    return ev.WorkerFailure(rank=rank, **{**fields, **more})


def echo(rank: int) -> ev.WorkerFailure:
    return ev.WorkerFailure(
        rank=rank,
        kind="raised",
        summary=f"rank {rank} raised RuntimeError",
        error_type="RuntimeError",
        message="Connection closed by peer\nmany\nmore lines",
        secondary=True,
    )


def region_text(view: RunView, now: float, bars: Sequence[tuple[int, str]] = ()) -> str:
    return "\n".join("".join(text for text, _ in row) for row in terminal_view.live_rows(view, now, bars))


def narrated(view: RunView, narrator: Narrator, events: Sequence[ev.Event]) -> list[str]:
    said: list[str] = []
    for event in events:
        view.on_event(event)
        said += [line.plain() for line in narrator.on_event(event)]
    return said


# --------------------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.123456, "0.1235"),
        (12, "12"),
        (99_999, "99999"),
        (123_456, "123.5 k"),
        (12_345.6, "12.35 k"),
        (5_000_000, "5 M"),
        (0.0000123456, "1.235e-05"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (-2.5, "-2.5"),
        (True, "True"),
    ],
)
def test_numbers_have_four_digits(value: float, text: str) -> None:
    assert terminal_text.number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.003, "3 ms"), (0.45, "0.45 s"), (12.34, "12.3 s"), (59.97, "1 min 00 s"), (185, "3 min 05 s"),
     (3600 * 2 + 180, "2 h 03 min"), (86400 * 3 + 3600 * 4, "3 d 4 h"), (-1, "0 ms")],
)  # fmt: skip
def test_durations_read_as_people_say_them(seconds: float, text: str) -> None:
    assert terminal_text.duration(seconds) == text


@pytest.mark.parametrize(
    ("rate", "text"),
    [(1234, "1.23 k rows/s"), (12.345, "12.3 rows/s"), (1 / 185, "3 min 05 s per row"), (0, "")],
)
def test_slow_rates_become_time_per_row(rate: float, text: str) -> None:
    assert terminal_text.pace(rate) == text


def test_ranks_are_listed_and_long_stretches_folded() -> None:
    assert terminal_text.rank_list([1]) == "rank 1"
    assert terminal_text.rank_list([3, 0, 2]) == "ranks 0, 2, 3"
    assert terminal_text.rank_list([*range(6), 9]) == "ranks 0-5, 9"
    assert terminal_text.rank_list(range(0, 200, 2)).endswith("and 90 more")


@given(st.one_of(st.integers(), st.floats(), st.text(), st.lists(st.integers()), st.none(), st.booleans()))
def test_every_metric_value_fits_on_a_line(value: Any) -> None:
    text = terminal_text.metric_value(value)
    assert len(text) <= 40
    assert text.isprintable()


def test_nested_metrics_are_joined_and_surplus_ones_counted() -> None:
    assert terminal_text.metric_pairs({"val": {"loss": 0.5}, "n": [1, 2]}) == [
        ("val/loss", "0.5"),
        ("n", "[2 items]"),
    ]
    many = terminal_text.metric_pairs({f"m{i}": i for i in range(20)})
    assert len(many) == 13
    assert many[-1] == ("", "8 more")


# --------------------------------------------------------------------------- the view


def test_the_view_follows_a_run_from_start_to_end() -> None:
    view = RunView(name="digits", path="/runs/digits")
    states = []
    ended = ev.Ended(time=9.0, state="finished", reason="", rows=3, seconds=9.0)
    for event in [run_started(), *starting_facts(), ended]:
        view.on_event(event)
        states.append(view.state)
    assert list(dict.fromkeys(states)) == ["waiting", "starting", "training", "finished"]
    assert (view.world_size, view.attempts, view.startup_seconds) == (2, 1, 2.0)
    assert view.phases == pytest.approx({"slots": 0.1, "processes": 0.1, "process group": 1.9})


def test_the_rate_is_that_of_the_last_seconds_and_memory_stays_bounded() -> None:
    view = trained_view()
    for row in range(1, 20_001):
        view.on_row(row, {"loss": 1.0}, 10 + row * 0.001)
    assert view.rate() == pytest.approx(1000, rel=0.01)
    for row in range(20_001, 20_101):
        view.on_row(row, {"loss": 1.0}, 30 + (row - 20_000) * 1.0)
    assert view.rate() == pytest.approx(1, rel=0.1)
    assert len(view._samples) <= terminal_view._RATE_SAMPLES


def test_a_new_attempt_starts_rate_rows_and_phases_over() -> None:
    view = trained_view()
    view.on_row(1, {"loss": 1.0}, 3.0)
    view.on_row(7, {"loss": 0.9}, 4.0)
    failed = ev.Failed(time=5.0, attempt=0, failures=(raised(),), decision="retry", reason="one of three")
    view.on_event(failed)
    assert view.state == "recovering"
    for event in starting_facts(workers=1, attempt=1, first_row=5, at=6.0)[:2]:
        view.on_event(event)
    assert (view.row, view.rate(), view.attempts, view.world_size) == (4, 0.0, 2, 1)
    assert view.phases == pytest.approx({"slots": 0.1})
    assert view.metrics == {"loss": 0.9}


def test_rank_zero_that_takes_no_part_keeps_its_last_metrics() -> None:
    view = trained_view()
    view.on_row(1, {"loss": 0.5}, 3.0)
    view.on_row(2, None, 4.0)
    assert (view.row, view.metrics) == (2, {"loss": 0.5})


def test_a_late_rank_is_forgotten_when_its_row_closes() -> None:
    view = trained_view()
    view.on_waiting(5, (1,), 2.0, at=10.0)
    view.on_row(4, {}, 10.5)
    assert view.late is not None
    assert view.late.waited(13.0) == 5.0
    view.on_row(5, {}, 11.0)
    assert view.late is None


ANY_FACTS: list[ev.Event] = [
    run_started(),
    *starting_facts(),
    ev.SlotsWaited(time=1.0, attempt=0, granted=0, count=2, reason="r"),
    ev.Committed(time=1.0, attempt=0, row=1, checkpoint="c"),
    ev.UploadLagged(time=1.0, attempt=0, row=1, seconds=10.0, waiting=2, bytes=5_000_000, reason="503"),
    ev.CheckpointFailed(time=1.0, attempt=0, row=1, checkpoint="c", reason="r"),
    ev.ValidationEnded(time=1.0, checkpoint="c", row=1, status="VALIDATED", metrics={"accuracy": 1.0}),
    ev.Warned(time=1.0, message="m"),
    ev.Informed(time=1.0, message="m"),
    ev.RanksAbsent(time=1.0, attempt=0, row=1, ranks=(1,)),
    ev.Stopping(time=1.0, attempt=0, cause="command", reason="r"),
    ev.Lost(time=1.0, attempt=0, ranks=(), decision="retry", reason="r"),
    ev.Notified(time=1.0, attempt=0, ranks=(1,), reason="r", deadline=31.0),
    ev.HangNoticed(
        time=1.0, attempt=0, row=1, ranks=(1,), waiting=(0,), seconds=5.0, message="m\nn", stacks="s"
    ),
    ev.HangOver(time=1.0, attempt=0, seconds=9.0),
    ev.Resized(time=1.0, attempt=0, world_size=3, reason="r"),
    ev.Failed(time=1.0, attempt=0, failures=(), decision="give_up", reason="r"),
    ev.Ended(time=1.0, state="stopped", reason="r"),
]


def test_the_facts_tried_in_any_order_are_all_there_are() -> None:
    assert {type(fact) for fact in ANY_FACTS} == set(get_args(ev.Event))


@given(st.permutations(ANY_FACTS))
def test_facts_in_any_order_can_be_folded_and_shown(facts: list[ev.Event]) -> None:
    view = RunView(name="digits", path="/runs/digits")
    said = narrated(view, Narrator(view, verbose=2), facts)
    assert "[digits] warning: m" in said
    assert "digits" in region_text(view, 3.0)
    view.on_event(ev.Ended(time=2.0, state="failed", reason="r"))
    assert end_card.end_card(view).startswith("Run digits failed")


# --------------------------------------------------------------------------- the live region


def test_the_region_shows_state_size_row_rate_metrics_and_checkpoint() -> None:
    commit = ev.Committed(time=4.0, attempt=0, row=2, checkpoint="checkpoint_000002", bytes=12_000_000)
    view = trained_view(commit)
    for row in range(1, 11):
        view.on_row(row, {"loss": 0.123456, "accuracy": 0.97}, 3.0 + row)
    text = region_text(view, 13.5)
    for expected in ("digits", "training", "2 workers", "row 10", "1 rows/s", "loss 0.1235", "accuracy 0.97",
                     "checkpoint of row 2 (12 MB)", "started in 2.00 s", "13 s"):  # fmt: skip
        assert expected in text
    assert "ago" not in text
    assert "last 31 s ago" in region_text(view, 44.0)


def test_it_is_shown_how_far_data_have_been_read_until_another_attempt_begins() -> None:
    view = trained_view()
    narrator = Narrator(view)
    view.on_row(1, {}, 3.0)
    view.on_data("train: epoch 3, 45 %")
    assert "data train: epoch 3, 45 %" in region_text(view, 4.0)
    assert narrator.on_row(9.0)[0].text.endswith("row 1, train: epoch 3, 45 %")
    view.on_event(ev.Ended(time=9.0, state="finished", reason="all ranks returned", rows=1, seconds=9.0))
    assert ("data", "train: epoch 3, 45 %") in end_card.end_rows(view)
    view.on_event(ev.AttemptStarted(time=10.0, attempt=1, world_size=2, first_row=2))
    assert view.data == ""


def test_the_region_shows_phases_and_missing_ranks_while_starting() -> None:
    view = RunView(name="digits")
    for event in [run_started(), *starting_facts(workers=4)[:3]]:
        view.on_event(event)
    text = region_text(view, 1.0)
    assert "start-up slots 0.10 s, processes 0.10 s" in text
    assert "waiting for ranks 1, 2, 3 to connect" in text


def test_the_region_names_the_late_rank_and_shows_unfinished_bars() -> None:
    view = trained_view()
    view.on_row(4, {}, 3.0)
    view.on_waiting(5, (1,), 2.0, at=5.0)
    text = region_text(view, 15.0, [(0, " 45%|####    |")])
    assert "waiting for rank 1 at row 5 since 12 s" in text
    assert "[rank 0]  45%|####    |" in text


def test_the_region_says_why_slots_are_waited_for() -> None:
    view = RunView(name="digits")
    view.on_event(run_started())
    view.on_event(ev.SlotsWaited(time=1.0, attempt=0, granted=0, count=2, reason="waiting for 2 GPUs"))
    assert "waiting for 2 GPUs" in region_text(view, 2.0)


# --------------------------------------------------------------------------- plain lines


def test_plain_lines_show_start_and_training() -> None:
    view = RunView(name="digits", path="/runs/digits")
    said = narrated(view, Narrator(view), [run_started(), *starting_facts()])
    assert said == [
        "[digits] run started in /runs/digits (local engine, 2 workers)",
        "[digits] training started on 2 workers after 2.00 s",
        "[digits] first step after 2.5 s: slots 0.10, process group 1.9, data 0.45, first step 0.05 (rank 1 was last)",
    ]


def test_a_start_without_a_first_step_is_shown_only_at_the_highest_verbosity() -> None:
    cut_off = startup_measured(unfinished=(0,), rank=0)
    view = trained_view()
    assert narrated(view, Narrator(view), [cut_off]) == []
    said = narrated(view, Narrator(view, verbose=2), [cut_off])
    assert said[0].startswith("[digits] rank 0 had made no step and no report after 2.5 s: ")


def test_a_start_that_an_old_journal_records_by_phases_is_not_reported() -> None:
    old = ev.decode(
        b'{"fact":"startup_measured","time":1.0,"attempt":0,"rank":1,"phase":"fork","seconds":0.5}'
    )
    view = trained_view()
    assert narrated(view, Narrator(view, verbose=2), [old]) == []


def test_the_start_line_of_an_elastic_run_names_its_sizes_whatever_comes_next() -> None:
    view = RunView(name="digits", path="/runs/digits")
    started = run_started(min_workers=1, max_workers=4)
    (line,) = narrated(view, Narrator(view), [started, ev.SlotsRequested(time=1.0, attempt=0, count=3)])
    assert line == "[digits] run started in /runs/digits (local engine, 1 to 4 workers)"
    first, _ = narrated(view, Narrator(view), [started, ev.Warned(time=1.0, message="a remark")])
    assert first == line


def test_the_notice_of_a_restart_names_the_directory_of_the_logs() -> None:
    view = trained_view()
    failed = ev.Failed(time=5.0, attempt=0, failures=(raised(1),), decision="retry", reason="1 of 2")
    assert narrated(view, Narrator(view), [failed])[-1].endswith("is kept in /runs/digits/logs")


def test_progress_comes_at_once_and_then_every_few_seconds_with_commits_folded_in() -> None:
    view = trained_view()
    narrator = Narrator(view)
    said: list[str] = []
    for tenth in range(1, 121):
        view.on_row(tenth, {"loss": 1 / tenth}, 3 + tenth / 10)
        said += [line.plain() for line in narrator.on_row(3 + tenth / 10)]
        if tenth == 3:
            event = ev.Committed(time=3.3, attempt=0, row=3, checkpoint="checkpoint_000003")
            said += narrated(view, narrator, [event])
    assert len(said) == 3
    assert said[0] == "[digits] row 1, loss 1"
    assert "10 rows/s" in said[1]
    assert said[1].endswith("checkpoint of row 3 committed")
    assert "checkpoint" not in said[2]


def test_commits_and_losses_of_checkpoints_are_shown() -> None:
    view = trained_view()
    said = narrated(
        view,
        Narrator(view),
        [
            ev.UploadLagged(
                time=1.0, attempt=0, row=3, seconds=12.0, waiting=2, bytes=5_000_000, reason="503"
            ),
            ev.CheckpointFailed(time=1.0, attempt=0, row=3, checkpoint="c", reason="the disk is full"),
            ev.ValidationEnded(
                time=1.0, checkpoint="c", row=1, status="VALIDATED", metrics={"accuracy": 0.5}
            ),
            ev.ValidationEnded(
                time=1.0, checkpoint="c", row=1, status="VALIDATION_FAILED", reason="KeyError"
            ),
        ],
    )
    assert said == [
        "[digits] 2 checkpoints (5 MB) not in storage yet, the oldest (row 3) for 12.0 s: 503",
        "[digits] the checkpoint of row 3 was NOT saved: the disk is full",
        "[digits] c validated in 0 ms: accuracy 0.5",
        "[digits] the validation of c failed: KeyError",
    ]


def test_a_rare_commit_has_its_own_line() -> None:
    view = trained_view()
    narrator = Narrator(view)
    event = ev.Committed(time=90.0, attempt=0, row=3, checkpoint="checkpoint_000003", bytes=2048)
    assert narrated(view, narrator, [event]) == [
        "[digits] checkpoint of row 3 (2.05 kB) committed: checkpoint_000003"
    ]


def test_waiting_for_slots_is_said_once_per_reason() -> None:
    view = RunView(name="digits", path="/runs/digits")
    waits = [
        ev.SlotsWaited(time=float(i), attempt=0, granted=0, count=2, reason=reason)
        for i, reason in enumerate(["waiting for 2 GPUs"] * 3 + ["waiting for 1 GPU"])
    ]
    said = narrated(view, Narrator(view), [run_started(), *waits])
    assert [text for text in said if "slots" in text] == [
        "[digits] 0 of 2 slots are available, waiting for 2 GPUs",
        "[digits] 0 of 2 slots are available, waiting for 1 GPU",
    ]


def test_a_late_rank_is_named_after_five_seconds_and_when_the_wait_doubled() -> None:
    view = trained_view()
    narrator = Narrator(view)
    said: list[str] = []
    for second in range(1, 25):
        view.on_waiting(5, (1,), float(second), at=float(second))
        said += [line.plain() for line in narrator.on_waiting(float(second))]
    assert said == [
        "[digits] waiting for rank 1 at row 5 since 5 s",
        "[digits] waiting for rank 1 at row 5 since 10 s",
        "[digits] waiting for rank 1 at row 5 since 20 s",
    ]


def test_a_failure_that_is_retried_is_reported_whole_and_a_last_one_in_a_line() -> None:
    view = trained_view()
    narrator = Narrator(view)
    retry = ev.Failed(
        time=5.0, attempt=0, failures=(raised(), echo(0)), decision="retry", reason="failure 1 of 3"
    )
    said = "\n".join(narrated(view, narrator, [retry]))
    assert "attempt 0 failed; the run continues" in said
    assert "train.py:42 in train_func" in said
    assert "Failure 1 of 3." in said
    final = ev.Failed(
        time=5.0, attempt=0, failures=(raised(), echo(0)), decision="give_up", reason="no retries left"
    )
    assert narrated(view, narrator, [final]) == [
        "[digits] attempt 0 failed: rank 1 raised ValueError: bad label 7; no retries left"
    ]


def test_quiet_keeps_warnings_and_failures_only() -> None:
    view = RunView(name="digits", path="/runs/digits")
    narrator = Narrator(view, verbose=0)
    warned = ev.Warned(time=3.0, message="storage is slow", rank=1)
    said = narrated(view, narrator, [run_started(), *starting_facts(), warned])
    view.on_row(1, {}, 4.0)
    assert narrator.on_row(4.0) == []
    assert said == ["[digits] warning (rank 1): storage is slow"]


def test_verbose_names_each_process_and_phase() -> None:
    view = RunView(name="digits", path="/runs/digits")
    said = narrated(view, Narrator(view, verbose=2), [run_started(), *starting_facts()])
    assert "[digits] rank 1 is up: process 101 on here" in said
    assert "  data             0.00    0.45" in said


# --------------------------------------------------------------------------- the error report


def test_the_report_names_first_rank_frame_source_message_and_folds_echoes() -> None:
    report = failures.failure_report(
        [echo(0), raised(1), echo(2), echo(3)], "no retries are left", logs="/runs/digits"
    )
    assert report.splitlines() == [
        "Rank 1 raised ValueError: bad label 7",
        "  at train.py:42 in train_func",
        "      loss = criterion(out, y)",
        "  after row 12, 3.40 s into the attempt",
        "3 other ranks ended after it: ranks 0, 2, 3 "
        "(RuntimeError: Connection closed by peer many more lines)",
        "No retries are left.",
        "The output of every rank is kept in /runs/digits",
    ]


def test_the_report_of_a_killed_rank_is_its_summary() -> None:
    killed = ev.WorkerFailure(
        rank=1, kind="signal", summary="rank 1 was killed by SIGKILL", host="here", pid=9
    )
    assert failures.failure_report([killed]).splitlines() == [
        "Rank 1 was killed by SIGKILL.",
        "  before its first report, process 9 on here",
    ]


def test_equal_failures_are_folded_and_different_ones_named() -> None:
    other = raised(3, error_type="KeyError", message="'x'")
    report = failures.failure_report([raised(0), raised(1), raised(2), other])
    assert "The same happened on ranks 1, 2." in report
    assert "Also: rank 3 raised KeyError: 'x'" in report


def test_a_failure_without_a_users_frame_shows_the_end_of_its_traceback() -> None:
    failure = raised(file="", traceback="\n".join(f"frame {i}" for i in range(40)))
    report = failures.failure_report([failure])
    assert "frame 39" in report
    assert "frame 5\n" not in report


def test_only_echoes_still_name_the_first() -> None:
    assert failures.failure_report([echo(2), echo(0)]).startswith(
        "Rank 2 raised RuntimeError: Connection closed"
    )


def test_a_long_message_is_clipped_and_a_width_wraps_words() -> None:
    failure = raised(message="\n".join(f"part {i} of it" for i in range(60)))
    report = failures.failure_report([failure], "word " * 60, width=60)
    assert "39 more lines" in report
    assert all(len(line) <= 60 for line in report.splitlines())


def test_no_failures_still_make_a_sentence() -> None:
    assert failures.failure_report([], "the storage is gone") == (
        "The run failed before any worker did.\nThe storage is gone."
    )


# --------------------------------------------------------------------------- the end card


def test_the_end_card_shows_all_that_matters() -> None:
    commit = ev.Committed(time=8.0, attempt=0, row=30, checkpoint="checkpoint_000030")
    view = trained_view(commit)
    view.on_row(30, {"loss": 0.25}, 9.0)
    view.on_event(ev.Ended(time=200.0, state="finished", reason="", rows=30, seconds=185.0))
    assert end_card.end_card(view).splitlines() == [
        "Run digits finished",
        "  rows        30",
        "  time        3 min 05 s",
        "  metrics     loss 0.25",
        "  checkpoint  checkpoint_000030 (row 30)",
        "  path        /runs/digits",
    ]


def test_a_run_that_has_not_ended_has_no_card() -> None:
    assert end_card.end_card(trained_view()) == ""


# --------------------------------------------------------------------------- the ranks' output


def assembled(chunks: Sequence[bytes]) -> list[str]:
    assembler = LineAssembler()
    return [line for chunk in chunks for line in assembler.feed(chunk)] + assembler.finish()


def cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


output_bytes = st.lists(
    st.one_of(
        st.binary(max_size=6),
        st.sampled_from([b"\n", b"\r", b"\r\n", "é€😀".encode(), b"\x1b[31mred", b"\x1b[A"]),
    )
).map(b"".join)


@given(output_bytes, st.lists(st.integers(0, 10_000), max_size=12))
def test_any_chunking_gives_the_same_lines(data: bytes, places: list[int]) -> None:
    assert assembled(cut(data, places)) == assembled([data])


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cf", "Zl", "Zp")))))
def test_plain_lines_come_through_as_written(lines: list[str]) -> None:
    assert assembled(["".join(line + "\n" for line in lines).encode()]) == lines


def test_a_progress_bar_leaves_its_last_state() -> None:
    assert assembled([b"\r 10%\r 20", b"%\r 100%\ndone\r\n"]) == [" 100%", "done"]


def test_an_unfinished_bar_can_be_seen() -> None:
    assembler = LineAssembler()
    assembler.feed(b"\r 10%|# ")
    assert assembler.is_bar
    assert assembler.unfinished() == " 10%|# "


def test_undecodable_bytes_are_replaced_and_cursor_moves_dropped() -> None:
    assert assembled([b"a\xffb\n", b"\x1b[31mred\x1b[0m\x1b[A\x1b[K\n"]) == ["a\ufffdb", "\x1b[31mred\x1b[0m"]


def test_an_endless_line_is_shown_in_pieces_however_it_is_cut() -> None:
    data = "é".encode() * terminal_lines._LINE_LIMIT
    whole = assembled([data])
    assert whole == assembled([data[i : i + 1001] for i in range(0, len(data), 1001)])
    assert "".join(whole) == "é" * terminal_lines._LINE_LIMIT
    assert all(len(line.encode()) <= terminal_lines._LINE_LIMIT for line in whole)


# --------------------------------------------------------------------------- the terminal, plain


def plain_terminal(**options: Any) -> tuple[Terminal, io.StringIO]:
    stream = io.StringIO()
    return Terminal("digits", "/runs/digits", stream=stream, **options), stream


def test_output_is_prefixed_and_an_unfinished_line_comes_at_close() -> None:
    terminal, stream = plain_terminal()
    terminal.output(1, b"hel")
    terminal.output(0, b"zero\n")
    terminal.output(1, b"lo\nrest")
    assert stream.getvalue() == "[rank 0] zero\n[rank 1] hello\n"
    terminal.close()
    assert stream.getvalue().endswith("[rank 1] rest\n")


def test_the_unfinished_line_of_a_dead_process_does_not_run_into_the_next_attempt() -> None:
    terminal, stream = plain_terminal()
    terminal.output(0, b"cut off")
    terminal.event(ev.AttemptStarted(time=1.0, attempt=1, world_size=1, first_row=1))
    terminal.output(0, b"fresh\n")
    assert stream.getvalue() == "[rank 0] cut off\n[rank 0] fresh\n"


def test_equal_lines_are_all_printed() -> None:
    terminal, stream = plain_terminal()
    for _ in range(5):
        terminal.output(0, b"again\n")
    assert stream.getvalue() == "[rank 0] again\n" * 5


def test_log_to_file_keeps_the_ranks_output_off_the_terminal() -> None:
    terminal, stream = plain_terminal(log_to_file=True)
    terminal.output(0, b"hidden\n")
    terminal.event(ev.Warned(time=1.0, message="shown"))
    terminal.close()
    assert stream.getvalue() == "[digits] warning: shown\n"


def test_lines_are_kept_while_other_code_prints_to_the_terminal() -> None:
    terminal, stream = plain_terminal()
    terminal.hold()
    terminal.output(0, b"meanwhile\n")
    assert stream.getvalue() == ""
    terminal.release()
    assert stream.getvalue() == "[rank 0] meanwhile\n"


def test_a_whole_run_in_plain_mode() -> None:
    terminal, stream = plain_terminal()
    for event in [run_started(), *starting_facts()]:
        terminal.event(event)
    terminal.row(1, [{"loss": 0.5}, {"loss": 0.7}], 3.0)
    terminal.event(ev.Ended(time=4.0, state="finished", reason="", rows=1, seconds=4.0))
    terminal.close(metrics={"loss": 0.25})
    terminal.close()
    terminal.output(0, b"too late\n")
    said = stream.getvalue().splitlines()
    assert said[3] == "[digits] row 1, loss 0.5"
    assert said[4] == "Run digits finished"
    assert "  metrics     loss 0.25" in said
    assert "too late" not in stream.getvalue()


class Unprintable:
    def __str__(self) -> str:
        raise RuntimeError("no text for this")


def test_what_goes_wrong_inside_is_noted_once_and_never_raised() -> None:
    terminal, stream = plain_terminal()
    for row in range(1, 4):
        terminal.row(row, [{"odd": Unprintable()}], row * 10.0)
    terminal.output(0, b"still here\n")
    assert stream.getvalue().count("RuntimeError: no text for this") == 1
    assert "the run continues" in stream.getvalue()
    assert "[rank 0] still here" in stream.getvalue()


@pytest.mark.parametrize(
    "error", [BrokenPipeError(), OSError("gone"), ValueError("closed"), RuntimeError("x")]
)
def test_a_broken_stream_is_left_alone(error: Exception) -> None:
    class Broken(io.StringIO):
        def write(self, _: str) -> int:
            raise error

    terminal = Terminal("digits", "/runs/digits", stream=Broken())
    terminal.output(0, b"x\n")
    terminal.event(run_started())
    terminal.close()


def test_a_stream_that_cannot_say_a_character_gets_a_question_mark() -> None:
    raw = io.BytesIO()
    terminal = Terminal("digits", "/runs/digits", stream=io.TextIOWrapper(raw, encoding="ascii"))
    terminal.output(0, "é\n".encode())
    assert raw.getvalue() == b"[rank 0] ?\n"


def test_no_stream_at_all_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    terminal = Terminal("digits", "/runs/digits")
    terminal.output(0, b"x\n")
    terminal.close()


def test_a_pipe_that_is_not_read_delays_lines_but_never_the_caller() -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        terminal = Terminal("digits", "/runs/digits", stream=stream)
        sent = [f"line {i} ".ljust(100, "x") for i in range(3000)]
        caller = threading.Thread(
            target=lambda: [terminal.output(0, line.encode() + b"\n") for line in sent], daemon=True
        )
        caller.start()
        caller.join(20)
        assert not caller.is_alive(), "output() blocked on a full pipe"
        received: list[str] = []
        reading = threading.Thread(target=lambda: received.extend(os.fdopen(reader)), daemon=True)
        reading.start()
        terminal.close()
    reading.join(20)
    assert received == [f"[rank 0] {line}\n" for line in sent]


def test_lines_beyond_the_limit_are_counted_not_lost_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "_PENDING_LIMIT", 1000)
    monkeypatch.setattr(screen, "_can_write", lambda _: False)
    terminal, stream = plain_terminal()
    for i in range(100):
        terminal.output(0, f"line {i:03d}\n".encode())
    terminal.close()
    said = stream.getvalue().splitlines()
    note = next(line for line in said if "left out" in line)
    shown = [line for line in said if line.startswith("[rank 0]")]
    assert f"[{100 - len(shown)} lines left out" in note
    assert shown[-1] == "[rank 0] line 099"


def test_many_threads_lose_no_line() -> None:
    terminal, stream = plain_terminal()

    def speak(rank: int) -> None:
        for i in range(300):
            terminal.output(rank, f"{i}\n".encode())
            terminal.row(i, [{"loss": float(i)}], float(i))
            terminal.event(ev.Warned(time=0.0, message="w", rank=rank))
            terminal.waiting(i, (rank,), 0.1)

    speakers = [threading.Thread(target=speak, args=(rank,)) for rank in range(4)]
    for speaker in speakers:
        speaker.start()
    for speaker in speakers:
        speaker.join(30)
    terminal.close()
    said = stream.getvalue().splitlines()
    for rank in range(4):
        prefix = f"[rank {rank}] "
        assert [line.removeprefix(prefix) for line in said if line.startswith(prefix)] == [
            str(i) for i in range(300)
        ]
    assert sum("warning" in line for line in said) == 1200
    assert not any("terminal output failed" in line for line in said)


# --------------------------------------------------------------------------- live or plain


class FakeTty(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("environ", "live"),
    [
        ({"TERM": "xterm"}, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, True),
        ({"TERM": "xterm", "CI": "false"}, True),
        ({"TERM": "dumb"}, False),
        ({}, False),
        ({"TERM": "xterm", "CI": "true"}, False),
    ],
)
def test_the_environment_decides_on_a_live_view(environ: dict[str, str], live: bool) -> None:
    assert screen.wants_live(FakeTty(), environ) is live


def test_pipes_notebooks_and_no_stream_are_plain() -> None:
    notebook = type("OutStream", (FakeTty,), {"__module__": "ipykernel.iostream"})
    for stream in (io.StringIO(), notebook(), None):
        assert not screen.wants_live(stream, {"TERM": "xterm"})


def test_a_live_view_that_cannot_be_drawn_falls_back_to_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Terminal) -> None:
        raise RuntimeError("no picture")

    monkeypatch.setattr(Terminal, "_run_live", broken)
    stream = FakeTty()
    terminal = Terminal("digits", "/runs/digits", stream=stream, live=True)
    thread = terminal._thread
    assert thread is not None
    assert thread.name == "powertrain-terminal"
    thread.join(10)
    terminal.output(0, b"hello\n")
    terminal.close()
    assert "RuntimeError: no picture" in stream.getvalue()
    assert "[rank 0] hello\n" in stream.getvalue()
    assert screen._live_owner is None


def test_the_region_is_current_below_lines_that_keep_coming() -> None:
    from rich.console import Console
    from rich.live import Live

    terminal, _ = plain_terminal()
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    with Live(console=console, auto_refresh=False) as live:
        for row in (41, 42):
            terminal.view.on_row(row, {}, float(row))
            terminal._queue([Line("busy", rank=0)])
            terminal._refresh(console, live)
        drawn = console.file.getvalue()  # type: ignore[attr-defined]
    assert drawn.count("[rank 0] busy") == 2
    assert drawn.rindex("row 42") > drawn.rindex("[rank 0] busy")


def test_two_live_runs_share_one_region_and_lose_nothing() -> None:
    stream = FakeTty()
    first = Terminal("first", "/runs/first", stream=stream, live=True)
    second = Terminal("second", "/runs/second", stream=stream, live=True)
    try:
        assert second._thread is None
        second.event(ev.Warned(time=0.0, message="from the second"))
    finally:
        first.close()
    second.event(ev.Warned(time=0.0, message="after the first"))
    second.close()
    assert "[second] warning: from the second" in stream.getvalue()
    assert "[second] warning: after the first" in stream.getvalue()
    assert screen._live_owner is None


def test_the_live_region_is_gone_while_other_code_prints_to_the_terminal() -> None:
    stream = FakeTty()
    terminal = Terminal("digits", "/runs/digits", stream=stream, live=True)
    try:
        terminal.event(ev.Warned(time=0.0, message="before"))
        terminal.hold()
        before = stream.getvalue()
        assert "[digits] warning: before" in before
        terminal.event(ev.Warned(time=0.0, message="meanwhile"))
        time.sleep(3 * screen._REFRESH_INTERVAL_S)  # it would have been drawn again by now
        assert stream.getvalue() == before
        terminal.release()
    finally:
        terminal.close()
    assert "[digits] warning: meanwhile" in stream.getvalue()


# --------------------------------------------------------------------------- real streams

SCRIPT = textwrap.dedent(
    """
    import sys, time
    from powertrain.run import events as ev
    from powertrain.terminal.screen import Terminal

    terminal = Terminal("digits", "/runs/digits")
    now = time.time()
    terminal.event(
        ev.RunStarted(time=now, name="digits", lease=1, host="h", pid=1, version="0", engine="local")
    )
    terminal.event(ev.SlotsRequested(time=now, attempt=0, count=2))
    terminal.event(ev.AttemptStarted(time=now, attempt=0, world_size=2, first_row=1))
    terminal.event(ev.TrainingStarted(time=now, attempt=0))
    terminal.output(1, b"hello from a rank\\n")
    terminal.row(1, [{"loss": 0.123456}, None], now)
    sys.stdin.readline()
    print("a print of the driver")
    terminal.event(ev.Ended(time=now, state="finished", reason="", rows=1, seconds=2.0))
    terminal.close()
    print("rich" if "rich" in sys.modules else "no " + "rich")
    """
)


def test_plain_mode_under_a_pipe_never_imports_rich() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], input="\n", capture_output=True, text=True, timeout=30, check=True
    )
    said = done.stdout.splitlines()
    assert said[-1] == "no rich"
    assert "\x1b" not in done.stdout
    assert "[rank 1] hello from a rank" in said
    assert "[digits] row 1, loss 0.1235" in said


def read_until(descriptor: int, word: bytes, seen: bytes = b"") -> bytes:
    """What comes from a pseudo-terminal until ``word`` is in it, or it is closed."""
    deadline = time.monotonic() + 20
    while word not in seen:
        assert time.monotonic() < deadline, f"{word!r} did not appear in {seen!r}"
        if select.select([descriptor], [], [], 0.5)[0]:
            try:
                data = os.read(descriptor, 65536)
            except OSError:  # Linux reports the closed other side as an error
                break
            if not data:
                break
            seen += data
    return seen


@pytest.fixture
def on_a_terminal() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    ours, theirs = pty.openpty()
    environ = {k: v for k, v in os.environ.items() if k not in ("CI", "NO_COLOR")}
    environ |= {"TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdin=theirs, stdout=theirs, stderr=theirs, env=environ
    )
    os.close(theirs)
    try:
        yield process, ours
    finally:
        process.kill()
        process.wait(10)
        os.close(ours)


def test_the_live_view_appears_on_a_terminal_and_leaves_it_clean(
    on_a_terminal: tuple[subprocess.Popen[bytes], int],
) -> None:
    process, ours = on_a_terminal
    seen = read_until(ours, b"0.1235")
    assert b"training" in seen
    assert b"hello from a rank" in seen
    os.write(ours, b"\n")
    seen = read_until(ours, b"\nrich", seen)
    assert process.wait(20) == 0
    text = seen.decode()
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor stayed hidden"
    assert "a print of the driver" in text
    assert "finished" in text
    assert "/runs/digits" in text
    after_card = text[text.rindex("finished") :]
    assert "\x1b[1A" not in after_card, "the region was drawn again after the end card"


def test_a_hang_is_reported_in_its_own_lines_with_the_place_of_all_stacks() -> None:
    view = RunView(name="digits", path="/runs/digits")
    noticed = ev.HangNoticed(
        time=1.0, attempt=0, row=7, ranks=(1,), waiting=(0,), seconds=5.0, message="No step for 5 s.\nRank 1 sleeps.",
        stacks="stacks/attempt-0-hang-1.txt",
    )  # fmt: skip
    over = ev.HangOver(time=3.0, attempt=0, seconds=12.0, ranks=(1,))
    lines = narrated(view, Narrator(view, verbose=0), [noticed, over])
    assert lines == [
        "[digits] No step for 5 s.",
        "  Rank 1 sleeps.",
        "  All stacks: /runs/digits/stacks/attempt-0-hang-1.txt",
        "[digits] progress resumed after 12.0 s",
    ]


def test_a_notice_says_how_long_is_left_and_the_end_how_to_go_on() -> None:
    view = RunView(name="digits", path="/runs/digits")
    facts: list[ev.Event] = [
        ev.Notified(
            time=1.0, attempt=0, ranks=(1,), reason="rank 1 was asked to end by SIGTERM", deadline=31.0
        ),
        ev.Ended(time=2.0, state="preempted", reason="rank 1 was asked to end by SIGTERM"),
    ]
    said = narrated(view, Narrator(view), facts)
    assert "[digits] notice: rank 1 was asked to end by SIGTERM (30.0 s left)" in said
    assert ("to resume", "start the same script again") in end_card.end_rows(view)
