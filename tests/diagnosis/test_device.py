"""Findings about devices, from a window of kernels, a counted step and the allocator's figures."""

from __future__ import annotations

from typing import Any

import pytest
from tests.diagnosis import synthetic

from powertrain.diagnosis.finding import Finding
from powertrain.diagnosis.report import diagnose
from powertrain.diagnosis.rules.root_cause import is_trouble
from powertrain.trace.recording import phases

#: Seconds of a step of ``synthetic.run`` with one rank, about.
STEP = 0.028


def activity(
    busy: float, kernels: float = 700, waits: float = 0, waited: float = 0.0, **more: Any
) -> dict[str, Any]:
    return {
        "steps": 1,
        "busy": busy,
        "busy_by_phase": {"forward": busy / 3, "backward": busy * 2 / 3},
        "kernels": kernels,
        "to_device": 0.0,
        "to_host": 0.0,
        "waits": {"forward": waits} if waits else {},
        "waited": {"forward": waited} if waits else {},
        **more,
    }


def waiting(where: str = "train.py:31 in forward", count: int = 12, seconds: float = 0.01) -> dict[str, Any]:
    return {"where": where, "call": "item", "count": count, "seconds": seconds}


def findings(facts: dict[str, Any], *faults: synthetic.Fault) -> list[Finding]:
    report = diagnose(synthetic.run(1, *faults, ranks=1, noise=synthetic.QUIET), devices={0: facts})
    assert not report.notes, report.notes
    return list(report.findings)


def troubles(facts: dict[str, Any], *faults: synthetic.Fault) -> list[str]:
    return [finding.kind for finding in findings(facts, *faults) if finding.severity != "info"]


def test_a_device_that_waits_for_launches_is_named_with_its_busy_share_and_a_sized_cure() -> None:
    first = findings({"activity": activity(0.2 * STEP)})[0]
    assert first.kind == "launch_bound"
    assert first.severity == "critical"
    assert first.evidence["busy"] == pytest.approx(0.2, abs=0.03)
    assert first.evidence["batch_factor"] in (4, 5)
    assert first.evidence["gap"] == pytest.approx(0.8 * STEP / 700, rel=0.1)
    assert "reduce-overhead" in first.action
    assert [echo.kind for echo in first.echoes] == ["compute_bound"]


def test_a_busy_device_is_healthy() -> None:
    assert troubles({"activity": activity(0.98 * STEP)}) == []
    assert troubles({"activity": activity(0.85 * STEP)}) == []


def test_a_window_of_a_batch_of_another_size_says_nothing() -> None:
    assert troubles({"activity": activity(0.2 * STEP, seconds=0.3 * STEP)}) == []
    assert troubles({"activity": activity(0.2 * STEP, seconds=1.5 * STEP)}) == ["launch_bound"], (
        "the profiler's own cost"
    )


def test_work_of_the_host_that_launches_little_is_not_called_slow_launching() -> None:
    assert troubles({"activity": activity(0.2 * STEP, kernels=40)}) == ["host_bound"]


def test_a_wait_between_steps_while_the_device_works_is_a_wait_and_no_work_of_the_host() -> None:
    waits = {"waits": {"outside": 8}, "waited": {"outside": 0.010}}
    facts = {"activity": {**activity(0.6 * STEP), **waits}}
    found = troubles(facts, synthetic.bound(phases.OUTSIDE, 0.010))
    assert "sync_bound" in found


def test_lines_of_the_counted_step_alone_are_no_waits_of_every_step() -> None:
    facts = {"activity": activity(0.8 * STEP), "operators": {"waiting": [waiting(seconds=0.02)]}}
    assert troubles(facts) == []


def test_the_wait_of_a_gradient_scaler_is_not_the_optimizers_own_time() -> None:
    slow = {"waits": {"optimizer": 1}, "waited": {"optimizer": 0.012}, "busy_by_phase": {"optimizer": 0.0005}}
    facts = {"activity": {**activity(0.85 * STEP), **slow}, "operators": {"optimizer_operators": 150}}
    assert "unfused_optimizer" not in troubles(facts, synthetic.bound(phases.OPTIMIZER, 0.012))


def test_a_device_that_waits_for_batches_is_not_bound_by_launches() -> None:
    assert troubles({"activity": activity(0.9 * STEP)}, synthetic.bound(phases.INPUT, 0.05)) == [
        "input_bound"
    ]


def test_waits_in_every_layer_are_the_cause_of_an_idle_device_and_name_the_line() -> None:
    facts = {
        "activity": activity(0.3 * STEP, waits=12, waited=0.004),
        "operators": {"flops": 1, "waiting": [waiting()]},
    }
    [first] = [finding for finding in findings(facts) if finding.severity != "info"]
    assert first.kind == "sync_bound"
    assert first.evidence["line"] == "train.py:31 in forward"
    assert "train.py:31 in forward (item, 12 a step)" in first.summary
    assert "launch_bound" in [echo.kind for echo in first.echoes]


