"""One rank under torchrun: every process runs the script, and rank 0 also hosts the controller.

torchrun starts, ends and restarts the processes, so a failure here ends the attempt and torchrun's restart begins the
next one. Ranks find each other through torchrun's own store: each publishes where it is and the public half of a key
pair it made; no secret travels. Rank 0's engine turns that into slots, which are therefore not its children.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec

from powertrain.engine import process
from powertrain.engine.base import (
    Claim,
    EventSink,
    Exited,
    Granted,
    Inspection,
    OutputSink,
    ProcessSpec,
    RankInDriver,
    Slot,
    SlotLost,
    SlotShape,
    Started,
)
from powertrain.engine.inline import environment
from powertrain.errors import ConfigError, EngineError
from powertrain.fork_server import exit_descriptor
from powertrain.wire.hub import Hub
from powertrain.wire.keys import ConnectionInfo, KeyPair
from powertrain.worker.main import Rank, WorkerSpec

#: A rank that has not called ``fit`` by then never will.
_JOIN_TIMEOUT = timedelta(minutes=30)
_FOREVER = timedelta(days=365)
#: The interval at which a wait for a rank checks whether it was cancelled.
_POLL_INTERVAL = timedelta(seconds=1)
_fits = 0


class Joined(msgspec.Struct, frozen=True, kw_only=True):
    """The record that a rank publishes about itself."""

    rank: int
    host: str
    address: str
    pid: int
    key: bytes
    #: The number of the rank's agent, which torchrun calls the group, and the GPU that torchrun means for the rank.
    group: str
    gpu: str


def is_torchrun() -> bool:
    """Return True when torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def own_rank() -> int:
    return int(os.environ["RANK"])


def world_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def local_world_size() -> int:
    return int(os.environ["LOCAL_WORLD_SIZE"])


def own_gpu() -> str:
    """Return the GPU of this rank as torchrun's users choose it: number LOCAL_RANK of those that its agent may use."""
    index = int(os.environ["LOCAL_RANK"])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return visible[index].strip() if index < len(visible) and visible[index].strip() else str(index)


def check_num_workers(num_workers: int | tuple[int, int]) -> None:
    """Check the number of workers: 0 accepts torchrun's, any other number must agree."""
    if num_workers not in (0, world_size()):
        raise ConfigError(
            f"ScalingConfig(num_workers={num_workers}) does not fit: torchrun started {world_size()} processes. Use "
            f"num_workers=0 to take all of torchrun's processes, or start it with --nproc-per-node={num_workers}."
        )


def agreed_name(proposal: str) -> str:
    """Return the name of this process's next ``fit``: the first proposal of this job, and the same after each restart.

    The store lives as long as torchrun's agent does, so another launch begins with other names.
    """
    key = f"powertrain/name/{os.environ['TORCHELASTIC_RUN_ID']}/{_fits + 1}"
    name: bytes = _open_store().compare_set(key, "", proposal)
    return name.decode()


class TorchrunStore:
    """This process's access to torchrun's store, for one ``fit``. The n-th ``fit`` of every rank belongs together."""

    def __init__(self, prefix: str, keys: KeyPair) -> None:
        self._prefix = prefix
        self._store = _open_store()
        self.keys = keys

    @classmethod
    def next(cls) -> TorchrunStore:
        """Return the meeting of this process's next ``fit``."""
        global _fits
        _fits += 1
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return cls(f"powertrain/fit/{restart}/{_fits}", KeyPair.new())

    def again(self) -> TorchrunStore:
        """Return the same meeting over a connection of its own: waiting blocks a connection."""
        return TorchrunStore(self._prefix, self.keys)

    def publish(self, key: str, value: bytes) -> None:
        self._store.set(f"{self._prefix}/{key}", value)

    def has(self, key: str) -> bool:
        """Return True when the key has been published."""
        return bool(self._store.check([f"{self._prefix}/{key}"]))

    def await_(self, key: str, within: timedelta) -> bytes:
        """Wait for ``key`` and return its value."""
        name = f"{self._prefix}/{key}"
        self._store.wait([name], within)
        value: bytes = self._store.get(name)
        return value

    def await_while(self, key: str, within: timedelta, wanted: Callable[[], bool]) -> bytes | None:
        """As :meth:`await_`; None as soon as it is no longer wanted."""
        deadline = time.monotonic() + within.total_seconds()
        while wanted():
            try:
                return self.await_(key, _POLL_INTERVAL)
            except RuntimeError:
                self._store.check(
                    [f"{self._prefix}/{key}"]
                )  # raises where the store is gone, and not merely silent
                if time.monotonic() > deadline:
                    raise
        return None

    def join(self) -> None:
        me = Joined(
            rank=own_rank(),
            host=socket.gethostname(),
            address=own_address(),
            pid=os.getpid(),
            key=self.keys.public,
            group=os.environ["GROUP_RANK"],
            gpu=own_gpu(),
        )
        self.publish(f"join/{me.rank}", msgspec.msgpack.encode(me))


