"""One rank under torchrun: every process runs the script, and rank 0 also hosts the controller.

torchrun starts, ends and restarts the processes, so a failure here ends the attempt and torchrun's restart begins the
next one. Ranks find each other through torchrun's own store: each publishes where it is and the public half of a key
pair it made; no secret travels. Rank 0's engine turns that into slots, which are therefore not its children.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec

from powertrain.engine.base import (
    EventSink,
    Exited,
    Granted,
    Inspection,
    OutputSink,
    ProcessSpec,
    Slot,
    SlotShape,
    Started,
)
from powertrain.errors import ConfigError, EngineError
from powertrain.wire import Door, KeyPair
from powertrain.worker.main import Rank, WorkerSpec

#: A rank that has not called ``fit`` by then never will.
_JOIN_WITHIN = timedelta(minutes=30)
_FOREVER = timedelta(days=365)
_fits = 0


class Joined(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank publishes of itself."""

    rank: int
    host: str
    address: str
    pid: int
    key: bytes


def is_torchrun() -> bool:
    """True when torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def own_rank() -> int:
    return int(os.environ["RANK"])


def world_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def check_num_workers(num_workers: int | tuple[int, int]) -> None:
    """torchrun decides how many there are: 0 accepts that, any other number must agree."""
    if num_workers not in (0, world_size()):
        raise ConfigError(
            f"ScalingConfig(num_workers={num_workers}) does not fit: torchrun started {world_size()} processes. Use "
            f"num_workers=0 to take what torchrun gives, or start it with --nproc-per-node={num_workers}."
        )


class Meeting:
    """This process's access to torchrun's store, for one ``fit``. The n-th ``fit`` of every rank belongs together."""

    def __init__(self, prefix: str, keys: KeyPair) -> None:
        self._prefix = prefix
        self._store = _open_store()
        self.keys = keys

    @classmethod
    def next(cls) -> Meeting:
        """The meeting of this process's next ``fit``."""
        global _fits
        _fits += 1
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return cls(f"powertrain/fit/{restart}/{_fits}", KeyPair.new())

    def again(self) -> Meeting:
        """The same meeting over a connection of its own: waiting blocks a connection."""
        return Meeting(self._prefix, self.keys)

    def publish(self, key: str, value: bytes) -> None:
        self._store.set(f"{self._prefix}/{key}", value)

    def await_(self, key: str, within: timedelta) -> bytes:
        """The value of ``key`` once somebody has published it."""
        name = f"{self._prefix}/{key}"
        self._store.wait([name], within)
        value: bytes = self._store.get(name)
        return value

    def join(self) -> None:
        me = Joined(
            rank=own_rank(),
            host=socket.gethostname(),
            address=own_address(),
            pid=os.getpid(),
            key=self.keys.public,
        )
        self.publish(f"join/{me.rank}", msgspec.msgpack.encode(me))


def _open_store() -> Any:
    """A connection of our own to the store that torchrun (or the process group) hosts."""
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
    """The address of this node that reaches the master's."""
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

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._meeting = Meeting.next()
        self._watching = self._meeting.again()
        self._forks: queue.SimpleQueue[tuple[Slot, ProcessSpec] | None] = queue.SimpleQueue()
        self._events: EventSink = lambda _: None
        self._slots: list[Slot] = []
        self._pids: dict[str, int] = {}
        self._thread: threading.Thread | None = None
        self.error: BaseException | None = None

    def start(self, events: EventSink, output: OutputSink) -> None:
        self._events = events

    def wire_address(self) -> str:
        return "ipc" if own_address() == "127.0.0.1" else own_address()

    def request(self, count: int, shape: SlotShape) -> TorchrunClaim:
        claim = TorchrunClaim("torchrun")
        self._meeting.join()
        self._thread = threading.Thread(
            target=self._watch, args=(claim, shape), name="powertrain-torchrun", daemon=True
        )
        self._thread.start()
        return claim

    def fork(self, slot: Slot, spec: ProcessSpec) -> None:
        if slot is self._slots[0]:
            self._forks.put((slot, spec))
        else:
            self._meeting.publish(f"spec/{slot.id}", spec.payload)
            self._events(Started(slot, self._pids[slot.id]))

    def signal(self, slot: Slot, number: signal.Signals) -> None:
        """torchrun owns the processes: it ends them all when one fails."""

    def inspect(self, slot: Slot) -> Inspection:
        return Inspection(pid=self._pids.get(slot.id, 0), state="running")

    def release(self, slots: Sequence[Slot]) -> None:
        """torchrun keeps its processes."""

    def close(self) -> None:
        self._events = lambda _: None
        self._forks.put(None)
        for slot in self._slots[1:]:
            self._meeting.publish(f"exit/{slot.id}", b"-1")  # lets the watching thread go
        if self._thread is not None:
            self._thread.join()

    def serve(self) -> None:
        """Run rank 0 in this thread when it is forked; returns when the engine is closed."""
        while (fork := self._forks.get()) is not None:
            slot, spec = fork
            code, rank = live(spec.payload, self._meeting.keys, self._function)
            self.error = rank.error
            self._events(Exited(slot, os.getpid(), code))

    def _watch(self, claim: TorchrunClaim, shape: SlotShape) -> None:
        """Wait for every rank to join, then for every rank to end."""
        for rank in range(world_size()):
            joined = msgspec.msgpack.decode(self._watching.await_(f"join/{rank}", _JOIN_WITHIN), type=Joined)
            gpus = (str(_local_index(self._slots, joined.host)),) if shape.gpus else ()
            slot = Slot(
                id=str(rank),
                host=joined.host,
                address=joined.address,
                local=rank == 0,
                gpus=gpus,
                key=joined.key,
            )
            self._slots.append(slot)
            self._pids[slot.id] = joined.pid
        self._events(Granted(claim.id, tuple(self._slots)))
        for slot in self._slots[1:]:
            code = int(self._watching.await_(f"exit/{slot.id}", _FOREVER))
            self._events(Exited(slot, self._pids[slot.id], code))


def _local_index(slots: list[Slot], host: str) -> int:
    return sum(slot.host == host for slot in slots)


def follow(function: Callable[[], Any]) -> tuple[int, Rank]:
    """Any rank but 0: join, wait to be told, live, say how it ended."""
    meeting = Meeting.next()
    meeting.join()
    payload = meeting.await_(f"spec/{own_rank()}", _JOIN_WITHIN)
    code, rank = live(payload, meeting.keys, function)
    meeting.publish(f"exit/{own_rank()}", str(code).encode())
    return code, rank


def live(payload: bytes, keys: KeyPair, function: Callable[[], Any]) -> tuple[int, Rank]:
    """Live one rank in this process with the keys it made itself."""
    spec = msgspec.msgpack.decode(payload, type=WorkerSpec)
    door = Door(endpoint=spec.door.endpoint, hub_key=spec.door.hub_key, keys=keys)
    rank = Rank(msgspec.structs.replace(spec, door=door), function)
    return rank.live(), rank
