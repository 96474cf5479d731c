"""The one loop of a run: wait, decide, act, journal.

It wakes when a message, an exit or a deadline arrives, and never polls. Pure policies decide
(:mod:`~powertrain.run.health.failure_policy`, :mod:`~powertrain.run.stopping`, :mod:`~powertrain.run.scaling.policy`);
the parts act, each on one concern; this connects them. Engines are known only by their protocol and workers only by
their messages, and nothing that either sends is unpickled.

::

    request slots ─▶ fork ─▶ hooks ─▶ train ─▶ shut down ─▶ dismiss ─▶ end
          ▲                    │        │
          └── decide ◀── clear ◀────────┘   a death, an error, a loss
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from powertrain.checkpoint.chain import Chain
from powertrain.checkpoint.manifest import Manifest
from powertrain.engine import base
from powertrain.errors import EngineError, PowertrainError, ResourceError
from powertrain.run import events as ev
from powertrain.run import lifecycle
from powertrain.run.active_run import ActiveRun
from powertrain.run.callbacks import Callbacks, RunContext
from powertrain.run.checkpoints.settling import CUT_SHORT_TIMEOUT_S
from powertrain.run.checkpoints.uploads import Uploaders
from powertrain.run.deadlines import Clock, Deadline, SystemClock
from powertrain.run.forced_end import EndedAtOnce
from powertrain.run.health.hangs import Hangs
from powertrain.run.inbox import (
    Delivered,
    Disconnected,
    EndEarly,
    EndNoticed,
    Interrupt,
    LeaseLost,
    UnreadableMessage,
    WarningPosted,
)
from powertrain.run.metrics.store import MetricsStore
from powertrain.run.next_steps import (
    AfterClearing,
    DecideOnRetry,
    DismissRanks,
    EndRun,
    FinishRun,
    KillRanks,
    NextStep,
    RetryAfter,
)
from powertrain.run.outcome import RunOutcome
from powertrain.run.parts import Parts
from powertrain.run.record.facts import Facts
from powertrain.run.record.journal import Journal
from powertrain.run.record.telemetry import TelemetryWriter
from powertrain.run.remote import protocol, status
from powertrain.run.spec import RunSpec
from powertrain.run.startup.recorder import StartupRecorder
from powertrain.run.workers import launch
from powertrain.run.workers.attempt import Attempt, Member
from powertrain.storage import Storage
from powertrain.text.errors import describe_error, message_of
from powertrain.wire import from_worker
from powertrain.wire.from_controller import Dismissed
from powertrain.wire.hub import Hub

if TYPE_CHECKING:
    from powertrain.run.outcome import Observer

#: Seconds for the last deletions.
_COMMITTER_TIMEOUT_S = 10.0


class Controller:
    """Runs one run to its end.

    ``run`` blocks its thread until then; the methods under "from other threads" may be called from any thread.
    """

    def __init__(
        self,
        spec: RunSpec,
        engine: base.Engine,
        storage: Storage,
        chain: Chain,
        state: lifecycle.RunState,
        observer: Observer,
        from_checkpoint: Manifest | None = None,
        is_displaced: Callable[[], bool] = lambda: False,
        clock: Clock | None = None,
    ) -> None:
        """``is_displaced`` returns True when the run's directory was removed, or belongs to another start by now."""
        self._is_displaced, self._chain = is_displaced, chain
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        clock = clock or SystemClock()
        with contextlib.ExitStack() as undone:  # closed again where a part of the controller cannot be made
            self._journal = Journal(storage, chain.lease)
            undone.callback(self._journal.close)
            metrics = MetricsStore(storage, chain.lease)
            undone.callback(metrics.close)
            facts = Facts(state, self._journal, observer, clock)
            self._run = ActiveRun(spec, engine, storage, observer, clock, facts, self._inbox, metrics)
            self._parts = self._make_parts(from_checkpoint)
            undone.pop_all()
        self._deadline_handlers = self._parts.deadline_handlers()
        self._handlers = self._parts.event_handlers()

    def _make_parts(self, from_checkpoint: Manifest | None) -> Parts:
        run, spec = self._run, self._run.spec
        run.flow = self
        context = RunContext(
            spec.run.name, spec.run.path, spec.run.storage_path, **spec.arguments, end_early=self.end_early
        )
        run.callbacks = run.facts.callbacks = Callbacks(spec.callbacks, context, run.warn)
        run.startup = StartupRecorder(run.record, run.engine.name, run.clock.monotonic)
        run.startup.runs_script, run.startup.forks_driver = spec.runs_scripts, run.engine.forks_driver
        return Parts(run, self._chain, from_checkpoint)

    # ------------------------------------------------------------------ the loop

    def run(self) -> RunOutcome:
        """Conduct the run from the first request to its end. Afterwards nothing of it is alive."""
        run = self._run
        with contextlib.ExitStack() as closing:  # from the last to the first, each even if another fails
            self._open(closing)
            run.record(self._run_started())
            closing.enter_context(self._errors_recorded())
            run.startup.slots_asked()
            run.slots.begin()
            while run.outcome is None:
                item = run.deadlines.next(self._inbox, run.hangs.on_standstill)
                self._parts.messages.take_in()  # they came before it
                if isinstance(item, Deadline):
                    self._deadline_handlers[item]()
                elif (handler := self._handlers.get(type(item))) is not None:
                    handler(item)
        return run.outcome

    def _open(self, closing: contextlib.ExitStack) -> None:
        """Open the parts that hold sockets, threads or processes; ``closing`` closes them."""
        run = self._run
        closing.callback(self._journal.close)
        closing.callback(self._close_metrics)
        with self._engine_closed_on_error():
            run.telemetry = TelemetryWriter(run.spec, run.storage, self._chain.lease, run.show_once)
            closing.callback(self._close_telemetry)
            run.hub = self._open_hub()
            closing.callback(run.hub.close)
            run.uploaders = self._make_uploaders()
            closing.callback(run.uploaders.remove_empty_log)
        closing.callback(run.engine.close)
        closing.callback(self._dismiss_remaining_ranks)
        closing.callback(self._close_committer)
        closing.callback(run.uploaders.close)
        run.checkpoints.use_uploaders(run.uploaders)
        run.validations = self._parts.validating.open()
        closing.callback(run.validations.close)
        run.hangs = Hangs(run.spec, run.engine, run.storage, run.send, run.post, self.post_warning, run.clock)
        closing.callback(run.hangs.close)
        closing.callback(run.debugging.close)
        closing.callback(self._parts.requests.close)
        run.engine.connect(run.hub)
        run.engine.start(run.post, self._on_output)

    @contextlib.contextmanager
    def _errors_recorded(self) -> Iterator[None]:
        """Record the end of a run that an error ends: the journal must not look as if it went on."""
        try:
            yield
        except (ResourceError, EngineError) as error:
            self._parts.ending.record_end(lifecycle.FAILED, str(error))
            raise
        except EndedAtOnce:
            self._parts.ending.record_forced_end()
            raise
        except BaseException as error:  # a fault of our own, or of storage
            self._parts.ending.record_broken_end(lifecycle.FAILED, describe_error(error))
            raise

    # ------------------------------------------------------------------ transitions (RunFlow)

    def fail(self, member: Member, failure: ev.WorkerFailure) -> None:
        self._parts.recovery.fail(member, failure)

    def stop(self, cause: str, reason: str, *, is_agreed: bool = False) -> None:
        self._parts.ending.stop(cause, reason, is_agreed=is_agreed)

    def shut_down(self, attempt: Attempt) -> None:
        self._parts.ending.shut_down(attempt)

    def dismiss(self, attempt: Attempt) -> None:
        self._parts.ending.dismiss(attempt)

    def clear(self, attempt: Attempt, then: AfterClearing) -> None:
        self._parts.clearing.clear(attempt, then)

    def lose_lease(self, error: BaseException) -> None:
        self._parts.ending.lose_lease(error)

    def proceed(self, step: NextStep) -> None:
        """Take the next step of the run."""
        attempt = self._run.attempt
        match step:
            case DismissRanks():
                assert attempt is not None
                self._parts.ending.dismiss_now(attempt)
            case KillRanks(then):
                assert attempt is not None
                self._parts.clearing.kill(attempt, then)
            case DecideOnRetry():
                self._parts.recovery.decide()
            case RetryAfter(delay):
                self._parts.recovery.retry_after(delay)
            case FinishRun():
                self._parts.ending.finish()
            case EndRun():
                self._parts.ending.end(step)

    # ------------------------------------------------------------------ from other threads

    def interrupt(self) -> None:
        """Ask for an end: gracefully the first time, at once the second. Any thread, also a signal handler."""
        self._inbox.put(Interrupt())

    def end_early(self, reason: str) -> None:
        """End the run at the next boundary, as if its stop criterion had been met. Any thread."""
        self._inbox.put(EndEarly(str(reason)))

    def notify(self, reason: str) -> None:
        """The process that runs this will be ended soon. A second time means at once. Any thread, a signal handler."""
        self._inbox.put(EndNoticed(reason))

    def launched(self, at: float, parts: Mapping[str, float]) -> None:
        """The run began ``at`` the call of ``fit``; see :meth:`StartupRecorder.launched`. Before ``run``."""
        self._run.startup.launched(at, parts)

    def post_request(self, request: protocol.Request, client: protocol.ControlClient) -> None:
        """Answer a request of the command line. Any thread."""
        self._inbox.put(status.ControlRequest(request, client))

    def post_warning(self, message: str) -> None:
        """Record a warning as soon as the run has begun. Any thread."""
        self._inbox.put(WarningPosted(message))

    def post_lease_lost(self, reason: str) -> None:
        """End the run: another controller has taken it. Any thread."""
        self._inbox.put(LeaseLost(reason))

    @property
    def is_ending_at_once(self) -> bool:
        """True when the run was asked twice to end, and the controller has taken note of it. Any thread."""
        return self._run.stop.is_at_once

    def _on_output(self, slot: base.Slot, data: bytes) -> None:
        """Show the output of a rank; that of processes beside the ranks is in their logs. The engine's threads."""
        rank = self._parts.starting.ranks_by_slot.get(slot.id)
        if rank is not None and not self._run.debugging.show_output(rank, data):
            self._run.observer.output(rank, data)

    # ------------------------------------------------------------------ opening and closing

    def _open_hub(self) -> Hub:
        spec, post = self._run.spec, self._run.post
        return Hub(
            self._run.engine.wire_address(),
            self._parts.messages.batches.append,
            lambda problem: post(from_worker.Noted(message=problem)),
            delivered=lambda: post(Delivered()),
            parted=lambda key: post(Disconnected(key)),
            refused=lambda key, problem: post(UnreadableMessage(key, problem)),
            directory=spec.directories.runtime,
            port=spec.port,
            listen_on=spec.bind_host,
        )

    def _make_uploaders(self) -> Uploaders:
        run = self._run
        return Uploaders(
            run.engine,
            run.hub,
            run.spec.storage or pickle.dumps(run.storage),
            run.spec.sync_timeout,
            launch.log_path(run.spec, "uploader.log"),
            run.post,
            (self._chain.lease, self._chain.token),
        )

    def _run_started(self) -> ev.RunStarted:
        run, newest = self._run, self._run.checkpoints.newest
        return ev.RunStarted(
            time=run.clock.time(),
            name=run.spec.run.name,
            lease=self._chain.lease,
            host=socket.gethostname(),
            pid=os.getpid(),
            version=run.spec.version,
            engine=run.engine.name,
            min_workers=run.spec.min_workers,
            max_workers=run.spec.max_workers,
            row=newest.row if newest else 0,
            checkpoint=newest.name if newest else "",
        )

    @contextlib.contextmanager
    def _engine_closed_on_error(self) -> Iterator[None]:
        """Close the engine where the block fails: an inline rank waits in its thread until then."""
        try:
            yield
        except BaseException:
            self._run.engine.close()
            raise

    def _dismiss_remaining_ranks(self) -> None:
        """After an error of our own: a rank in this very process waits to be dismissed."""
        for member in self._run.attempt.members if self._run.attempt is not None else ():
            if not member.exited:
                self._run.send(member, Dismissed())

    def _close_committer(self) -> None:
        self._parts.committer.close(CUT_SHORT_TIMEOUT_S if self.is_ending_at_once else _COMMITTER_TIMEOUT_S)

    def _close_telemetry(self) -> None:
        if self._is_displaced():
            self._run.telemetry.abandon()
        else:
            self._run.telemetry.close()

    def _close_metrics(self) -> None:
        """A run that has ended well does not fail because points could not be put in their last place."""
        if self._is_displaced():
            self._run.metrics.abandon()
            return
        try:
            self._run.metrics.close()
        except (PowertrainError, OSError) as error:
            warning = ev.Warned(time=self._run.clock.time(), message=message_of(error))
            self._run.observer.event(warning)