def test_one_wait_at_the_end_of_a_step_costs_nothing_where_the_device_is_busy() -> None:
    facts = {
        "activity": activity(0.97 * STEP, waits=1, waited=0.015),
        "operators": {"waiting": [waiting(count=1)]},
    }
    assert troubles(facts) == []


def test_one_wait_that_leaves_the_device_idle_costs_what_the_host_waited() -> None:
    facts = {
        "activity": activity(0.8 * STEP, waits=1, waited=0.005),
        "operators": {"waiting": [waiting(count=1)]},
    }
    [first] = [finding for finding in findings(facts) if finding.severity != "info"]
    assert first.kind == "sync_bound"
    assert first.evidence["lost"] == pytest.approx(0.2 * STEP, rel=0.15)


def test_copies_of_batches_to_the_device_are_not_counted_as_waits_of_the_loop() -> None:
    copy = {**waiting(), "call": "to a GPU"}
    assert troubles({"activity": activity(0.8 * STEP), "operators": {"waiting": [copy]}}) == []


def test_an_optimizer_of_single_tensors_is_named_where_it_takes_much_of_the_step() -> None:
    facts = {"activity": activity(0.9 * STEP), "operators": {"optimizer_operators": 1500}}
    assert troubles(facts) == ["unfused_optimizer"]
    facts["operators"]["optimizer_operators"] = 14
    assert troubles(facts) == []


def test_products_of_full_floats_are_named_with_their_time_on_tensor_cores() -> None:
    facts = {
        "device": "NVIDIA H200",
        "activity": activity(0.98 * STEP),
        "operators": {"flops": 10**12, "flops_of_full_floats": 10**12},
    }
    [first] = [finding for finding in findings(facts) if finding.severity != "info"]
    assert first.kind == "full_float_products"
    assert first.evidence["seconds"] == pytest.approx(1e12 / 67e12)
    facts["device"] = "a device that nobody knows"
    assert troubles(facts) == []


def test_memory_in_pieces_is_named_only_where_it_is_much() -> None:
    allocator = {"used": 4000.0, "peak": 11000.0, "reserved": 12000.0, "split": 5000.0, "retries": 0}
    assert troubles({"allocator": allocator}) == ["fragmented_memory"]
    assert troubles({"allocator": {**allocator, "split": 900.0}}) == []
    assert troubles({"allocator": {**allocator, "reserved": 60000.0, "peak": 59000.0}}) == []


@pytest.mark.parametrize(
    ("change", "is_trouble"),
    [
        ({}, False),
        ({"reserved": 57e3, "peak": 40e3}, True),  # much of the device is held
        ({"reserved": 40e3, "peak": 10e3}, True),  # a fifth of it is of no use
        ({"retries": 1}, True),
        ({"allocations": 30.0}, True),
    ],
)
def test_memory_that_tensors_never_used_at_once_is_a_trouble_where_it_costs_time_or_is_scarce(
    change: dict[str, float], is_trouble: bool
) -> None:
    least = {"used": 4e3, "peak": 8e3, "reserved": 12e3, "split": 20.0, "retries": 0, "total": 140e3}
    facts = {"allocator": {**least, **change}}
    assert troubles(facts) == ["fragmented_memory"] * is_trouble
    assert "fragmented_memory" in [one.kind for one in findings(facts)]


def test_memory_in_pieces_that_took_most_of_the_device_comes_before_slow_launches() -> None:
    allocator = {"used": 7e3, "peak": 8e3, "reserved": 119e3, "split": 160.0, "retries": 0, "total": 143e3}
    facts = {"allocator": {**allocator, "allocations": 3.3}, "activity": activity(0.7 * STEP)}
    troubled = [(one.kind, one.severity) for one in findings(facts) if is_trouble(one)]
    assert troubled == [("fragmented_memory", "critical"), ("launch_bound", "warning")]


def test_a_host_that_does_other_work_than_launching_is_named_with_the_phase() -> None:
    (first,) = [one for one in findings({"activity": activity(0.2 * STEP, kernels=40)}) if is_trouble(one)]
    assert (first.kind, first.severity) == ("host_bound", "critical")
    assert first.summary.endswith("mostly in backward.")
    assert first.evidence["gap"] == pytest.approx(0.02 * STEP, rel=0.05)
    assert troubles({"activity": activity(0.8 * STEP, kernels=40)}) == [], "a fifth of a step is not much"


def test_a_busy_host_comes_with_what_the_allocator_did() -> None:
    facts = {
        "activity": activity(0.2 * STEP, kernels=40),
        "allocator": {"retries": 5, "allocations": 12.0},
    }
    (first,) = [one for one in findings(facts) if is_trouble(one)]
    assert (first.kind, first.evidence["alloc_retries"], first.evidence["allocations"]) == (
        "host_bound",
        5,
        12.0,
    )


