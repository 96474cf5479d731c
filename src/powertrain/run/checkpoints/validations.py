"""Validations of committed checkpoints: which wait, which one runs, and how each ended.

One at a time, in the order of commits, so that slow ones do not eat the machine that trains::

    waiting ─▶ has a slot ─▶ runs ─▶ over ─▶ its process is gone ─▶ the next
                  └──────────┴──▶ failed, timed out

A validation never fails the run. Validations cut off by the end of the run stay pending in storage and start again when
the run is resumed.
"""

from __future__ import annotations

import math
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from powertrain import functions
from powertrain.checkpoint.checkpoint import Checkpoint, ReportedCheckpointStatus
from powertrain.checkpoint.manifest import Manifest, Validation
from powertrain.config.validation import ValidationConfig
from powertrain.engine import base
from powertrain.errors import EngineError, ResourceError
from powertrain.run.checkpoints.pending import VALIDATION_EXTRA
from powertrain.run.spec import RunSpec
from powertrain.run.workers import launch, placement
from powertrain.run.workers.child import Child
from powertrain.wire import values
from powertrain.wire.from_worker import Validated
from powertrain.wire.hub import Hub
from powertrain.wire.keys import ConnectionInfo, Received
from powertrain.wire.values import ErrorReport
from powertrain.worker import validation as process

PENDING = Validation(status=ReportedCheckpointStatus.PENDING_VALIDATION.value)
#: Seconds for a process to leave after its validation is over.
_EXIT_TIMEOUT_S = 10.0
#: Variables that launchers set for ranks. A validation is none, and libraries that see these would look for other
#: ranks.
_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK")


# --------------------------------------------------------------------------- pure


@dataclass(frozen=True)
class Task:
    """One requested validation."""

    checkpoint: str
    row: int
    #: Where the checkpoint lies; ``on_filesystem`` when that is a path of the filesystem that the user gave.
    path: str
    on_filesystem: bool = False
    #: Keyword arguments that go over those of the trainer, which travel with the function.
    arguments: Mapping[str, Any] = field(default_factory=dict)
    #: Seconds it may take.
    timeout: float = math.inf


def task_of(
    config: ValidationConfig, asked: values.ValidationRequest, manifest: Manifest, checkpoint: Checkpoint
) -> Task:
    """Return the task of a request; its values override those of the trainer."""
    usual = config.task_config
    return Task(
        checkpoint=manifest.name,
        row=manifest.row,
        path=checkpoint.address,
        on_filesystem=checkpoint.given_filesystem is not None,
        arguments=asked.arguments,
        timeout=asked.timeout or usual.timeout_s or math.inf,
    )


def cut_off(manifests: Iterable[Manifest], status: Callable[[Manifest], str]) -> list[Manifest]:
    """Return the checkpoints whose requested validation has not ended, oldest first."""
    open_ones = (PENDING.status, ReportedCheckpointStatus.COMMITTED.value)
    return [m for m in manifests if requested_validation(m) is not None and status(m) in open_ones]


def requested_validation(manifest: Manifest) -> values.ValidationRequest | None:
    """Return the validation that was requested when the checkpoint was reported."""
    try:
        return msgspec.convert(manifest.extras[VALIDATION_EXTRA], values.ValidationRequest)
    except (KeyError, msgspec.ValidationError):
        return None


def shape_of(config: ValidationConfig) -> base.SlotShape | None:
    """Return the slot that a validation reserves; None where no resources were requested."""
    asked = config.ray_remote_kwargs
    cpus, gpus = asked.get("num_cpus", 0.0), asked.get("num_gpus", 0.0)
    return base.SlotShape(cpus=cpus or 1.0, gpus=gpus, explicit=True) if cpus or gpus else None


def found(message: Validated) -> Validation:
    """Return the validation that a validating process has sent."""
    if message.error is None:
        return Validation(
            status=ReportedCheckpointStatus.VALIDATED.value, metrics=message.metrics, seconds=message.seconds
        )
    return failed(_in_words(message.error), message.seconds)


