"""Figures of a run: what its events and rows make of them, and that their failure never ends it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.recorded_run import EVENTFUL, at

from powertrain.driver.prometheus.figures import MOST_METRICS, MeasuredRun, RunFigures, numbers_in
from powertrain.run import events as ev

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana" / "powertrain.json"
STARTED = ev.RunStarted(time=at(0), name="r", lease=1, host="h", pid=1, version="0", engine="local")


def values(figures: RunFigures) -> dict[str, float]:
    """Each figure by its name, with the labels other than the run in brackets."""
    found = {}
    for family in figures.families():
        for sample in family.samples:
            others = [value for key, value in sample.labels.items() if key != "run"]
            assert sample.labels["run"] == "r"
            found[family.name + (f"[{', '.join(others)}]" if others else "")] = sample.value
    return found


@pytest.fixture
def eventful() -> RunFigures:
    figures = RunFigures("r")
    figures.on_event(ev.Warned(time=at(0), message="before the run has started"))
    for event in (STARTED, ev.SlotsRequested(time=at(0), attempt=0, count=2), *EVENTFUL):
        figures.on_event(event)
    return figures


def test_states_counts_and_sizes_follow_the_events(eventful: RunFigures) -> None:
    eventful.on_event(ev.Committed(time=at(9), attempt=2, row=9, checkpoint="c", bytes=123))
    found = values(eventful)
    assert found["powertrain_run_info[local]"] == 1.0
    assert {key for key, value in found.items() if key.startswith("powertrain_run_state") and value} == {
        "powertrain_run_state[training]"
    }
    expected = {
        "attempts_total": 3, "failures_total": 1, "resizes_total": 1, "hangs_total": 0, "checkpoints_total": 1,
        "workers": 3, "row": 8, "last_commit_row": 9, "checkpoint_bytes": 123, "last_commit_time_seconds": at(9),
    }  # fmt: skip
    assert {name: found[f"powertrain_{name}"] for name in expected} == expected


def test_rows_are_counted_and_the_numbers_of_rank_0_kept(eventful: RunFigures) -> None:
    eventful.on_row(9, [{"loss": 0.5, "a": {"b": 2}, "text": "x", "flag": True}, {"loss": 9.0}], at(9))
    eventful.on_row(10, [None, {"loss": 9.0}], at(10))
    found = values(eventful)
    assert {key: value for key, value in found.items() if key.startswith("powertrain_metric[")} == {
        "powertrain_metric[loss]": 0.5,
        "powertrain_metric[a/b]": 2.0,
    }
    assert (found["powertrain_row"], found["powertrain_rows_total"]) == (10, 2)
    assert found["powertrain_last_row_time_seconds"] == at(10)


def test_metrics_without_end_are_bounded_and_the_rest_counted(eventful: RunFigures) -> None:
    for row in range(2):
        eventful.on_row(row, [{f"m{index}": float(row) for index in range(MOST_METRICS + 3)}], at(row))
    found = values(eventful)
    assert sum(key.startswith("powertrain_metric[") for key in found) == MOST_METRICS
    assert (found["powertrain_dropped_metrics_total"], found["powertrain_metric[m0]"]) == (6, 1.0)


def test_only_numbers_are_taken_also_of_nested_reports() -> None:
    report = {"a": 1, 2: {"b": 0.5}, "none": None, "text": "1", "flag": False, "huge": 10**400}
    assert dict(numbers_in(report)) == {"a": 1.0, "2/b": 0.5}


class Recorder:
    """An observer that records the calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self.calls.append(name)


def test_everything_reaches_the_observer_also_when_figures_fail() -> None:
    class Failing(RunFigures):
        def on_event(self, event: ev.Fact) -> None:
            raise RuntimeError("broken")

    recorder = Recorder()
    run = MeasuredRun(Failing("r"), recorder)
    run.event(STARTED)
    run.row(1, [], 0.0)
    run.waiting(1, [0], 1.0)
    run.data("text")
    run.output(0, b"x")
    run.hold()
    run.release()
    assert recorder.calls == ["event", "row", "waiting", "data", "output", "hold", "release"]


def test_the_guide_lists_exactly_the_figures_that_exist(eventful: RunFigures) -> None:
    eventful.on_row(9, [{"loss": 0.5}], at(9))
    eventful.on_event(ev.Committed(time=at(9), attempt=2, row=9, checkpoint="c", bytes=123))
    guide = (DASHBOARD.parents[1] / "prometheus.md").read_text("utf-8")
    rows = [line for line in guide.splitlines() if line.startswith("| `powertrain_")]
    listed = {name for row in rows for name in re.findall(r"`(powertrain_\w+)`", row.split("|")[1])}
    assert listed == {family.name for family in eventful.families()}


def test_the_dashboard_of_the_guide_uses_only_figures_that_exist(eventful: RunFigures) -> None:
    eventful.on_row(9, [{"loss": 0.5}], at(9))
    eventful.on_event(ev.Committed(time=at(9), attempt=2, row=9, checkpoint="c", bytes=123))
    exported = {family.name for family in eventful.families()}
    board = json.loads(DASHBOARD.read_text("utf-8"))
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    queries += [one["definition"] for one in board["templating"]["list"] if "definition" in one]
    used = set(re.findall(r"powertrain_\w+", " ".join(queries)))
    assert used
    assert used <= exported
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
