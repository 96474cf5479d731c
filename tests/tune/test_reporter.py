"""The progress of a sweep as text: what matters comes first, and nothing is wider or longer than it may be."""

from __future__ import annotations

import io
import sys
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from powertrain.errors import ConfigError
from powertrain.tune import reporter as r
from powertrain.tune import trial as states
from powertrain.tune.trial import Trial


def make_trial(number: int, status: str = states.RUNNING, seconds: float = 0.0, **metrics: Any) -> Trial:
    """A trial that has made one report of these metrics."""
    config = {"lr": 0.1 * (number + 1), "model": {"depth": number}}
    trial = Trial(f"7f3a2_{number:05d}", number, f"train_7f3a2_{number:05d}", config, status=status)
    trial.evaluated_params = {"lr": config["lr"], "model/depth": number}
    trial.starts, trial.seconds = int(status != states.PENDING), seconds
    if metrics:
        trial.add_report({"training_iteration": 3, "time_total_s": seconds, **metrics})
    return trial


def ended(number: int, seconds: float = 60.0, **metrics: Any) -> Trial:
    return make_trial(number, states.TERMINATED, seconds, **metrics)


def render(*shown: Any, width: int = 200) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    for one in shown:
        console.print(one)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text.splitlines()


def rows_of(table: Any) -> list[list[str]]:
    """The cells of a table, without those of its header."""
    cells = [[str(cell) for cell in column._cells] for column in table.columns]
    return [list(row) for row in zip(*cells, strict=True)]


def titles_of(table: Any) -> list[str]:
    return [str(column.header) for column in table.columns]


# --------------------------------------------------------------------------- the summary


def test_a_summary_says_where_a_sweep_stands() -> None:
    early = ended(3, 30.0, loss=2.0)
    early.was_stopped_early = True
    trials = [
        ended(0, 60.0, loss=0.5),
        make_trial(1, seconds=15.0, loss=0.25),
        make_trial(2, states.PENDING),
        early,
    ]
    line = r.summary_line(trials, total=10, metric="loss", mode="min", elapsed=75)
    assert line == (
        "2/10 trials done, 1 running, 1 stopped early, 1 pending, best loss=0.25 (train_7f3a2_00001), "
        "1m 15s so far, about 5m 45s left"
    )


def test_a_summary_of_a_sweep_that_has_hardly_begun_promises_nothing() -> None:
    assert r.summary_line([]) == "0 of 0 trials done"
    assert r.summary_line([make_trial(0)], total=4, metric="loss", mode="min") == "0/4 trials done, 1 running"


def test_a_summary_of_a_sweep_that_is_over_has_no_time_left() -> None:
    failed = make_trial(1, states.ERROR, 5.0)
    assert (
        r.summary_line([ended(0), failed], total=2, elapsed=3700)
        == "2/2 trials done, 1 failed, 1h 01m so far"
    )


def test_control_characters_in_names_reach_no_terminal() -> None:
    trial = ended(0, loss=1.0)
    trial.name = "a\x1b]0;title\x07\nb"
    shown = [
        r.summary_line([trial], metric="loss", mode="min"),
        *render(r.trial_table([trial], max_column_length=80)),
    ]
    assert all(line.isprintable() for line in shown)


@pytest.mark.parametrize(
    ("trials", "total", "expected"),
    [
        ([make_trial(0)], 4, None),
        ([ended(0, 60.0)], None, None),
        ([ended(0, 60.0)], 3, 120.0),
        ([ended(0, 60.0), make_trial(1, seconds=20), make_trial(2, seconds=90)], 3, 20.0),
        ([ended(0, 60.0), make_trial(1, seconds=60), make_trial(2, states.PAUSED, 5.0)], 4, 120.0),
        ([ended(0, 20.0), ended(1, 40.0)], 2, 0.0),
    ],
)
def test_the_time_left_follows_from_the_trials_that_have_ended(
    trials: list[Trial], total: int | None, expected: float | None
) -> None:
    assert r.estimate_seconds_left(trials, total) == expected


