"""The resources of a machine, which of them are counted, and how much is free. Pure except for ``detect``.

GPUs and custom resources are always counted, CPUs only where they were requested by name: the default of one CPU per
worker never refuses and holds nothing, because people try things out with eight workers on two cores. It only bounds an
elastic run: to one worker per core.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from powertrain.engine.base import SlotShape
from powertrain.errors import ResourceError

_ACCELERATOR = "accelerator_type:"
#: The number of slots of a shape that holds nothing countable. A number and not infinity, because it travels in an
#: event; more than one machine ever starts.
BOUNDLESS = 1 << 16
#: Amounts are floats: 3 x 0.1 must fit into 0.3.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Machine:
    """The resources of one machine. ``gpus`` are the names the driver gives them, in ``visible`` order."""

    cpus: int
    gpus: tuple[str, ...] = ()
    #: The values for CUDA_VISIBLE_DEVICES, one for each entry of ``gpus``.
    visible: tuple[str, ...] = ()
    custom: Mapping[str, float] = field(default_factory=dict)
    #: A global id for each GPU: indices differ between jobs that see different GPUs.
    #: Where they are not known the entries of ``visible`` stand for them.
    uuids: tuple[str, ...] = ()
    #: The numbers of the cores that this process may run on; empty where they are not known.
    cores: frozenset[int] = frozenset()

    @property
    def identities(self) -> tuple[str, ...]:
        """Return a unique id for each GPU of ``visible``."""
        return self.uuids if len(self.uuids) == len(self.visible) else self.visible

    def identity(self, visible: str) -> str:
        """Return the identity of one entry of ``visible``."""
        return self.identities[self.visible.index(visible)]

    def total(self, resource: str) -> float:
        """Return the total amount of a resource; accelerator types count one per GPU of that type unless declared."""
        if resource == "CPU":
            return float(self.cpus)
        if resource == "GPU":
            return float(len(self.gpus))
        if resource.startswith(_ACCELERATOR) and resource not in self.custom:
            wanted = _words(resource[len(_ACCELERATOR) :])
            return float(sum(wanted <= _words(name) for name in self.gpus))
        return float(self.custom.get(resource, 0.0))


def _words(name: str) -> set[str]:
    """Return the whole words of a GPU's name, so that T4 does not match T400. "80GB" also counts as "80G"."""
    words = set(name.lower().replace("-", " ").split())
    return words | {word[:-1] for word in words if word.endswith("gb")}


def detect(custom: Mapping[str, float] | None = None) -> Machine:
    """Return this machine's resources. Queries NVML and never CUDA: a CUDA context here would break every fork."""
    with _nvml():
        names, uuids = _gpu_names(), _gpu_uuids()
    if len(uuids) != len(names):  # one came or went meanwhile
        uuids = tuple(str(index) for index in range(len(names)))
    found = list(zip(names, uuids, strict=True))
    visible = visible_gpus(len(found), os.environ.get("CUDA_VISIBLE_DEVICES"))
    gpus = [gpu_of(entry, found) for entry in visible]
    cores = _cores()
    return Machine(
        cpus=len(cores) or os.cpu_count() or 1,
        gpus=tuple(name for name, _ in gpus),
        visible=visible,
        custom=dict(custom or {}),
        uuids=tuple(uuid for _, uuid in gpus),
        cores=cores,
    )


def gpu_of(entry: str, gpus: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """Return (name, uuid) of an entry of CUDA_VISIBLE_DEVICES: a number, the beginning of a uuid, or a part of a
    GPU."""
    if entry.isdigit():
        return gpus[int(entry)]
    meant = [gpu for gpu in gpus if gpu[1].lower().startswith(entry.lower())]
    return meant[0] if len(meant) == 1 else (gpus[0][0], entry)


def visible_gpus(count: int, chosen: str | None) -> tuple[str, ...]:
    """Return the GPUs that CUDA shows of ``count``, given CUDA_VISIBLE_DEVICES: it stops at the first invalid entry."""
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
            f"This machine cannot hold {count} worker(s) of the requested size. It would need "
            + "; and ".join(missing)
            + ". Ask for fewer workers, or change ScalingConfig(resources_per_worker=...)."
        )


def _fits(machine: Machine, name: str, amount: float, count: int) -> bool:
    total = machine.total(name)
    if name == "GPU" and amount >= 1:
        return amount * count <= total
    if name == "GPU":
        return count <= total * _sharers(amount)
    return amount * count <= total + _ROUNDING


