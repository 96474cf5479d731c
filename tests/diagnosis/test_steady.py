"""What is judged of a run: start-up is apart, and time counts where it was spent."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.diagnosis import synthetic

from powertrain.diagnosis.tables.steady import spent, steady_steps
from powertrain.trace.recording import phases


def test_the_first_step_and_the_slow_ones_after_it_are_start_up() -> None:
    steps = synthetic.run(1, noise=synthetic.QUIET)
    steps.phases[:] = steps.phases[150]
    steps.phases[:7] *= 3.0
    assert steady_steps(steps).start_up == 7
    steps.phases[3] /= 3.0
    assert steady_steps(steps).start_up == 7


def test_one_hiccup_later_on_is_no_start_up() -> None:
    steps = synthetic.run(1, noise=synthetic.QUIET)
    steps.phases[:] = steps.phases[150]
    steps.phases[9] *= 5.0
    assert steady_steps(steps).start_up == 1


def test_the_start_of_a_run_that_is_slow_throughout_stays_short() -> None:
    steps = synthetic.run(1, noise=synthetic.QUIET)
    steps.phases[:] = np.linspace(1.0, 3.0, len(steps))[::-1, None, None] * steps.phases[150]
    assert steady_steps(steps).start_up <= 20


def test_steps_whose_beginning_was_thinned_away_have_no_start_up() -> None:
    steps = synthetic.run(1, noise=synthetic.QUIET)
    steps.phases[:] = steps.phases[150]
    assert steady_steps(replace(steps, numbers=steps.numbers + 1000)).start_up == 0


def test_of_a_run_whose_older_steps_were_thinned_the_newer_ones_are_judged() -> None:
    """Of each group that was thinned, the slowest step has stayed."""
    whole = synthetic.run(1, steps=400)
    numbers = np.concatenate([np.arange(0, 2000, 10), np.arange(2000, 2200)])
    run = steady_steps(replace(whole, numbers=numbers))
    assert run.numbers.tolist() == list(range(2000, 2200))
    assert run.begins == 200
    assert len(run.start) == run.start_up
    few = steady_steps(
        replace(whole, numbers=np.concatenate([np.arange(0, 3000, 10), np.arange(3000, 3100)]))
    )
    assert few.begins == few.start_up, "too few to judge by them alone"


def test_an_optimizer_step_counts_before_the_meeting_that_it_delays() -> None:
    steps = synthetic.run(1, noise=synthetic.QUIET)
    steps.phases[100, 1, phases.OPTIMIZER] = 0.5
    run = steady_steps(steps)
    assert run.between[101 - run.start_up, 1, phases.OPTIMIZER] == 0.5
    assert run.table[100 - run.start_up, 1, phases.OPTIMIZER] == 0.5


def on_device(thread: dict[int, float], device: dict[int, float]) -> dict[str, float]:
    """Where the time of a step goes that has these times on the thread and on the device."""
    steps = synthetic.run(0, ranks=1, steps=3)
    steps.phases[:] = 0.0
    for phase, time in thread.items():
        steps.phases[:, :, phase] = time
    for phase, time in device.items():
        steps.device[:, :, phase] = time
    steps.flags[:] = phases.TIMED_ON_DEVICE
    found = spent(steps)[1, 0]
    assert found.sum() == pytest.approx(sum(thread.values()))
    return {name: float(time) for name, time in zip(phases.NAMES, found, strict=True) if time > 1e-9}


def test_a_thread_that_waits_for_its_device_is_computing() -> None:
    found = on_device(
        {phases.FORWARD: 1, phases.BACKWARD: 1, phases.INSIDE: 28}, {phases.FORWARD: 10, phases.BACKWARD: 20}
    )
    assert found == pytest.approx({"forward": 10.0, "backward": 20.0})


def test_a_device_that_waits_for_its_batch_is_idle_for_as_long_as_that() -> None:
    found = on_device(
        {phases.INPUT: 30, phases.FORWARD: 1, phases.BACKWARD: 1, phases.INSIDE: 28},
        {phases.FORWARD: 10, phases.BACKWARD: 20},
    )
    assert found == pytest.approx({"input": 30.0, "forward": 10.0, "backward": 20.0})


def test_loading_that_the_device_hides_costs_only_what_it_does_not_hide() -> None:
    found = on_device(
        {phases.INPUT: 30, phases.FORWARD: 2, phases.BACKWARD: 1}, {phases.FORWARD: 10, phases.BACKWARD: 17}
    )
    assert found == pytest.approx({"input": 6.0, "forward": 10.0, "backward": 17.0})


def test_more_time_on_the_device_than_in_the_step_is_cut_down_to_it() -> None:
    assert on_device({phases.FORWARD: 10}, {phases.FORWARD: 15, phases.BACKWARD: 15}) == pytest.approx(
        {"forward": 5.0, "backward": 5.0}
    )


def test_without_times_of_the_device_the_threads_are_believed() -> None:
    steps = synthetic.run(0, ranks=2, steps=30)
    steps.device[:] = 1.0
    assert np.array_equal(spent(steps), steps.phases)
