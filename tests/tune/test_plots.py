"""The figure of a sweep: what its panels show, whatever trials have reported, and what the importance measures."""

from __future__ import annotations

import math
import random
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.collections import LineCollection
from tests.tune.recorded_sweep import trial_facts, trial_name, write_sweep

from powertrain.errors import ConfigError
from powertrain.storage import open_storage
from powertrain.tune import trial as tr
from powertrain.tune.plots import (
    MISSING,
    draw_sweep,
    explain_ranks,
    find_best_trial,
    has_log_scale,
    scale_values,
)
from powertrain.tune.result_grid import ResultGrid

#: What trials of spaces have: numbers, categories, nothing.
values = st.one_of(
    st.floats(allow_nan=False),
    st.integers(-(10**400), 10**400),
    st.booleans(),
    st.text(max_size=5),
    st.none(),
    st.lists(st.integers(), max_size=2),
)


def grid_of(path: Path, trials: Sequence[Mapping[str, Any]]) -> ResultGrid:
    """The grid of trials given as arguments of ``trial_facts``."""
    facts = [
        trial_facts(
            number, given.get("params", {"lr": 0.1}), given["losses"], at=1000.0, **given.get("more", {})
        )
        for number, given in enumerate(trials)
    ]
    write_sweep(open_storage(str(path / "sweep")), facts)
    return ResultGrid.from_path(path / "sweep")


def drawn(grid: ResultGrid, metric: str = "loss", mode: str = "min") -> list[Any]:
    """The axes of the figure, which can be drawn: curves, importance, coordinates, and the scale of colours."""
    figure = draw_sweep(grid, metric, mode)
    figure.draw_without_rendering()
    return list(figure.axes)


def words(axes: Any) -> str:
    return " ".join(text.get_text().replace("\n", " ") for text in axes.texts)


def test_each_trial_has_a_curve_and_the_best_stands_out(tmp_path: Path) -> None:
    trials: list[dict[str, Any]] = [
        {"losses": [3.0, 2.0]},
        {"losses": [3.0, 1.0]},
        {"losses": [3.5], "more": {"is_stopped_early": True}},
    ]
    curves, *_ = drawn(grid_of(tmp_path, trials))
    first, best, faded = curves.lines
    assert (best.get_xdata().tolist(), best.get_ydata().tolist()) == ([1.0, 2.0], [3.0, 1.0])
    assert best.get_linewidth() > first.get_linewidth()
    assert faded.get_alpha() < first.get_alpha()
    labels = [text.get_text() for text in curves.get_legend().get_texts()]
    assert labels == [trial_name(0), f"{trial_name(1)} (best)", trial_name(2)]


def test_a_trial_that_was_stopped_at_its_end_is_not_faded(tmp_path: Path) -> None:
    stopped = {"is_stopped_early": True}
    trials: list[dict[str, Any]] = [
        {"losses": losses, "more": stopped} for losses in ([3.0, 2.0], [3.0, 2.5], [4.0])
    ]
    curves, *_ = drawn(grid_of(tmp_path, trials))
    assert [line.get_alpha() for line in curves.lines] == [1.0, 1.0, 0.4]


def test_which_trial_is_best_is_a_matter_of_the_mode(tmp_path: Path) -> None:
    grid = grid_of(
        tmp_path, [{"losses": [3.0]}, {"losses": [1.0]}, {"losses": [math.inf]}, {"losses": [math.nan]}]
    )
    assert [str(find_best_trial(grid.trials, "loss", mode)) for mode in ("min", "max")] == [
        trial_name(1),
        trial_name(0),
    ]
    assert find_best_trial(grid.trials, "accuracy", "max") is None
    assert trial_name(0) in drawn(grid, mode="max")[0].get_title(loc="left")


def test_two_hundred_trials_are_drawn_in_three_styles_and_without_a_legend(tmp_path: Path) -> None:
    trials = [
        {
            "params": {"lr": 10 ** -(1 + number % 5), "layers": number % 3, "kind": "ab"[number % 2]},
            "losses": [5.0, 1.0 + number / 100][: 1 if number % 2 else 2],
            "more": {"is_stopped_early": number % 2 == 1},
        }
        for number in range(200)
    ]
    grid = grid_of(tmp_path, trials)
    curves, importance, coordinates, _ = drawn(grid)
    assert curves.get_legend() is None
    faded, plain, best = curves.lines
    # A gap before the first and after each.
    assert [len(line.get_xdata()) for line in (faded, plain, best)] == [201, 301, 2]
    assert faded.get_alpha() < plain.get_alpha()
    assert best.get_ydata().tolist() == [5.0, 1.0]
    assert len(importance.patches) == 3
    coloured = coordinates.collections[1]
    assert isinstance(coloured, LineCollection)
    assert len(coloured.get_segments()) == 200


