"""What a real GPU does in each phase of a step, without ever waiting for it. Skipped, visibly, where there is none."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(not os.path.exists("/dev/nvidiactl"), reason="this machine has no NVIDIA GPU")

torch = pytest.importorskip("torch")

from powertrain import trace  # noqa: E402
from powertrain.trace.recording import current, patches, phases, ring  # noqa: E402
from powertrain.trace.recording.phases import RECORD_SIZE, StepRecord  # noqa: E402
from powertrain.trace.recording.recorder import Recorder  # noqa: E402

#: About 0.1 s of an idle GPU at 1.7 GHz.
CYCLES = int(0.1 * 1.7e9)


class Busy(torch.nn.Module):  # type: ignore[name-defined]
    """Keeps the GPU busy for a while, in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)

    def forward(self, x: Any) -> Any:
        torch.cuda._sleep(CYCLES)
        return self.layer(x).sum()


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder(bytearray(ring.ring_size(1000)))
    current.use(recorder)
    trace.init()
    yield recorder
    patches.uninstall()
    current.use(None)


def steps(recorder: Recorder) -> list[StepRecord]:
    recorder.flush()
    data = recorder.drain(0)[1]
    return [phases.unpack_from(data, at) for at in range(0, len(data), RECORD_SIZE)]


def train(model: Any, count: int, pinned: bool = False) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.ones(1024, 64)
    x = x.pin_memory() if pinned else x
    for _ in range(count):
        optimizer.zero_grad()
        model(x.to("cuda", non_blocking=True)).backward()
        optimizer.step()


def test_the_devices_time_is_found_in_its_phase_and_the_thread_never_waited(recorder: Recorder) -> None:
    model = Busy().cuda()
    train(model, 2)
    torch.cuda.synchronize()
    warm = len(steps(recorder))
    began = time.monotonic()
    train(model, 5, pinned=True)
    launched = time.monotonic() - began
    assert len(steps(recorder)) < warm + 5, "the GPU is still busy with them"
    assert launched < 0.25, "and nobody waited for it"
    assert time.monotonic() - began < 0.3
    torch.cuda.synchronize()
    found = steps(recorder)[warm:]
    assert len(found) == 5
    assert all(step.flags & phases.TIMED_ON_DEVICE for step in found)
    assert all(0.05 < step.device[phases.FORWARD] < 0.3 for step in found)
    assert all(step.device[phases.BACKWARD] < 0.05 for step in found)
    assert all(step.phases[phases.FORWARD] < 0.05 for step in found)
    assert all(step.memory > 0 and step.peak_memory >= step.memory for step in found)


def test_copies_from_pageable_memory_are_distinguished_from_others(recorder: Recorder) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 1)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for pinned in (False, True, True):
        x = torch.ones(1024, 64)
        x = x.pin_memory() if pinned else x
        model(x.cuda(non_blocking=True)).sum().backward()
        optimizer.step()
    torch.cuda.synchronize()
    assert [bool(step.flags & phases.PAGEABLE) for step in steps(recorder)] == [True, False, False]
    assert all(step.phases[phases.H2D] > 0 for step in steps(recorder))


def test_the_users_peak_of_memory_is_not_reset(recorder: Recorder) -> None:
    held = torch.empty(64 * 2**20, device="cuda")
    del held
    peak = torch.cuda.max_memory_allocated()
    train(Busy().cuda(), 2)
    torch.cuda.synchronize()
    steps(recorder)
    assert torch.cuda.max_memory_allocated() == peak
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() < peak


def test_a_captured_graph_is_left_alone(recorder: Recorder) -> None:
    model = torch.nn.Linear(64, 64).cuda()
    x = torch.ones(8, 64, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        model(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = model(x)
    x.fill_(2.0)
    graph.replay()
    with torch.no_grad():
        assert torch.allclose(y, model(x))
    train(Busy().cuda(), 2)
    torch.cuda.synchronize()
    assert steps(recorder)[-1].flags & phases.TIMED_ON_DEVICE


def test_steps_that_are_taken_by_another_thread_do_not_end_a_capture(recorder: Recorder) -> None:
    """As torch captures by default, what any thread asks of the device makes the capture fail."""
    model = Busy().cuda()
    train(model, 3)
    torch.cuda.synchronize()
    recorder.flush()
    x, graph = torch.ones(8, 64, device="cuda"), torch.cuda.CUDAGraph()
    within: list[bytes] = []
    after: list[bytes] = []

    def take(into: list[bytes]) -> None:
        thread = threading.Thread(target=lambda: into.append(recorder.drain(0)[1]))
        thread.start()
        thread.join()

    with torch.no_grad(), torch.cuda.graph(graph):
        y = x * 2
        take(within)
        z = y + 1
    graph.replay()
    torch.cuda.synchronize()
    assert bool((z == 3).all())
    assert within == [b""], "nothing was asked, so nothing is known"
    take(after)
    assert len(after[0]) == 3 * RECORD_SIZE
    assert all(step.flags & phases.TIMED_ON_DEVICE for step in steps(recorder))


def test_a_capture_that_cannot_begin_does_not_hold_up_the_times_of_the_device(
    recorder: Recorder,
) -> None:
    model = Busy().cuda()
    train(model, 2)
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="non-default stream"):
        torch.cuda.CUDAGraph().capture_begin()
    assert [bool(step.flags & phases.TIMED_ON_DEVICE) for step in steps(recorder)] == [True, True]


def test_gradients_that_are_exchanged_split_the_devices_backward(recorder: Recorder, tmp_path: Any) -> None:
    import torch.distributed as dist

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        model = torch.nn.parallel.DistributedDataParallel(Busy().cuda())
        train(model, 4)
        torch.cuda.synchronize()
        found = steps(recorder)
        assert len(found) == 4
        assert all(step.flags & phases.TIMED_ON_DEVICE for step in found)
        assert all(step.device[phases.COLLECTIVE] > 0 for step in found[1:])
        assert all(step.phases[phases.COLLECTIVE] < 0.05 for step in found[1:])
    finally:
        dist.destroy_process_group()
