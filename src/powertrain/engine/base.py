"""The protocol between the control plane and an engine, which provides slots and starts processes on them.

The surface is small on purpose: request slots, start and signal processes, inspect them, and a stream of events.
Retry, resize, commit and restart are not here. They belong to the controller, so that a laptop run exercises the code
of a cluster run.

An engine guarantees the following, and ``powertrain.testing.engine_contract`` checks it:

- ``request`` returns at once. Slots arrive as ``Granted`` events, possibly in parts unless the shape is a gang's;
  ``Waiting`` names what is missing. A request that can never be met raises :class:`~powertrain.errors.ResourceError`;
  where that turns out later, a ``ClaimRefused`` event follows.
- ``fork`` returns at once. For every fork there is exactly one ``Exited`` or one ``SlotLost``, and after
  it nothing of that process (its own children included) is running.
- A slot outlives its processes: after ``Exited`` it can be forked on again. After ``SlotLost`` it cannot.
- A slot's process need not be a child of the controller's process, nor be on its machine.
- ``attend`` starts a process beside the slots of a node, outside every slot's kill scope: it outlives their
  processes and ends with ``close``. It gets a slot of its own, which events name. Where the engine does not own the
  node's processes it returns None.
- After ``watch_capacity`` there is a ``Capacity`` event soon, and one whenever the number changes. An engine whose
  number of slots never changes need not send any. An engine that can grow, such as a cluster with an autoscaler,
  requests the slots missing to the wanted number, and keeps them for some minutes.
- ``release`` ends the processes on the slots and gives the slots back. ``close`` does so for everything, and
  afterwards no event is delivered.
- Events come from any thread, one at a time per slot, in the order in which they happened.
"""

from __future__ import annotations

import signal as _signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Union

from powertrain.wire.hub import Hub
from powertrain.wire.values import Point, ProcessStack


@dataclass(frozen=True)
class SlotShape:
    """The resources that one worker needs."""

    cpus: float = 1.0
    gpus: float = 0.0
    #: Custom resources by name, such as ``{"accelerator_type:T4": 0.001}``.
    custom: Mapping[str, float] = field(default_factory=dict)
    #: True when the user named the amounts: only then are they checked against the machine.
    explicit: bool = False
    #: PACK, SPREAD, STRICT_PACK or STRICT_SPREAD; means nothing on one machine.
    placement: str = "PACK"
    #: True when the slots of a request are of use only together: all are granted at once, or none.
    gang: bool = True
    #: Which nodes a worker may lie on, by their labels: one selector for all workers, or one for each.
    labels: tuple[Mapping[str, str], ...] = ()


@dataclass(frozen=True)
class Slot:
    """A place for one worker: its node and its resources."""

    id: str
    #: Host name of the node, and the address under which other nodes reach it.
    host: str
    address: str
    #: True when the node is the controller's own machine.
    local: bool = True
    #: Indices of the node's GPUs this slot may use, as the node numbers them.
    gpus: tuple[str, ...] = ()
    #: Public half of the wire keys that the slot's process made for itself; b"" where the controller makes them.
    key: bytes = b""
    #: The node as the engine knows it, where one host may be several nodes; "" where a host is one.
    node: str = ""
    #: The launcher's own group of slots, where a launcher made them: each group has local ranks and a node rank of its
    #: own, also where several groups are on one host. Its slots come in the order of their ranks.
    group: str = ""

    @property
    def node_id(self) -> str:
        """The same for slots of one node, and only for those."""
        return self.node or self.host


