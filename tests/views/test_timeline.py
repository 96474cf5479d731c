"""The step timeline: in each pixel the share of each phase, and a straggler that stands out."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.diagnosis import synthetic
from tests.diagnosis.run_directory import records

from powertrain.diagnosis.tables.samples import SAMPLE
from powertrain.diagnosis.tables.steps import RECORD
from powertrain.trace.recording import phases
from powertrain.views.compact import compact
from powertrain.views.machine import sample_window
from powertrain.views.timeline import NOTHING, ORDER, Window, full_window, timeline


def table(durations: list[dict[int, float]], start: float = 100.0) -> Any:
    made = np.zeros(len(durations), RECORD)
    for place, one in enumerate(durations):
        made[place]["step"], made[place]["start"] = place, start
        for phase, seconds in one.items():
            made[place]["phases"][phase] = seconds
        start += sum(one.values())
    return made


def shares(content: dict[str, Any]) -> Any:
    cells = np.frombuffer(base64.b64decode(content["cells"]), np.uint8)
    return cells.reshape(len(content["rows"]), content["columns"], phases.COUNT) / 255


def share_of(content: dict[str, Any], phase: int) -> Any:
    return shares(content)[:, :, ORDER.index(phase)]


def test_pixels_show_phases_where_they_were() -> None:
    steps = {0: {0: table([{phases.FORWARD: 2.0, phases.BACKWARD: 2.0}, {phases.INPUT: 4.0}])}}
    window = full_window(steps, 4)
    assert window == Window(100.0, 108.0, 4)
    content = timeline(steps, window, most_rows=8)
    assert share_of(content, phases.FORWARD).tolist() == [[1, 0, 0, 0]]
    assert share_of(content, phases.BACKWARD).tolist() == [[0, 1, 0, 0]]
    assert share_of(content, phases.INPUT).tolist() == [[0, 0, 1, 1]]
    (times,) = content["steps"]
    assert (times["count"], times["median"], times["longest"]) == (2, 4.0, 4.0)
    shown = {ORDER[place]: share for place, share in enumerate(times["shares"]) if share}
    assert shown == {phases.INPUT: 0.5, phases.FORWARD: 0.25, phases.BACKWARD: 0.25}


def test_a_window_shows_a_part_and_a_gap_between_attempts_is_empty() -> None:
    steps = {
        0: {0: table([{phases.FORWARD: 4.0}])},
        1: {0: table([{phases.FORWARD: 4.0}], start=108.0)},
    }
    content = timeline(steps, Window(102.0, 110.0, 4), most_rows=8)
    assert share_of(content, phases.FORWARD).tolist() == [[1, 0, 0, 1]]


@given(
    st.lists(st.lists(st.floats(0, 3), min_size=9, max_size=9), min_size=1, max_size=20).filter(
        lambda steps: sum(map(sum, steps)) > 0.1
    ),
    st.integers(1, 50),
)
def test_no_time_is_lost_in_pixels(durations: list[list[float]], columns: int) -> None:
    made = table([dict(enumerate(one)) for one in durations])
    steps = {0: {0: made}}
    window = full_window(steps, columns)
    assert window is not None
    found = shares(timeline(steps, window, most_rows=4))[0]
    width = (window.end - window.begin) / columns
    by_phase = found.sum(axis=0) * width
    expected = made["phases"].astype(np.float64).sum(axis=0)[list(ORDER)]
    assert by_phase == pytest.approx(expected, abs=columns * width / 255 + 1e-3)


def test_of_many_ranks_a_row_shows_the_one_that_works_longest() -> None:
    made = synthetic.run(3, synthetic.late(517, phases.FORWARD, 0.02), ranks=1024, steps=12)
    steps = {0: {rank: np.frombuffer(records(made, rank), RECORD) for rank in made.ranks}}
    window = full_window(steps, 100)
    assert window is not None
    content = timeline(steps, window, most_rows=64)
    assert len(content["rows"]) == 64
    assert content["kind"] == "longest"
    row = next(row for row in content["rows"] if row["first"] <= 517 <= row["last"])
    assert row["rank"] == 517
    cells = np.frombuffer(base64.b64decode(content["cells"]), np.uint8).reshape(64, 100)
    forward = (cells == ORDER.index(phases.FORWARD)).mean(axis=1)
    assert int(forward.argmax()) == content["rows"].index(row), "its row is the odd one"
    assert NOTHING not in cells[0]


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf"), 1e15, 5.0])
@pytest.mark.parametrize("place", [0, 3, 9])
def test_one_bad_clock_leaves_the_other_steps_where_they_were(bad: float, place: int) -> None:
    made = table([{phases.FORWARD: 2.0}] * 10, start=1.7e9)
    steps = {0: {0: made.copy(), 1: made.copy()}}
    steps[0][0]["start"][place] = bad
    window = full_window(steps, 10)
    assert window is not None
    assert window.begin >= 1.7e9 - 1
    assert window.end <= 1.7e9 + 21
    content = timeline(steps, window, most_rows=8)
    assert share_of(content, phases.FORWARD)[1].sum() == pytest.approx(10, abs=1)
    assert share_of(content, phases.FORWARD)[0].sum() >= 8


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("-inf"), 1e15])
def test_one_bad_clock_leaves_the_other_samples_where_they_were(bad: float) -> None:
    made = np.zeros(10, SAMPLE)
    made["time"] = 1.7e9 + np.arange(10)
    made["time"][4] = bad
    assert sample_window({0: {0: made}}, 10) == Window(1.7e9, 1.7e9 + 9, 10)


def test_a_phase_that_is_not_a_number_spoils_no_other() -> None:
    made = table([{phases.FORWARD: 1.0}] * 4)
    made["phases"][1][phases.INPUT] = np.nan
    made["phases"][2][phases.INPUT] = np.inf
    window = full_window({0: {0: made}}, 4)
    assert window == Window(100.0, 104.0, 4)
    (times,) = timeline({0: {0: made}}, window, most_rows=4)["steps"]
    assert (times["count"], times["longest"]) == (4, 1.0)


def test_no_steps_are_no_window() -> None:
    assert full_window({}, 10) is None
    assert full_window({0: {0: np.zeros(0, RECORD)}}, 10) is None


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True)))
def test_compact_numbers_are_near_and_have_neither_nan_nor_infinity(values: list[float]) -> None:
    for value, short in zip(values, compact(np.array(values, np.float64)), strict=True):
        if np.isfinite(value):
            assert short == pytest.approx(value, rel=1e-4, abs=1e-300)
        else:
            assert short is None
