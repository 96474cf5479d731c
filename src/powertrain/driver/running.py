"""Run the controller in the driver's process: signals, the forced end, the terminal."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from powertrain.config.run import RunConfig
from powertrain.driver.directories import directory_of
from powertrain.errors import EngineError

if TYPE_CHECKING:
    from powertrain.engine.base import Engine, RankInDriver
    from powertrain.run.controller import Controller
    from powertrain.run.forced_end import ForcedEnd
    from powertrain.run.outcome import RunOutcome
    from powertrain.storage import Storage

#: Seconds for the controller's own thread to end after the rank's thread was interrupted.
_LEAVE_TIMEOUT_S = 5.0


def do_nothing() -> None:
    pass


def interrupt_run(controller: Controller, ending: ForcedEnd) -> None:
    ending.request("interrupt")
    controller.interrupt()


def notify(controller: Controller, ending: ForcedEnd, number: signal.Signals) -> None:
    controller.notify(_on_end_signal(number))
    ending.request("notice")


def forced_outcome(kind: str) -> RunOutcome:
    """Return the outcome of a run that was stuck at the second interrupt."""
    from powertrain.run.lifecycle import STOPPED
    from powertrain.run.outcome import RunOutcome

    return RunOutcome(
        STOPPED,
        "it was asked twice to end, and was stuck",
        None,
        b"",
        (),
        interrupted=kind == "interrupt",
        is_to_leave=kind == "notice",
    )


def run_beside_rank(
    controller: Controller, engine: Engine, rank: RankInDriver, ending: ForcedEnd
) -> RunOutcome:
    """Run the controller on a thread: the rank itself needs this one."""
    from powertrain.run.forced_end import EndedAtOnce

    outcome: list[RunOutcome] = []
    problem: list[BaseException] = []

    def control() -> None:
        try:
            outcome.append(controller.run())
            _leave_if_hung(outcome[0], engine)
        except BaseException as error:
            problem.append(error)

    thread = threading.Thread(target=control, name="powertrain-controller", daemon=True)
    thread.start()
    try:
        rank.serve()
    except BaseException as error:  # nothing will come of it any more: the controller need not wait
        controller.interrupt()
        thread.join(None if isinstance(error, EngineError) else _LEAVE_TIMEOUT_S)
        raise
    thread.join(_LEAVE_TIMEOUT_S if ending.has_forced else None)
    if thread.is_alive():
        raise EndedAtOnce
    if problem:
        raise problem[0]
    return outcome[0]


def _leave_if_hung(outcome: RunOutcome, engine: Engine) -> None:
    """End this process for its launcher to start it again, since its hanging main thread would not end."""
    if not engine.restarts and any(failure.kind == "hung" for failure in outcome.failures):
        from powertrain.terminal.failures import failure_report

        print(failure_report(outcome.failures, outcome.reason), file=sys.stderr, flush=True)
        os._exit(1)


@contextmanager
def handle_interrupts(ask_to_end: Callable[[], None], *, users_code_is_here: bool) -> Iterator[list[float]]:
    """Turn Ctrl-C into a graceful end, the second one into an end at once. Does nothing on other threads.

    Yields the times at which interrupts have come. Under torchrun every rank gets them: rank 0 requests the end, the
    others wait for its boundary.
    """
    interrupts: list[float] = []
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return

    def interrupt(*_: Any) -> None:
        interrupts.append(time.time())
        ask_to_end()
        if len(interrupts) > 1 and users_code_is_here:
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, interrupt)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, previous)


def _on_end_signal(number: signal.Signals) -> str:
    return f"the driver (process {os.getpid()}) was asked to end by {number.name}"


def listen(
    name: str, lease: int, storage: Storage, runtime: Path, controller: Controller, stack: ExitStack
) -> None:
    """Let the command line find this run and talk to it."""
    from powertrain.run.remote import protocol as control

    files = os.path.dirname(directory_of(storage, "logs"))
    card = control.card_of(name, storage.uri, files, lease)
    try:
        stack.enter_context(control.listening(runtime, card, controller.post_request))
    except OSError as error:
        controller.post_warning(
            f"'powertrain stop' and others will not find this run: its socket cannot be made ({error})."
        )


def make_terminal(run: RunConfig, name: str, path: str) -> Any:
    from powertrain.terminal.screen import Terminal
    from powertrain.worker.debugger import is_attached

    live, verbose = {None: (None, 1), 0: (None, 0), 1: (False, 1), 2: (None, 1)}.get(run.verbose, (None, 2))
    if is_attached():  # its prompt would be drawn over
        live = False
    return Terminal(name, path, live=live, log_to_file=bool(run.log_to_file), verbose=verbose)


def standing_remarks(storage: Storage) -> list[str]:
    """Return warnings for the user about the chosen storage."""
    from powertrain.storage.files.private_roots import take_notices
    from powertrain.storage.safety import remarks_about

    path = storage.local_path("x")
    return [*storage.lacks, *(remarks_about(path.parent) if path is not None else ()), *take_notices()]


def about_restoring(not_stored: str) -> list[str]:
    if not not_stored:
        return []
    return [
        f"restore(path) will need the training function again: the trainer could not be kept ({not_stored})."
    ]


def set_log_level(run: RunConfig) -> None:
    logging.getLogger("powertrain").setLevel(run.logging_config.log_level)
