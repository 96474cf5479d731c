"""Healthy runs stay healthy, whatever the machine does to them."""

from __future__ import annotations

import pytest
from tests.diagnosis import synthetic
from tests.diagnosis.synthetic import HEAVY, QUIET, Noise

from powertrain.diagnosis.finding import Finding
from powertrain.diagnosis.rules import step_time, stragglers
from powertrain.diagnosis.tables.steps import StepTable


def wrong(steps: StepTable) -> list[Finding]:
    """All that says that something should be changed."""
    found = [*step_time.find(steps), *stragglers.find(steps)]
    return [finding for finding in found if finding.severity != "info"]


@pytest.mark.parametrize(
    ("count", "options"),
    [
        (200, {}),
        (150, {"noise": HEAVY}),
        (60, {"steps": 1000}),
        (60, {"steps": 1000, "noise": HEAVY}),
        (40, {"noise": QUIET}),
        (40, {"noise": Noise(hiccups=0.05, longest=0.1)}),
        (40, {"steps": 40, "noise": HEAVY}),
    ],
)
def test_healthy_runs_are_healthy(count: int, options: dict[str, object]) -> None:
    for seed in range(count):
        assert wrong(synthetic.run(seed, ranks=2 + seed % 2, **options)) == []  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [1, 8])
def test_healthy_runs_of_one_and_of_many_ranks_are_healthy(ranks: int) -> None:
    for seed in range(40):
        assert wrong(synthetic.run(seed, ranks=ranks, noise=HEAVY)) == []
