"""Functions that are compiled again and again are named, with what changed; others are not."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.diagnosis import synthetic

from powertrain.diagnosis.finding import Finding
from powertrain.diagnosis.report import diagnose
from powertrain.trace.compilations import Compilations, graph_breaks
from powertrain.trace.recording import phases


def compiled(count: int, seconds: float, *reasons: str, first: float = 1.0) -> dict[str, Any]:
    where = "train.py:7 in forward"
    return {
        "where": where,
        "count": count,
        "seconds": seconds,
        "first_seconds": first,
        "reasons": list(reasons),
    }


def sizes(*lengths: int) -> list[str]:
    return [
        f"0/{number}: tensor 'x' size mismatch at index 1. expected {old}, actual {new}"
        for number, (old, new) in enumerate(pairwise(lengths))
    ]


def findings(*functions: dict[str, Any], steps: int = 200) -> dict[str, Finding]:
    report = diagnose(synthetic.run(1, steps=steps), compiled={0: functions})
    assert not report.notes, report.notes
    return {finding.kind: finding for finding in report.findings}


def test_changing_lengths_are_named_with_the_dimension_and_the_seconds() -> None:
    found = findings(compiled(7, 4.0, *sizes(64, 72, 80, 88, 96, 104, 112)))["recompiles"]
    assert found.summary == (
        "train.py:7 in forward was compiled 7 times on rank 0, which took 3.00 s after the first time: dimension 1 "
        "of 'x' was 64, 72, 80, 88, 96 and more."
    )
    assert "dynamic=True" in found.action
    assert "mark_dynamic(x, 1)" in found.action
    assert found.severity == "warning"
    assert (found.evidence["count"], found.evidence["seconds_lost"]) == (7, 3.0)
    assert 0.3 < found.cost <= 1.0


def test_another_reason_is_quoted() -> None:
    found = findings(compiled(4, 9.0, "0/0: self.training == True", "0/1: step == 3\n  # line"))["recompiles"]
    assert found.summary.endswith("after the first time: 0/1: step == 3.")


@pytest.mark.parametrize(
    "function",
    [
        compiled(1, 30.0, first=30.0),
        compiled(2, 5.0, *sizes(64, 72)),
        compiled(6, 1.2, *sizes(1, 2, 3, 4, 5, 6)),
    ],
    ids=["once", "once more for dynamic shapes", "too quick to matter"],
)
def test_usual_compilations_are_no_finding(function: dict[str, Any]) -> None:
    assert set(findings(function)) <= {"healthy", "compute_bound"}


def test_recompilations_that_a_long_run_does_not_feel_are_no_finding() -> None:
    assert "recompiles" not in findings(compiled(4, 1.6, *sizes(1, 2, 3, 4)), steps=3000)


def test_spikes_that_they_cause_are_explained_by_them() -> None:
    def spike(times: Any, generator: Any) -> None:
        times[20::20, :, phases.FORWARD] += 0.2

    steps = synthetic.run(1, spike)
    before = {finding.kind for finding in diagnose(steps).findings}
    assert "periodic_spike" in before
    report = diagnose(steps, compiled={0: [compiled(9, 3.0, *sizes(1, 2, 3, 4, 5, 6, 7, 8, 9))]})
    kinds = [finding.kind for finding in report.findings]
    assert kinds[0] == "recompiles"
    assert "periodic_spike" not in kinds
    assert "periodic_spike" in {echo.kind for echo in report.findings[0].echoes}


@pytest.mark.parametrize("wrong", [{}, {"where": 3}, {"where": "x", "count": "many"}])
def test_facts_of_another_version_break_nothing_else(wrong: dict[str, Any]) -> None:
    report = diagnose(synthetic.run(1), compiled={0: [wrong]})
    assert any("compilations" in note for note in report.notes)
    assert report.phases


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
def test_compilations_of_torch_are_counted_with_their_reasons() -> None:
    compilations = Compilations()
    compilations.news()  # of other tests in this process

    @torch.compile(dynamic=False, backend="eager")
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    for length in (3, 4, 5, 5):
        doubled(torch.ones(2, length))
    (function,) = [one for one in compilations.news() or () if one["where"].endswith(" in doubled")]
    assert function["where"].startswith(__file__)
    assert (function["count"], len(function["reasons"])) == (3, 2)
    assert "size mismatch at index 1. expected 3, actual 4" in function["reasons"][0]
    assert function["seconds"] >= function["first_seconds"] > 0
    assert compilations.news() is None, "nothing new"


@pytest.mark.usefixtures("fresh_compiler")
def test_reasons_of_broken_graphs_are_read_from_the_compiler() -> None:
    @torch.compile(backend="eager")
    def step(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    before = sum(graph_breaks().values())
    step(torch.ones(2))
    assert sum(graph_breaks().values()) > before
