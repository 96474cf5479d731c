"""Looks at the machine: real ones, against what the test itself does to it."""

from __future__ import annotations

import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from powertrain.trace.machine import samples
from powertrain.trace.machine.samplers import Sampler, throttling

MIB = 1 << 20


def busy(seconds: float) -> None:
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def test_processor_time_of_this_process_is_seen_as_cores() -> None:
    began = time.monotonic()
    sampler = Sampler()
    busy(0.3)
    seen = sampler.look(7)
    took = time.monotonic() - began
    assert seen.step == 7
    assert 0.2 / took <= seen.cpu <= 1.5
    assert seen.cpu <= seen.host_cpu + 0.5, "the machine was at least as busy"
    assert seen.host_cores == psutil.cpu_count()


def test_cores_that_others_get_are_reported_and_are_not_busy_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    times = psutil.cpu_times()
    if "steal" not in times._fields:
        pytest.skip("this system does not tell")
    given = [times]
    monkeypatch.setattr(psutil, "cpu_times", lambda: given[-1])
    before = time.monotonic()
    sampler = Sampler()
    began = time.monotonic()
    busy(0.1)
    given.append(times._replace(steal=times.steal + 0.05, user=times.user + 0.1))
    least = time.monotonic() - began
    seen = sampler.look(0)
    most = time.monotonic() - before
    assert 0.05 / most <= seen.stolen <= 0.05 / least * (1 + 1e-6)
    assert 0.1 / most <= seen.host_cpu <= 0.1 / least * (1 + 1e-6)


def test_processes_that_it_has_started_count_with_it() -> None:
    sampler = Sampler()
    before = sampler.look(0).rss
    code = f"held = bytearray({200 * MIB}); print('held', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert sampler.look(0).rss > before + 190
        child.communicate(b"\n")


def test_the_memory_of_the_machine_is_reported() -> None:
    seen = Sampler().look(0)
    assert 0 < seen.ram_used < seen.ram_total == pytest.approx(psutil.virtual_memory().total / MIB)


def test_the_gpu_of_the_thread_that_trains_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others have a current one of their own, which is the first."""
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        device_count=lambda: 4,
        current_device=lambda: 0,
        get_device_properties=lambda number: SimpleNamespace(uuid=f"GPU-{number}"),
    )
    watts = {"GPU-0": 100_000, "GPU-3": 400_000}
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetPowerUsage=lambda uuid: watts[uuid],
    )
    torch = SimpleNamespace(cuda=cuda, get_num_threads=lambda: 1)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    given: list[int | None] = [None]
    sampler = Sampler(lambda: given[0])
    assert sampler.look(0).gpu_power == 0, "it is not known yet which it is"
    given[0] = 3
    assert sampler.look(0).gpu_power == 400


def test_a_record_comes_back_as_it_was() -> None:
    seen = Sampler().look(3)
    again = samples.unpack_from(samples.pack(seen))
    assert again.step == 3
    assert again.time == seen.time
    assert again.rss == pytest.approx(seen.rss, rel=1e-6)
    assert [name for name, _ in samples.FIELDS] == list(samples.Sample._fields)
    assert len(samples.pack(seen)) == samples.SAMPLE_SIZE


@pytest.mark.parametrize(
    ("reasons", "meaning"),
    [
        (0x1, 0),  # idle
        (0x2, 0),  # clocks set by the user
        (0x4, samples.POWER),
        (0x20 | 0x40, samples.THERMAL),
        (0x8 | 0x80, samples.HARDWARE | samples.POWER),
    ],
)
def test_reasons_for_a_slow_clock_are_distinguished(reasons: int, meaning: int) -> None:
    assert throttling(reasons) == meaning