@pytest.mark.parametrize(
    "trials",
    [
        pytest.param([{"losses": [1.0]}], id="one"),
        pytest.param([{"losses": []}], id="no report"),
        pytest.param([], id="no trial"),
        pytest.param([{"losses": [math.nan, math.nan]}, {"losses": [math.inf]}], id="nothing finite"),
        pytest.param([{"losses": [1e308, -1e308, 1.0]}, {"losses": [2.0]}], id="too large"),
        pytest.param([{"losses": [1.0]}, {"losses": [], "more": {"status": tr.ERROR}}], id="failed"),
        pytest.param([{"losses": [1.0], "params": {}}] * 6, id="nothing drawn"),
        pytest.param([{"losses": [1.0]}] * 6, id="all the same"),
        pytest.param([{"losses": [1.0], "params": {"$a$_{": "$x^$"}}] * 9, id="mathematics"),
        pytest.param([{"losses": [1.0], "more": {"status": tr.RUNNING}}] * 6, id="running"),
    ],
)
def test_any_sweep_can_be_drawn(tmp_path: Path, trials: list[Mapping[str, Any]]) -> None:
    assert len(drawn(grid_of(tmp_path, trials))) in (3, 4)


def test_what_is_missing_is_said_in_its_place(tmp_path: Path) -> None:
    grid = grid_of(tmp_path, [{"losses": [1.0]}, {"losses": [2.0]}])
    curves, importance, *_ = drawn(grid)
    assert curves.lines
    assert "too few trials: 2 ended" in words(importance)
    curves, importance, *_ = drawn(grid, metric="accuracy")
    assert "no trial has reported a finite 'accuracy'" in words(curves)
    assert "too few trials: 0 ended with a value of 'accuracy'" in words(importance)


def test_trials_that_run_do_not_count_as_ended(tmp_path: Path) -> None:
    trials = [
        {"losses": [1.0], "more": {"status": tr.RUNNING if number else tr.TERMINATED}} for number in range(7)
    ]
    assert "too few trials: 1 ended" in words(drawn(grid_of(tmp_path, trials))[1])


def test_a_curve_is_broken_where_there_is_no_number(tmp_path: Path) -> None:
    curves, *_ = drawn(grid_of(tmp_path, [{"losses": [3.0, math.nan, math.inf, 1.0]}]))
    assert np.isnan(curves.lines[0].get_ydata()).tolist() == [False, True, True, False]


def test_losses_over_several_decades_have_a_logarithmic_axis(tmp_path: Path) -> None:
    wide = grid_of(tmp_path / "wide", [{"losses": [1.0, 0.1, 0.01, 0.001]}])
    narrow = grid_of(tmp_path / "narrow", [{"losses": [1.0, 0.9, 0.8]}])
    assert [drawn(grid)[0].get_yscale() for grid in (wide, narrow)] == ["log", "linear"]


def test_of_many_parameters_those_that_matter_are_shown(tmp_path: Path) -> None:
    rng = random.Random(0)
    trials = []
    for _ in range(60):
        params = {f"p{number:02d}": rng.random() for number in range(20)}
        trials.append({"params": params, "losses": [params["p19"]]})
    _, importance, coordinates, _ = drawn(grid_of(tmp_path, trials))
    shown = [text.get_text() for text in coordinates.get_xticklabels()]
    assert len(shown) == 12
    assert shown[-1] == "p19"
    assert "12 of 20 parameters" in coordinates.get_title()
    assert importance.get_yticklabels()[-1].get_text() == "p19"
    assert "adjusted correlation ratio" in importance.get_xlabel()


def test_the_figure_shows_itself_in_notebooks_and_leaves_pyplot_alone(tmp_path: Path) -> None:
    figure: Any = grid_of(tmp_path, [{"losses": [1.0]}]).plot()
    assert figure._repr_png_().startswith(b"\x89PNG")
    script = "import sys, powertrain.tune.plots; print('matplotlib' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "False"


