"""Torch's process group: every worker joins it before the user's function is called.

Rank 0 decides the rendezvous: see :mod:`powertrain.torch.rendezvous`.

The driver's part imports no torch; functions that begin with ``_`` and import it run in workers.
"""

from __future__ import annotations

import itertools
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, cast, runtime_checkable

from powertrain.backend import Backend, BackendConfig, Worker, WorkerGroup
from powertrain.errors import ConfigError, EngineError
from powertrain.frameworks.joining import LEAVE_TIMEOUT_S, await_joined, leave_all, within
from powertrain.frameworks.ports import on_one_host, on_one_node
from powertrain.text.loggers import module_logger
from powertrain.torch import gpu_warming
from powertrain.torch.rendezvous import (
    Rendezvous,
    ReservedPort,
    open_file_store,
    open_tcp_store,
    publish_reserved,
    read_reserved,
)

logger = module_logger(__name__)


@dataclass(frozen=True)
class TorchWorkerInfo:
    """The information that one worker needs to join."""

    rank: int
    world_size: int
    meeting: Rendezvous
    #: "" lets the worker choose: nccl with a GPU, gloo without.
    backend: str
    timeout_s: float
    #: True when all workers are on one host; then ``address`` is not used.
    one_host: bool
    #: The worker's own node, as other nodes reach it.
    address: str
    gpus: int
    #: True to set MASTER_ADDR and MASTER_PORT for the user's code.
    announce: bool


# --------------------------------------------------------------------------- the driver's part


@runtime_checkable
class ProcessGroupSettings(Protocol):
    """The process group's settings in a backend config: :class:`powertrain.torch.TorchConfig`."""

    @property
    def backend(self) -> str | None:
        """The process group's backend; None for nccl with GPUs and gloo without."""

    @property
    def init_method(self) -> str:
        """``"env"`` or ``"tcp"``."""

    @property
    def timeout_s(self) -> float:
        """Seconds after which a collective that does not complete is an error."""


class TorchBackend(Backend):
    """Sets up ``torch.distributed`` in all workers, and takes it down."""

    share_cuda_visible_devices = True

    def on_start(self, worker_group: WorkerGroup, backend_config: BackendConfig) -> None:
        """Bring every worker into the default process group. Raises the first worker's error."""
        assert isinstance(backend_config, ProcessGroupSettings)
        workers = worker_group.workers
        refuse_shared_gpus(backend_config.backend, workers)
        one_host = on_one_host(workers)
        if len(workers) > 1 and backend_config.init_method == "env" and on_one_node(workers):
            meeting = Rendezvous.in_new_file()
        else:
            address = "" if one_host else workers[0].metadata.node_ip
            meeting = worker_group.execute_single(0, _open_meeting, len(workers), address)
        joining = [
            worker_group.execute_single_async(
                worker.rank, _join, _place(worker, len(workers), meeting, one_host, backend_config)
            )
            for worker in workers
        ]
        await_joined(joining)

    def on_shutdown(self, worker_group: WorkerGroup, backend_config: BackendConfig) -> None:
        """Make every worker that still answers leave the group. Never raises, never hangs."""
        leave_all(worker_group, _leave)


def _place(
    worker: Worker, world_size: int, meeting: Rendezvous, one_host: bool, config: ProcessGroupSettings
) -> TorchWorkerInfo:
    return TorchWorkerInfo(
        rank=worker.rank,
        world_size=world_size,
        meeting=meeting,
        backend=config.backend or "",
        timeout_s=config.timeout_s,
        one_host=one_host,
        address=worker.metadata.node_ip,
        gpus=len(worker.metadata.gpu_ids),
        announce=config.init_method == "env",
    )


def refuse_shared_gpus(backend: str | None, workers: Sequence[Worker]) -> None:
    """Raise :class:`ConfigError` when NCCL would have to serve two ranks on one GPU, which it cannot."""
    if backend is not None and not uses_nccl(backend):
        return
    holder: dict[tuple[str, str], int] = {}
    for worker in workers:
        for gpu in worker.metadata.gpu_ids:
            other = holder.setdefault((worker.metadata.node_id, gpu), worker.rank)
            if other != worker.rank:
                raise ConfigError(
                    f"Ranks {other} and {worker.rank} share GPU {gpu} of {worker.host}, and NCCL refuses two "
                    'ranks on one GPU. Use TorchConfig(backend="gloo"), or give each worker its own GPU '
                    "(fewer workers, or a whole GPU in resources_per_worker)."
                )


