"""Terminal output of a sweep: a live table, or plain lines without a terminal."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from powertrain.run import events as ev
from powertrain.terminal.lines import LineAssembler
from powertrain.terminal.screen import wants_live
from powertrain.tune.reporter.table import summary_line, trial_table

if TYPE_CHECKING:
    from powertrain.tune.trial import Trial

#: Seconds between two summary lines without a terminal.
_LINE_INTERVAL_S = 30.0


class SweepScreen:
    """The output of a sweep.

    Args:
        name: The name of the sweep.
        path: Its directory.
        metric: The metric to compare.
        mode: "max" or "min".
        total: Total number of trials, if known.
        verbose: 0 for warnings and errors, 1 for plain lines; otherwise the live table on a terminal.
        reporter: The user's reporter, which then shows the trials.
        hides_output: Whether the output of trials is left to their log files.
        is_continued: Whether the sweep is resumed.
    """

    def __init__(
        self,
        name: str,
        path: str,
        *,
        metric: str | None,
        mode: str | None,
        total: int | None,
        verbose: int | None,
        reporter: Any = None,
        hides_output: bool = False,
        is_continued: bool = False,
    ) -> None:
        self._name, self._metric, self._mode, self.total = name, metric, mode, total
        self._verbose, self._reporter, self.hides_output = verbose, reporter, hides_output
        self._guard = threading.RLock()
        self._shown: set[str] = set()
        self._began = self._line_at = time.monotonic()
        if reporter is not None:
            reporter.setup(start_time=time.time(), total_samples=total, metric=metric, mode=mode)
        self._live: Any = None
        is_live = verbose not in (0, 1) and reporter is None and wants_live(sys.stdout)
        if is_live:
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(file=sys.stdout), auto_refresh=False, transient=False)
            self._live.start()
        if verbose != 0:
            self.print_line(f"sweep {'continued' if is_continued else 'started'} in {path}")

    def print_line(self, text: str) -> None:
        """Print a line of the sweep."""
        self._print(f"[{self._name}] {text}")

    def warn(self, text: str, name: str = "") -> None:
        """Print a warning once, also if several trials give it."""
        key = text.replace(name, "*") if name else text
        with self._guard:
            if key in self._shown:
                return
            self._shown.add(key)
        self._print(f"[{name or self._name}] warning: {text}")

    def waits(self, name: str, reason: str) -> None:
        """Print the reason why a trial waits to start."""
        if self._verbose != 0:
            self.print_line(f"{name} waits to start: {reason}")

    def lines(self, name: str, rank: int, lines: Sequence[str]) -> None:
        """Print lines that a rank of a trial wrote."""
        for line in lines:
            self._print(f"[{name} rank {rank}] {line}")

    def draw(self, trials: Sequence[Trial]) -> None:
        """Show the trials as they are now."""
        if self._reporter is not None:
            if self._reporter.should_report(list(trials), done=False):
                self._reporter.report(list(trials), False)
        elif self._live is not None:
            self._live.update(self._view(trials), refresh=True)
        elif self._verbose != 0 and time.monotonic() - self._line_at > _LINE_INTERVAL_S:
            self._line_at = time.monotonic()
            self.print_line(self._summary(trials))

    def trial_ended(self, trial: Trial) -> None:
        """Print the end of a trial, without a table."""
        if self._reporter is not None or self._live is not None or self._verbose == 0:
            return
        metrics = trial.metrics
        shown = [f"{self._metric}={metrics[self._metric].last:.6g}"] if self._metric in metrics else []
        early = "stopped early" if trial.was_stopped_early else trial.status.lower()
        self.print_line(
            f"{trial} {early} after {trial.iteration} reports{''.join(', ' + text for text in shown)}"
        )

    def close(self, trials: Sequence[Trial], ending: str) -> None:
        """Show the last state and stop."""
        if self._reporter is not None:
            self._reporter.report(list(trials), True)
        elif self._live is not None:
            self._live.update(self._view(trials), refresh=True)
        if self._live is not None:
            self._live.stop()
            self._live = None
        if self._verbose != 0:
            self.print_line(f"{ending}: {self._summary(trials)}")

    def _summary(self, trials: Sequence[Trial]) -> str:
        return summary_line(
            trials,
            total=self.total,
            metric=self._metric,
            mode=self._mode,
            elapsed=time.monotonic() - self._began,
        )

    def _view(self, trials: Sequence[Trial]) -> Any:
        from rich.console import Group
        from rich.text import Text

        width = self._live.console.width
        table = trial_table(trials, metric=self._metric, mode=self._mode, width=width)
        return Group(table, Text(self._summary(trials)))

    def _print(self, line: str) -> None:
        with self._guard:
            if self._live is not None:
                from rich.text import Text

                self._live.console.print(Text(line))
            else:
                print(line, flush=True)


class TrialObserver:
    """Observer that shows the run of one trial: warnings, waits, and the output of its ranks.

    Args:
        screen: The sweep's screen.
        name: The trial's name.
        on_commit: Called with the name of each committed checkpoint.
    """

    def __init__(self, screen: SweepScreen, name: str, on_commit: Callable[[str], None]) -> None:
        self._screen, self._name, self._on_commit = screen, name, on_commit
        #: Called when the run has failed and is restarted.
        self.on_recover: Callable[[], None] = lambda: None
        self._assemblers: dict[int, LineAssembler] = {}
        #: Seconds of this start spent waiting for slots, which are not part of reports.
        self.waited_s = 0.0
        self._asked_at: float | None = None
        self._has_shown_wait = False

    def event(self, event: ev.Event) -> None:
        """Show a fact of the run if it is a warning or the reason of a wait."""
        self._time_wait(event)
        if isinstance(event, ev.Warned):
            self._screen.warn(event.message, self._name)
        elif isinstance(event, ev.Committed):
            self._on_commit(event.checkpoint)
        elif isinstance(event, ev.Failed) and event.decision == "retry":
            self.on_recover()
        elif isinstance(event, ev.SlotsWaited) and not self._has_shown_wait:
            self._has_shown_wait = True  # once: the missing resources change whenever another trial ends
            self._screen.waits(self._name, event.reason)

    def _time_wait(self, event: ev.Event) -> None:
        if isinstance(event, ev.SlotsRequested):
            self._asked_at = time.monotonic()
        elif isinstance(event, ev.AttemptStarted) and self._asked_at is not None:
            self.waited_s += time.monotonic() - self._asked_at
            self._asked_at = None

    def output(self, rank: int, data: bytes) -> None:
        """Show bytes that a rank wrote."""
        if not self._screen.hides_output:
            self._screen.lines(
                self._name, rank, self._assemblers.setdefault(rank, LineAssembler()).feed(data)
            )

    def close(self, *_: Any) -> None:
        """Show incomplete lines."""
        for rank, assembler in self._assemblers.items():
            self._screen.lines(self._name, rank, assembler.finish())
        self._assemblers.clear()

    def row(self, *_: Any) -> None:
        """Do nothing: the sweep handles reports itself."""

    waiting = data = hold = release = text = row
