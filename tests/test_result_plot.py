from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from tests.recorded_run import EVENTFUL, ROW_SECONDS, at, attempt, points, write

from powertrain import Result
from powertrain.errors import ConfigError
from powertrain.result.plot import ranks_drawn, smoothed
from powertrain.run import events as ev

LOSSES = {1: 1.0, 2: 0.8, 3: math.nan, 4: math.inf, 5: 0.6, 6: 0.5, 7: 0.4, 8: 0.3, 9: 0.2, 10: 0.1}


def measured(row: int, rank: int) -> dict[str, Any]:
    return {"loss": LOSSES[row] + rank, "eval": {"f1": row / 10}, "note": "words", "flag": True}


@pytest.fixture
def eventful(tmp_path: Path) -> Result:
    """Ten rows in three attempts, of two and then three ranks, with checkpoints at rows 4 and 8."""
    records = [
        *points(range(1, 7), measured, ranks=(0, 1)),
        *points(range(5, 9), measured, attempt=1, ranks=(0, 1)),
        *points(range(9, 11), measured, attempt=2, ranks=(0, 1, 2)),
    ]
    scores = {4: {"loss": 0.9}, 8: {"loss": 0.3}}
    write(tmp_path / "run", records, facts=EVENTFUL, checkpoints=scores, score=("loss", "min"))
    return Result.from_path(tmp_path / "run")


def artist(axes: Any, label: str) -> Any:
    (found,) = [line for line in axes.lines if line.get_label() == label]
    return found


def curve(axes: Any) -> Any:
    """The line of the metric itself, which is drawn first."""
    return axes.lines[0]


def test_every_metric_that_is_a_number_has_a_panel_over_the_same_axis(eventful: Result) -> None:
    figure = eventful.plot()
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title(loc="left") for axes in shown] == ["loss", "eval/f1"]
    assert len({axes.get_xlim() for axes in shown}) == 1
    assert figure.get_suptitle() == "run, rank 0"


def test_the_line_has_the_runs_own_points_and_is_broken_where_there_is_no_number(eventful: Result) -> None:
    axes = eventful.plot("loss").axes[0]
    rows, values = curve(axes).get_data()
    assert rows.tolist() == list(range(1, 11)), "the rows that a restart went back behind are there once"
    assert np.isnan(values[[2, 3]]).all()
    assert values[[0, 1, 4, 9]].tolist() == [1.0, 0.8, 0.6, 0.1]
    assert artist(axes, "NaN or infinite").get_xdata().tolist() == [3, 4]


def test_numbers_too_large_for_any_axis_are_shown_as_infinite(tmp_path: Path) -> None:
    values = {1: 1.0, 2: 1.7e308, 3: -1.7e308, 4: 2.0}
    write(tmp_path / "run", points(range(1, 5), lambda row, rank: {"loss": values[row]}))
    figure = Result.from_path(tmp_path / "run").plot(path=tmp_path / "run.png")
    assert artist(figure.axes[0], "NaN or infinite").get_xdata().tolist() == [2, 3]


def test_checkpoints_lie_on_the_line_and_the_best_has_a_star(eventful: Result) -> None:
    axes = eventful.plot("eval/f1").axes[0]
    plain, best = artist(axes, "checkpoint"), artist(axes, "best checkpoint")
    assert (plain.get_xdata().tolist(), plain.get_ydata().tolist()) == ([4.0], [0.4])
    assert (best.get_xdata().tolist(), best.get_ydata().tolist()) == ([8.0], [0.8])
    assert best.get_marker() == "*"


def test_failures_restarts_and_resizes_are_upright_lines_named_in_the_legend(eventful: Result) -> None:
    figure = eventful.plot()
    found = {
        words: artist(figure.axes[0], words).get_xdata()[0]
        for words in ("rank 1 raised ValueError", "again from row 5", "3 workers instead of 2")
    }
    assert list(found.values()) == [6, 5, 9]
    (legend,) = figure.legends
    named = [text.get_text() for text in legend.get_texts()]
    assert {*found, "NaN or infinite", "checkpoint", "best checkpoint"} == set(named)
    assert len(named) == len(set(named)), "each is named once, however many panels there are"


def test_several_of_a_kind_are_counted(tmp_path: Path) -> None:
    facts: list[ev.Event] = [attempt(0, 1, 1)]
    for number in (1, 2):
        facts += [
            ev.Resized(time=at(number), attempt=number - 1, world_size=1, reason=""),
            attempt(number, 1, 2),
        ]
    write(tmp_path / "run", points([1, 2], lambda row, _: {"a": row}, attempt=0), facts=facts)
    axes = Result.from_path(tmp_path / "run").plot().axes[0]
    assert artist(axes, "2 restarts").get_xdata()[0] == 2


def test_over_time_everything_lies_where_it_happened(eventful: Result) -> None:
    axes = eventful.plot("loss", x="time").axes[0]
    assert axes.get_xlabel() == "minutes since the run began"
    rows = [1, 2, 3, 4, 6, 7, 8, 9, 11, 12]  # each attempt is a row's time later than the one before
    assert curve(axes).get_xdata() == pytest.approx([row * ROW_SECONDS / 60 for row in rows])
    assert artist(axes, "rank 1 raised ValueError").get_xdata()[0] == pytest.approx(6.5 * ROW_SECONDS / 60)
    assert artist(axes, "best checkpoint").get_xdata() == pytest.approx([9 * ROW_SECONDS / 60])