def uses_nccl(backend: str) -> bool:
    """Return True for "nccl" and for lists such as "cpu:gloo,cuda:nccl"."""
    return any(part.rpartition(":")[2] == "nccl" for part in backend.lower().split(","))


def uses_gloo(backend: str) -> bool:
    """Return True for "gloo" and for lists such as "cpu:gloo,cuda:nccl"."""
    return any(part.rpartition(":")[2] == "gloo" for part in backend.lower().split(","))


# --------------------------------------------------------------------------- in each worker


class _Membership:
    """The state of this process's group: one instance per process."""

    def __init__(self) -> None:
        self.port = ReservedPort()
        self.joined = False
        #: Variables set here, with their previous values.
        self.environment: dict[str, str | None] = {}
        self.joins = itertools.count()

    def set_variables(self, values: Mapping[str, str], *, overwrite: bool = True) -> None:
        for name, value in values.items():
            if overwrite or name not in os.environ:
                self.environment.setdefault(name, os.environ.get(name))
                os.environ[name] = value

    def restore_variables(self) -> None:
        for name, value in self.environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self.environment.clear()


_membership = _Membership()


def _distributed() -> Any:
    """Return ``torch.distributed``, whose stores and functions are only partly typed."""
    import torch.distributed

    return torch.distributed


def _open_meeting(world_size: int, address: str) -> Rendezvous:
    """Decide the rendezvous, on rank 0. ``address`` is the node's own, "" for this host only."""
    if _distributed().is_initialized() and not _membership.joined:
        return Rendezvous("existing")
    if world_size == 1:
        return Rendezvous("alone")
    return Rendezvous.of_torchrun() or Rendezvous("tcp", *_membership.port.open(address, listens=True))


def _runtime_directory() -> str:
    """Return the run's runtime directory on this node, which only this user can enter."""
    from powertrain.worker import context

    return context.runtime_directory()


def _join(place: TorchWorkerInfo) -> None:
    """Bring this worker into the default process group, and begin to count its optimizer steps."""
    from powertrain.torch import device as torch_device
    from powertrain.torch import prepare

    prepare.begin(gpus=place.gpus)
    if _distributed().is_initialized() and not _membership.joined:
        _keep_existing(place)
        return
    if _membership.joined:
        _leave(LEAVE_TIMEOUT_S)
    backend = place.backend or ("nccl" if _has_gpu() else "gloo")
    if uses_nccl(backend):
        _check_nccl_can_work()
    if place.gpus and _has_gpu():
        gpu_warming.begin(_current_cuda_device().index)
    if uses_gloo(backend):
        _membership.set_variables(gloo_variables(place.one_host, place.address), overwrite=False)
    began = time.monotonic()
    try:
        _init_group(place, backend)
    except Exception as error:
        where = "in this process" if place.meeting.kind == "alone" else f"at {place.meeting}"
        reach = (
            ""
            if place.meeting.file
            else "that every node can reach that address, that no firewall lies between, and "
        )
        raise EngineError(
            f"Rank {place.rank} of {place.world_size} could not join the {backend} process group {where}; it "
            f"gave up after {time.monotonic() - began:.1f} s: {type(error).__name__}: {error}. Check "
            f"{reach}that no other rank failed first."
        ) from error
    _membership.joined = True
    _membership.set_variables(_accelerate_variables(str(torch_device.own_devices()[0])), overwrite=False)


def _accelerate_variables(device: str) -> dict[str, str]:
    """Return the variables by which Hugging Face Accelerate finds this worker's device and process group.

    By itself it would choose another device, on a machine with GPUs not the CPU; and on CPUs it overlooks the group
    unless ``accelerate launch`` or this variable says that CPUs are meant, so that each rank would train alone.
    """
    found = {"ACCELERATE_TORCH_DEVICE": device}
    return {**found, "ACCELERATE_USE_CPU": "true"} if device == "cpu" else found


def _reset_accelerate() -> None:
    """Reset Accelerate's process group: a process in which it was used may join another one later."""
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _keep_existing(place: TorchWorkerInfo) -> None:
    dist = _distributed()
    found = (dist.get_rank(), dist.get_world_size())
    if found != (place.rank, place.world_size):
        raise ConfigError(
            f"A process group with rank {found[0]} of {found[1]} was already set up in this process, but "
            f"this worker is rank {place.rank} of {place.world_size}. Remove the script's own call of "
            "init_process_group."
        )


