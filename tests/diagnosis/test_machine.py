"""What a machine says of itself: idle GPUs, throttled GPUs, more threads than cores, cores that others use."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.diagnosis import synthetic
from tests.diagnosis.looks import by_rank, looks
from tests.support.examples import scaled

from powertrain.diagnosis.rules import machine
from powertrain.diagnosis.tables.samples import Samples
from powertrain.trace.machine.samples import HARDWARE, POWER, THERMAL
from powertrain.trace.recording import phases

STEPS = synthetic.run(0)
NO_STEPS = synthetic.run(0, steps=0)


def gpu(rank: int = 0, count: int = 50, host: str = "host-a", **fields: Any) -> Samples:
    return looks(rank, count, host, **{"gpu_memory_total": 80_000.0, "gpu_busy": 0.95, **fields})


# --------------------------------------------------------------------------- idle


@pytest.mark.parametrize(("busy", "found"), [(0.95, False), (0.55, False), (0.4, True), (0.0, True)])
def test_a_gpu_that_works_less_than_half_of_the_time_is_idle(busy: float, found: bool) -> None:
    findings = machine.find(STEPS, by_rank(gpu(0), gpu(1, gpu_busy=busy)))
    assert [one.ranks for one in findings if one.kind == "gpu_idle"] == [(1,)] * found
    if found:
        assert findings[0].cost == pytest.approx(1 - busy)


def test_noise_around_a_busy_gpu_is_not_idleness() -> None:
    for seed in range(50):
        busy = np.clip(np.random.default_rng(seed).normal(0.8, 0.3, 50), 0, 1)
        assert machine.find(STEPS, by_rank(gpu(gpu_busy=busy))) == []


def test_an_idle_gpu_says_what_it_waits_for() -> None:
    waiting = synthetic.run(0, synthetic.bound(phases.INPUT, 0.05))
    (finding,) = machine.find(waiting, by_rank(gpu(gpu_busy=0.2)))
    assert finding.phase == "input"
    assert "loader workers" in finding.action
    (finding,) = machine.find(STEPS, by_rank(gpu(gpu_busy=0.2)))
    assert finding.phase == ""
    assert "larger batch" in finding.action


def test_without_a_gpu_or_with_too_few_looks_nothing_is_idle() -> None:
    assert machine.find(STEPS, by_rank(looks(count=50))) == []
    assert machine.find(STEPS, by_rank(gpu(count=machine.LEAST_LOOKS - 1, gpu_busy=0.0))) == []


# --------------------------------------------------------------------------- throttled


@pytest.mark.parametrize(
    ("bits", "severity", "word"),
    [
        (THERMAL, "warning", "cooling"),
        (HARDWARE, "warning", "power supply"),
        (POWER, "info", "power limit"),
        (THERMAL | POWER, "warning", "cooling"),
    ],
)
def test_a_throttled_gpu_is_named_with_its_reason(bits: int, severity: str, word: str) -> None:
    throttle = np.where(np.arange(50) % 3 == 0, bits, 0)
    (finding,) = machine.find(STEPS, by_rank(gpu(0), gpu(1, throttle=throttle, gpu_temperature=91.0)))
    assert (finding.kind, finding.severity, finding.ranks) == ("gpu_throttled", severity, (1,))
    assert word in finding.action
    assert finding.evidence["temperature"] == 91.0


def test_a_defect_is_not_hidden_among_gpus_that_only_reach_their_power_limit() -> None:
    (finding,) = machine.find(STEPS, by_rank(gpu(0, throttle=POWER), gpu(1, throttle=THERMAL | POWER)))
    assert (finding.ranks, finding.severity) == ((1,), "warning")


def test_two_looks_at_a_throttled_gpu_are_no_finding() -> None:
    throttle = np.zeros(50, int)
    throttle[:2] = THERMAL
    assert machine.find(STEPS, by_rank(gpu(throttle=throttle))) == []


# --------------------------------------------------------------------------- threads


def cpu(rank: int, threads: float, busy: float = 4.0, cores: float = 4.0, host: str = "host-a") -> Samples:
    return looks(rank, 30, host, threads=threads, host_cores=cores, host_cpu=busy)


def test_more_threads_than_cores_are_reported_with_the_number_each_rank_should_have() -> None:
    (finding,) = machine.find(STEPS, by_rank(cpu(0, 4), cpu(1, 4)))
    assert (finding.kind, finding.ranks) == ("threads_oversubscribed", (0, 1))
    assert "OMP_NUM_THREADS=2" in finding.action
    assert finding.evidence["threads"] == 8


@pytest.mark.parametrize(
    "ranks",
    [
        [cpu(0, 2), cpu(1, 2)],
        [cpu(0, 4, busy=1.0), cpu(1, 4, busy=1.0)],
        [cpu(rank, 1, busy=2.0, cores=2.0) for rank in range(3)],
        [cpu(rank, 1, busy=2.0, cores=2.0) for rank in range(8)],
    ],
    ids=["as many as cores", "cores idle", "three ranks of one thread on two cores", "too many ranks"],
)
def test_threads_that_fewer_could_not_help_are_no_finding(ranks: list[Samples]) -> None:
    assert machine.find(STEPS, by_rank(*ranks)) == []


def test_only_the_crowded_host_is_named() -> None:
    tables = by_rank(cpu(0, 1, host="a"), cpu(1, 1, host="a"), cpu(2, 8, host="b"), cpu(3, 8, host="b"))
    (finding,) = machine.find(STEPS, tables)
    assert (finding.ranks, finding.hosts) == ((2, 3), ("b",))


# --------------------------------------------------------------------------- others


def beside(rank: int, own: float, busy: float, host: str = "host-a") -> Samples:
    """A rank that keeps ``own`` cores busy, on a host of four of which ``busy`` are."""
    return looks(rank, 30, host, threads=1, host_cores=4.0, host_cpu=busy, cpu=own)


def test_cores_that_others_keep_busy_are_reported_with_number_and_node() -> None:
    tables = by_rank(beside(0, 1.0, 2.0, "a"), beside(1, 0.5, 3.9, "b"), beside(2, 0.9, 3.9, "b"))
    (finding,) = machine.find(STEPS, tables)
    assert (finding.kind, finding.severity) == ("machine_shared", "info")
    assert (finding.ranks, finding.hosts) == ((1, 2), ("b",))
    assert finding.evidence["others_cores"] == pytest.approx(2.5, abs=0.01)
    assert "2.5 of the 4 cores on b" in finding.summary


@pytest.mark.parametrize(
    "ranks",
    [
        [beside(0, 0.5, 2.5), beside(1, 0.5, 2.5)],
        [beside(0, 1.8, 4.0), beside(1, 1.8, 4.0)],
        [beside(0, 0.0, 4.0), beside(1, 1.0, 4.0)],
    ],
    ids=["a core is free", "the run's own work", "a rank whose own use is not known"],
)
def test_cores_that_are_free_or_the_runs_own_are_no_finding(ranks: list[Samples]) -> None:
    assert machine.find(STEPS, by_rank(*ranks)) == []


# --------------------------------------------------------------------------- cores that are taken away


def robbed(rank: int, stolen: float, host: str) -> Samples:
    return looks(rank, 30, host, threads=1, host_cores=4.0, host_cpu=2.0, cpu=1.0, stolen=stolen)


def test_cores_that_a_virtual_machine_does_not_get_are_reported_with_number_and_node() -> None:
    tables = by_rank(robbed(0, 0.0, "a"), robbed(1, 0.7, "b"), robbed(2, 0.7, "b"), robbed(3, 0.1, "c"))
    (finding,) = machine.find(STEPS, tables)
    assert (finding.kind, finding.severity) == ("cpu_stolen", "info")
    assert (finding.ranks, finding.hosts) == ((1, 2), ("b",))
    assert finding.evidence["stolen_cores"] == pytest.approx(0.7, abs=0.01)
    assert "gives 0.7 of the 4 cores on b to other virtual machines" in finding.summary


# --------------------------------------------------------------------------- whatever the numbers are


@given(st.permutations(range(3)))
@settings(max_examples=scaled(6))
def test_permuting_ranks_permutes_findings(order: list[int]) -> None:
    tables = [gpu(0), gpu(1, gpu_busy=0.1), gpu(2, throttle=THERMAL)]
    moved = {place: replace(tables[rank], rank=place) for place, rank in enumerate(order)}
    before, after = machine.find(NO_STEPS, by_rank(*tables)), machine.find(NO_STEPS, moved)
    assert [one.kind for one in before] == ["gpu_idle", "gpu_throttled"]
    assert [(one.kind, tuple(order[rank] for rank in one.ranks)) for one in after] == [
        (one.kind, one.ranks) for one in before
    ]


_anything = st.one_of(st.floats(width=32), st.just(float("nan")), st.just(0.0))


@given(st.integers(0, 15), st.lists(_anything, min_size=8, max_size=8), st.integers(0, 7))
@settings(max_examples=scaled(80))
def test_no_number_and_no_length_makes_it_raise(count: int, values: list[float], bits: int) -> None:
    names = (
        "gpu_busy",
        "gpu_memory_total",
        "cpu",
        "threads",
        "host_cores",
        "host_cpu",
        "gpu_temperature",
        "stolen",
    )
    fields: dict[str, Any] = dict(zip(names, values, strict=True))
    tables = by_rank(*(looks(rank, count, throttle=bits, **fields) for rank in range(2)))
    machine.find(STEPS, tables)
    machine.find(NO_STEPS, tables)
