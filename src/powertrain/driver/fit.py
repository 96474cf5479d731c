"""``fit()`` in the process that holds the run: take the lease, resume from earlier starts, run the controller."""

from __future__ import annotations

import functools
import queue
import time
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from powertrain.config.checks import without_effect
from powertrain.driver.conclusion import (
    about_gone_directory,
    conclude,
    diagnose,
    keep_return_value,
    live_findings,
    notebook_view,
    remove_ends,
    warn_about_left_files,
    write_report,
)
from powertrain.driver.datasets import prepare_data
from powertrain.driver.directories import make_directories, naming_run, open_run, with_real_files
from powertrain.driver.engines import about_clean_workers, enter_server, make_engine
from powertrain.driver.messages import warn
from powertrain.driver.resume import EarlierStarts
from powertrain.driver.running import (
    about_restoring,
    do_nothing,
    forced_outcome,
    handle_interrupts,
    interrupt_run,
    listen,
    make_terminal,
    notify,
    run_beside_rank,
    set_log_level,
    standing_remarks,
)
from powertrain.driver.spec import keep_record, make_name, make_spec, run_record
from powertrain.driver.trackers import finish_trackers, start_trackers

if TYPE_CHECKING:
    from powertrain.data.plan.prepared import Prepared
    from powertrain.driver.request import TrainRequest
    from powertrain.engine.base import Engine
    from powertrain.result.result import Result
    from powertrain.run.controller import Controller
    from powertrain.run.outcome import Observer, RunOutcome
    from powertrain.run.record.lease import Lease
    from powertrain.storage import Storage


@dataclass
class _OpenRun:
    """The run while this process holds it."""

    name: str
    storage: Storage
    lease: Lease
    #: Receives the holder of a later lease.
    taken_by: queue.SimpleQueue[Any]
    terminal: Any
    runtime: Path
    #: The staging area, the directory for shared memory and the one for blocks of data.
    places: tuple[str, str, str]
    #: Staged files that could not be uploaded: they are not removed at the end.
    left: list[str] = field(default_factory=list)

    @property
    def address(self) -> str:
        """Return the run's address, without secrets."""
        from powertrain.storage.addresses import without_secrets

        return without_secrets(self.storage.uri)

    def is_displaced(self) -> bool:
        """Return True when another process has taken the run, or its directory is gone."""
        from powertrain.run.record import lease_watch

        return lease_watch.is_displaced(self.lease)


def fit_with_controller(request: TrainRequest, stack: ExitStack) -> Result:
    """Run a request to its end in this process.

    Args:
        request: The request.
        stack: Closed when ``fit()`` returns or raises; it holds all resources of the run.

    Returns:
        The result of a run that ended well.
    """
    began = time.monotonic()
    server = enter_server(request, stack)  # first: once threads run, this process can no longer be forked
    from powertrain.checkpoint.committed import verify_alone
    from powertrain.run.controller import Controller as Controller  # its import counts as part of the start

    imported = time.monotonic()
    set_log_level(request.run)
    _collect_remarks(request, about_clean_workers(server) if server is not None else "")
    run = _open(request, stack)
    datasets: dict[str, Prepared] = {}
    directories = [str(run.runtime), *run.places]
    engine = make_engine(request, run.name, run.storage, directories, datasets, stack, server)
    if request.begin_from is not None:
        verify_alone(request.begin_from)
    controller, append_storage, record, earlier = _make_controller(
        request, run, engine, datasets, stack, began, imported
    )
    trackers = start_trackers(request, run.storage, record, earlier, controller, stack)
    view = notebook_view(request, append_storage, run.name)
    with live_findings(request, append_storage, run.name, run.terminal), view:
        outcome, is_forced = run_to_end(request, controller, engine, stack)
    if is_forced:
        return conclude(request, outcome, run.storage, engine)
    run.left.extend(outcome.left)
    warn_about_left_files(run.terminal, run.runtime)
    if run.is_displaced():
        warn(run.terminal, about_gone_directory(run.address))
    else:
        keep_return_value(
            outcome, run.storage.within(request.storage_patience_s), append_storage, run.terminal
        )
        diagnose(request, append_storage, run.name, run.terminal)
        write_report(request, append_storage, run.name, run.terminal)
        if not isinstance(view, nullcontext):  # with the findings, which are made just now
            view.update()
        finish_trackers(request, trackers, outcome, run.storage, run.terminal)
    return conclude(request, outcome, run.storage, engine)


def _collect_remarks(request: TrainRequest, about_workers: str) -> None:
    """Begin the messages of this start."""
    request.remarks[:] = request.standing_remarks
    if about_workers:
        request.remarks.append(about_workers)
    configs = (request.scaling, request.run, request.data, request.validation)
    if ineffective := without_effect(config for config in configs if config is not None):
        request.remarks.append(ineffective)


