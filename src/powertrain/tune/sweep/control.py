"""Control socket of a running sweep, by which the command line stops it so that it can be resumed.

A sweep has a control socket as runs have (see :mod:`powertrain.run.remote.protocol`). It handles ``powertrain stop
SWEEP``; requests about ranks go to a trial, which is a run.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from powertrain.run.remote import protocol

if TYPE_CHECKING:
    from powertrain.storage import Storage
    from powertrain.tune.sweep.loop import SweepLoop

#: Timeout of a client for the decision of a searcher or scheduler.
_LOCK_TIMEOUT_S = 5.0


def listen(
    loop: SweepLoop, name: str, lease: int, storage: Storage, stack: ExitStack, warn: Callable[[str], None]
) -> None:
    """Serve requests to a sweep until the stack is closed. Without a socket the sweep runs all the same.

    Args:
        loop: The loop of the sweep; its first fact is in the journal.
        name: The name of the sweep.
        lease: The number of its lease.
        storage: Where its journal grows.
        stack: Removes the socket.
        warn: Prints one sentence for the user.
    """
    from powertrain.engine.local import runtime_directories

    journal = storage.local_path("journal/x")
    files = os.path.dirname(str(journal.parent)) if journal is not None else ""
    visits = SweepVisits(loop, name)
    try:
        runtime = runtime_directories.make_runtime_directory(name)
        stack.enter_context(runtime_directories.removed_at_the_end(runtime))
        card = protocol.card_of(name, storage.uri, files, lease)
        stack.callback(visits.close)
        stack.enter_context(protocol.listening(runtime, card, visits.post_request))
    except OSError as error:
        warn(f"'powertrain stop' and others will not find this sweep: its socket cannot be made ({error}).")


class SweepVisits:
    """Handler of requests to a sweep. Its methods may be called on any thread.

    Args:
        loop: The loop of the sweep.
        name: The name of the sweep.
    """

    def __init__(self, loop: SweepLoop, name: str) -> None:
        self._loop, self._name = loop, name
        self._guard = threading.Lock()
        #: Whether the trials were told to end immediately.
        self._is_ending_now = False
        self._timers: list[threading.Timer] = []

    def post_request(self, question: protocol.Request, client: protocol.ControlClient) -> None:
        """Handle one request."""
        if isinstance(question, protocol.StopRequest):
            client.answer(*self._stop(question))
        elif isinstance(question, protocol.Describe):
            client.send_part(self.describe())
            client.answer("")
        else:
            client.answer(
                f"{self._name!r} is a sweep, and that is for runs. Name one of its trials: {self._name}/TRIAL. "
                f"'powertrain show {self._name}' lists them.",
                False,
            )

    def describe(self) -> protocol.Description:
        """Return the status of the sweep: ``workers`` counts the running trials, ``row`` the ended ones."""
        state = self._loop.state
        trials = list(state.trials.values())
        running, done = self._count_running(), sum(trial.is_ended for trial in trials)
        is_stopping = self._loop.is_interrupted and state.state == "running"
        return protocol.Description(
            state="stopping" if is_stopping else state.state,
            reason=f"{done} of {len(trials)} trials done, {running} running",
            workers=running,
            row=done,
        )

    def close(self) -> None:
        """Stop handling stop requests."""
        with self._guard:
            for timer in self._timers:
                timer.cancel()
            timers, self._timers = self._timers, []
        for timer in timers:
            timer.join()

    def _stop(self, question: protocol.StopRequest) -> tuple[str, bool]:
        """Return the reply to ``powertrain stop``, and whether it was accepted."""
        if self._loop.state.state != "running":
            return f"The sweep {self._name!r} is over already: it has {self._loop.state.state}.", False
        running = self._count_running()
        self._interrupt(is_now=question.now)
        trials = f"{running} trial{'' if running == 1 else 's'} under way"
        ends = (
            "end at once" if question.now else "end at their next boundary, and save there if their loops can"
        )
        words = [f"The sweep {self._name!r} begins no more trials; {trials} {ends}."]
        if question.within and not question.now:
            self._end_later(question.within)
            words.append(f"Those that have not come to one within {question.within:g} s are ended.")
        return " ".join([*words, "It can be continued."]), True

    def _interrupt(self, *, is_now: bool) -> None:
        # Without the lock, a trial that is being started could be notified twice, which ends it immediately. A callback
        # that hangs holds the lock, and must not keep the sweep from being stopped.
        has_lock = self._loop.lock.acquire(timeout=_LOCK_TIMEOUT_S)
        try:
            if not self._loop.is_interrupted:
                self._loop.interrupt()
            if is_now and not self._is_ending_now:
                self._is_ending_now = True
                self._loop.interrupt()
        finally:
            if has_lock:
                self._loop.lock.release()

    def _end_later(self, seconds: float) -> None:
        timer = threading.Timer(seconds, self._interrupt, kwargs={"is_now": True})
        timer.name, timer.daemon = "powertrain-sweep-stop", True
        with self._guard:
            self._timers.append(timer)
        timer.start()

    def _count_running(self) -> int:
        from powertrain.tune.trial import RUNNING

        return sum(trial.status == RUNNING for trial in list(self._loop.state.unended.values()))