def test_a_short_wait_hides_no_host_that_is_busy_for_longer() -> None:
    facts = {"activity": activity(0.2 * STEP, kernels=40, waits=1, waited=0.08 * STEP)}
    found = {one.kind: one.cost for one in findings(facts) if is_trouble(one)}
    assert found == {"host_bound": pytest.approx(0.7, abs=0.03), "sync_bound": pytest.approx(0.08, abs=0.01)}
    facts = {"activity": activity(0.2 * STEP, kernels=40, waits=1, waited=0.7 * STEP)}
    assert troubles(facts) == ["sync_bound"], "the rest is not much"


def test_a_break_in_a_small_compiled_part_does_not_explain_a_busy_host() -> None:
    facts = {
        "activity": activity(0.2 * STEP, kernels=40),
        "operators": {"operators": 400},
        "graph_breaks": {"Failed to trace builtin operator: print": 1},
    }
    assert troubles(facts) == ["host_bound"]
    assert "graph_breaks" in [one.kind for one in findings(facts)]


def test_work_of_the_host_after_the_model_is_one_finding() -> None:
    heavy = synthetic.every(1, phases.INSIDE, 0.05)
    (first,) = [
        one for one in findings({"activity": activity(0.2 * STEP, kernels=40)}, heavy) if is_trouble(one)
    ]
    assert first.kind == "compute_bound"
    assert "host_bound" in [echo.kind for echo in first.echoes]


def test_a_host_that_takes_memory_from_the_device_again_and_again_is_not_launch_bound() -> None:
    allocator = {"used": 4e3, "peak": 8e3, "reserved": 60e3, "split": 20.0, "retries": 0, "total": 140e3}
    facts = {"allocator": {**allocator, "allocations": 90.0}, "activity": activity(0.2 * STEP)}
    assert troubles(facts) == ["fragmented_memory"]
    facts["allocator"] = {**allocator, "allocations": 2.0}
    assert "launch_bound" in troubles(facts)


def test_time_that_goes_into_taking_memory_makes_pieces_of_no_use_the_cause() -> None:
    allocator = {"used": 4e3, "peak": 8e3, "reserved": 12e3, "split": 20.0, "retries": 0, "total": 140e3}
    facts = {
        "allocator": {**allocator, "allocations": 3.0},
        "activity": activity(0.2 * STEP, allocating=0.6 * STEP),
    }
    (first,) = [one for one in findings(facts) if is_trouble(one)]
    assert (first.kind, first.echoes[0].kind) == ("fragmented_memory", "launch_bound")
    assert "taking more from the GPU is 59 % of a step" in first.summary
    facts["activity"] = activity(0.2 * STEP, allocating=0.02 * STEP)
    assert troubles(facts) == ["launch_bound"], "which so little time does not explain"
    facts["activity"] = activity(0.98 * STEP, allocating=0.08 * STEP)
    assert troubles(facts) == [], "of which the device does not wait for most"


def test_spikes_of_the_host_are_no_finding_while_the_device_is_always_busy() -> None:
    spike = synthetic.every(20, phases.OUTSIDE, 0.03)
    assert troubles({}, spike) == ["periodic_spike"]
    assert troubles({"activity": activity(STEP + 0.0015)}, spike) == []
    assert "periodic_spike" in troubles({"activity": activity(0.93 * STEP)}, spike), (
        "a loss for the device, too"
    )


def test_broken_graphs_explain_an_idle_device_and_alone_need_no_action() -> None:
    facts = {"graph_breaks": {"Failed to trace builtin operator: print": 1}}
    assert troubles(facts) == []
    compiled = {**facts, "activity": activity(0.2 * STEP), "operators": {"operators": 200}}
    assert troubles(compiled) == ["graph_breaks"]
    eager = {**facts, "activity": activity(0.2 * STEP), "operators": {"operators": 680}}
    assert troubles(eager) == ["launch_bound"], "of which torch.compile compiles next to nothing"


def test_recompilations_that_cost_more_than_slow_launches_explain_them() -> None:
    function = {
        "where": "train.py:7 in forward",
        "count": 8,
        "seconds": 20.0,
        "first_seconds": 2.0,
        "reasons": [],
    }
    report = diagnose(
        synthetic.run(1, ranks=1), compiled={0: [function]}, devices={0: {"activity": activity(0.2 * STEP)}}
    )
    assert report.findings[0].kind == "recompiles"
    assert "launch_bound" in [echo.kind for echo in report.findings[0].echoes]


def test_facts_that_are_broken_are_noted_and_break_nothing_else() -> None:
    report = diagnose(synthetic.run(1, ranks=1), devices={0: {"activity": {"busy": "much"}}})
    assert any("devices" in note for note in report.notes)
    assert report.findings