# --------------------------------------------------------------------------- the best


@given(values=st.lists(st.floats() | st.none(), max_size=8), mode=st.sampled_from(["min", "max"]))
def test_the_best_trial_is_the_one_with_the_best_number(values: list[float | None], mode: str) -> None:
    trials = [
        make_trial(number) if value is None else make_trial(number, loss=value)
        for number, value in enumerate(values)
    ]
    numbers = [value for value in values if value is not None and value == value]
    best = r.find_best(trials, "loss", mode)
    if not numbers:
        assert best is None
    else:
        assert best is not None
        assert best.last_result["loss"] == (min if mode == "min" else max)(numbers)


def test_without_a_metric_none_is_best() -> None:
    assert r.find_best([ended(0, loss=1.0)], None, None) is None
    assert r.find_best([ended(0, loss=1.0)], "loss", None) is None


# --------------------------------------------------------------------------- the table


def test_the_best_trial_comes_first_and_is_marked_then_those_that_run() -> None:
    early = ended(4, loss=3.0)
    early.was_stopped_early = True
    trials = [
        make_trial(0, states.PENDING),
        ended(1, loss=2.0),
        make_trial(2, loss=1.0),
        ended(3, loss=0.5),
        early,
        make_trial(5, states.ERROR),
    ]
    table = r.trial_table(trials, metric="loss", mode="min")
    assert titles_of(table) == ["trial", "status", "lr", "depth", "iter", "time", "loss"]
    assert [(row[0][-7:], row[1]) for row in rows_of(table)] == [
        ("2_00003", "finished"),
        ("2_00002", "running"),
        ("2_00005", "failed"),
        ("2_00001", "finished"),
        ("2_00004", "stopped early"),
        ("2_00000", "pending"),
    ]
    assert [row[0].startswith("* ") for row in rows_of(table)] == [True, *[False] * 5]
    assert rows_of(table)[0][2:] == ["0.4", "3", "3", "1m 00s", "0.5"]
    assert rows_of(table)[-1][2:] == ["0.1", "0", "", "", ""]


def test_trials_of_a_state_can_be_ordered_by_the_metric() -> None:
    trials = [ended(0, loss=2.0), ended(1, loss=1.0), ended(2), ended(3, loss=3.0), ended(4, loss=4.0)]

    def order(**how: Any) -> list[int]:
        table = r.trial_table(trials, metric="loss", **how)
        return [int(row[0][-1]) for row in rows_of(table)]

    assert order(mode="max", sort_by_metric=True) == [4, 3, 0, 1, 2]
    assert order(mode="min", sort_by_metric=True) == [1, 0, 3, 4, 2]
    assert order(mode="min") == [1, 4, 3, 2, 0]


def test_rows_beyond_the_limit_are_counted() -> None:
    trials = [
        *(make_trial(number, loss=1.0) for number in range(5)),
        *(ended(number) for number in range(5, 30)),
    ]
    table = r.trial_table(trials, max_progress_rows=4)
    assert len(rows_of(table)) == 4
    assert str(table.caption) == "26 more trials (1 running, 25 finished)"
    assert r.trial_table(trials, max_progress_rows=None).caption is None
    assert len(rows_of(r.trial_table(trials, max_progress_rows=None))) == 30


def test_columns_can_be_chosen_and_named() -> None:
    trial = ended(0, loss=0.5, eval={"accuracy": 0.75}, note="text")
    trial.config["seed"] = 7
    table = r.trial_table(
        [trial],
        metric_columns={
            "eval/accuracy": "acc",
            "training_iteration": "epoch",
            "note": "note",
            "missing": "m",
        },
        parameter_columns=["seed", "model/depth"],
    )
    assert titles_of(table) == ["trial", "status", "seed", "model/depth", "epoch", "acc", "note", "m"]
    assert rows_of(table)[0][2:] == ["7", "0", "3", "0.75", "text", ""]


