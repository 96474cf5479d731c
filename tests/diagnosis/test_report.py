"""The whole diagnosis: one root cause leads, its echoes are folded, the tables add up, and JSON brings it all back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.diagnosis import synthetic
from tests.diagnosis.looks import by_rank, looks
from tests.support.examples import scaled

from powertrain.diagnosis import words
from powertrain.diagnosis.card import LINES
from powertrain.diagnosis.finding import SEVERITIES, Finding
from powertrain.diagnosis.goodput import TimeShare
from powertrain.diagnosis.report import diagnose, from_json, render, to_json
from powertrain.diagnosis.rules import memory, stragglers
from powertrain.diagnosis.rules.root_cause import fold
from powertrain.diagnosis.summary import SCHEMA_VERSION, Report, Throughput
from powertrain.errors import StorageError
from powertrain.trace.recording import phases


def found(kind: str, severity: str = "warning", **fields: object) -> Finding:
    return Finding(kind=kind, severity=severity, summary=f"{kind} is so.", **fields)  # type: ignore[arg-type]


def tree(findings: tuple[Finding, ...]) -> dict[str, list[str]]:
    return {one.kind: sorted(echo.kind for echo in one.echoes) for one in findings}


# --------------------------------------------------------------------------- causes and echoes


def test_the_most_severe_comes_first_then_the_costliest() -> None:
    ordered = fold(
        [
            found("input_bound", cost=0.2),
            found("outside_bound", cost=0.6),
            found("compute_bound", "info", cost=0.9),
            found("host_memory_leak", "critical"),
        ]
    )
    assert [one.kind for one in ordered] == [
        "host_memory_leak",
        "outside_bound",
        "input_bound",
        "compute_bound",
    ]


@pytest.mark.parametrize(
    ("causes", "expected"),
    [
        (
            [
                found("input_straggler", ranks=(1,)),
                found("gpu_idle", ranks=(0, 1)),
                found("collective_bound"),
            ],
            {"input_straggler": ["collective_bound", "gpu_idle"]},
        ),
        ([found("input_bound"), found("gpu_idle", ranks=(0,), cost=0.9)], {"input_bound": ["gpu_idle"]}),
        (
            [
                found("host_memory_leak", ranks=(1,)),
                found("memory_pressure", "critical", ranks=(0, 1), evidence={"where": "host"}),
            ],
            {"host_memory_leak": ["memory_pressure"]},
        ),
        (
            [
                found("device_memory_creep", ranks=(1,)),
                found("memory_pressure", ranks=(0, 1), evidence={"where": "host"}),
                found("memory_imbalance", ranks=(1,), evidence={"where": "device"}),
            ],
            {"device_memory_creep": ["memory_imbalance"], "memory_pressure": []},
        ),
        (
            [
                found("gpu_throttled", ranks=(2,)),
                found("forward_straggler", ranks=(2,)),
                found("gpu_idle", ranks=(0,)),
            ],
            {"gpu_throttled": ["forward_straggler", "gpu_idle"]},
        ),
        (
            [
                found("fragmented_memory", evidence={"where": "device", "allocations": 90.0}),
                found("gpu_idle", ranks=(0,), cost=0.8),
            ],
            {"fragmented_memory": ["gpu_idle"]},
        ),
        (
            [
                found("fragmented_memory", evidence={"where": "device", "allocations": 2.0}),
                found("gpu_idle", ranks=(0,), cost=0.8),
            ],
            {"gpu_idle": [], "fragmented_memory": []},
        ),
        (
            [
                found("fragmented_memory", cost=0.5, evidence={"where": "device", "allocations": 2.0}),
                found("gpu_idle", ranks=(0,), cost=0.8),
            ],
            {"fragmented_memory": ["gpu_idle"]},
        ),
        (
            [found("gpu_throttled", "info", ranks=(2,)), found("forward_straggler", ranks=(2,))],
            {"forward_straggler": [], "gpu_throttled": []},
        ),
        (
            [found("gpu_throttled", ranks=(0,)), found("forward_straggler", ranks=(2,))],
            {"forward_straggler": [], "gpu_throttled": []},
        ),
        (
            [found("threads_oversubscribed", ranks=(0, 1)), found("alternating_straggler", cost=0.3)],
            {"threads_oversubscribed": ["alternating_straggler"]},
        ),
        (
            [found("threads_oversubscribed", ranks=(0, 1)), found("collective_bound", cost=0.3)],
            {"threads_oversubscribed": ["collective_bound"]},
        ),
        (
            [
                found("slow_node", ranks=(2, 3)),
                found("backward_straggler", ranks=(3,)),
                found("collective_bound"),
            ],
            {"slow_node": ["backward_straggler", "collective_bound"]},
        ),
    ],
)
def test_echoes_are_folded_under_their_cause(causes: list[Finding], expected: dict[str, list[str]]) -> None:
    assert tree(fold(causes)) == expected
    assert tree(fold(causes[::-1])) == expected


def test_a_cause_is_as_severe_as_what_it_explains_and_then_leads() -> None:
    shared = found("machine_shared", "info", ranks=(0, 1))
    folded = fold([found("compute_bound", "info"), shared, found("collective_bound", cost=0.3)])
    assert [(one.kind, one.severity, one.cost) for one in folded] == [
        ("machine_shared", "warning", 0.3),
        ("compute_bound", "info", 0.0),
    ]
    assert fold([found("input_bound", cost=0.2), found("gpu_idle", cost=0.8)])[0].cost == 0.2


@pytest.mark.parametrize("kind", ["machine_shared", "cpu_stolen"])
def test_a_rank_that_is_late_in_every_step_is_not_blamed_on_other_load_of_the_machine(kind: str) -> None:
    shared = found(kind, "info", ranks=(0, 1), evidence={"stolen_cores": 0.6, "cores": 4.0})
    now_and_then, always = (
        found("alternating_straggler", cost=0.4, evidence={"late_in": often}) for often in (0.7, 1.0)
    )
    assert tree(fold([shared, now_and_then])) == {kind: ["alternating_straggler"]}
    assert tree(fold([shared, always])) == {"alternating_straggler": [], kind: []}


def test_cores_that_were_stolen_explain_no_more_than_they_can_cost_and_nothing_elsewhere() -> None:
    stolen = found("cpu_stolen", "info", ranks=(0, 1), evidence={"stolen_cores": 0.4, "cores": 4.0})
    little, much = (found("collective_bound", cost=cost) for cost in (0.25, 0.7))
    assert tree(fold([stolen, little])) == {"cpu_stolen": ["collective_bound"]}
    assert tree(fold([stolen, much])) == {"collective_bound": [], "cpu_stolen": []}
    elsewhere = found("alternating_straggler", cost=0.2, ranks=(2, 3), evidence={"late_in": 0.5})
    assert tree(fold([stolen, elsewhere])) == {"alternating_straggler": [], "cpu_stolen": []}


_KINDS = [
    *(
        "input_bound",
        "outside_bound",
        "collective_bound",
        "input_straggler",
        "forward_straggler",
        "slow_node",
    ),
    *("alternating_straggler", "gpu_idle", "gpu_throttled", "threads_oversubscribed", "host_memory_leak"),
    *("device_memory_creep", "memory_pressure", "memory_imbalance", "periodic_spike", "incomplete"),
    *("machine_shared", "cpu_stolen"),
]
_findings = st.builds(
    found,
    st.sampled_from(_KINDS),
    st.sampled_from(SEVERITIES),
    cost=st.floats(0, 1),
    ranks=st.lists(st.integers(0, 3), max_size=3, unique=True).map(lambda ranks: tuple(sorted(ranks))),
    evidence=st.sampled_from([{}, {"where": "host"}, {"where": "device"}]),
)


@given(st.lists(_findings, max_size=8))
def test_folding_loses_nothing_but_repeats(findings: list[Finding]) -> None:
    def key(one: Finding) -> tuple[object, ...]:
        return one.kind, one.phase, one.ranks, one.evidence.get("where")

    folded = fold(findings)
    kept = [key(one) for cause in folded for one in (cause, *cause.echoes)]
    assert sorted(map(str, kept)) == sorted({str(key(one)) for one in findings})
    assert bool(folded) == bool(findings)


# --------------------------------------------------------------------------- whole runs


def test_a_healthy_run_is_called_healthy() -> None:
    for seed in range(20):
        report = diagnose(synthetic.run(seed), by_rank(looks(0, rss=500.0), looks(1, rss=510.0)))
        assert report.findings[0].kind == "healthy", report.findings
        assert "healthy" in render(report).splitlines()[0]
        assert not report.notes


def test_a_late_rank_leads_and_is_all_that_is_wrong() -> None:
    steps = synthetic.run(3, synthetic.late(1, phases.INPUT, 0.03), ranks=3)
    report = diagnose(steps)
    troubles = [one for one in report.findings if one.severity != "info"]
    assert [(one.kind, one.ranks) for one in troubles] == [("input_straggler", (1,))]


def test_too_few_steps_are_not_called_healthy() -> None:
    report = diagnose(synthetic.run(0, steps=5))
    assert [one.kind for one in report.findings] == ["incomplete"]
    assert diagnose(synthetic.run(0, steps=0)).step_seconds == 0.0


def test_phase_shares_add_up_and_medians_are_those_of_the_run() -> None:
    report = diagnose(synthetic.run(1))
    assert sum(time.share for time in report.phases) == pytest.approx(1)
    times = {time.phase: time for time in report.phases}
    assert times["forward"].seconds == pytest.approx(0.010, rel=0.1)
    assert "h2d" not in times
    assert [rank.rank for rank in report.ranks] == [0, 1]
    for rank in report.ranks:
        assert sum(time.share for time in rank.phases) == pytest.approx(1)
        assert rank.step_seconds == pytest.approx(report.step_seconds, rel=0.1)


def test_hosts_are_named_where_the_tables_do_not_name_them() -> None:
    report = diagnose(synthetic.run(0, hosts=["", "x"]), hosts={0: "node-a", 1: "node-b"})
    assert [rank.host for rank in report.ranks] == ["node-a", "x"]


def test_throughput_counts_all_ranks_and_mfu_needs_both_numbers() -> None:
    steps = synthetic.run(0, ranks=2)
    steps = replace(steps, tokens=np.full((200, 2), 1000.0))
    speed = diagnose(steps, flops_per_sample=1e9, peak_flops=1e11).throughput
    assert speed.steps_per_second == pytest.approx(1 / 0.030, rel=0.2)
    assert speed.samples_per_second == pytest.approx(64 * speed.steps_per_second)
    assert speed.tokens_per_second == pytest.approx(2000 * speed.steps_per_second)
    assert speed.mfu == pytest.approx(speed.samples_per_second * 1e9 / 2e11)
    assert diagnose(steps, flops_per_sample=1e9).throughput.mfu is None
    assert diagnose(steps).throughput.flops_per_second == 0.0


def test_counted_operations_of_a_step_give_the_utilisation_also_where_a_rank_has_none() -> None:
    steps = synthetic.run(2, synthetic.bound(phases.FORWARD, 0.030))
    both = diagnose(steps, step_flops={0: 4e9, 1: 2e9}, peak_flops=1e12).throughput
    assert both.flops_per_second == pytest.approx(6e9 * both.steps_per_second)
    assert both.mfu == pytest.approx(both.flops_per_second / 2e12)
    one = diagnose(steps, step_flops={0: 4e9, 1: 0.0}, peak_flops=1e12).throughput
    assert one.flops_per_second == pytest.approx(8e9 * one.steps_per_second)
    given = diagnose(steps, flops_per_sample=1e9, step_flops={0: 4e9}).throughput
    assert given.flops_per_second == pytest.approx(given.samples_per_second * 1e9)
    assert f", {words.flops(both.flops_per_second)}, MFU " in render(
        diagnose(steps, step_flops={0: 4e9, 1: 2e9}, peak_flops=1e12)
    )


def test_the_card_says_how_much_of_its_time_a_run_trained() -> None:
    time = (
        TimeShare(cause="training", seconds=90.0, share=0.9),
        TimeShare(cause="startup", seconds=1.0, share=0.01),
        TimeShare(cause="redone", seconds=8.8, share=0.088),
        TimeShare(cause="save", seconds=0.2, share=0.002),
    )
    card = render(Report(time=time))
    assert (
        "goodput    90 % of 100 s in training; training that a restart repeated 9 %, starting up 1 %" in card
    )
    assert "saving" not in card
    assert "goodput" not in render(Report())


def test_a_thinned_run_says_so_and_keeps_its_speed() -> None:
    whole = synthetic.run(0, steps=600)
    kept = np.concatenate([np.arange(0, 300, 4), np.arange(300, 600)])
    columns = ("phases", "device", "start", "memory", "peak_memory", "fetch", "flags", "samples", "tokens")
    thinned = replace(
        whole, numbers=whole.numbers[kept], **{name: getattr(whole, name)[kept] for name in columns}
    )
    report = diagnose(thinned, notes=["Something else."])
    assert report.notes[0].startswith("Of 600 steps 375 are kept: up to step 300")
    assert report.notes[1] == "Something else."
    expected = diagnose(whole).throughput.steps_per_second
    assert report.throughput.steps_per_second == pytest.approx(expected, rel=0.01)


def test_a_finder_that_fails_costs_only_its_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> list[Finding]:
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr(stragglers, "find", fail)
    report = diagnose(synthetic.run(0, synthetic.bound(phases.INPUT, 0.05)))
    assert [one.kind for one in report.findings if one.severity != "info"] == ["input_bound"]
    assert "The check of late ranks failed (ZeroDivisionError: by nothing)" in report.notes[0]
    assert not any(one.kind == "healthy" for one in diagnose(synthetic.run(0)).findings)


def test_nan_everywhere_does_not_raise() -> None:
    steps = synthetic.run(0)
    nothing: Any = np.full_like(steps.start, np.nan)
    for column in ("start", "memory", "peak_memory", "fetch", "samples", "tokens"):
        steps = replace(steps, **{column: nothing})
    broken = replace(steps, phases=np.full_like(steps.phases, np.nan))
    for one in (steps, broken):
        report = diagnose(one, by_rank(looks(0, rss=np.nan), looks(1, 1)))
        assert from_json(to_json(report)) == report
        render(report)


# --------------------------------------------------------------------------- JSON


@pytest.mark.parametrize(
    "fault", [None, synthetic.late(1, phases.FORWARD, 0.02), synthetic.every(20, phases.OUTSIDE, 0.3)]
)
def test_json_brings_everything_back(fault: synthetic.Fault | None) -> None:
    steps = synthetic.run(2, *([fault] if fault else []), ranks=3)
    tables = by_rank(*(looks(rank, rss=500 + 2.0 * np.arange(200)) for rank in range(3)))
    report = diagnose(steps, tables, name="digits", notes=["A note."])
    data = to_json(report)
    assert from_json(data) == report
    plain = msgspec.json.decode(data)
    assert plain["schema_version"] == SCHEMA_VERSION
    assert plain["name"] == "digits"
    assert data.endswith(b"}\n")


def test_numbers_of_numpy_and_what_is_no_number_survive_json(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = found(
        "input_bound",
        ranks=(np.int64(1),),
        cost=np.float64(0.5),
        evidence={"a": np.float32(2), "b": np.nan, "c": (np.int64(3), None), "d": {"e": np.arange(2)}},
    )
    monkeypatch.setattr(memory, "find", lambda *_: [odd])
    report = diagnose(synthetic.run(0))
    (finding,) = (one for one in from_json(to_json(report)).findings if one.kind == "input_bound")
    assert finding.evidence == {"a": 2.0, "b": None, "c": [3, None], "d": {"e": [0, 1]}}
    assert (finding.ranks, finding.cost) == ((1,), 0.5)


def test_a_later_version_and_something_else_are_refused_in_words() -> None:
    later = to_json(Report(schema_version=SCHEMA_VERSION + 1))
    with pytest.raises(StorageError, match=f"schema version {SCHEMA_VERSION + 1}"):
        from_json(later)
    for data in (b"", b"[]", b'{"findings": 3}', b'{"schema_version": 1, "findings": 3}', b"\xff"):
        with pytest.raises(StorageError, match="not a summary"):
            from_json(data)


def test_a_field_that_is_added_later_does_not_hinder_reading() -> None:
    plain = msgspec.json.decode(to_json(Report(name="x")))
    plain["added"] = {"later": 1}
    assert from_json(msgspec.json.encode(plain)).name == "x"


# --------------------------------------------------------------------------- the card


def test_the_card_says_what_is_wrong_what_to_do_and_where_the_time_went() -> None:
    steps = synthetic.run(0, synthetic.bound(phases.INPUT, 0.03))
    card = render(diagnose(steps, name="digits", flops_per_sample=1e9, peak_flops=1e12))
    lines = card.splitlines()
    assert lines[0].startswith("diagnosis of digits: 1 finding (200 steps, 2 ranks, the first ")
    assert any("input_bound: " in line for line in lines)
    assert any(line.startswith("   do: ") for line in lines)
    assert any(line.split()[0] == "input" and "rank " in line for line in lines if line.strip())
    assert "samples/s" in lines[-1]
    assert "MFU" in lines[-1]


def test_an_empty_report_is_a_card_too() -> None:
    assert render(Report()) == "diagnosis: no action needed (0 steps, 0 ranks)"


_words = st.text("abcdefg ", max_size=400).map(lambda text: f"x{text}")
_reports = st.builds(
    Report,
    name=st.text("abc", max_size=20),
    findings=st.lists(
        st.builds(
            Finding,
            kind=st.sampled_from(_KINDS),
            severity=st.sampled_from(SEVERITIES),
            summary=_words,
            action=_words,
            echoes=st.lists(_findings, max_size=4).map(tuple),
        ),
        max_size=12,
    ).map(tuple),
    notes=st.lists(_words, max_size=4).map(tuple),
    throughput=st.builds(Throughput, steps_per_second=st.floats(0, 1e6), mfu=st.none() | st.floats(0, 1)),
)


@given(_reports, st.integers(20, 160))
@settings(max_examples=scaled(60))
def test_a_card_is_never_longer_than_it_may_be(report: Report, width: int) -> None:
    full = msgspec.structs.replace(
        report, phases=_SOME.phases, ranks=_SOME.ranks, step_seconds=_SOME.step_seconds
    )
    for one in (report, full):
        lines = render(one, width).splitlines()
        assert len(lines) <= LINES
        said = sum(line.lstrip("! ").partition(":")[0] in _KINDS for line in lines)
        if one.findings and said < len(one.findings):
            assert any("more in final_summary.json" in line for line in lines)


_SOME = diagnose(synthetic.run(0, ranks=3))
