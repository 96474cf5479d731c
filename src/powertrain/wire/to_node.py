"""Messages from a run to a node agent."""

from __future__ import annotations

from powertrain.wire.values import Message


class StartProcess(Message, frozen=True, tag="start_process"):
    """Start a process: see ``engine.base.ProcessSpec``."""

    id: str
    entry: str
    payload: bytes
    env: dict[str, str | None]
    cwd: str = ""
    title: str = ""
    shielded: bool = False
    stacks: str = ""
    #: For a rank: where it marks its row, and where its attempt's shares are staged, to be looked at when it is gone.
    mark: str = ""
    staging: str = ""
    attempt: int = 0
    rank: int = -1
    #: Where it keeps its newest steps.
    ring: str = ""


class SignalProcess(Message, frozen=True, tag="signal_process"):
    """SIGKILL reaches all that the process has started."""

    id: str
    number: int


class LookAt(Message, frozen=True, tag="look_at"):
    """Request for the state of a process as seen from outside; with ``stacks`` also its stacks."""

    ask: int
    id: str
    stacks: bool = False


class EndNode(Message, frozen=True, tag="end_node"):
    """End everything on the node, and the agent."""
