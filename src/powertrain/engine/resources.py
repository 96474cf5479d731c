"""What the machine has, who holds it, and the queue of those who wait.

Only what was asked for by name is checked: the default of one CPU per worker never refuses, because asking
for eight workers on two cores is how people try things out.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from powertrain.engine.base import SlotShape
from powertrain.errors import ResourceError

_ACCELERATOR = "accelerator_type:"


@dataclass(frozen=True)
class Machine:
    """What one machine has. ``gpus`` are the names the driver gives them, in ``visible`` order."""

    cpus: int
    gpus: tuple[str, ...] = ()
    #: The values for CUDA_VISIBLE_DEVICES, one for each entry of ``gpus``.
    visible: tuple[str, ...] = ()
    custom: Mapping[str, float] = field(default_factory=dict)

    def total(self, resource: str) -> float:
        """How much there is of a resource; accelerator types count one per GPU of that type unless declared."""
        if resource == "CPU":
            return float(self.cpus)
        if resource == "GPU":
            return float(len(self.gpus))
        if resource.startswith(_ACCELERATOR) and resource not in self.custom:
            wanted = _words(resource[len(_ACCELERATOR) :])
            return float(sum(wanted <= _words(name) for name in self.gpus))
        return float(self.custom.get(resource, 0.0))


def _words(name: str) -> set[str]:
    """The words of a GPU's name, whole: a T4 is no T400 and an A10 no A100. "80GB" also counts as "80G"."""
    words = set(name.lower().replace("-", " ").split())
    return words | {word[:-1] for word in words if word.endswith("gb")}


def detect(custom: Mapping[str, float] | None = None) -> Machine:
    """This machine. Asks NVML and never CUDA: a CUDA context here would break every fork."""
    names = _gpu_names()
    visible = visible_gpus(len(names), os.environ.get("CUDA_VISIBLE_DEVICES"))
    names = tuple(names[int(entry) if entry.isdigit() else 0] for entry in visible)
    return Machine(cpus=_cpu_count(), gpus=names, visible=visible, custom=dict(custom or {}))


def visible_gpus(count: int, chosen: str | None) -> tuple[str, ...]:
    """The GPUs CUDA would show of ``count``, given CUDA_VISIBLE_DEVICES: it stops at the first entry that is none."""
    if chosen is None:
        return tuple(str(index) for index in range(count))
    found: list[str] = []
    for entry in map(str.strip, chosen.split(",")):
        by_number = entry.isdigit() and int(entry) < count
        by_name = count > 0 and entry.upper().startswith(("GPU-", "MIG-"))
        if not (by_number or by_name):
            break
        found.append(entry)
    return tuple(found)


def check(machine: Machine, count: int, shape: SlotShape) -> None:
    """Raise :class:`ResourceError`, naming what is missing, where the machine can never hold ``count`` slots."""
    if shape.gpus and not machine.gpus:
        raise ResourceError(
            f"{count} worker(s) were to get {shape.gpus:g} GPU(s) each, but this machine has no NVIDIA GPU that "
            "the driver reports. Use ScalingConfig(use_gpu=False) to train on the CPU, or start this on a machine "
            "with GPUs."
        )
    wanted = {"GPU": shape.gpus, **shape.custom}
    if shape.explicit:
        wanted["CPU"] = shape.cpus
    missing = [
        f"{amount * count:g} {name} ({count} x {amount:g}), of which it has {machine.total(name):g}"
        for name, amount in wanted.items()
        if amount > 0 and not _fits(machine, name, amount, count)
    ]
    if missing:
        raise ResourceError(
            f"This machine cannot hold {count} worker(s) of the size asked for. It would need "
            + "; and ".join(missing)
            + ". Ask for fewer workers, or change ScalingConfig(resources_per_worker=...)."
        )


def _fits(machine: Machine, name: str, amount: float, count: int) -> bool:
    total = machine.total(name)
    if name == "GPU" and amount >= 1:
        return amount * count <= total
    if name == "GPU":
        return count <= total * int(1 / amount + 1e-9)
    return amount * count <= total + 1e-9


def share_gpus(visible: tuple[str, ...], count: int, per_slot: float) -> list[tuple[str, ...]]:
    """GPUs of each of ``count`` slots: whole ones apart, fractions of one packed onto it in order."""
    if per_slot <= 0:
        return [()] * count
    if per_slot < 1:
        holders = int(1 / per_slot + 1e-9)
        return [(visible[slot // holders],) for slot in range(count)]
    size = int(per_slot)
    return [tuple(visible[slot * size : (slot + 1) * size]) for slot in range(count)]


class Ledger:
    """Who holds which GPUs of this machine, among the runs of this process; others wait in order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[str, tuple[str, ...]] = {}
        self._queue: deque[tuple[str, int, Callable[[tuple[str, ...]], None]]] = deque()

    def claim(
        self, claim: str, wanted: int, machine: Machine, granted: Callable[[tuple[str, ...]], None]
    ) -> str:
        """Take ``wanted`` GPUs now or queue; returns "" or who is waited for. ``granted`` gets them, any thread."""
        with self._lock:
            free = self._free(machine)
            if wanted and (self._queue or len(free) < wanted):
                self._queue.append((claim, wanted, granted))
                return f"{wanted} GPU(s), {len(free)} free; the others are held by {len(self._held)} other run(s)"
            self._held[claim] = free[:wanted]
        granted(free[:wanted])
        return ""

    def give_back(self, claim: str, machine: Machine, gpus: tuple[str, ...] | None = None) -> None:
        """Free what ``claim`` holds (only ``gpus`` of it, if given) or waits for, and serve the queue."""
        ready: list[tuple[Callable[[tuple[str, ...]], None], tuple[str, ...]]] = []
        with self._lock:
            held = self._held.pop(claim, ())
            kept = tuple(gpu for gpu in held if gpus is not None and gpu not in gpus)
            if kept:
                self._held[claim] = kept
            self._queue = deque(entry for entry in self._queue if entry[0] != claim)
            while self._queue and len(free := self._free(machine)) >= self._queue[0][1]:
                name, wanted, granted = self._queue.popleft()
                self._held[name] = free[:wanted]
                ready.append((granted, free[:wanted]))
        for granted, given in ready:
            granted(given)

    def _free(self, machine: Machine) -> tuple[str, ...]:
        held = {gpu for gpus in self._held.values() for gpu in gpus}
        return tuple(gpu for gpu in machine.visible if gpu not in held)


def _cpu_count() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def _gpu_names() -> tuple[str, ...]:
    if not os.path.exists("/dev/nvidiactl"):
        return ()  # saves loading the library where there is nothing to find
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return tuple(_text(pynvml.nvmlDeviceGetName(handle)) for handle in handles)
    finally:
        pynvml.nvmlShutdown()


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name