def _open(request: TrainRequest, stack: ExitStack) -> _OpenRun:
    """Open the run's storage, take its lease, and make its directories on this machine."""
    from powertrain.run.record.lease import Lease
    from powertrain.storage.addresses import without_secrets

    name = request.run.name or make_name(request)
    storage = open_run(request, name)
    taken_by: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with naming_run(storage):
        lease = stack.enter_context(
            Lease.take(storage, shared=request.run.shared_storage, on_lost=taken_by.put)
        )
        storage.sweep()
    if request.trial is None:
        terminal = make_terminal(request.run, name, without_secrets(storage.uri))
    else:
        terminal = request.trial.observer
    stack.callback(terminal.close)
    left: list[str] = []
    runtime, places = make_directories(request, name, storage, left, stack)
    return _OpenRun(name, storage, lease, taken_by, terminal, runtime, places, left)


def _make_controller(
    request: TrainRequest,
    run: _OpenRun,
    engine: Engine,
    datasets: dict[str, Prepared],
    stack: ExitStack,
    began: float,
    imported: float,
) -> tuple[Controller, Storage, dict[str, Any], EarlierStarts]:
    """Read the state of earlier starts, prepare the data, and make the controller of this start.

    Returns:
        The controller, the storage that it appends to, the run's record, and the state of earlier starts.
    """
    from powertrain.checkpoint.chain import Chain, tag_for
    from powertrain.run.controller import Controller
    from powertrain.run.record import lease_watch

    storage, lease = run.storage, run.lease
    with naming_run(storage):
        chain = Chain.take_over(storage, lease.number, lease.token)
        if request.trial is not None:
            request.trial.prepare(storage, chain)
        earlier = EarlierStarts.read(storage)
    record = run_record(request, run.name, earlier)
    inspecting = time.monotonic()
    datasets.update(prepare_data(request, record["data_seed"], run.places[2], earlier.checkpoint, storage))
    known = {"imports": imported - began, "datasets": time.monotonic() - inspecting}
    with naming_run(storage):
        not_stored = keep_record(request, storage, record)
    remove_ends(request, storage)
    append_storage = with_real_files(request, storage, stack, run.terminal)
    tag = tag_for(storage, lease.number)
    spec = request.adjust_spec(
        make_spec(request, run.name, append_storage, storage, run.runtime, run.places, record, tag, datasets)
    )
    controller = Controller(
        spec,
        engine,
        append_storage,
        chain,
        earlier.state,
        _observer_of(request, run, stack),
        earlier.checkpoint,
        functools.partial(lease_watch.is_displaced, lease),
    )
    controller.launched(began, known)
    if request.trial is not None:
        request.trial.on_controller(controller)
    else:
        _send_messages(controller, earlier.messages(record, run.address))
    _send_messages(controller, [*standing_remarks(storage), *about_restoring(not_stored), *request.remarks])
    stack.enter_context(lease_watch.watching(lease, controller.post_lease_lost, run.taken_by))
    listen(run.name, lease.number, append_storage, run.runtime, controller, stack)
    return controller, append_storage, record, earlier


def _observer_of(request: TrainRequest, run: _OpenRun, stack: ExitStack) -> Observer:
    """Return the observer of the run: its terminal, with figures for Prometheus where they are asked for."""
    observer: Observer = run.terminal
    if request.run.metrics_port is None or request.trial is not None:
        return observer
    from powertrain.driver.prometheus.server import measured  # loads an HTTP server

    return measured(request.run, run.name, observer, stack, request.remarks)


def _send_messages(controller: Controller, messages: list[str]) -> None:
    for message in messages:
        controller.post_warning(message)


def run_to_end(
    request: TrainRequest, controller: Controller, engine: Engine, stack: ExitStack
) -> tuple[RunOutcome, bool]:
    """Run the controller to its end; return its outcome and whether a second request to end cut it short."""
    from powertrain.run.forced_end import EndedAtOnce, ForcedEnd
    from powertrain.worker import signals

    users_code_is_here = engine.rank_in_driver is not None
    # Where the rank is in this process, closing the engine releases the thread that waits for it.
    release = engine.close if users_code_is_here else do_nothing
    ending = ForcedEnd(lambda: controller.is_ending_at_once, signals.SAME_NOTICE_INTERVAL_S, release)
    if request.starts_processes:  # otherwise the rank, which is in this process, handles the signals
        stack.enter_context(signals.handling(lambda number: notify(controller, ending, number)))
    interrupts = handle_interrupts(
        lambda: interrupt_run(controller, ending), users_code_is_here=users_code_is_here
    )
    try:
        with ending.watching(), interrupts:
            if engine.rank_in_driver is None:
                return controller.run(), False
            return run_beside_rank(controller, engine, engine.rank_in_driver, ending), False
    except EndedAtOnce:
        return forced_outcome(ending.kind), True
