"""One sample of a rank's machine as a record. Pure: loads neither torch nor numpy."""

from __future__ import annotations

import struct
from typing import NamedTuple

#: Bits of ``Sample.throttle``: reasons for a GPU's reduced clock.
THERMAL = 1
POWER = 2
HARDWARE = 4
THROTTLE_WORDS = {THERMAL: "too hot", POWER: "power limit", HARDWARE: "hardware slowdown"}

_FLOATS = (
    #: Cores kept busy by this process and its children, cores kept busy on the machine, and cores of the machine.
    "cpu",
    "host_cpu",
    "host_cores",
    #: Stolen cores: those that the hypervisor gave to other virtual machines.
    "stolen",
    #: Threads that torch and OpenMP use in this process.
    "threads",
    #: MiB: of the process and its children, used on the machine, total of the machine.
    "rss",
    "ram_used",
    "ram_total",
    #: MiB a second, of the whole machine.
    "disk_read",
    "disk_write",
    "net_in",
    "net_out",
    #: Values of the rank's own GPU; 0 without one: busy share, MiB, W, degrees Celsius.
    "gpu_busy",
    "gpu_memory",
    "gpu_memory_total",
    "gpu_power",
    "gpu_temperature",
)
_LAYOUT = struct.Struct(f"<dII{len(_FLOATS)}f")
SAMPLE_SIZE = _LAYOUT.size
#: Names and numpy types of the fields, in order.
FIELDS = (("time", "<f8"), ("step", "<u4"), ("throttle", "<u4"), *((name, "<f4") for name in _FLOATS))


class Sample(NamedTuple):
    """One sample. ``time`` is Unix seconds, ``step`` the number of steps of the rank."""

    time: float
    step: int
    throttle: int = 0
    cpu: float = 0.0
    host_cpu: float = 0.0
    host_cores: float = 0.0
    stolen: float = 0.0
    threads: float = 0.0
    rss: float = 0.0
    ram_used: float = 0.0
    ram_total: float = 0.0
    disk_read: float = 0.0
    disk_write: float = 0.0
    net_in: float = 0.0
    net_out: float = 0.0
    gpu_busy: float = 0.0
    gpu_memory: float = 0.0
    gpu_memory_total: float = 0.0
    gpu_power: float = 0.0
    gpu_temperature: float = 0.0


def pack(sample: Sample) -> bytes:
    return _LAYOUT.pack(*sample)


def unpack_from(buffer: bytes | bytearray | memoryview, offset: int = 0) -> Sample:
    return Sample(*_LAYOUT.unpack_from(buffer, offset))
