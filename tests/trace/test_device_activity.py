"""Times of a device from the activities of a window of steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powertrain.trace.device.activity import Activity, covered, summarize
from powertrain.trace.recording.phases import BACKWARD, FORWARD, INSIDE, OPTIMIZER, OUTSIDE

US = 1000


def call(name: str, start: int, duration: int, correlation: int = 0) -> Activity:
    return Activity(name, start * US, duration * US, False, correlation)


def kernel(start: int, duration: int, correlation: int = 0, name: str = "gemm") -> Activity:
    return Activity(name, start * US, duration * US, True, correlation)


PHASES = [(0, OUTSIDE), (10 * US, FORWARD), (50 * US, BACKWARD), (90 * US, OPTIMIZER), (100 * US, INSIDE)]


def test_kernels_belong_to_the_phase_that_launched_them_however_late_they_run() -> None:
    found = summarize(
        [
            call("cudaLaunchKernel", 20, 1, 7),
            kernel(60, 30, 7),
            call("cudaLaunchKernel", 60, 1, 8),
            kernel(95, 10, 8),
        ],
        PHASES,
        1,
        1e-4,
        end=200 * US,
    )
    assert found is not None
    assert found.busy_by_phase == pytest.approx({"forward": 30e-6, "backward": 10e-6})
    assert found.busy == pytest.approx(40e-6)
    assert found.kernels == 2


def test_calls_that_take_memory_from_the_device_are_summed_by_step() -> None:
    calls = [call("cudaMalloc", 20, 30), call("cudaFree", 60, 10), call("cudaMalloc", 300, 50)]
    found = summarize([kernel(0, 10), *calls], PHASES, 2, 1e-4, end=200 * US)
    assert found is not None
    assert found.allocating == pytest.approx(20e-6), "without the call after the last step"


def test_overlapping_kernels_are_busy_time_once() -> None:
    found = summarize([kernel(0, 10), kernel(5, 10), kernel(30, 10)], PHASES, 2, 1e-4, end=200 * US)
    assert found is not None
    assert found.busy == pytest.approx(25e-6 / 2)


def test_waits_are_counted_by_phase_and_those_of_the_profiler_are_left_out() -> None:
    found = summarize(
        [
            kernel(0, 1),
            call("cudaStreamSynchronize", 20, 5),
            call("cudaStreamSynchronize", 30, 5),
            call("cudaLaunchKernel", 40, 5),
            call("cudaEventSynchronize", 95, 2),
            call("cudaDeviceSynchronize", 201, 50),
        ],
        PHASES,
        1,
        1e-4,
        end=200 * US,
    )
    assert found is not None
    assert found.waits == {"forward": 2, "optimizer": 1}
    assert found.waited == pytest.approx({"forward": 10e-6, "optimizer": 2e-6})


def test_copies_are_no_kernels_and_are_summed_by_direction() -> None:
    copies = [
        kernel(0, 4, name="Memcpy HtoD (Pageable -> Device)"),
        kernel(10, 2, name="Memcpy DtoH (Device -> Pinned)"),
        kernel(20, 1, name="Memset (Device)"),
    ]
    found = summarize(copies, PHASES, 1, 1e-4, end=200 * US)
    assert found is not None
    assert found.kernels == 0
    assert (found.to_device, found.to_host) == pytest.approx((4e-6, 2e-6))


def test_a_device_that_did_nothing_has_no_times() -> None:
    assert summarize([call("cudaLaunchKernel", 1, 1)], PHASES, 1, 1e-4, end=200) is None
    assert summarize([kernel(1, 1)], PHASES, 0, 1e-4, end=200) is None


INTERVALS = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda one: (one[0], one[0] + one[1]))
)


@given(INTERVALS)
def test_covered_is_the_number_of_moments_within_any_interval(intervals: list[tuple[int, int]]) -> None:
    moments = {moment for start, end in intervals for moment in range(start, end)}
    assert covered(intervals) == len(moments)
