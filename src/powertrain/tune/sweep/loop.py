"""The loop of a sweep: runs its trials concurrently, and writes its journal.

Each of ``concurrency`` threads takes a trial, runs it to its end and takes the next. Decisions about trials (the
:class:`Judge`, the journal, callbacks) are made under one lock, by the thread of the trial that reports or ends. The
main thread waits, draws the table, and handles signals.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from powertrain.errors import ConfigError, StorageError
from powertrain.run.stopping import PauseHere, StopHere
from powertrain.text.loggers import module_logger
from powertrain.tune import trial as tr
from powertrain.tune.callback import CallbackList
from powertrain.tune.stopper import bounds_of
from powertrain.tune.sweep.journal import events as ev
from powertrain.tune.sweep.journal.state import Exploit, SweepState
from powertrain.tune.sweep.judge import Judge
from powertrain.tune.sweep.trial_run import TrialEnd, TrialRun
from powertrain.tune.trial import Trial

#: Entries of a report that the sweep adds.
_OWN_METRICS = frozenset({"training_iteration", "time_total_s", "time_this_iter_s"})
_logger = module_logger(__name__)
#: Seconds between two checks of the time while trials run.
_POLL_INTERVAL_S = 0.5
#: Seconds for trials to reach a boundary once the sweep ends; as after Ctrl-C.
_END_GRACE_S = 15.0
#: Number of reports after which a limit for a metric that was never reported is probably a mistake.
_REPORTS_BEFORE_HINT = 10

#: Starts the run of a trial: f(trial, its pending change, a function for its reports).
Starter = Callable[[Trial, "Exploit | None", Callable[[int, Mapping[str, Any], float, bool], str]], TrialRun]


class SweepLoop:
    """The trials of a sweep, from the first to the last.

    Args:
        judge: Decides about trials.
        record: Writes a fact to the journal.
        start: Creates the run of a trial.
        callbacks: The user's callbacks.
        concurrency: Number of concurrent trials.
        num_samples: Number of trials if the searcher does not know it; -1 for no limit.
        time_budget_s: Seconds after which no trial continues; None for no limit.
        fail_fast: Whether the first failed trial ends the sweep.
        metrics: The metrics that trials must report.
        warn: Prints one sentence for the user.
        on_trial_end: Called with each trial that has ended.
    """

    def __init__(
        self,
        judge: Judge,
        record: Callable[[ev.SweepEvent], None],
        start: Starter,
        callbacks: CallbackList,
        *,
        concurrency: int,
        num_samples: int,
        time_budget_s: float | None = None,
        fail_fast: bool = False,
        metrics: Sequence[str] = (),
        warn: Callable[[str], None] = _logger.warning,
        on_trial_end: Callable[[Trial], None] = lambda _: None,
    ) -> None:
        self._judge, self._record, self._start, self._callbacks = judge, record, start, callbacks
        self._concurrency, self._num_samples, self._fail_fast = concurrency, num_samples, fail_fast
        self._budget, self._metrics, self._warn = time_budget_s, tuple(metrics), warn
        self._on_trial_end = on_trial_end
        self._changed = threading.Condition(threading.RLock())
        self._running: dict[str, TrialRun] = {}
        #: The reason, by trial, of the end of a run whose trial continues: paused, or with another configuration.
        self._leaving: dict[str, str] = {}
        #: Trials taken by threads and not finished.
        self._taken = 0
        self._threads = 0
        #: The reason why no trial continues; "" while they do.
        self._ending = ""
        #: Whether the driver is leaving a resumable sweep.
        self.is_interrupted = False
        #: Whether running trials are left to the next driver, after an error that ends the sweep.
        self.is_left = False
        #: Urgency of interruption: see :meth:`TrialRun.interrupt`.
        self._interrupts = 0
        #: Deadline for trials to reach a boundary after the end of the sweep, by the monotonic clock.
        self._end_by: float | None = None
        #: The missing metric of each trial that ended without reporting it.
        self._silent: dict[str, str] = {}
        #: Whether limits for unreported metrics were checked.
        self._has_checked_bounds = False
        #: An error that ends the sweep: invalid input, or a bug.
        self.fault: BaseException | None = None
        #: Exceptions of failed trials in this process.
        self.errors: dict[str, BaseException] = {}

    @property
    def state(self) -> SweepState:
        """The state of the sweep."""
        return self._judge.state

    @property
    def lock(self) -> threading.Condition:
        """Held while the state changes."""
        return self._changed

    # ------------------------------------------------------------------ the main thread

    def begin(self, started: ev.SweepStarted, resume: Callable[[], Sequence[ev.SweepEvent]]) -> None:
        """Record the start of this driver, and its treatment of the trials of earlier drivers."""
        self._keep([started])
        self._keep(resume(), apply=False)

    def conclude(self) -> None:
        """Record the end of the sweep."""
        self._callbacks.call("on_experiment_end", trials=list(self.state.trials.values()))
        is_over = not self.is_interrupted and not self.is_left and self.fault is None
        state = "finished" if is_over else "stopped" if self.is_interrupted else "failed"
        self._keep([ev.SweepEnded(time=time.time(), state=state, reason=self._ending)])

    def run(self, draw: Callable[[], None]) -> None:
        """Run trials until none is left. ``draw`` is called about twice a second."""
        began = time.monotonic()
        self._check_limits(began)  # before new trials: the time of a resumed sweep may have expired
        self._threads = self._concurrency
        for number in range(self._concurrency):
            threading.Thread(target=self._work, name=f"powertrain-trials-{number}", daemon=True).start()
        while self._threads:
            draw()
            with self._changed:
                self._changed.wait_for(lambda: not self._threads, _POLL_INTERVAL_S)
                self._check_limits(began)
        draw()
        if self._silent and len(self._silent) == len(self.state.trials):
            self.fault = self.fault or ConfigError(next(iter(self._silent.values())))
        if self.fault is not None:
            raise self.fault

    def _check_limits(self, began: float) -> None:
        """End the sweep if its time has expired, and then trials that do not reach a boundary."""
        now = time.monotonic()
        try:
            if self._budget is not None and now - began >= self._budget:
                self.end(f"the time budget of {self._budget:g} s is spent")
            elif not self._ending and self._judge.stopper.stop_all():
                self.end("RunConfig(stop=...) has ended the sweep")
        except Exception as error:
            self._fail(error)
        if self._end_by is not None and now > self._end_by:
            for run in list(self._running.values()):
                run.interrupt(2)

    def interrupt(self) -> None:
        """Leave the sweep so that it can be resumed; a second call ends its trials. Safe in signal handlers."""
        self.is_interrupted, self._ending = True, self._ending or "it was interrupted"
        self._interrupts += 1
        for run in list(self._running.values()):
            run.interrupt(self._interrupts)

    def end(self, reason: str) -> None:
        """Start no more trials, and end the running ones."""
        with self._changed:
            if self._ending:
                return
            self._ending, self._end_by = reason, time.monotonic() + _END_GRACE_S
            for trial_id, run in self._running.items():
                if trial_id not in self.state.stops:
                    self._keep(self._judge.stop(self.state.trials[trial_id], reason, time.time()))
                run.end_early(reason)
            self._changed.notify_all()

    def _fail(self, error: BaseException, reason: str = "the sweep has failed") -> None:
        """End the sweep on an error outside the trials, which can be resumed once it is fixed."""
        with self._changed:
            self.fault = self.fault or error
            self._leave(reason)

    def _leave(self, reason: str) -> None:
        """Start no more trials, and leave the running ones to the next driver."""
        with self._changed:
            if self._ending:
                return
            self._ending, self.is_left = reason, True
            self._interrupts = max(1, self._interrupts)
            for run in self._running.values():
                run.interrupt(self._interrupts)
            self._changed.notify_all()

    # ------------------------------------------------------------------ threads that run trials

    def _work(self) -> None:
        try:
            while (taken := self._take()) is not None:
                self._run_trial(*taken)
        except BaseException as error:  # a bug, or an error of the user's searcher, scheduler or stopper
            self._fail(error)
        finally:
            with self._changed:
                self._threads -= 1
                self._changed.notify_all()

    def _take(self) -> tuple[Trial, Exploit | None] | None:
        """Wait for the next trial to run, and mark it as started; None if none is left."""
        with self._changed:
            while True:
                if not self.is_interrupted and not self.is_left:
                    self._end_stopped_trials()
                if self._ending:
                    return None
                was_over = self.state.is_search_over
                trial = self._next_trial()
                if trial is not None:
                    self._keep([ev.TrialStarted(time=time.time(), trial=trial.trial_id)])
                    self._taken += 1
                    return trial, self.state.exploits.get(trial.trial_id)
                if self.state.is_search_over and not was_over:
                    continue  # has decided about trials that waited for others to be added
                if not self._taken and self._release_paused():
                    continue
                if not self._taken and self.state.is_search_over:
                    self._changed.notify_all()
                    return None
                self._changed.wait(_POLL_INTERVAL_S)

    def _end_stopped_trials(self) -> None:
        """End the trials whose stop no driver has carried out yet."""
        for trial_id, reason in list(self.state.stops.items()):
            trial = self.state.trials[trial_id]
            if trial_id not in self._running and not trial.is_ended:
                self._finish(trial, TrialEnd("finished", reason))

    def _next_trial(self) -> Trial | None:
        if self._judge.awaits_members():  # trials that have not begun have the least progress
            return self._suggested() or self._next_pending()
        return self._next_pending() or self._suggested()

    def _next_pending(self) -> Trial | None:
        scheduler = self._judge.scheduler
        statuses = (tr.PENDING, tr.PAUSED) if scheduler.takes_turns else (tr.PENDING,)
        pending = [
            trial.trial_id
            for trial in self.state.unended.values()
            if trial.status in statuses and trial.trial_id not in self._running
        ]
        chosen = scheduler.choose(pending)
        if chosen is None:
            return None
        trial = self.state.trials[chosen]
        if trial.status == tr.PAUSED:
            self._keep([_continued(trial, "it is its turn")])
        return trial

    def _suggested(self) -> Trial | None:
        """Return a new trial; None if there is none now."""
        state = self.state
        if state.is_search_over:
            return None
        total = self._judge.searcher.total_trials()
        limit = total if total is not None else self._num_samples
        if 0 <= limit <= len(state.trials):
            self._keep(self._judge.end_search(time.time()), apply=False)
            return None
        facts = self._judge.suggest(time.time())
        if facts is None:
            return None
        self._keep(facts, apply=False)
        added = facts[0]
        return state.trials[added.trial] if isinstance(added, ev.TrialAdded) else None

    def _release_paused(self) -> bool:
        """Resume paused trials if nothing else can run: those that the scheduler names, or else the first."""
        if facts := self._judge.release(time.time()):
            self._keep(facts, apply=False)
            return True
        for trial in self.state.unended.values():
            if trial.status == tr.PAUSED:
                self._keep([_continued(trial, "no other trial is left")])
                return True
        return False

    # ------------------------------------------------------------------ one trial

    def _run_trial(self, trial: Trial, exploit: Exploit | None) -> None:
        base = trial.seconds
        try:
            run = self._start(
                trial,
                exploit,
                lambda row, metrics, seconds, is_saved: self._on_report(
                    trial, row, metrics, base + seconds, is_saved
                ),
            )
        except Exception as error:  # a configuration that the trainer rejects
            self._on_end(trial, TrialEnd("failed", str(error), error))
            return
        run.on_recover(functools.partial(self._on_recover, trial))
        with self._changed:
            self._running[trial.trial_id] = run
            self._call("on_trial_start", trial=trial)
            if trial.starts > 1:
                self._call("on_trial_restore", trial=trial)
            if self._ending:
                if self._interrupts:
                    run.interrupt(self._interrupts)
                else:
                    run.end_early(self._ending)
        self._on_end(trial, run.fit())

    def _on_recover(self, trial: Trial) -> None:
        with self._changed:
            try:
                self._keep([ev.TrialFailed(time=time.time(), trial=trial.trial_id)])
            except Exception as error:
                self._fail(error)
            self._call("on_trial_recover", trial=trial)

    def _on_report(
        self, trial: Trial, row: int, metrics: Mapping[str, Any], seconds: float, is_saved: bool
    ) -> str:
        """Handle a report; return the reason to end the trial's run, or ""."""
        with self._changed:
            try:
                facts = self._judge.report(trial, row, metrics, seconds, time.time(), is_saved)
                self._keep(facts, apply=False)
                if facts:
                    self._call("on_step_begin")
                    self._call("on_trial_result", trial=trial, result=trial.last_result)
                    self._call("on_step_end")
                self._carry_out(facts, trial)
                self._check_bounds(trial)
                if not self._ending and self._judge.stopper.stop_all():
                    self.end("RunConfig(stop=...) has ended the sweep")
            except Exception as error:
                self._fail(error)
                self._keep_undecided(trial, row, metrics, seconds)
            return self._reason_to_leave(trial)

    def _keep_undecided(self, trial: Trial, row: int, metrics: Mapping[str, Any], seconds: float) -> None:
        """Record a report on which a scheduler, searcher or stopper failed: the trial does not repeat it."""
        if row > trial.iteration:
            with contextlib.suppress(Exception):  # the error's own, if the journal failed
                self._keep([self._judge.report_of(trial, row, metrics, seconds, time.time())])

    def _reason_to_leave(self, trial: Trial) -> str:
        if self._ending and not self.is_interrupted and not self.is_left:  # those resume with the next driver
            return self._ending
        if trial.trial_id in self.state.stops:
            return StopHere(self.state.stops[trial.trial_id] or "the scheduler has stopped it early")
        return PauseHere(self._leaving.get(trial.trial_id, ""))

    def _carry_out(self, facts: Sequence[ev.SweepEvent], reporting: Trial | None) -> None:
        """Apply decisions: the reporting trial gets them as the reply to its report, others are notified."""
        for fact in facts:
            if not isinstance(fact, ev.TrialDecided) or fact.trial not in self._running:
                continue
            if fact.trial in self._leaving and fact.action != "stop":
                continue  # its run is ending already, and restarts as decided now
            if fact.action == "pause":
                self._leaving[fact.trial] = "it is paused"
            elif fact.action == "continue":
                self._leaving[fact.trial] = (
                    f"it continues from the checkpoint of {fact.source}"
                    if fact.source
                    else "its configuration changed"
                )
            if reporting is None or fact.trial != reporting.trial_id:
                self._running[fact.trial].end_early(self._reason_to_leave(self.state.trials[fact.trial]))
        if facts:
            self._changed.notify_all()

    def _on_end(self, trial: Trial, end: TrialEnd) -> None:
        with self._changed:
            self._running.pop(trial.trial_id, None)
            self._taken -= 1
            leaving = self._leaving.pop(trial.trial_id, None)
            is_stopped = trial.trial_id in self.state.stops
            if end.is_interrupted and not is_stopped:
                if trial.status == tr.RUNNING:
                    trial.status = tr.PENDING  # here, or by the driver that restores the sweep
            elif end.error is not None or is_stopped or end.reason != leaving:
                self._finish(trial, end)
            self._changed.notify_all()

    def _finish(self, trial: Trial, end: TrialEnd) -> None:
        """Record the end of a trial."""
        is_error = end.error is not None and not end.is_interrupted
        reason = (self.state.stops.get(trial.trial_id) if end.is_interrupted else "") or end.reason
        if not is_error and (problem := self._missing_metric(trial)):
            is_error, reason = True, problem
        if is_error and end.error is not None:
            self.errors[trial.trial_id] = end.error
        status = tr.ERROR if is_error else tr.TERMINATED
        facts = self._judge.end(trial, status, end.state, reason, trial.seconds, time.time())
        self._keep(facts, apply=False)
        self._call("on_trial_error" if is_error else "on_trial_complete", trial=trial)
        self._on_trial_end(trial)
        self._check_bounds(trial)
        self._carry_out(facts, None)
        if is_error and self._fail_fast:
            self._leave(f"{trial} has failed, and FailureConfig(fail_fast=True) ends the sweep then")

    def _check_bounds(self, trial: Trial) -> None:
        """Warn once, after some reports, about metrics of ``RunConfig(stop={...})`` that no trial has reported."""
        if self._has_checked_bounds or not (trial.is_ended or trial.iteration >= _REPORTS_BEFORE_HINT):
            return
        self._has_checked_bounds = True
        reported = sorted({name for other in self.state.trials.values() for name in other.metrics})
        missing = [name for name in bounds_of(self._judge.stopper) if name not in reported]
        if missing and reported:
            self._warn(
                f"RunConfig(stop=...) has a limit for {', '.join(map(repr, missing))}, which no trial has reported so "
                f"far: it ends none. Reported were {', '.join(map(repr, reported))}."
            )

    def _missing_metric(self, trial: Trial) -> str:
        """Return an error if a trial succeeded without ever reporting the compared metric.

        If no trial has reported it and this one has reported something else, the metric is wrong: the sweep ends, and
        the trial stays unchanged for a script with another metric.
        """
        missing = [name for name in self._metrics if name not in trial.metrics]
        if not missing or (trial.trial_id in self.state.stops and not trial.metrics):
            return ""
        reported = sorted(set(trial.metrics) - _OWN_METRICS)
        found = f"It reported {', '.join(map(repr, reported))}." if reported else "It reported nothing."
        others = {
            name: type(trial.last_result[name]).__name__ for name in missing if name in trial.last_result
        }
        if others:
            found = f"It reported {', '.join(f'{name!r} as {kind}' for name, kind in others.items())}, not as a number."
        problem = (
            f"Trial {trial} never reported {', '.join(map(repr, missing))}, by which trials are compared. {found} "
            "Report it with powertrain.report({...}), or set TuneConfig(metric=...) to a metric that is reported."
        )
        if not any(name in other.metrics for other in self.state.trials.values() for name in missing):
            if reported:
                self._fail(
                    ConfigError(problem), "the metric is never reported"
                )  # all others would do the same
                return ""
            self._silent[trial.trial_id] = problem
        return problem

    # ------------------------------------------------------------------ facts

    def _keep(self, facts: Sequence[ev.SweepEvent], apply: bool = True) -> None:
        for fact in facts:
            if apply:
                self.state.apply(fact)
            try:
                self._record(fact)
            except OSError as error:
                raise StorageError(
                    f"The journal of the sweep cannot be written: {error.strerror or error}. Make room, or mend the "
                    "storage, and run the script again: the sweep continues."
                ) from error

    def _call(self, hook: str, **info: Any) -> None:
        if self._callbacks:
            trials = list(self.state.trials.values())
            self._callbacks.call(hook, trials=trials, **info)


def _continued(trial: Trial, reason: str) -> ev.TrialDecided:
    return ev.TrialDecided(time=time.time(), trial=trial.trial_id, action="continue", reason=reason)
