"""Rates of steps in pixels."""

from __future__ import annotations

import numpy as np
import pytest

from powertrain.diagnosis.tables.steps import RECORD
from powertrain.trace.recording import phases
from powertrain.views.machine import resources
from powertrain.views.timeline import Window


def steps(begins: list[float], seconds: float, samples: int) -> np.ndarray:
    table = np.zeros(len(begins), RECORD)
    table["start"] = begins
    table["phases"][:, phases.FORWARD] = seconds
    table["samples"] = samples
    return table


def test_a_rate_is_the_count_by_the_time_of_the_steps_in_each_pixel_over_all_attempts() -> None:
    records = {0: {0: steps([100.0, 100.5], 0.5, 32)}, 1: {0: steps([102.0], 0.25, 32)}}
    found = resources({}, Window(100.0, 103.0, 3), records)
    charts = {chart["field"]: chart for chart in found["charts"]}
    assert charts["steps"]["lines"] == [{"rank": 0, "values": [2.0, None, 4.0]}]
    assert charts["samples"]["lines"] == [{"rank": 0, "values": [64.0, None, 128.0]}]
    assert (charts["samples"]["title"], charts["samples"]["unit"]) == ("Data", "samples/s")
    assert "tokens" not in charts


@pytest.mark.parametrize("seconds", [0.0, float("nan"), float("inf"), -1.0])
def test_steps_without_a_known_time_have_no_rate(seconds: float) -> None:
    found = resources({}, Window(100.0, 101.0, 1), {0: {0: steps([100.2], seconds, 8)}})
    assert found["charts"] == []
