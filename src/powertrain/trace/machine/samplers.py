"""Samplers of a rank's machine: processor, memory, disk, network, and the rank's own GPU.

A sample takes about a millisecond on the service thread, once a second by default. It must never disturb the
training: unreadable values are 0, and a GPU is sampled only once the rank itself uses it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil

from powertrain.trace.machine import processes, samples
from powertrain.trace.machine.samples import Sample

_MIB = float(1 << 20)
#: Fields of psutil's CPU times that do not count as busy: idle, used by other machines, or counted twice.
_NOT_BUSY = ("idle", "iowait", "steal", "guest", "guest_nice")


class Sampler:
    """A sampler of one process and its machine. One thread only."""

    def __init__(self, gpu: Callable[[], int | None] = lambda: None) -> None:
        """Create a sampler. ``gpu`` returns the index of the training device, if known."""
        self._gpu_number = gpu
        self._process = psutil.Process()
        self._below: dict[int, psutil.Process] = {}
        self._gpu: _Gpu | None = None
        self._before = self._counters()

    def look(self, step: int) -> Sample:
        """Return current values, and rates since the previous sample."""
        counters, before = self._counters(), self._before
        self._before = counters
        seconds = max(1e-3, counters["time"] - before["time"])
        rates = {name: max(0.0, counters[name] - before[name]) / seconds for name in counters}
        memory = psutil.virtual_memory()
        return Sample(
            time=time.time(),
            step=step,
            cpu=rates["cpu"],
            host_cpu=rates["host_cpu"],
            host_cores=float(psutil.cpu_count() or 1),
            stolen=rates["stolen"],
            threads=float(_threads()),
            rss=self._resident() / _MIB,
            ram_used=(memory.total - memory.available) / _MIB,
            ram_total=memory.total / _MIB,
            disk_read=rates["disk_read"] / _MIB,
            disk_write=rates["disk_write"] / _MIB,
            net_in=rates["net_in"] / _MIB,
            net_out=rates["net_out"] / _MIB,
            **self._look_at_gpu(),
        )

    def _counters(self) -> dict[str, float]:
        """Return cumulative counters by the name of their rate."""
        host, disk, net = (
            psutil.cpu_times(),
            _quietly(psutil.disk_io_counters),
            _quietly(psutil.net_io_counters),
        )
        return {
            "time": time.monotonic(),
            "cpu": sum(_busy(process) for process in self._family()),
            "host_cpu": sum(host) - sum(getattr(host, name, 0.0) for name in _NOT_BUSY),
            "stolen": getattr(host, "steal", 0.0),
            "disk_read": getattr(disk, "read_bytes", 0.0),
            "disk_write": getattr(disk, "write_bytes", 0.0),
            "net_in": getattr(net, "bytes_recv", 0.0),
            "net_out": getattr(net, "bytes_sent", 0.0),
        }

    def _family(self) -> list[psutil.Process]:
        """Return this process and its children, such as loader workers."""
        below = {}
        for pid in processes.descendants(self._process.pid):
            with contextlib.suppress(psutil.Error):  # the process has just ended
                below[pid] = self._below.get(pid) or psutil.Process(pid)
        self._below = below
        return [self._process, *below.values()]

    def _resident(self) -> float:
        total = 0.0
        for process in self._family():
            with contextlib.suppress(psutil.Error):  # the process has just ended
                total += process.memory_info().rss
        return total

    def _look_at_gpu(self) -> dict[str, Any]:
        if self._gpu is None:
            self._gpu = _Gpu.of_this_process(self._gpu_number())
        return self._gpu.look() if self._gpu is not None else {}


def _busy(process: psutil.Process) -> float:
    try:
        used = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(used.user + used.system)


def _quietly(ask: Any) -> Any:
    """Return the value, or None if the kernel does not provide it."""
    try:
        return ask()
    except (OSError, RuntimeError, psutil.Error):
        return None


def _threads() -> int:
    """Return the number of compute threads. Never imports torch."""
    torch = sys.modules.get("torch")
    try:
        return (
            int(torch.get_num_threads()) if torch is not None else int(os.environ.get("OMP_NUM_THREADS", "1"))
        )
    except (AttributeError, ValueError):
        return 1


class _Gpu:
    """The training GPU of this process, by NVIDIA's management library."""

    def __init__(self, library: Any, handle: Any) -> None:
        self._library, self._handle = library, handle
        #: The time of the newest sample of the device's own that was read, in its microseconds.
        self._newest = time.time_ns() // 1000

    @classmethod
    def of_this_process(cls, number: int | None) -> _Gpu | None:
        """Return the GPU with this index, or the only one; None while the process uses none, or if it is unknown.

        Never makes torch initialize a GPU, and never reads the current device: each thread has its own.
        """
        torch = sys.modules.get("torch")
        try:
            if torch is None or not torch.cuda.is_initialized():
                return None
            if number is None and torch.cuda.device_count() > 1:
                return None
            import pynvml

            pynvml.nvmlInit()
            uuid = str(torch.cuda.get_device_properties(number or 0).uuid)
            return cls(
                pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
            )
        except Exception:  # no library, no driver, or a GPU shared in a way that the library does not report
            return None

    def look(self) -> dict[str, Any]:
        sample: dict[str, Any] = {}
        library, handle = self._library, self._handle
        with contextlib.suppress(Exception):  # a GPU may support none of these
            sample["gpu_busy"] = library.nvmlDeviceGetUtilizationRates(handle).gpu / 100.0
        with contextlib.suppress(Exception):  # not all devices keep them, and there may be no new one
            sample["gpu_busy"] = self._busy_since_last_look()
        with contextlib.suppress(Exception):
            memory = library.nvmlDeviceGetMemoryInfo(handle)
            sample |= {"gpu_memory": memory.used / _MIB, "gpu_memory_total": memory.total / _MIB}
        with contextlib.suppress(Exception):
            sample["gpu_power"] = library.nvmlDeviceGetPowerUsage(handle) / 1000.0
        with contextlib.suppress(Exception):
            sample["gpu_temperature"] = float(
                library.nvmlDeviceGetTemperature(handle, library.NVML_TEMPERATURE_GPU)
            )
        with contextlib.suppress(Exception):
            sample["throttle"] = throttling(library.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        return sample

    def _busy_since_last_look(self) -> float:
        """Return the mean of the device's own samples of whether a kernel ran, five to six a second."""
        kind = self._library.NVML_GPU_UTILIZATION_SAMPLES
        _, found = self._library.nvmlDeviceGetSamples(self._handle, kind, self._newest)
        values = [(one.timeStamp, one.sampleValue.uiVal) for one in found if one.timeStamp > self._newest]
        self._newest = max(when for when, _ in values)
        return float(sum(value for _, value in values)) / len(values) / 100.0


#: Bits of NVML's reasons: power cap, hardware slowdown, board limit, software thermal, hardware thermal, power brake.
_REASONS = {
    0x4: samples.POWER,
    0x8: samples.HARDWARE,
    0x10: samples.POWER,
    0x20: samples.THERMAL,
    0x40: samples.THERMAL,
    0x80: samples.POWER,
}


def throttling(reasons: int) -> int:
    """Return the bits of ``Sample.throttle`` for those of NVML, without idling and user-set clocks."""
    found = 0
    for bit, meaning in _REASONS.items():
        if reasons & bit:
            found |= meaning
    return found