def failed(reason: str, seconds: float = 0.0) -> Validation:
    status = ReportedCheckpointStatus.VALIDATION_FAILED.value
    return Validation(status=status, error=reason, seconds=round(seconds, 3))


def no_room(seconds: float, missing: str) -> Validation:
    because = f": {missing}" if missing else ""
    return failed(
        f"there was no room for it within queue_timeout_s={seconds:g} s after the training{because}"
    )


def timed_out(task: Task) -> Validation:
    return Validation(
        status=ReportedCheckpointStatus.VALIDATION_TIMEOUT.value,
        error=f"it took more than timeout_s={task.timeout:g} s and was ended",
        seconds=task.timeout,
    )


def _in_words(error: ErrorReport) -> str:
    where = f" ({error.file}:{error.line} in {error.function}: {error.source})" if error.file else ""
    return f"{error.type}: {error.message}{where}"


def _why_gone(event: base.Exited | base.SlotLost, log: str) -> str:
    if isinstance(event, base.SlotLost):
        return f"its slot was lost: {event.reason}"
    words = event.error or base.describe_exit(event)[1]
    return f"its process ended without a result: it {words}; {log} may say why"


# --------------------------------------------------------------------------- at work


@dataclass
class _Current:
    """The current validation."""

    task: Task
    #: For its slot; None where it needs none.
    claim: base.Claim | None = None
    #: The resources that its slot waits for.
    missing: str = ""
    slot: base.Slot | None = None
    child: Child | None = None
    #: The public key of its process.
    key: bytes = b""
    began: float = 0.0
    #: True once its outcome is known; its process may still be there.
    over: bool = False

    def claimed(self, claim: str) -> bool:
        return self.claim is not None and self.claim.id == claim


