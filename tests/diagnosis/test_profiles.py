"""Hot spots of a profile: kernels, lines, pauses of the device, and waits of the host."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powertrain.diagnosis.profiles.card import profile_lines
from powertrain.diagnosis.profiles.hotspots import summarize
from powertrain.diagnosis.profiles.trace_events import read_trace
from powertrain.errors import StorageError


def event(
    category: str, name: str, start: float, duration: float, thread: Any = 1, **arguments: Any
) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 1,
        "tid": thread,
        "ts": start,
        "dur": duration,
        "args": {name.replace("_", " "): value for name, value in arguments.items()},
    }


def packed(events: list[dict[str, Any]], lines: list[str], operators: dict[int, int], **others: Any) -> bytes:
    trace = {
        "powertrain": {"lines": lines, "operators": operators, **others},
        "traceEvents": events,
        "baseTimeNanoseconds": 10**18,
    }
    return gzip.compress(json.dumps(trace).encode())


BACKWARD = "autograd::engine::evaluate_function: AddmmBackward0"
#: One step of 1 ms: a forward kernel, a pause, its backward, a sync.
ON_A_GPU = packed(
    [
        event("cpu_op", "aten::linear", 0.0, 50.0, External_id=1, Sequence_number=9),
        event("cuda_runtime", "cudaLaunchKernel", 10.0, 5.0, External_id=1),
        event("kernel", "gemm", 20.0, 300.0, "stream 7", External_id=1),
        event("cpu_op", "aten::item", 60.0, 300.0, External_id=2),
        event("cuda_runtime", "cudaStreamSynchronize", 65.0, 280.0, External_id=2),
        event("cpu_op", BACKWARD, 500.0, 60.0, 2, External_id=3, Sequence_number=9),
        event("cpu_op", "aten::mm", 505.0, 40.0, 2, External_id=4),
        event("kernel", "gemm", 520.0, 200.0, "stream 7", External_id=4),
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
    ],
    ["train.py:10 in forward", "train.py:20 in train"],
    {1: 0, 2: 1},
)  # fmt: skip


def test_kernels_lines_pauses_and_waits_of_a_gpu() -> None:
    found = summarize(read_trace(ON_A_GPU), steps=1, seconds=1e-3)
    assert (found.device_ms, found.step_ms) == (0.5, 1.0)
    assert [(spot.name, spot.ms, spot.calls) for spot in found.kernels] == [("gemm", 0.5, 2.0)]
    assert {spot.name: spot.ms for spot in found.lines} == {
        "train.py:10 in forward": 0.3,
        "backward of train.py:10 in forward": 0.2,
    }
    assert [(spot.name, spot.ms) for spot in found.gaps] == [
        ("before backward of train.py:10 in forward", 0.2)
    ]
    assert [(spot.name, spot.ms) for spot in found.syncs] == [("stream sync at train.py:20 in train", 0.28)]
    text = "\n".join(profile_lines(3, found))
    assert "rank 3: 1 step of 1.00 ms while profiled" in text
    assert "the device works for 0.50 ms of a step (50 %)" in text
    assert "waits of the host for the device" in text


def test_numbers_are_those_of_one_step() -> None:
    one, two = (summarize(read_trace(ON_A_GPU), steps=steps, seconds=1e-3 * steps) for steps in (1, 2))
    assert two.step_ms == one.step_ms
    assert two.kernels[0].ms == one.kernels[0].ms / 2
    assert two.kernels[0].share == one.kernels[0].share / 2


@pytest.mark.parametrize(
    "damaged",
    [b"", b"no gzip", gzip.compress(b"no json"), gzip.compress(b"[1]"), ON_A_GPU[:-20]],
    ids=["empty", "not packed", "not JSON", "another object", "cut short"],
)
def test_a_damaged_trace_is_named_with_what_to_do(damaged: bytes) -> None:
    with pytest.raises(
        StorageError, match=r"The profile is damaged: .* Make it again with 'powertrain profile'"
    ):
        read_trace(damaged)


def test_a_trace_without_events_and_steps_is_no_error() -> None:
    empty = summarize(read_trace(packed([], [], {})), steps=0, seconds=0.0)
    assert (empty.kernels, empty.lines, empty.device_ms) == ((), (), None)
    assert profile_lines(0, empty)


_SPANS = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 60), st.integers(1, 2)), max_size=30)


@given(_SPANS)
def test_a_device_is_never_busier_than_the_time_that_its_kernels_span(
    spans: list[tuple[int, int, int]],
) -> None:
    events = [event("kernel", f"k{stream}", start, length, stream) for start, length, stream in spans]
    found = summarize(read_trace(packed(events, [], {})), steps=1, seconds=1.0)
    if not spans:
        assert found.device_ms is None
        return
    first, last = min(start for start, *_ in spans), max(start + length for start, length, _ in spans)
    pauses = sum(spot.ms for spot in found.gaps)
    assert found.device_ms is not None
    assert found.device_ms <= (last - first) / 1e3 + 1e-9
    assert found.device_ms + pauses <= (last - first) / 1e3 + 1e-9


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(1, 50)), max_size=20))
def test_own_times_of_nested_operators_add_up_to_the_outermost(spans: list[tuple[int, int]]) -> None:
    nested = [(0, 1000), *sorted((start, start + 1) for start, _ in spans)]
    events = [
        event("cpu_op", f"op{i}", start, end - start, External_id=i + 1)
        for i, (start, end) in enumerate(nested)
    ]
    found = summarize(read_trace(packed(events, [], {})), steps=1, seconds=1.0, most=100)
    assert sum(spot.ms for spot in found.operators) <= 1.0 + 1e-9
    assert found.operators_ms == pytest.approx(1.0)


def test_a_wait_outside_of_operators_has_the_line_of_its_call() -> None:
    synchronize = "<built-in function _cuda_synchronize>"
    trace = packed(
        [
            event("kernel", "gemm", 0.0, 300.0, "stream 7"),
            event("python_function", synchronize, 90.0, 270.0),
            event("cuda_runtime", "cudaDeviceSynchronize", 100.0, 250.0),
            event("cuda_runtime", "cudaStreamSynchronize", 150.0, 30.0, thread=2),
            event("cuda_runtime", "cudaDeviceSynchronize", 500.0, 20.0),
            event("python_function", "<method 'synchronize' of Event>", 690.0, 30.0),
            event("cuda_runtime", "cudaEventSynchronize", 700.0, 10.0),
        ],
        ["train.py:10 in train", "train.py:30 in evaluate"],
        {},
        waits=[(10**18 + 690_000, 10**18 + 720_000, 1), (10**18 + 90_000, 10**18 + 360_000, 0)],
    )
    found = summarize(read_trace(trace), steps=1, seconds=1e-3)
    assert {spot.name: spot.ms for spot in found.syncs} == {
        "device sync at train.py:10 in train": 0.25,
        "stream sync at (no line of yours)": 0.03,
        "device sync at (no line of yours)": 0.02,
        "event sync at train.py:30 in evaluate": 0.01,
    }