def _check_nccl_can_work() -> None:
    """Raise :class:`ConfigError` where NCCL would fail later with a less clear message."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            'TorchConfig(backend="nccl") needs a GPU, and this worker sees none. Use TorchConfig(backend="gloo"), '
            "or ScalingConfig(use_gpu=True) on a machine with GPUs."
        )
    local_ranks, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if local_ranks > gpus:
        raise ConfigError(
            f"{local_ranks} ranks of this node share {gpus} GPU(s), and NCCL refuses two ranks on one GPU. "
            f'Use TorchConfig(backend="gloo"), or give each worker its own GPU (at most {gpus} workers here).'
        )


def gloo_variables(one_host: bool, address: str) -> dict[str, str]:
    """Return variables that keep gloo on the run's network interface; without them it looks up the host's name.

    Args:
        one_host: True when all workers are on this host.
        address: The address of this node, as other nodes reach it.
    """
    interface = _loopback_interface() if one_host else _interface_of(address)
    return {"GLOO_SOCKET_IFNAME": interface} if interface else {}


def _loopback_interface() -> str:
    names = {name for _, name in socket.if_nameindex()}
    return next((name for name in ("lo", "lo0") if name in names), "")


def _interface_of(address: str) -> str:
    """Return the interface that has ``address``; "" when none has (then gloo chooses)."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in addresses):
            return str(name)
    return ""


def _init_group(place: TorchWorkerInfo, backend: str) -> None:
    dist = _distributed()
    timeout = timedelta(seconds=place.timeout_s)
    store, announce = _store(place, timeout)
    store.set_timeout(timeout)
    options: dict[str, Any] = {}
    if uses_nccl(backend):
        options["device_id"] = _current_cuda_device()
    dist.init_process_group(
        backend, store=store, rank=place.rank, world_size=place.world_size, timeout=timeout, **options
    )
    if place.announce:
        announce()


def _current_cuda_device() -> Any:
    """Return the device for NCCL, so that it connects now and not within the first step, and never has to guess."""
    import torch

    return torch.device("cuda", torch.cuda.current_device())


def _store(place: TorchWorkerInfo, timeout: timedelta) -> tuple[Any, Callable[[], None]]:
    """Return the store of the rendezvous, and a function that sets MASTER_ADDR and MASTER_PORT after it."""
    dist, meeting = _distributed(), place.meeting
    # Rank 0 is not consulted where all are on one node, so each rank checks whether torchrun has started it.
    meeting = Rendezvous.of_torchrun() or meeting if meeting.kind == "file" else meeting
    if meeting.kind == "alone":
        return dist.HashStore(), lambda: _announce("127.0.0.1", "29500", overwrite=False)
    if meeting.kind == "env":
        rendezvous = dist.rendezvous("env://", place.rank, place.world_size, timeout=timeout)
        store = next(iter(rendezvous))[0]
        # torchrun's store outlives a restart and a second fit(): keys of the earlier group are still in it.
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return dist.PrefixStore(f"powertrain/{restart}/{next(_membership.joins)}", store), lambda: None
    if meeting.kind == "file":
        store = open_file_store(dist, meeting, _runtime_directory())
        if place.rank == 0:
            publish_reserved(store, _membership.port)
        return dist.PrefixStore("default_pg", store), lambda: _announce(*read_reserved(store))
    store = open_tcp_store(
        dist, meeting, place.world_size, _membership.port if place.rank == 0 else None, timeout
    )
    return dist.PrefixStore("default_pg", store), lambda: _announce(meeting.host, str(meeting.port))


def _announce(host: str, port: str, *, overwrite: bool = True) -> None:
    _membership.set_variables({"MASTER_ADDR": host, "MASTER_PORT": port}, overwrite=overwrite)


def _leave(seconds: float) -> None:
    """Leave the group if it was made here, within ``seconds``, and restore the variables."""
    import torch

    dist, cuda = _distributed(), cast(Any, torch.cuda)
    _membership.port.close()
    if _membership.joined and dist.is_initialized():
        problem = within(seconds, dist.destroy_process_group)
        if problem:
            logger.warning("The process group could not be taken down, and is left: %s", problem)
    if _membership.joined:
        _reset_accelerate()
    _membership.joined = False
    _membership.restore_variables()
    if cuda.is_initialized():
        cuda.empty_cache()