def test_all_ranks_are_drawn_by_name(eventful: Result) -> None:
    figure = eventful.plot("loss", rank="all")
    axes = figure.axes[0]
    assert artist(axes, "rank 1").get_ydata()[0] == 2.0
    assert artist(axes, "rank 2").get_xdata().tolist() == [9, 10]
    assert figure.get_suptitle() == "run, all 3 ranks"
    assert curve(eventful.plot("loss", rank=2).axes[0]).get_ydata() == pytest.approx([2.2, 2.1])


def test_many_points_become_a_band_of_at_most_a_thousand_pixels(tmp_path: Path) -> None:
    rows = range(1, 20001)  # enough for segments with summaries
    write(tmp_path / "run", points(rows, lambda row, _: {"wave": math.sin(row)}))
    result = Result.from_path(tmp_path / "run")
    axes = result.plot("wave").axes[0]
    assert 100 < len(curve(axes).get_xdata()) <= 1000
    (band,) = axes.collections
    heights = np.asarray(band.get_paths()[0].vertices)[:, 1]
    assert heights.min() == min(map(math.sin, rows))
    assert heights.max() == max(map(math.sin, rows))
    begins = curve(axes).get_xdata()
    over_time = curve(result.plot("wave", x="time").axes[0])
    assert over_time.get_xdata() * 86400 == pytest.approx(begins * ROW_SECONDS)


def test_one_metric_goes_into_axes_of_the_caller(eventful: Result) -> None:
    figure = Figure()
    _, axes = figure.subplots(1, 2)
    assert eventful.plot(["loss"], ax=axes) is figure
    assert len(curve(axes).get_xdata()) == 10
    assert axes.get_legend() is not None
    with pytest.raises(ConfigError, match=r"draws one metric, and this would be 2.*plot\('loss', ax=ax\)"):
        eventful.plot(ax=axes)


def test_a_figure_is_saved_in_the_form_that_its_name_says(eventful: Result, tmp_path: Path) -> None:
    figure = eventful.plot(path=tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    eventful.plot(path=tmp_path / "curves.svg")
    assert b"<svg" in (tmp_path / "curves.svg").read_bytes()
    assert figure._repr_png_().startswith(b"\x89PNG"), "a notebook shows it"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"metrics": "lss"}, "no metric 'lss' that is a number. Did you mean 'loss'?"),
        ({"metrics": ["loss", "note"]}, "no metric 'note' that is a number"),
        ({"metrics": []}, "names no metric"),
        ({"x": "epoch"}, "neither 'row' nor 'time'"),
        ({"rank": 3}, "ranks 0 to 2, or rank='all'"),
        ({"rank": "some"}, "rank='some' cannot be plotted"),
        ({"smooth": 1.0}, "at least 0 and less than 1"),
        ({"smooth": math.nan}, "at least 0 and less than 1"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_words(
    eventful: Result, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        eventful.plot(**arguments)
    assert words in str(caught.value)


def test_a_run_without_a_number_has_nothing_to_plot(tmp_path: Path) -> None:
    write(tmp_path / "run", points([1], lambda row, rank: {"note": "words"}))
    with pytest.raises(ConfigError, match="nothing to plot: the run has no metric that is a number"):
        Result.from_path(tmp_path / "run").plot()


def test_without_matplotlib_the_extra_is_named(eventful: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure")
    monkeypatch.delitem(sys.modules, "powertrain.result.plot")
    monkeypatch.delattr("powertrain.result.plot")
    with pytest.raises(ConfigError, match=r"pip install 'powertrain\[plot\]'"):
        eventful.plot()


def test_pyplot_is_left_alone(eventful: Result) -> None:
    code = (
        "import sys; from powertrain import Result; Result.from_path(sys.argv[1]).plot()._repr_png_(); "
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, eventful.path], check=True, timeout=60)


@given(
    st.lists(st.floats(-1e6, 1e6) | st.sampled_from([math.nan]), max_size=30),
    st.floats(0, 0.99, exclude_max=False),
)
def test_a_smooth_line_stays_between_its_values_and_keeps_its_gaps(
    values: list[float], weight: float
) -> None:
    given_values = np.array(values, float)
    smooth = smoothed(given_values, weight)
    assert (np.isnan(smooth) == np.isnan(given_values)).all()
    known = given_values[~np.isnan(given_values)]
    if len(known):
        slack = 1e-6 * max(1.0, float(np.abs(known).max()))
        assert np.nanmin(smooth) >= known.min() - slack
        assert np.nanmax(smooth) <= known.max() + slack
    if weight == 0:
        assert np.array_equal(smooth, given_values, equal_nan=True)


@given(st.integers(1, 5000))
def test_of_many_ranks_the_first_the_last_and_some_between_are_drawn(world_size: int) -> None:
    ranks = list(ranks_drawn(world_size))
    assert ranks == sorted(set(ranks))
    assert len(ranks) == min(world_size, 64)
    assert (ranks[0], ranks[-1]) == (0, world_size - 1)
