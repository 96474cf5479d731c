"""Messages from a node agent to its run."""

from __future__ import annotations

from powertrain.wire.values import Count, Message, Point, ProcessStack


class NodeReady(Message, frozen=True, tag="node_ready"):
    """An agent has started, with its findings about its node."""

    pid: Count
    host: str
    address: str
    version: str
    #: Why nothing can be started there; "" where all is well.
    problem: str = ""
    #: True where the run's files are missing: the message is sent again when they have arrived.
    wants_files: bool = False


class NodeBeat(Message, frozen=True, tag="node_beat"):
    """The agent lives."""


class ProcessStarted(Message, frozen=True, tag="process_started"):
    id: str
    pid: Count
    #: As in ``powertrain.engine.base.Started``.
    waited: float = 0.0
    imports: float = 0.0


class ProcessOutput(Message, frozen=True, tag="process_output"):
    """Output of a process, in order."""

    id: str
    data: bytes


class ProcessEnded(Message, frozen=True, tag="process_ended"):
    """A process and all that it had started are gone; its output has been sent."""

    id: str
    pid: Count
    code: int
    out_of_memory: bool = False
    #: Why it could not be started, where it never ran.
    error: str = ""
    #: True when the agent's own server was killed, and the process with it.
    lost: bool = False
    #: Of a rank that was not on the controller's machine: the newest row whose report had returned, and its newest
    #: reports as far as its node has them: those with a share that is still staged and, if it died, the others.
    row: Count = 0
    reports: list[Point] = []
    #: Should it have died: its newest steps, as they lie in its ring.
    steps: bytes = b""


class ProcessSeen(Message, frozen=True, tag="process_seen"):
    """The answer to :class:`LookAt`."""

    ask: Count
    pid: Count
    state: str
    processes: list[ProcessStack] = []
    debugged: bool = False
