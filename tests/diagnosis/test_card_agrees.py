"""The card never contradicts itself: one base for all times and shares, and one number for one thing."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.diagnosis import synthetic
from tests.support.examples import scaled

from powertrain.diagnosis.report import Report, diagnose, render
from powertrain.trace.recording import phases

#: Wide enough that no sentence is cut short.
WIDTH = 400
COMPUTE = {"forward", "backward", "optimizer", "inside"}
AMOUNT = r"([\d.,]+ (?:ms|s))"


@dataclass(frozen=True)
class Card:
    """A card as a reader sees it."""

    text: str
    base: float
    #: (mean seconds, share) of each phase in the table, as they are printed.
    table: dict[str, tuple[str, str]]


def read(report: Report) -> Card:
    text = render(report, WIDTH)
    (base,) = re.findall(rf"mean step(?: of the slowest rank)? after start-up: {AMOUNT}", text)
    rows = re.findall(rf"^   (\w+) +{AMOUNT} +([\d.]+ %)   rank", text, re.MULTILINE)
    assert rows
    return Card(text, seconds(base), {phase: (mean, share) for phase, mean, share in rows})


def seconds(amount: str) -> float:
    number, unit = amount.replace(",", "").split()
    return float(number) * (1e-3 if unit == "ms" else 1.0)


def percent(share: str) -> float:
    return float(share.removesuffix(" %"))


FAULTS = st.one_of(
    st.builds(synthetic.bound, st.integers(0, phases.COUNT - 1), st.floats(0.001, 0.2)),
    st.builds(synthetic.by_turns, st.sampled_from([phases.FORWARD, phases.INPUT]), st.floats(0.001, 0.1)),
    st.builds(
        synthetic.late, st.just(0), st.sampled_from([phases.BACKWARD, phases.INPUT]), st.floats(0.001, 0.1)
    ),
    st.builds(
        synthetic.every,
        st.integers(2, 40),
        st.sampled_from([phases.REPORT, phases.OUTSIDE, phases.INPUT]),
        st.floats(0.005, 0.5),
    ),
    st.builds(synthetic.first_batch, st.floats(0.1, 3.0)),
)
NOISE = st.builds(
    synthetic.Noise,
    jitter=st.floats(0.0, 0.8),
    hiccups=st.floats(0.0, 0.3),
    shortest=st.just(0.002),
    longest=st.floats(0.003, 0.2),
)


@st.composite
def recorded(draw: st.DrawFn) -> Report:
    """The diagnosis of a run of random step times, with up to three faults."""
    run = synthetic.run(
        draw(st.integers(0, 2**16)),
        *draw(st.lists(FAULTS, max_size=3)),
        ranks=draw(st.integers(1, 4)),
        steps=draw(st.integers(30, 120)),
        noise=draw(NOISE),
    )
    return diagnose(run, name="digits")


def property_of_cards(test: Any) -> Any:
    return settings(deadline=None, max_examples=scaled(200))(given(recorded())(test))


@property_of_cards
def test_every_line_speaks_of_the_same_step(report: Report) -> None:
    card = read(report)
    said = re.findall(rf"(?:of each|instead of) {AMOUNT}", card.text)
    assert {seconds(amount) for amount in said} <= {card.base}
    healthy = re.findall(rf"\d steps of {AMOUNT} on \d", card.text)
    assert {seconds(amount) for amount in healthy} <= {card.base}


@property_of_cards
def test_shares_of_the_table_are_parts_of_that_step_and_add_up_to_no_more(report: Report) -> None:
    card = read(report)
    assert sum(percent(share) for _, share in card.table.values()) <= 100 + 0.5 * len(card.table)
    for mean, share in card.table.values():
        part = 100 * seconds(mean) / card.base
        assert abs(percent(share) - part) <= 0.5 + 0.015 * part, "apart from the rounding of three numbers"


@property_of_cards
def test_a_finding_about_a_phase_agrees_with_the_row_of_that_phase(report: Report) -> None:
    card = read(report)
    for finding in report.findings:
        is_about_all = finding.kind.endswith("_bound") or finding.kind == "uneven_steps"
        if not is_about_all or finding.phase not in card.table or finding.ranks:
            continue
        mean, share = card.table[finding.phase]
        if "at least" in finding.summary:
            (time, part) = re.findall(rf"at least {AMOUNT} of each .* step \(([\d.]+ %)\)", finding.summary)[
                0
            ]
            assert seconds(time) <= seconds(mean)
            assert percent(part) <= percent(share)
        else:
            assert share in finding.summary
            if finding.kind != "checkpoint_bound":
                assert mean in finding.summary


@property_of_cards
def test_computing_is_given_one_share(report: Report) -> None:
    text = render(report, WIDTH)
    said = re.findall(r"([\d.]+ %) of the time spent computing", text)
    said += re.findall(r"computes for .* step \(([\d.]+ %)\)", text)
    assert len(set(said)) <= 1


@property_of_cards
def test_the_verdict_agrees_with_the_largest_share(report: Report) -> None:
    """Among findings of one severity the costlier comes first; "healthy" is said of runs that compute most."""
    card = read(report)
    largest = max(card.table, key=lambda phase: percent(card.table[phase][1]))
    if "healthy" in card.text:
        assert largest in COMPUTE
    by_severity: dict[str, list[float]] = {}
    for finding in report.findings:
        by_severity.setdefault(finding.severity, []).append(finding.cost)
    for severity, costs in by_severity.items():
        assert severity == "info" or costs == sorted(costs, reverse=True)
    bounds = [one for one in report.findings if one.kind.endswith("_bound") and one.severity != "info"]
    assert [one.cost for one in bounds] == sorted((one.cost for one in bounds), reverse=True)


@property_of_cards
def test_the_speed_is_that_of_the_mean_step(report: Report) -> None:
    card = read(report)
    (rate,) = re.findall(r"speed      ([\d.,]+) steps/s", card.text)
    assert float(rate.replace(",", "")) * card.base == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize("ranks", [1, 3])
def test_shares_of_a_slow_loader_are_said_once(ranks: int) -> None:
    report = diagnose(synthetic.run(3, synthetic.bound(phases.INPUT, 0.05), ranks=ranks))
    card = read(report)
    (finding,) = report.findings
    assert finding.evidence["step"] == report.mean_step_seconds
    assert np.isclose(finding.evidence["share"], finding.cost)
    assert ("at least" in finding.summary) == (ranks > 1)
    assert "median" not in card.text