def test_without_matplotlib_the_error_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = grid_of(tmp_path, [{"losses": [1.0]}])
    monkeypatch.delitem(sys.modules, "powertrain.result.plot", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'powertrain\[plot\]'"):
        grid.plot()


# --------------------------------------------------------------------------- axes of parameters


@given(st.lists(st.one_of(values, st.just(MISSING)), max_size=30))
def test_every_value_has_a_place_on_its_axis_and_equal_ones_the_same(given_values: list[Any]) -> None:
    axis = scale_values(given_values)
    assert len(axis.places) == len(given_values)
    for value, place in zip(given_values, axis.places, strict=True):
        assert math.isnan(place) if value is MISSING else 0.0 <= place <= 1.0
    assert all(0.0 <= at <= 1.0 for at, _ in axis.ticks)
    by_value: dict[str, float] = {}
    for value, place in zip(given_values, axis.places, strict=True):
        if value is not MISSING:
            assert by_value.setdefault(repr(value), place) == place


@given(st.lists(st.floats(-1e300, 1e300), min_size=2, max_size=30))
def test_numbers_keep_their_order(numbers: list[float]) -> None:
    places = scale_values(numbers).places
    for one, other in zip(np.argsort(numbers), np.argsort(numbers)[1:], strict=False):
        assert places[one] <= places[other]


def test_rates_have_a_logarithmic_axis_and_their_own_numbers_as_labels() -> None:
    axis = scale_values([1e-4, 1e-3, 1e-2])
    assert axis.is_log
    assert axis.places.tolist() == pytest.approx([0.0, 0.5, 1.0])
    assert axis.ticks == ((0.0, "0.0001"), (0.5, "0.001"), (1.0, "0.01"))
    assert not has_log_scale([0.001, 0.5, 0.9, 1.0])
    assert not has_log_scale([0.0, 1.0, 100.0])
    assert not has_log_scale([])


def test_flags_and_words_are_categories() -> None:
    axis = scale_values(["adam", True, "adam", None])
    assert axis.places.tolist() == [0.0, 0.5, 0.0, 1.0]
    assert [label for _, label in axis.ticks] == ["adam", "True", "None"]
    assert len(scale_values([f"category-{number}" for number in range(100)]).ticks) <= 8


# --------------------------------------------------------------------------- importance


@given(st.lists(st.tuples(values, st.floats()), max_size=40))
def test_a_share_is_one_whatever_was_drawn_and_reported(pairs: list[tuple[Any, float]]) -> None:
    share = explain_ranks([value for value, _ in pairs], [score for _, score in pairs])
    assert share is None or 0.0 <= share <= 1.0


@given(
    st.lists(st.tuples(st.integers(0, 3), st.floats(allow_nan=False)), min_size=5, max_size=40),
    st.randoms(use_true_random=False),
)
def test_a_share_depends_neither_on_the_order_nor_on_the_scale(
    pairs: list[tuple[int, float]], rng: random.Random
) -> None:
    scale = sorted({score for _, score in pairs})
    shuffled = rng.sample(pairs, len(pairs))
    before = explain_ranks([f"{value}" for value, _ in pairs], [score for _, score in pairs])
    after = explain_ranks(
        [f"group {value}" for value, _ in shuffled], [float(scale.index(score)) ** 3 for _, score in shuffled]
    )
    assert before == (None if after is None else pytest.approx(after))


def test_what_decides_the_score_explains_it_and_what_does_not_explains_nothing() -> None:
    rng = random.Random(1)
    rates = [10 ** rng.uniform(-5, -1) for _ in range(100)]
    others = [rng.random() for _ in range(100)]
    kinds = [rng.choice("abc") for _ in range(100)]
    by_rate = [(math.log10(rate) + 3) ** 2 for rate in rates]  # best in the middle
    assert (explain_ranks(rates, by_rate) or 0.0) > 0.6
    assert (explain_ranks(others, by_rate) or 0.0) < 0.1
    by_kind = ["abc".index(kind) + 0.1 * rng.random() for kind in kinds]
    assert (explain_ranks(kinds, by_kind) or 0.0) > 0.85


def test_chance_alone_explains_about_nothing() -> None:
    rng = random.Random(2)
    shares = [
        explain_ranks([rng.random() for _ in range(10)], [rng.random() for _ in range(10)]) or 0.0
        for _ in range(300)
    ]
    assert float(np.mean(shares)) < 0.1


def test_a_few_that_diverge_do_not_hide_what_matters() -> None:
    rates = [0.1] * 10 + [0.2] * 10 + [0.9]
    scores = [1.0 + 0.001 * number for number in range(10)] + [2.0 + 0.001 * number for number in range(10)]
    assert (explain_ranks(rates, [*scores, math.inf]) or 0.0) > 0.7


def test_nothing_is_claimed_where_nothing_can_be_known() -> None:
    assert explain_ranks([1, 2, 3, 4], [1.0, 2.0, 3.0, 4.0]) is None
    assert explain_ranks([1, 2, 3, 4, 5], [1.0, 2.0, 3.0, 4.0, math.nan]) is None
    assert explain_ranks(list("abcde"), [1.0, 2.0, 3.0, 4.0, 5.0]) is None, "each value occurs once"
    assert explain_ranks([7] * 6, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == 0.0, "it never varied"
    assert explain_ranks([1, 2, 1, 2, 1], [3.0] * 5) == 0.0


# --------------------------------------------------------------------------- notebooks


def test_a_notebook_shows_the_trials_with_the_best_first_and_every_word_escaped(tmp_path: Path) -> None:
    trials: list[dict[str, Any]] = [{"params": {"lr": 0.5, "kind": "<b>"}, "losses": [3.0]}]
    trials += [{"params": {"lr": 0.25, "kind": "b"}, "losses": [1.0 + number]} for number in range(14)]
    page = grid_of(tmp_path, trials)._repr_html_()
    names = re.findall(r"train_abcde_\d+", page.partition("<table")[2])
    assert names == [trial_name(1), trial_name(0), *(trial_name(number) for number in range(2, 10))]
    assert "&lt;b&gt;" in page
    assert "<b>" not in page
    assert "and 5 more" in page
    assert "15 of 15 trials done" in page


def test_a_notebook_shows_a_sweep_without_trials(tmp_path: Path) -> None:
    assert "0 of 0 trials done" in grid_of(tmp_path, [])._repr_html_()