def share_gpus(visible: tuple[str, ...], count: int, per_slot: float) -> list[tuple[str, ...]]:
    """Return GPUs of each of ``count`` slots: whole ones apart, fractions of one packed onto it in order."""
    if per_slot <= 0:
        return [()] * count
    if per_slot < 1:
        sharers = _sharers(per_slot)
        return [(visible[slot // sharers],) for slot in range(count)]
    size = int(per_slot)
    return [tuple(visible[slot * size : (slot + 1) * size]) for slot in range(count)]


# --------------------------------------------------------------------------- holdings and free amounts


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """The resources of one claim and its owner, as published to this user's other processes."""

    run: str
    host: str
    pid: int
    #: Identities of GPUs.
    gpus: tuple[str, ...] = ()
    #: Amounts by name, GPUs left out.
    amounts: dict[str, float] = {}
    #: The cores that the holder's CPUs are among; empty where they are not known, or no CPU is held.
    cores: tuple[int, ...] = ()


def gpus_for(count: int, per_slot: float) -> int:
    """Return the number of whole GPUs that :func:`share_gpus` gives to ``count`` slots."""
    if per_slot <= 0:
        return 0
    return math.ceil(count / _sharers(per_slot)) if per_slot < 1 else count * int(per_slot)


def counted(shape: SlotShape, count: int) -> dict[str, float]:
    """Return the amounts that ``count`` slots hold exclusively, by name; empty where everything may be shared."""
    each = {**shape.custom, **({"CPU": shape.cpus} if shape.explicit else {})}
    amounts = {name: amount * count for name, amount in each.items() if amount > 0}
    gpus = gpus_for(count, shape.gpus)
    return {**amounts, "GPU": float(gpus)} if gpus else amounts


def free_gpus(machine: Machine, held: Iterable[Holding]) -> tuple[str, ...]:
    """Return the unheld entries of ``machine.visible``."""
    taken = {gpu for holding in held for gpu in holding.gpus}
    return tuple(
        gpu
        for gpu, identity in zip(machine.visible, machine.identities, strict=True)
        if identity not in taken
    )


def free(machine: Machine, held: Collection[Holding], name: str) -> float:
    """Return the free amount of a resource; never below 0, although others may see more of it than this process."""
    if name == "GPU":
        return float(len(free_gpus(machine, held)))
    return max(0.0, machine.total(name) - sum(taken(machine, holding, name) for holding in held))


def missing(machine: Machine, held: Collection[Holding], wanted: Mapping[str, float]) -> dict[str, float]:
    """Return the resources that do not suffice, each with its free amount; empty when all suffice."""
    left = {name: free(machine, held, name) for name in wanted}
    return {name: left[name] for name, amount in wanted.items() if amount > left[name] + _ROUNDING}


def slots_free(
    machine: Machine,
    shape: SlotShape,
    held: Collection[Holding],
    set_aside: Collection[Mapping[str, float]] = (),
) -> int:
    """Return the number of slots of this shape that fit beside what is held and reserved for others.

    One per core where no resource was requested by name.
    """
    if not shape.explicit and not counted(shape, 1):
        return machine.cpus
    room = BOUNDLESS
    for name, amount in counted(shape, 1).items():
        left = free(machine, held, name) - sum(wanted.get(name, 0.0) for wanted in set_aside)
        if name == "GPU" and shape.gpus < 1:
            fitting = int(left) * _sharers(shape.gpus)
        else:
            fitting = int((left + _ROUNDING) / amount)
        room = min(room, fitting)
    return max(0, room)


def taken(machine: Machine, holding: Holding, name: str) -> float:
    """Return the amount of a resource visible to this process that a claim takes.

    CPUs that may be on cores which only the holder sees do not count: jobs on one node often have cores of their own.
    """
    amount = holding.amounts.get(name, 0.0)
    if name != "CPU" or not machine.cores:
        return amount
    return max(0.0, amount - len(set(holding.cores) - machine.cores))


def _sharers(per_slot: float) -> int:
    """Return the number of slots that share one GPU when each needs this part of it."""
    return int(1 / per_slot + _ROUNDING)


def _cores() -> frozenset[int]:
    try:
        return frozenset(os.sched_getaffinity(0))
    except AttributeError:
        return frozenset()


def _gpu_names() -> tuple[str, ...]:
    with _nvml() as nvml:
        return tuple(_text(nvml.nvmlDeviceGetName(handle)) for handle in _handles(nvml))


def _gpu_uuids() -> tuple[str, ...]:
    with _nvml() as nvml:
        return tuple(_text(nvml.nvmlDeviceGetUUID(handle)) for handle in _handles(nvml))


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    """Yield NVML, which takes milliseconds to start; None where there is no driver."""
    if not os.path.exists("/dev/nvidiactl"):
        yield None  # saves loading the library where there is no driver
        return
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _handles(nvml: Any) -> list[Any]:
    if nvml is None:
        return []
    return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name