class Validations:
    """All validations of one run. The controller's thread only."""

    def __init__(
        self,
        spec: RunSpec,
        engine: base.Engine,
        hub: Hub,
        *,
        post: Callable[[base.Exited], None],
        over: Callable[[Task, Validation], None],
        idle: Callable[[], None],
        remind: Callable[[float], None],
        warn: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``post`` is the controller's inbox. ``over`` is called with the outcome of each, ``idle`` when none waits or
        runs, ``remind`` with the time at which :meth:`overdue` is due (by ``clock``; infinity for never).

        Raises :class:`TrainFunctionError` where the user's function cannot be pickled.
        """
        self._spec, self._engine, self._hub = spec, engine, hub
        self._post, self._over, self._idle, self._remind, self._warn = post, over, idle, remind, warn
        self._clock = clock
        self._queue: deque[Task] = deque()
        self._current: _Current | None = None
        self._beside: base.Slot | None = None
        self._trained = False
        self._shown: set[str] = set()
        config = spec.validation
        self._shape = shape_of(config) if config is not None else None
        self._function = b""
        if config is not None:
            usual = dict(config.task_config.fn_kwargs)
            self._function = functions.pickle_function(
                config.fn, usual, "the validation function", "fn_kwargs"
            )

    # -- state

    @property
    def names(self) -> list[str]:
        """Return the checkpoints whose validation waits or runs."""
        return [task.checkpoint for task in self._unfinished()]

    @property
    def busy(self) -> bool:
        """Return True while a validation waits or runs."""
        return self._current is not None or (bool(self._queue) and self._beside is not None)

    @property
    def wants_slot(self) -> bool:
        """Return True while the current validation waits for a slot."""
        return self._current is not None and self._current.slot is None

    def awaited(self, row: int) -> bool:
        """Return True while a checkpoint up to ``row`` will be validated without the ranks having to exit first."""
        if self._current is not None and self._current.missing:
            return False  # it may be waiting for what they hold
        return any(task.row <= row for task in self._unfinished())

    def _unfinished(self) -> list[Task]:
        now = [self._current.task] if self._current is not None and not self._current.over else []
        return [*now, *self._queue]

    # -- events

    def begin(self, beside: base.Slot) -> None:
        """Allow validations to start, on the node of this slot."""
        self._beside = beside
        self._advance()

    def ask(self, task: Task) -> None:
        """Queue the validation of a checkpoint."""
        self._queue.append(task)
        self._advance()

    def owns_claim(self, claim: str) -> bool:
        """Return True when the slot of the current validation was requested with this claim."""
        return self._current is not None and self._current.claimed(claim)

    def owns_slot(self, slot: str) -> bool:
        """Return True when a validation runs on the slot with this id."""
        current = self._current
        return current is not None and current.slot is not None and current.slot.id == slot

    def owns_process(self, key: bytes) -> bool:
        """Return True when the process with this public key validates."""
        return self._current is not None and self._current.key == key

    def on_slots_granted(self, event: base.Granted) -> None:
        """Start the validation on the slot that was requested for it."""
        current = self._current
        assert current is not None
        if current.slot is None and event.slots:
            current.missing = ""
            self._start(current, event.slots[0])
            self._advance()
        else:
            self._engine.release(event.slots)

    def on_slots_awaited(self, event: base.Waiting) -> None:
        """Note what the slot is waiting for; warn the first time."""
        current = self._current
        assert current is not None
        if not current.missing:
            self._warn(
                f"The validation of {current.task.checkpoint} is {event.reason}. It begins when that is free, at the "
                "latest after the training."
            )
        current.missing = event.reason

    def on_slots_refused(self, event: base.ClaimRefused) -> None:
        """Fail the validation: the engine will never grant its slot."""
        current = self._current
        assert current is not None
        if current.slot is None:
            self._conclude(current, failed(f"there is no slot for it: {event.reason}"))
            self._leave(current)
            self._advance()

    def on_messages(self, received: Received) -> None:
        """Take the result out of a batch that the validating process sent."""
        current = self._current
        assert current is not None
        for message in received.envelope.messages:
            if isinstance(message, Validated) and not current.over:
                self._pass_on(message.warnings)
                self._conclude(current, found(message))

    def _pass_on(self, warnings: list[str]) -> None:
        """Show each warning of validation functions once: they return the same metrics for every checkpoint."""
        for warning in warnings:
            if warning not in self._shown:
                self._shown.add(warning)
                self._warn(f"Validation: {warning}")

    def on_process_gone(self, event: base.Exited | base.SlotLost) -> None:
        """Conclude the validation whose process has ended, and start the next."""
        current = self._current
        assert current is not None
        if not current.over:
            seconds = self._clock() - current.began
            self._conclude(current, failed(_why_gone(event, self._log(current.task)), seconds))
        self._leave(current)
        self._advance()

    def training_over(self) -> None:
        """Note that the ranks have released their slots: a validation now waits for room no longer than the run
        would."""
        self._trained = True
        self._bound_wait()

    def _bound_wait(self) -> None:
        if self._trained and self.wants_slot and self._spec.queue_timeout is not None:
            self._remind(self._clock() + self._spec.queue_timeout)

    def overdue(self) -> None:
        """Handle the deadline that was set with ``remind``."""
        current = self._current
        if current is None:
            return
        if not current.over and current.slot is None:
            self._conclude(current, no_room(self._spec.queue_timeout or 0.0, current.missing))
            self._leave(current)
            self._advance()
        elif not current.over:
            self._kill(current)
            self._conclude(current, timed_out(current.task))
        else:
            self._leave(current)
            self._advance()

    def cut_short(self) -> None:
        """Wait for no validation any more. Those that did not end stay pending."""
        self._queue.clear()
        if self._current is not None:
            self._leave(self._current)
        self._advance()

    def close(self) -> None:
        """End processes that were started here; those of the engine end with it."""
        if self._current is not None and self._current.child is not None:
            self._current.child.close()

    # -- steps

    def _advance(self) -> None:
        while self._current is None and self._queue and self._beside is not None:
            current = self._current = _Current(self._queue.popleft())
            if self._shape is None:
                self._start(current, None)
            else:
                self._claim_slot(current, self._shape)
        if not self.busy:
            self._idle()

    def _claim_slot(self, current: _Current, shape: base.SlotShape) -> None:
        try:
            if not self._engine.restarts:
                raise ResourceError(
                    "the launcher has given what the machine has to its own processes, and nothing can be reserved "
                    "beside them. Leave ray_remote_kwargs out to validate on the CPU"
                )
            current.claim = self._engine.request(1, shape)
            self._bound_wait()
        except (ResourceError, EngineError) as error:
            self._conclude(current, failed(f"ValidationConfig(ray_remote_kwargs=...) cannot be met: {error}"))
            self._leave(current)

    def _start(self, current: _Current, granted: base.Slot | None) -> None:
        """Start the process: on a slot of its own, beside the others, or, where the engine starts none, from here."""
        assert self._beside is not None
        where = granted or base.Slot(
            f"validation/{current.task.checkpoint}", self._beside.host, self._beside.address
        )
        connection = self._hub.admit()
        current.key, current.began = connection.keys.public, self._clock()
        spec = self._process_of(current.task, where, connection)
        try:
            if granted is None:
                current.slot = self._engine.attend(self._beside, spec)
            elif self._engine.rank_in_driver is None:  # otherwise it would run in this very process
                current.slot = granted
                self._engine.fork(granted, spec)
            if current.slot is None:
                current.slot = where
                current.child = Child(where, spec, self._post)
        except (OSError, EngineError) as error:
            self._conclude(current, failed(f"its process could not be started: {error}"))
            self._leave(current)
        else:
            self._remind(current.began + current.task.timeout)

    def _process_of(self, task: Task, slot: base.Slot, connection: ConnectionInfo) -> base.ProcessSpec:
        spec, config = self._spec, self._spec.validation
        assert config is not None
        place = placement.arrange([slot])[0]
        threads = max(1, int(config.ray_remote_kwargs.get("num_cpus", 1)))
        env: dict[str, str | None] = {
            **placement.environment(place, 1),
            **dict.fromkeys(_OF_RANKS),
            "OMP_NUM_THREADS": str(threads),
            **spec.env,
        }
        return base.ProcessSpec(
            entry=process.ENTRY,
            payload=msgspec.msgpack.encode(
                process.ValidationSpec(
                    connection=connection,
                    checkpoint=task.checkpoint,
                    path=task.path,
                    filesystem=spec.run.filesystem if task.on_filesystem else b"",
                    function=self._function,
                    arguments=dict(task.arguments),
                    sources=dict(spec.sources),
                    launch_dir=spec.run.launch_dir,
                    working_dir=spec.directories.working,
                )
            ),
            env=env,
            log_path=self._log(task),
            cwd=spec.directories.working,
            title="validation",
        )

    def _log(self, task: Task) -> str:
        return launch.log_path(self._spec, f"validation-{task.checkpoint}.log")

    def _conclude(self, current: _Current, outcome: Validation) -> None:
        """Record the outcome; the process has a little time to exit."""
        current.over = True
        self._remind(self._clock() + _EXIT_TIMEOUT_S)
        self._over(current.task, outcome)

    def _leave(self, current: _Current) -> None:
        """Forget the current validation, and end a process that is still there."""
        self._kill(current)
        if current.slot is not None and current.child is None:
            self._engine.release([current.slot])
        elif current.slot is None and current.claim is not None:
            self._engine.withdraw(current.claim)
        self._current = None
        self._remind(math.inf)

    def _kill(self, current: _Current) -> None:
        if current.child is not None:
            current.child.kill()
        elif current.slot is not None:
            self._engine.signal(current.slot, signal.SIGKILL)
