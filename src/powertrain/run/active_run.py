"""The run that a controller conducts: what its parts share, and the transitions that any of them may ask for."""

from __future__ import annotations

import queue
from dataclasses import dataclass, field
from typing import Any, Protocol

from powertrain.engine import base
from powertrain.run import events as ev
from powertrain.run import lifecycle
from powertrain.run.callbacks import Callbacks
from powertrain.run.checkpoints.manager import CheckpointManager
from powertrain.run.checkpoints.queries import CheckpointQueries
from powertrain.run.checkpoints.uploads import Uploaders
from powertrain.run.checkpoints.validations import Validations
from powertrain.run.deadlines import Clock, Deadlines
from powertrain.run.debugging.sessions import Debugging
from powertrain.run.health.hangs import Hangs
from powertrain.run.metrics.store import MetricsStore
from powertrain.run.next_steps import AfterClearing, NextStep
from powertrain.run.outcome import Observer, RunOutcome
from powertrain.run.record.facts import Facts
from powertrain.run.record.telemetry import TelemetryWriter
from powertrain.run.scaling.policy import Elastic
from powertrain.run.scaling.preemption import PreemptionNotice
from powertrain.run.scaling.slots import Slots
from powertrain.run.scaling.steering import Steering
from powertrain.run.spec import RunSpec
from powertrain.run.startup.recorder import StartupRecorder
from powertrain.run.workers import attempt as phases
from powertrain.run.workers.attempt import Attempt, Member
from powertrain.storage import Storage
from powertrain.wire.envelope import FromController
from powertrain.wire.hub import Hub


@dataclass
class StopState:
    """Whether the run was asked to end, by what, and how urgently."""

    #: The request that counts; None while the run is to go on.
    request: ev.Stopping | None = None
    #: How often it was interrupted (Ctrl-C), and how often its process was asked to end (SIGTERM).
    interrupts: int = 0
    signals: int = 0
    #: True when the process that runs the controller must exit.
    should_exit: bool = False
    #: True once it is decided that the run ends, and how.
    is_decided: bool = False
    #: True when another controller has taken the run.
    is_fenced: bool = False
    #: True when checkpoints on their way were left behind by a second Ctrl-C.
    left_by_interrupt: bool = False

    @property
    def cause(self) -> str:
        """The cause of the request; "" for none."""
        return self.request.cause if self.request is not None else ""

    @property
    def is_at_once(self) -> bool:
        """True when the run was asked twice to end."""
        return self.interrupts > 1 or self.signals > 1

    @property
    def is_cut_short(self) -> bool:
        """True when the run must not wait for storage any longer."""
        return self.is_fenced or self.is_at_once

    @property
    def is_urgent(self) -> bool:
        """True when a person or a scheduler waits for the run to end."""
        return self.cause in ("interrupt", "notice", "asked")

    @property
    def was_interrupted(self) -> bool:
        return self.cause == "interrupt"

    def end_state(self, *, has_attempt: bool) -> tuple[str, str]:
        """Return the state and the reason of a run that ends because of the request."""
        if self.request is None:
            return lifecycle.STOPPED, "it was asked to end"
        reason = self.request.reason.partition(";")[0]
        if self.cause == "notice":
            return lifecycle.PREEMPTED, reason
        is_finished = has_attempt and self.cause == "criterion"
        return (lifecycle.FINISHED if is_finished else lifecycle.STOPPED), reason


class RunFlow(Protocol):
    """Transitions of a run. The parts that bring them about are above those that ask for them."""

    def fail(self, member: Member, failure: ev.WorkerFailure) -> None:
        """Note the failure of a rank and act on it."""
        ...

    def stop(self, cause: str, reason: str, *, is_agreed: bool = False) -> None:
        """End the run at the next boundary; ``is_agreed`` when all ranks wait at one and end there."""
        ...

    def shut_down(self, attempt: Attempt) -> None:
        """Every function has returned: run the backend's shutdown hooks, then dismiss the ranks."""
        ...

    def dismiss(self, attempt: Attempt) -> None:
        """The shutdown hooks are over: let the ranks exit once their checkpoints are in storage."""
        ...

    def clear(self, attempt: Attempt, then: AfterClearing) -> None:
        """End every process of the attempt; ``then`` follows."""
        ...

    def lose_lease(self, error: BaseException) -> None:
        """Another controller has taken the run: end it, and commit nothing more."""
        ...

    def proceed(self, step: NextStep) -> None:
        """Take the next step now."""
        ...


@dataclass
class ActiveRun:
    """One run context for all parts of the controller. Its thread only, but for :meth:`post`.

    The parts without a default are set by the controller: some in its constructor, those that hold sockets, threads or
    processes when the run begins.
    """

    spec: RunSpec
    engine: base.Engine
    storage: Storage
    observer: Observer
    clock: Clock
    facts: Facts
    inbox: queue.SimpleQueue[Any]
    metrics: MetricsStore
    stop: StopState = field(default_factory=StopState)
    attempt: Attempt | None = None
    #: By public key every rank of this and earlier attempts.
    members: dict[bytes, Member] = field(default_factory=dict)
    #: The newest notice of a preemption, and the ids of all slots that one came for.
    notice: PreemptionNotice | None = None
    noticed_slots: set[str] = field(default_factory=set)
    #: How the run ended; None until it has.
    outcome: RunOutcome | None = None

    def __post_init__(self) -> None:
        self.deadlines = Deadlines(self.clock)
        self.elastic = Elastic(self.spec.min_workers, self.spec.max_workers)
        self.began = self.clock.monotonic()
        self.flow: RunFlow
        self.callbacks: Callbacks
        self.startup: StartupRecorder
        self.checkpoints: CheckpointManager
        self.queries: CheckpointQueries
        self.slots: Slots
        self.steering: Steering
        self.debugging: Debugging
        self.hub: Hub
        self.telemetry: TelemetryWriter
        self.uploaders: Uploaders
        self.validations: Validations
        self.hangs: Hangs

    @property
    def state(self) -> lifecycle.RunState:
        """The run as its facts tell it."""
        return self.facts.state

    def post(self, item: Any) -> None:
        """Have ``item`` handled on the controller's thread. Any thread."""
        self.inbox.put(item)

    def record(self, event: ev.Event) -> None:
        self.facts.record(event)

    def warn(self, message: str, rank: int = -1) -> None:
        self.facts.warn(message, rank)

    def warn_once(self, message: str) -> None:
        self.facts.warn_once(message)

    def inform_once(self, message: str) -> None:
        self.facts.inform_once(message)

    def show_once(self, message: str) -> None:
        self.facts.show_once(message)

    def send(self, member: Member, message: FromController) -> None:
        self.hub.send(member.key, message)

    @property
    def has_returned(self) -> bool:
        """True when every function has returned and only the ending is left."""
        return self.attempt is not None and self.attempt.phase in (phases.SHUTTING_DOWN, phases.DISMISSED)

    def consider_resize(self) -> None:
        """Plan a change of the number of workers, if one is due and the run is not ending."""
        self.steering.consider(self.attempt, is_free=self.stop.request is None)