@dataclass(frozen=True)
class ProcessSpec:
    """One process to start on a slot."""

    #: "package.module:function", called with ``payload`` in the new process's main thread.
    entry: str
    payload: bytes
    #: Variables to set before ``entry`` runs; ``None`` removes one.
    env: Mapping[str, str | None]
    #: The file of the controller's machine that stdout and stderr are appended to; "" for none.
    log_path: str = ""
    #: The process's working directory, created if absent; "" leaves the choice to the process.
    cwd: str = ""
    #: A name for people: "rank 3".
    title: str = ""
    #: True for a process that signals asking for an end do not reach before it unblocks them itself.
    shielded: bool = False
    #: The file to which the process writes its stacks on a signal; "" for none.
    stacks: str = ""
    #: Which rank of how many, in which attempt of the run; -1 for a process that is no rank.
    rank: int = -1
    world_size: int = 0
    attempt: int = 0
    #: Of a rank: the file in which it marks its row, and the directory in which its shares are staged.
    mark: str = ""
    staging: str = ""
    #: Of a rank that is traced: the file in which it keeps its newest steps.
    ring: str = ""
    #: For a rank that the engine feeds with data: the socket of each dataset.
    feeds: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Inspection:
    """The state of a process as seen from outside."""

    pid: int
    #: The kernel's state: "running", "sleeping", "disk-sleep", "stopped", "zombie", or "gone"; "unknown" for one
    #: that cannot be seen from here.
    state: str
    #: The stacks of its threads, and of the processes it has started; itself first. Empty where they are not available,
    #: or were not requested.
    processes: tuple[ProcessStack, ...] = ()
    #: True while a debugger holds it.
    debugged: bool = False


@dataclass(frozen=True)
class Granted:
    """These slots now belong to the claim."""

    claim: str
    slots: tuple[Slot, ...]


@dataclass(frozen=True)
class Waiting:
    """The claim is not met yet; ``reason`` names what is missing."""

    claim: str
    granted: int
    reason: str


@dataclass(frozen=True)
class ClaimRefused:
    """The claim will never be met; ``reason`` is a sentence with the cause and the remedy."""

    claim: str
    reason: str


@dataclass(frozen=True)
class Started:
    """The process requested with ``fork`` exists."""

    slot: Slot
    pid: int
    #: Seconds since the request in which its warm server was not ready, and the part of them spent in the server's
    #: imports; 0 without a warm server.
    waited: float = 0.0
    imports: float = 0.0


@dataclass(frozen=True)
class Exited:
    """The slot's process has ended; the slot lives. ``code`` is negative for a signal, as in ``subprocess``."""

    slot: Slot
    pid: int
    code: int
    #: True when the kernel ended it for want of memory.
    out_of_memory: bool = False
    #: Why it could not be started, when it never ran.
    error: str = ""
    #: True where only its end was seen, and not how: ``code`` means nothing then.
    unseen: bool = False
    #: Of a rank whose files the controller cannot look at: the newest row whose report had returned, and its
    #: newest reports, as far as its node has them.
    row: int = 0
    reports: tuple[Point, ...] = ()
    #: And, should it have died, its newest steps, as they were recorded there.
    steps: bytes = b""


@dataclass(frozen=True)
class SlotLost:
    """The slot is gone, and any process on it."""

    slot: Slot
    reason: str


@dataclass(frozen=True)
class Drain:
    """The slot will be taken away at ``deadline`` (Unix seconds)."""

    slot: Slot
    deadline: float
    reason: str


@dataclass(frozen=True)
class Capacity:
    """The number of slots of the watched shape available now, including those already held."""

    count: int


@dataclass(frozen=True)
class Remark:
    """A warning for the user about a difference in processes that are started from now on."""

    text: str


EngineEvent = Union[Granted, Waiting, ClaimRefused, Started, Exited, SlotLost, Drain, Capacity, Remark]
EventSink = Callable[[EngineEvent], None]
#: Called with (slot, bytes) for each piece of output, in order per slot.
OutputSink = Callable[[Slot, bytes], None]


#: Explanations of signals for users.
_SIGNAL_WORDS = {
    _signal.SIGSEGV: "segmentation fault: native code touched memory that is not its own",
    _signal.SIGBUS: "bus error: often a full /dev/shm or a truncated memory-mapped file",
    _signal.SIGABRT: "abort: native code ended the process; its last output is in the rank's log",
    _signal.SIGFPE: "arithmetic error in native code",
    _signal.SIGILL: "illegal instruction: a binary built for another processor",
    _signal.SIGKILL: "sent by another process or the system; it cannot be caught",
    _signal.SIGTERM: "requested by another process or the system",
    _signal.SIGINT: "an interrupt by another process or the terminal",
    _signal.SIGHUP: "its terminal was closed",
}


