"""The facts of a run as they happen: into its state, its journal, its terminal and the user's callbacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from powertrain.run import events as ev
from powertrain.run import lifecycle

if TYPE_CHECKING:
    from powertrain.run.callbacks import Callbacks
    from powertrain.run.deadlines import Clock
    from powertrain.run.outcome import Observer
    from powertrain.run.record.journal import Journal


class Facts:
    """What has happened so far. The controller's thread only."""

    #: The user's callbacks; set before the first fact.
    callbacks: Callbacks

    def __init__(self, state: lifecycle.RunState, journal: Journal, observer: Observer, clock: Clock) -> None:
        self.state = state
        self._journal, self._observer, self._clock = journal, observer, clock
        #: Facts that storage has not taken yet.
        self._unwritten: list[ev.Event] = []
        self._shown: set[str] = set()

    def record(self, event: ev.Event) -> None:
        """Apply, write and show one fact. A journal that cannot be written does not end the run."""
        self.state = lifecycle.apply(self.state, event)
        self._unwritten.append(event)
        try:
            while self._unwritten:
                self._journal.append(self._unwritten[0])
                self._unwritten.pop(0)
        except OSError as error:
            self.show_once(
                f"The journal cannot be written ({error}); the run goes on, and it is tried again."
            )
        self._observer.event(event)
        self.callbacks.call("on_event", event)

    def warn(self, message: str, rank: int = -1) -> None:
        """Record a warning."""
        attempt = max(0, self.state.attempt)
        self.record(ev.Warned(time=self._clock.time(), message=message, attempt=attempt, rank=rank))

    def warn_once(self, message: str) -> None:
        """Record a warning unless the same one was given before."""
        if message not in self._shown:
            self._shown.add(message)
            self.warn(message)

    def inform_once(self, message: str) -> None:
        """Show a line unless the same one was shown before."""
        if message not in self._shown:
            self._shown.add(message)
            self._observer.event(ev.Informed(time=self._clock.time(), message=message))

    def show_once(self, message: str) -> None:
        """Show a warning about the record itself, which therefore cannot be recorded."""
        if message not in self._shown:
            self._shown.add(message)
            self._observer.event(ev.Warned(time=self._clock.time(), message=message))