def test_metrics_that_were_not_named_are_shown_up_to_a_limit() -> None:
    trials = [ended(0, a=1, b=2), ended(1, c=3, loss=4)]
    assert titles_of(r.trial_table(trials, metric="loss", mode="min"))[-3:] == ["loss", "a", "b"]
    assert titles_of(r.trial_table(trials, infer_limit=1))[-1] == "a"


def test_parameters_of_the_same_name_keep_their_paths() -> None:
    trial = ended(0)
    trial.evaluated_params = {"a/lr": 1, "b/lr": 2, "c/depth": 3}
    assert titles_of(r.trial_table([trial]))[2:5] == ["a/lr", "b/lr", "depth"]


def test_long_values_are_shortened_and_names_keep_their_end() -> None:
    trial = ended(0, loss=1 / 3)
    trial.name = "a_very_long_name_of_a_trial_7f3a2_00000"
    trial.evaluated_params = {"layers": list(range(1000)), "text": "x" * 100}
    row = rows_of(r.trial_table([trial], max_column_length=12))[0]
    assert row[0] == "…7f3a2_00000"
    assert row[2].startswith("[0, 1, 2")
    assert row[3] == "x" * 11 + "…"
    assert row[-1] == "0.333333"


TEXTS = st.text(max_size=30)


@given(
    names=st.lists(TEXTS, max_size=6),
    params=st.dictionaries(TEXTS.filter(bool), TEXTS | st.floats() | st.lists(st.integers()), max_size=5),
    width=st.integers(20, 160),
    rows=st.integers(0, 4),
    longest=st.integers(1, 30),
)
def test_no_line_is_wider_than_the_terminal_and_no_table_longer_than_its_limit(
    names: list[str], params: dict[str, Any], width: int, rows: int, longest: int
) -> None:
    trials = []
    for number, name in enumerate(names):
        trial = ended(number, loss=float(number))
        trial.name, trial.evaluated_params = name, params
        trials.append(trial)
    table = r.trial_table(
        trials, metric="loss", mode="min", max_progress_rows=rows, max_column_length=longest, width=width
    )
    assert table.row_count == min(rows, len(trials))
    assert all(cell_len(line) <= width for line in render(table, width=width))


def test_columns_without_room_are_left_out_and_counted() -> None:
    trials = [ended(number, loss=1.0, other=2.0) for number in range(3)]
    wide = r.trial_table(trials, metric="loss", mode="min", width=200)
    narrow = r.trial_table(trials, metric="loss", mode="min", width=50)
    assert titles_of(wide) == ["trial", "status", "lr", "depth", "iter", "time", "loss", "other"]
    assert titles_of(narrow) == ["trial", "status", "iter", "loss"]
    assert str(narrow.caption) == "4 columns left out for lack of room"
    assert not any("…" in line for line in render(narrow, width=50))


def test_values_are_text_and_no_markup() -> None:
    trial = ended(0)
    trial.evaluated_params = {"[bold]x": "[red]y[/red]"}
    assert "[red]y[/red]" in "\n".join(render(r.trial_table([trial])))


def test_failed_trials_are_listed_with_their_errors() -> None:
    trials = [make_trial(number, states.ERROR) for number in range(3)]
    trials[2].reason = "ValueError: bad [lr]\nTraceback"
    lines = render(r.error_table(trials, max_error_rows=2))
    assert "ValueError: bad [lr]" in lines[2]
    assert "Traceback" not in "".join(lines)
    assert "unknown" in lines[3]
    assert lines[-1].strip() == "1 more failed"
    assert len(render(r.error_table(trials), width=30)) < 10
    assert r.error_table([ended(0)]) is None


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0, "0s"), (59.4, "59s"), (61, "1m 01s"), (3600, "1h 00m"), (90061, "1d 01h"), (-5, "0s")],
)
def test_durations_have_two_units(seconds: float, expected: str) -> None:
    assert r.format_seconds(seconds) == expected


# --------------------------------------------------------------------------- reporters