def _open_store() -> Any:
    """Return a connection of our own to the store that torchrun (or the process group) hosts."""
    import torch

    dist: Any = torch.distributed
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        raise EngineError(
            "This torchrun does not host a store that all ranks can meet in (TORCHELASTIC_USE_AGENT_STORE is not "
            "True). Start it with --standalone or with --rdzv-backend=c10d."
        )
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=60), wait_for_workers=False)


def own_address() -> str:
    """Return the address of this node that reaches the master's."""
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        return str(probe.getsockname()[0])


@dataclass(frozen=True)
class TorchrunClaim:
    id: str


class TorchrunEngine:
    """Rank 0's view of all ranks."""

    name = "torchrun"
    restarts = False
    replaces = False
    owns_processes = False
    shares_driver_process = False
    forks_driver = False

    def __init__(self, function: Callable[[], Any], env: Mapping[str, str] | None = None) -> None:
        """``env`` are the user's own variables for the rank that lives here."""
        self._function, self._env = function, env or {}
        self._meeting = TorchrunStore.next()
        self._watching = self._meeting.again()
        self._forks: queue.SimpleQueue[tuple[Slot, ProcessSpec] | EngineError | None] = queue.SimpleQueue()
        self._events: EventSink = lambda _: None
        self._slots: list[Slot] = []
        self._pids: dict[str, int] = {}
        #: Each slot's process title, and the file for its stacks.
        self._dumps: dict[str, tuple[str, str]] = {}
        self._threads: list[threading.Thread] = []
        self._ended: set[str] = set()
        self._telling = threading.Lock()
        self._closed = threading.Event()
        self._close_read, self._close_write = os.pipe()
        #: Why the ranks can no longer be seen.
        self._problem: EngineError | None = None
        self.error: BaseException | None = None

    @property
    def rank_in_driver(self) -> RankInDriver:
        return self

    def connect(self, hub: Hub) -> None:
        """Do nothing: the rank is in this process, or connects to the controller itself."""

    def start(self, events: EventSink, output: OutputSink) -> None:
        self._events = events

    def wire_address(self) -> str:
        return "ipc" if own_address() == "127.0.0.1" else own_address()

    def request(self, count: int, shape: SlotShape) -> TorchrunClaim:
        if self._threads:
            raise EngineError(
                "A rank was lost, and under torchrun only torchrun can start ranks again. Start it with "
                "--max-restarts=N to have it do so."
            ) from self._problem
        claim = TorchrunClaim("torchrun")
        self._meeting.join()
        self._start(lambda: self._watch(claim, shape))
        return claim

    def _start(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name="powertrain-torchrun", daemon=True)
        self._threads.append(thread)
        thread.start()

    def withdraw(self, claim: Claim) -> None:
        """Do nothing: torchrun has started all ranks, and a rank that has not joined cannot be cancelled."""

    def watch_capacity(self, shape: SlotShape, wanted: int = 0) -> None:
        """Do nothing: torchrun decides the number of ranks, and restarts all of them when it changes."""

    def fork(self, slot: Slot, spec: ProcessSpec) -> None:
        self._dumps[slot.id] = (spec.title, spec.stacks)
        if slot is self._slots[0]:
            self._forks.put((slot, spec))
        else:
            self._meeting.publish(f"spec/{slot.id}", spec.payload)
            self._events(Started(slot, self._pids[slot.id]))

    def attend(self, beside: Slot, spec: ProcessSpec) -> None:
        """Return None: torchrun owns the processes of every node; the controller uploads on its own, each rank
        elsewhere."""

    def signal(self, slot: Slot, number: signal.Signals) -> None:
        """Do nothing: torchrun owns the processes, and ends them all when one fails."""

    def inspect(self, slot: Slot, stacks: bool = False) -> Inspection:
        pid = self._pids.get(slot.id, 0)
        if slot.host != self._slots[0].host:
            return Inspection(pid=pid, state="unknown")
        title, dump = self._dumps.get(slot.id, ("", ""))
        return process.inspection(pid, title, dump, stacks)

    def is_in_doubt(self, since: float) -> bool:
        return False

    def release(self, slots: Sequence[Slot]) -> None:
        """Do nothing: torchrun keeps its processes."""

    def close(self) -> None:
        self._events = lambda _: None
        if self._closed.is_set():
            return
        self._closed.set()
        self._forks.put(None)
        with contextlib.suppress(RuntimeError):  # the store is gone: then the watching thread is, too
            for slot in self._slots[1:]:
                self._meeting.publish(f"exit/{slot.id}", b"-1")  # lets the watching thread go
        os.write(self._close_write, b"x")
        for thread in self._threads:
            thread.join()
        os.close(self._close_read)
        os.close(self._close_write)

    def serve(self) -> None:
        """Run rank 0 in this thread when it is forked; returns when the engine is closed.

        Raises :class:`EngineError` when the ranks never came together.
        """
        while (fork := self._forks.get()) is not None:
            if isinstance(fork, EngineError):
                raise fork
            slot, spec = fork
            code, rank = live(spec.payload, self._meeting.keys, self._function, self._env)
            self.error = rank.error
            self._events(Exited(slot, os.getpid(), code))

    def _watch(self, claim: TorchrunClaim, shape: SlotShape) -> None:
        """Wait for every rank to join, then for every rank to end. Failures are reported to the claim."""
        try:
            meeting = self._meeting.again()
            if self._await_joins(shape):
                self._events(Granted(claim.id, tuple(self._slots)))
        except Exception as error:
            self._problem = EngineError(
                f"Rank {len(self._slots)} did not join the run within {_JOIN_TIMEOUT.total_seconds() / 60:g} minutes, "
                f"or torchrun's store cannot be reached any more ({error}). Every rank must call fit(); look into "
                "the output of the ranks and of torchrun."
            )
            self._forks.put(self._problem)
            return
        self._start(lambda: self._watch_processes(meeting))
        try:
            for slot in self._slots[1:]:
                code = int(self._watching.await_(f"exit/{slot.id}", _FOREVER))
                self._report_end(Exited(slot, self._pids[slot.id], code))
        except Exception as error:
            for slot in self._slots[1:]:
                self._report_end(SlotLost(slot, f"torchrun's store cannot be reached any more ({error})"))

    def _report_end(self, event: Exited | SlotLost) -> None:
        """Report the end of a rank, once."""
        with self._telling:
            if event.slot.id in self._ended:
                return
            self._ended.add(event.slot.id)
        self._events(event)

    def _watch_processes(self, meeting: TorchrunStore) -> None:
        """Detect silent deaths of this node's ranks, long before torchrun ends the other ranks."""
        poll = select.poll()
        poll.register(self._close_read, select.POLLIN)
        alive = {
            descriptor: slot
            for slot in self._slots[1:]
            if slot.host == self._slots[0].host and (descriptor := exit_descriptor(self._pids[slot.id])) >= 0
        }
        for descriptor in alive:
            poll.register(descriptor, select.POLLIN)
        while alive and not self._closed.is_set():
            for descriptor, _ in poll.poll():
                if (slot := alive.pop(descriptor, None)) is not None:
                    poll.unregister(descriptor)
                    os.close(descriptor)
                    with contextlib.suppress(RuntimeError):  # the store is gone: the other thread reports it
                        if not meeting.has(f"exit/{slot.id}"):
                            self._report_end(Exited(slot, self._pids[slot.id], 1, unseen=True))
        for descriptor in alive:
            os.close(descriptor)

    def _await_joins(self, shape: SlotShape) -> bool:
        """Make a slot of every rank that joins; False when the engine was closed before all had."""
        for rank in range(world_size()):
            data = self._watching.await_while(
                f"join/{rank}", _JOIN_TIMEOUT, lambda: not self._closed.is_set()
            )
            if data is None:
                return False
            joined = msgspec.msgpack.decode(data, type=Joined)
            slot = Slot(
                id=str(rank),
                host=joined.host,
                address=joined.address,
                local=rank == 0,
                gpus=(joined.gpu,) if shape.gpus else (),
                key=joined.key,
                group=joined.group,
            )
            self._slots.append(slot)
            self._pids[slot.id] = joined.pid
        return True


def run_other_rank(function: Callable[[], Any], env: Mapping[str, str]) -> tuple[int, Rank]:
    """Run any rank but 0: join, wait for the start, apply the user's variables, report the outcome."""
    meeting = TorchrunStore.next()
    meeting.join()
    payload = meeting.await_(f"spec/{own_rank()}", _JOIN_TIMEOUT)
    code, rank = live(payload, meeting.keys, function, env)
    meeting.publish(f"exit/{own_rank()}", str(code).encode())
    return code, rank


def live(
    payload: bytes, keys: KeyPair, function: Callable[[], Any], env: Mapping[str, str]
) -> tuple[int, Rank]:
    """Run one rank in this process with its own keys; the process ends when torchrun's agent does."""
    spec = msgspec.msgpack.decode(payload, type=WorkerSpec)
    connection = ConnectionInfo(endpoint=spec.connection.endpoint, hub_key=spec.connection.hub_key, keys=keys)
    agent = exit_descriptor(os.getppid())
    try:
        with environment(env):
            rank = Rank(
                msgspec.structs.replace(spec, connection=connection),
                function,
                watch=agent,
                orphaned=lambda: os._exit(1),
            )
            return rank.live(), rank
    finally:
        if agent >= 0:
            os.close(agent)