def describe_exit(event: Exited) -> tuple[str, str]:
    """Return the kind and the description of an exit: "was killed by SIGSEGV (segmentation fault ...)"."""
    code = event.code
    if event.error:
        return "start", "could not be started"
    if event.unseen:
        return "exit", "ended, and its exit code is not known"
    if event.out_of_memory:
        return "oom", "was killed by the kernel because memory ran out (SIGKILL from the OOM killer)"
    if code >= 0:
        return "exit", f"exited with code {code}"
    try:
        number = _signal.Signals(-code)
    except ValueError:
        return "signal", f"was killed by signal {-code}"
    words = _SIGNAL_WORDS.get(number)
    return "signal", f"was killed by {number.name}" + (f" ({words})" if words else "")


class Claim(Protocol):
    """The handle of one request."""

    @property
    def id(self) -> str: ...


class RankInDriver(Protocol):
    """The part of an engine that runs a rank in the thread that called ``fit()``."""

    @property
    def error(self) -> BaseException | None:
        """The exception that the rank raised last, for the error of ``fit()`` to chain to."""

    def serve(self) -> None:
        """Run each rank that is forked, in this thread, until the engine is closed."""


class Engine(Protocol):
    """Provides slots and starts processes on them. The module's docstring lists the guarantees.

    A class that derives from it gets the defaults of the attributes below.
    """

    #: The engine's name in ``ScalingConfig(engine=...)``, or a test engine's own.
    name: str
    #: False where a launcher starts the processes again after a failure (torchrun does).
    restarts: bool = True
    #: True where a slot that was taken away can be had again elsewhere.
    replaces: bool = False
    #: False where the processes of ranks are not the engine's to end: the driver's own, or those of a launcher.
    owns_processes: bool = True
    #: True where every rank is the driver's own process: a process forked on a slot would run in it.
    shares_driver_process: bool = False
    #: True where workers may be forked from the driver, and so have the modules that it has imported.
    forks_driver: bool = False

    @property
    def rank_in_driver(self) -> RankInDriver | None:
        """Return the way to run a rank in the thread that called ``fit()``; None where every rank is a process of its
        own.

        Where it is not None the controller runs on a thread beside the rank.
        """
        return None

    def connect(self, hub: Hub) -> None:
        """Pass the controller's wire, over which an engine may reach its nodes. Called once, before ``start``."""

    def start(self, events: EventSink, output: OutputSink) -> None:
        """Begin to deliver. Called once, before anything else but ``connect``."""

    def wire_address(self) -> str:
        """Return the listening address for the controller's wire: "ipc" (this machine only) or an IP address of this
        node."""

    def request(self, count: int, shape: SlotShape) -> Claim:
        """Request ``count`` slots."""

    def withdraw(self, claim: Claim) -> None:
        """Cancel the ungranted part of a claim; granted slots stay."""

    def watch_capacity(self, shape: SlotShape, wanted: int = 0) -> None:
        """Send :class:`Capacity` events for this shape: once soon, then on change. The run would use ``wanted``
        slots."""

    def fork(self, slot: Slot, spec: ProcessSpec) -> None:
        """Start a process on a granted slot that has none."""

    def attend(self, beside: Slot, spec: ProcessSpec) -> Slot | None:
        """Start a process on the node of ``beside`` that belongs to no slot of a claim; None where that cannot be."""

    def signal(self, slot: Slot, number: _signal.Signals) -> None:
        """Send a signal to the slot's process. SIGKILL reaches its whole kill scope. No process: no effect."""

    def inspect(self, slot: Slot, stacks: bool = False) -> Inspection:
        """Inspect the slot's process without disturbing it; with ``stacks`` also its threads, which may take a second
        or two. Any thread."""

    def is_in_doubt(self, since: float) -> bool:
        """Return True while a loss may be about to be reported. With the local engine: a process has ended and its exit
        was not delivered yet. On Ray: some node has sent no heartbeat since ``since`` (monotonic seconds)."""

    def release(self, slots: Sequence[Slot]) -> None:
        """End the processes on these slots and give the slots back."""

    def close(self) -> None:
        """Release everything and stop delivering events."""