def test_a_terminal_gets_a_summary_and_tables(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = r.CLIReporter(metric_columns=["loss"], max_progress_rows=1, max_report_frequency=0)
    reporter.setup(start_time=None, total_samples=3, metric="loss", mode="min", later=1)
    trials = [ended(0, loss=0.5), make_trial(1, loss=1.0), make_trial(2, states.ERROR)]
    reporter.report(trials, False, "Memory: 3 GiB")
    shown = capsys.readouterr().out
    assert "2/3 trials done" in shown
    assert "Memory: 3 GiB" in shown
    assert "2 more trials (1 running, 1 failed)" in shown
    assert "failed trial" in shown
    reporter.report(trials, True)
    assert "more trials" not in capsys.readouterr().out


def test_tables_can_wait_for_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = r.CLIReporter(print_intermediate_tables=False)
    reporter.report([ended(0, loss=0.5)], False)
    assert len(capsys.readouterr().out.splitlines()) == 1
    reporter.report([ended(0, loss=0.5)], True)
    assert "status" in capsys.readouterr().out


def test_reports_keep_their_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("powertrain.tune.reporter.reporters.time.monotonic", lambda: now[0])
    reporter = r.CLIReporter(max_report_frequency=5)
    answers = []
    for step in (0, 1, 5, 1):
        now[0] += step
        answers.append(reporter.should_report([]))
    assert answers == [True, False, True, False]
    assert reporter.should_report([], done=True)


def test_columns_can_be_added() -> None:
    reporter = r.CLIReporter(metric="loss", mode="min")
    reporter.add_metric_column("accuracy", "acc")
    reporter.add_parameter_column("seed")
    trial = ended(0, loss=0.5, accuracy=0.75, other=1)
    trial.config["seed"] = 7
    table = reporter.renderables([trial], False)[-1]
    assert titles_of(table) == ["trial", "status", "seed", "iter", "time", "loss", "acc"]
    listed = r.CLIReporter(metric_columns=["a"])
    listed.add_metric_column("b")
    with pytest.raises(ConfigError, match="shown already"):
        listed.add_metric_column("a")
    with pytest.raises(ConfigError, match="as a list"):
        listed.add_metric_column("c", "see")


def test_the_metric_is_given_once() -> None:
    reporter = r.CLIReporter(metric="loss", mode="min")
    reporter.set_search_properties("loss", None)
    with pytest.raises(ConfigError, match="differ"):
        reporter.setup(metric="accuracy")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"metric_columns": 3}, "takes a list or a dict"), ({"mode": "low"}, "neither 'min' nor 'max'")],
)
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        r.CLIReporter(**arguments)


def test_a_reporter_of_the_users_own_defines_its_methods() -> None:
    own = r.ProgressReporter()
    own.setup(total_samples=3)
    with pytest.raises(NotImplementedError):
        own.should_report([])
    with pytest.raises(NotImplementedError):
        own.report([], True)


class FakeHandle:
    def __init__(self) -> None:
        self.shown: list[str] = []

    def update(self, html: str) -> None:
        self.shown.append(html)


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_notebook_shows_each_report_in_place_of_the_last(
    monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    handle, cleared = FakeHandle(), []

    def display(html: str, display_id: bool) -> FakeHandle:
        handle.shown.append(html)
        return handle

    fake: Any = ModuleType("IPython.display")
    fake.HTML, fake.display, fake.clear_output = str, display, lambda wait: cleared.append(wait)
    monkeypatch.setitem(sys.modules, "IPython.display", fake)
    reporter = r.JupyterNotebookReporter(overwrite=overwrite, metric="loss", mode="min")
    trial = ended(0, loss=0.5)
    trial.evaluated_params = {"x": "<script>"}
    for done in (False, True):
        reporter.report([trial], done)
    assert len(handle.shown) == 2
    assert len(cleared) == int(overwrite)
    assert "train_7f3a2_00000" in handle.shown[0]
    assert "<script>" not in handle.shown[0]
    assert "&lt;script&gt;" in handle.shown[0]


def test_without_a_notebook_the_error_names_the_other_reporter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython.display", None)
    with pytest.raises(ConfigError, match="Use CLIReporter"):
        r.JupyterNotebookReporter().report([], True)
