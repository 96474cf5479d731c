"""Memory findings: growth is distinguished from noise, jumps and plateaus; shortage and imbalance are lasting ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.diagnosis import synthetic
from tests.diagnosis.looks import by_rank, looks
from tests.support.examples import scaled

from powertrain.diagnosis.finding import Finding
from powertrain.diagnosis.rules import memory
from powertrain.diagnosis.rules.trend import steady_growth
from powertrain.diagnosis.tables.steps import Floats, StepTable

_COUNTS = (30, 64, 200)
Series = Callable[[np.random.Generator, int], Floats]


def only(findings: list[Finding], kind: str) -> Finding:
    (found,) = [finding for finding in findings if finding.kind == kind]
    return found


def kinds(findings: list[Finding]) -> list[str]:
    return [finding.kind for finding in findings]


def steps_with(memory: Floats, peak: Floats | None = None, hosts: list[str] | None = None) -> StepTable:
    """A healthy run whose device memory at the end of steps, and at most within them, is as given."""
    steps = synthetic.run(0, ranks=memory.shape[1], steps=len(memory), hosts=hosts)
    return replace(steps, memory=memory, peak_memory=memory if peak is None else peak)


NO_STEPS = synthetic.run(0, steps=0)

# --------------------------------------------------------------------------- what does not grow


def white(random: np.random.Generator, count: int) -> Floats:
    return 500 + random.normal(0, random.choice([0.1, 5.0, 100.0]), count)


def random_walk(random: np.random.Generator, count: int) -> Floats:
    return 500 + random.normal(0, 5, count).cumsum()


def heavy_tailed(random: np.random.Generator, count: int) -> Floats:
    return 500 + 5 * random.standard_t(2, count)


def one_jump(random: np.random.Generator, count: int) -> Floats:
    return 500 + random.normal(0, 5, count) + 200.0 * (np.arange(count) >= random.integers(0, count))


def jumps_then_plateau(random: np.random.Generator, count: int) -> Floats:
    values = 500 + random.normal(0, random.choice([0.1, 1.0, 5.0, 20.0]), count)
    for _ in range(random.integers(2, 7)):
        values += random.uniform(5, 200) * (np.arange(count) >= random.integers(0, int(0.7 * count)))
    return values


def filling_up(random: np.random.Generator, count: int) -> Floats:
    settles = count * random.uniform(0.02, 0.12)
    return 500 + random.normal(0, 5, count) + 300 * (1 - np.exp(-np.arange(count) / settles))


@pytest.mark.parametrize(
    "series", [white, random_walk, heavy_tailed, one_jump, jumps_then_plateau, filling_up]
)
def test_what_does_not_keep_growing_never_counts_as_growth(series: Series) -> None:
    found = [
        (seed, count)
        for seed in range(1000)
        for count in (_COUNTS[seed % 3],)
        if steady_growth(np.arange(count, dtype=float), series(np.random.default_rng(seed), count))
    ]
    allowed = 1 if series is random_walk else 0  # which does climb without a cause, now and then
    assert len(found) <= allowed, found


def test_noise_and_jumps_in_looks_and_steps_are_no_finding() -> None:
    for seed in range(30):
        random = np.random.default_rng(seed)
        for series in (white, one_jump, jumps_then_plateau):
            values = series(random, 200)
            of_steps = steps_with(np.stack([values, series(random, 200)], axis=1))
            found = kinds(memory.find(of_steps, by_rank(looks(0, rss=values), looks(1, rss=values))))
            assert not {"host_memory_leak", "device_memory_creep"} & set(found)


# --------------------------------------------------------------------------- what does


def leaking(seed: int, slope: float = 1.0, noise: float = 5.0, count: int = 200) -> Floats:
    return 500 + slope * np.arange(count) + np.random.default_rng(seed).normal(0, noise, count)


@pytest.mark.parametrize("seed", range(40))
def test_a_mebibyte_a_step_in_noise_of_five_is_found_with_its_slope(seed: int) -> None:
    finding = only(
        memory.find(NO_STEPS, by_rank(looks(0, rss=500.0), looks(1, rss=leaking(seed)))), "host_memory_leak"
    )
    assert finding.ranks == (1,)
    assert finding.evidence["mib_per_step"] == [pytest.approx(1.0, rel=0.2)]
    assert finding.evidence["mib_per_minute"] == [pytest.approx(60.0, rel=0.2)]


@given(
    slope=st.floats(0.5, 50), noise=st.floats(0, 2), start=st.floats(100, 1000), count=st.integers(150, 400)
)
@settings(max_examples=scaled(60))
def test_any_clear_leak_is_found(slope: float, noise: float, start: float, count: int) -> None:
    random = np.random.default_rng(0)
    trend = steady_growth(
        np.arange(count, dtype=float), start + slope * np.arange(count) + random.normal(0, noise, count)
    )
    assert trend is not None
    assert trend.low <= trend.slope <= trend.high
    assert trend.slope == pytest.approx(slope, rel=0.1)


def test_nine_of_ten_intervals_and_more_hold_the_true_slope() -> None:
    trends = [steady_growth(np.arange(200, dtype=float), leaking(seed)) for seed in range(200)]
    assert sum(trend is not None and trend.low <= 1.0 <= trend.high for trend in trends) >= 180


def test_a_leak_that_begins_halfway_is_found() -> None:
    values = 500 + 3.0 * np.maximum(0, np.arange(300) - 150) + np.random.default_rng(1).normal(0, 2, 300)
    finding = only(memory.find(NO_STEPS, by_rank(looks(count=300, rss=values))), "host_memory_leak")
    assert finding.evidence["mib_per_step"] == [pytest.approx(3.0, rel=0.2)]


def test_a_leak_says_when_the_machine_is_full() -> None:
    machine = looks(rss=leaking(0), ram_used=8000.0 + np.arange(200), ram_total=16000.0)
    finding = only(memory.find(NO_STEPS, by_rank(machine)), "host_memory_leak")
    assert finding.evidence["seconds_until_full"] == pytest.approx((16000 - 8199) / 1.0, rel=0.1)
    assert finding.severity == "warning"
    assert "full in 2.1 hours" in finding.summary or "full in 2.2 hours" in finding.summary


def test_ranks_that_leak_together_fill_their_host_together() -> None:
    alone, beside = (
        only(
            memory.find(
                NO_STEPS,
                by_rank(
                    *(
                        looks(rank, rss=leaking(rank), ram_used=8000.0, ram_total=16000.0)
                        for rank in range(ranks)
                    )
                ),
            ),
            "host_memory_leak",
        )
        for ranks in (1, 4)
    )
    assert beside.ranks == (0, 1, 2, 3)
    assert beside.evidence["seconds_until_full"] == pytest.approx(
        alone.evidence["seconds_until_full"] / 4, rel=0.1
    )
    assert beside.severity == "critical"


def test_a_leak_without_steps_is_reported_by_the_minute() -> None:
    finding = only(memory.find(NO_STEPS, by_rank(looks(step=0, rss=leaking(0)))), "host_memory_leak")
    assert finding.evidence["mib_per_step"] == [None]
    assert finding.evidence["mib_per_minute"] == [pytest.approx(60, rel=0.1)]
    assert "a step" not in finding.summary


def test_growth_too_small_to_matter_is_no_finding() -> None:
    assert memory.find(NO_STEPS, by_rank(looks(rss=500 + 0.05 * np.arange(200)))) == []
    assert memory.find(NO_STEPS, by_rank(looks(rss=50_000 + 1.0 * np.arange(200)))) == []


def test_tensors_kept_from_every_step_are_device_memory_creep() -> None:
    grows = np.stack([np.full(200, 300.0), 300 + 2.0 * np.arange(200)], axis=1)
    device: dict[str, Any] = {"gpu_memory": 10_000.0, "gpu_memory_total": 80_000.0}
    found = memory.find(steps_with(grows), by_rank(looks(0, **device), looks(1, **device)))
    finding = only(found, "device_memory_creep")
    assert finding.ranks == (1,)
    assert finding.evidence["mib_per_step"] == [pytest.approx(2.0, rel=0.05)]
    assert finding.evidence["seconds_until_full"] > 0


def test_creep_is_seen_in_looks_where_steps_do_not_know_the_memory() -> None:
    found = memory.find(NO_STEPS, by_rank(looks(gpu_memory=leaking(3), gpu_memory_total=80_000.0)))
    assert kinds(found) == ["device_memory_creep"]


# --------------------------------------------------------------------------- pressure


@pytest.mark.parametrize(("used", "found"), [(0.90, False), (0.919, False), (0.93, True), (0.99, True)])
def test_pressure_needs_more_than_92_percent(used: float, found: bool) -> None:
    host = memory.find(NO_STEPS, by_rank(looks(ram_used=used * 1000, ram_total=1000.0)))
    device = memory.find(NO_STEPS, by_rank(looks(gpu_memory=used * 1000, gpu_memory_total=1000.0)))
    assert kinds(host) == kinds(device) == ["memory_pressure"] * found
    if found:
        assert host[0].severity == device[0].severity == ("critical" if used > 0.97 else "warning")
        assert (host[0].evidence["where"], device[0].evidence["where"]) == ("host", "device")


def test_one_look_at_full_memory_is_no_pressure_unless_the_run_ended_so() -> None:
    used = np.full(50, 500.0)
    used[20] = 990.0
    assert memory.find(NO_STEPS, by_rank(looks(count=50, ram_used=used, ram_total=1000.0))) == []
    used[-2:] = 990.0
    found = memory.find(NO_STEPS, by_rank(looks(count=50, ram_used=used, ram_total=1000.0)))
    assert kinds(found) == ["memory_pressure"]


def test_a_device_full_of_torchs_own_cache_is_only_worth_knowing() -> None:
    device = by_rank(looks(0, gpu_memory=950.0, gpu_memory_total=1000.0))
    small, large = (steps_with(np.full((100, 1), mib)) for mib in (300.0, 930.0))
    assert only(memory.find(small, device), "memory_pressure").severity == "info"
    assert only(memory.find(large, device), "memory_pressure").severity == "warning"


def test_pressure_names_the_hosts_and_all_their_ranks() -> None:
    tables = by_rank(
        looks(0, host="a", ram_used=10.0, ram_total=1000.0),
        looks(1, host="b", ram_used=960.0, ram_total=1000.0),
        looks(2, host="b", ram_used=960.0, ram_total=1000.0),
    )
    (finding,) = memory.find(NO_STEPS, tables)
    assert (finding.ranks, finding.hosts) == ((1, 2), ("b",))
    assert "Free 60 MiB" in finding.action


# --------------------------------------------------------------------------- imbalance


@pytest.mark.parametrize(("more", "found"), [(1.1, False), (1.19, False), (1.25, True), (2.0, True)])
def test_imbalance_needs_a_fifth_more_on_a_rank(more: float, found: bool) -> None:
    values = np.full((100, 3), 1000.0)
    values[:, 2] *= more
    assert kinds(memory.find(steps_with(values), {})) == ["memory_imbalance"] * found


def test_imbalance_must_last() -> None:
    values = np.full((100, 2), 1000.0)
    values[:40, 1] *= 2
    assert memory.find(steps_with(values), {}) == []


def test_imbalance_of_host_memory_counts_only_without_a_device() -> None:
    tables = by_rank(looks(0, rss=1000.0), looks(1, rss=2000.0))
    steps = synthetic.run(0)
    assert only(memory.find(steps, tables), "memory_imbalance").ranks == (1,)
    assert memory.find(steps_with(np.full((200, 2), 1000.0)), tables) == []


# --------------------------------------------------------------------------- whatever the numbers are


@given(st.permutations(range(4)))
@settings(max_examples=scaled(20))
def test_permuting_ranks_permutes_findings(order: list[int]) -> None:
    creep = np.stack([500 + 1.5 * (rank == 3) * np.arange(120) for rank in range(4)], axis=1)
    peaks = np.stack([np.full(120, 900.0 + 400 * (rank == 1)) for rank in range(4)], axis=1)
    steps = steps_with(creep, peaks)
    tables = [looks(rank, 120, rss=leaking(rank, count=120) if rank == 2 else 500.0) for rank in range(4)]
    moved = {place: replace(tables[rank], rank=place) for place, rank in enumerate(order)}
    before = memory.find(steps, by_rank(*tables))
    after = memory.find(synthetic.permuted(steps, order), moved)
    assert {one.kind for one in before} == {"host_memory_leak", "device_memory_creep", "memory_imbalance"}
    assert [(one.kind, one.severity, tuple(order[rank] for rank in one.ranks)) for one in after] == [
        (one.kind, one.severity, one.ranks) for one in before
    ]


_anything = st.one_of(st.floats(width=32), st.just(float("nan")), st.just(0.0))


@given(st.integers(0, 45), st.lists(_anything, min_size=6, max_size=6), st.integers(1, 3))
@settings(max_examples=scaled(80))
def test_no_number_and_no_length_makes_it_raise(count: int, values: list[float], ranks: int) -> None:
    fields: dict[str, Any] = dict(
        zip(("rss", "ram_used", "ram_total", "gpu_memory", "gpu_memory_total", "cpu"), values, strict=True)
    )
    tables = by_rank(*(looks(rank, count, **fields) for rank in range(ranks)))
    steps = steps_with(np.full((count, ranks), values[0]), np.full((count, ranks), values[1]))
    memory.find(steps, tables)
    memory.find(steps, {})
    memory.find(NO_STEPS, tables)
