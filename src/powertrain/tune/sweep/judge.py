"""Decisions about trials, as a function of the sweep's journal.

The judge passes the facts of the journal to the searcher, the scheduler and the stopper, in order, and turns their
replies into facts. It has no clock, no files and no processes. After a restart :meth:`Judge.replay` repeats the calls,
so all three have the same state again; decisions in the journal take precedence over those of a changed scheduler.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from powertrain.checkpoint.manifest import to_json_value
from powertrain.errors import ConfigError
from powertrain.tune import trial as tr
from powertrain.tune.schedulers.base import Action, Decision, TrialScheduler
from powertrain.tune.search.base import FINISHED, Searcher
from powertrain.tune.stopper import Stopper
from powertrain.tune.sweep.journal import events as ev
from powertrain.tune.sweep.journal.state import SweepState, json_form, result_of
from powertrain.tune.trial import Trial
from powertrain.values.arguments import shorten

#: Stores a configuration that JSON cannot represent, and returns its key.
KeepConfig = Callable[[str, Mapping[str, Any]], str]


class Judge:
    """The searcher, scheduler and stopper of a sweep, and the resulting state.

    Args:
        searcher: Suggests configurations.
        scheduler: Decides about trials after reports.
        stopper: Ends trials, or all of them.
        state: The state to keep up to date.
        name_trial: Returns the name of the run of a trial: f(trial_id, number, config, drawn values).
        keep_config: Stores configurations that JSON cannot represent.
        prefix: The first part of trial ids.
    """

    def __init__(
        self,
        searcher: Searcher,
        scheduler: TrialScheduler,
        stopper: Stopper,
        state: SweepState,
        name_trial: Callable[[Trial], str],
        keep_config: KeepConfig,
        prefix: str,
    ) -> None:
        self.searcher, self.scheduler, self.stopper = searcher, scheduler, stopper
        self.state = state
        self._name_trial, self._keep_config, self.prefix = name_trial, keep_config, prefix
        #: Decisions of the journal that a replay did not reproduce.
        self.changed_decisions = 0
        #: Trials of the journal for which the searcher suggested something else in a replay.
        self.changed_suggestions = 0
        #: Trials with a configuration that the searcher does not accept: it does not receive their results.
        self._unknown_to_searcher: set[str] = set()
        #: Decisions on the newest fact of a replayed journal that are not in it, with their reasons.
        self._missing: list[tuple[Decision, str]] = []

    # ------------------------------------------------------------------ replaying

    def replay(self, events: Iterable[ev.SweepEvent]) -> None:
        """Repeat the calls that led to some facts, and fold the facts into the state."""
        for event in events:
            if isinstance(event, ev.TrialDecided):
                self._expect(event)
            elif not isinstance(event, (ev.SweepStarted, ev.SweepEnded, ev.TrialFailed)):
                self._missing = []
            found = self.searcher.suggest(event.trial) if isinstance(event, ev.TrialAdded) else None
            decided = self._repeat(event)
            self.state.apply(event)
            if isinstance(event, ev.TrialAdded):
                self._check_suggestion(event, found)
                self.scheduler.on_trial_add(event.trial, self.state.trials[event.trial].config)
            elif isinstance(event, ev.TrialDecided) and event.trial in self.state.trials:
                self._adopt(event)
            elif isinstance(event, ev.TrialRevived) and event.trial in self.state.trials:
                self._show_revived(event)
            self._missing += [each for each in decided if not self._is_void(each[0])]

    def complete_decisions(self, at: float) -> list[ev.SweepEvent]:
        """Return the decisions that an earlier driver reached but did not write before it died."""
        missing, self._missing = self._missing, []
        facts: list[ev.SweepEvent] = []
        for decision, reason in missing:
            facts += self._facts([decision], at, reason)
        return facts

    def _expect(self, event: ev.TrialDecided) -> None:
        """Compare a decision of the journal with those of a replay."""
        for each in self._missing:
            if (each[0].trial, each[0].action.value) == (event.trial, event.action):
                self._missing.remove(each)
                return
        if not event.reason:
            self.changed_decisions += 1

    def _repeat(self, event: ev.SweepEvent) -> list[tuple[Decision, str]]:
        decided: list[Decision] = []
        if isinstance(event, ev.SearchEnded):
            decided = self.scheduler.on_trials_complete()
        elif isinstance(event, ev.TrialReported) and event.trial in self.state.trials:
            trial = self.state.trials[event.trial]
            if event.iteration > trial.iteration and self._is_judged(trial):
                self._look_for_others(trial, event)
                decided, reason = self._consult(trial, result_of(trial, event))
                if reason and not any(
                    each.trial == event.trial and each.action is Action.STOP for each in decided
                ):
                    return [(each, "") for each in decided] + [(Decision(event.trial, Action.STOP), reason)]
        elif isinstance(event, ev.TrialEnded) and event.trial in self.state.trials:
            decided = self._complete(self.state.trials[event.trial], event.status)
        return [(each, "") for each in decided]

    def _check_suggestion(self, event: ev.TrialAdded, found: Any) -> None:
        """Pass a trial's actual configuration to the searcher if it has suggested something else."""
        if isinstance(found, dict):
            drawn = self.searcher.drawn_values(event.trial)
            own, kept = (dict(drawn), event.params) if event.params else (found, event.config)
            kept = {
                name: value for name, value in kept.items() if name in own
            }  # a scheduler may add other entries
            if _without_addresses(json_form(own)[0]) == _without_addresses(kept):
                return
        self.changed_suggestions += found != FINISHED  # the script requests fewer trials
        self._tell_config(self.state.trials[event.trial])

    def _tell_config(self, trial: Trial) -> None:
        """Let the searcher adopt a trial's configuration, or exclude the trial."""
        self._unknown_to_searcher.discard(trial.trial_id)
        if not self.searcher.adopt(trial.trial_id, trial.config):
            self.searcher.on_trial_complete(trial.trial_id, None, error=True)
            self._unknown_to_searcher.add(trial.trial_id)

    def _show_revived(self, event: ev.TrialRevived) -> None:
        trial = self.state.trials[event.trial]
        self._tell_config(trial)
        self.scheduler.on_trial_revive(trial.trial_id, trial.config, bool(event.fresh_name))
        if event.fresh_name:
            self.stopper.forget(trial.trial_id)

    def _adopt(self, event: ev.TrialDecided) -> None:
        """Let the scheduler adopt a decision, because a random function may give another result in a replay."""
        config = self.state.trials[event.trial].config if event.config is not None else None
        self.scheduler.adopt(Decision(event.trial, Action(event.action), event.source, config))

    # ------------------------------------------------------------------ new trials

    def suggest(self, at: float) -> list[ev.SweepEvent] | None:
        """Return the facts of a new trial, or of the end of the search; None if the searcher has none now."""
        number = len(self.state.trials)
        trial_id = f"{self.prefix}_{number:05d}"
        found = self.searcher.suggest(trial_id)
        if found is None:
            return None
        if isinstance(found, str) and found == FINISHED:
            return self.end_search(at)
        if not isinstance(found, dict):
            raise ConfigError(
                f"{type(self.searcher).__name__}.suggest() returned {shorten(found)}. It must return a configuration "
                "(a dict), None to be asked again later, or Searcher.FINISHED."
            )
        suggested, found = found, self.scheduler.fill_config(found)
        drawn = {**self.searcher.drawn_values(trial_id), **_added_values(suggested, found)}
        trial = Trial(trial_id, number, "", found, evaluated_params=dict(drawn))
        config, is_exact = json_form(found)
        name = self._name_trial(trial)
        event = ev.TrialAdded(
            time=at,
            trial=trial_id,
            number=number,
            name=name,
            config=config,
            is_exact=is_exact,
            pickled="" if is_exact else self._keep_config(name, found),
            params=json_form(dict(drawn))[0],
        )
        self.scheduler.on_trial_add(trial_id, found)
        self.state.apply(event)
        self.state.trials[trial_id].config = found
        return [event]

    def end_search(self, at: float) -> list[ev.SweepEvent]:
        """Return the facts that follow from the end of the search."""
        event = ev.SearchEnded(time=at)
        self.state.apply(event)
        return [event, *self._facts(self.scheduler.on_trials_complete(), at)]

    def reopen_search(self, at: float) -> list[ev.SweepEvent]:
        """Return the fact that the search is open again."""
        event = ev.SearchReopened(time=at)
        self.state.apply(event)
        return [event]

    # ------------------------------------------------------------------ reports and ends

    def report(
        self,
        trial: Trial,
        iteration: int,
        metrics: Mapping[str, Any],
        seconds: float,
        at: float,
        is_saved: bool = False,
    ) -> list[ev.SweepEvent]:
        """Return the facts that follow from a report; none for an iteration that was reported before."""
        if iteration <= trial.iteration:
            return []
        event = self.report_of(trial, iteration, metrics, seconds, at, is_saved)
        decisions: list[Decision] = []
        reason = ""
        if self._is_judged(trial):
            self._look_for_others(trial, event)
            decisions, reason = self._consult(trial, result_of(trial, event))
        self.state.apply(event)
        facts = self._facts(decisions, at)
        if reason and trial.trial_id not in self.state.stops:
            facts += self.stop(trial, reason, at)
        return [event, *facts]

    def report_of(
        self,
        trial: Trial,
        iteration: int,
        metrics: Mapping[str, Any],
        seconds: float,
        at: float,
        is_saved: bool = False,
    ) -> ev.TrialReported:
        """Return the fact of a report alone, without decisions."""
        return ev.TrialReported(
            time=at,
            trial=trial.trial_id,
            iteration=iteration,
            seconds=seconds,
            metrics=to_json_value(dict(metrics)),
            is_saved=is_saved,
        )

    def end(
        self, trial: Trial, status: str, run_state: str, reason: str, seconds: float, at: float
    ) -> list[ev.SweepEvent]:
        """Return the facts that follow from the end of a trial."""
        event = ev.TrialEnded(
            time=at, trial=trial.trial_id, status=status, state=run_state, reason=reason, seconds=seconds
        )
        decisions = self._complete(trial, status)
        self.state.apply(event)
        return [event, *self._facts(decisions, at)]

    def stop(self, trial: Trial, reason: str, at: float) -> list[ev.SweepEvent]:
        """Return the fact that a trial ends, for a reason outside the scheduler."""
        event = ev.TrialDecided(time=at, trial=trial.trial_id, action="stop", reason=reason)
        self.state.apply(event)
        return [event]

    def release(self, at: float) -> list[ev.SweepEvent]:
        """Return the scheduler's decisions about paused trials when nothing runs and nothing can be added."""
        return self._facts(self.scheduler.on_stalled(), at, "no other trial can run")

    def awaits_members(self) -> bool:
        """Return whether trials take turns and some are still to be added."""
        if not self.scheduler.takes_turns or self.state.is_search_over:
            return False
        total = self.searcher.total_trials()
        return total is not None and len(self.state.trials) < total

    def _look_for_others(self, trial: Trial, event: ev.TrialReported) -> None:
        """Set in the scheduler whether the reporting trial can yield its slot to one that waits."""
        if self.scheduler.takes_turns:
            self.scheduler.can_give_way = event.is_saved and (
                any(
                    other.status in (tr.PENDING, tr.PAUSED)
                    for other in self.state.unended.values()
                    if other is not trial and other.trial_id not in self.state.stops
                )
                or self.awaits_members()
            )

    def revive(self, trial: Trial, fresh_name: str, at: float) -> list[ev.SweepEvent]:
        """Return the fact that a failed trial runs again; under a new name if it starts over."""
        event = ev.TrialRevived(time=at, trial=trial.trial_id, fresh_name=fresh_name)
        self.state.apply(event)
        self._show_revived(event)
        return [event]

    def _is_judged(self, trial: Trial) -> bool:
        """Return whether reports of a trial lead to decisions: not those before a pending end or pause."""
        return trial.status == tr.RUNNING and trial.trial_id not in self.state.stops

    def _consult(self, trial: Trial, result: dict[str, Any]) -> tuple[list[Decision], str]:
        """Pass a report to the searcher, the scheduler and the stopper; return their decisions."""
        if trial.trial_id not in self._unknown_to_searcher:
            self.searcher.on_trial_result(trial.trial_id, result)
        decisions = self.scheduler.on_trial_result(trial.trial_id, result)
        if not isinstance(decisions, list) or not all(isinstance(each, Decision) for each in decisions):
            raise ConfigError(
                f"{type(self.scheduler).__name__}.on_trial_result() returned {shorten(decisions)}. It must return a "
                "list of Decision, [] to let the trial continue."
            )
        reason = ""
        if self.stopper(trial.trial_id, result):
            why = getattr(self.stopper, "reason", None)
            reason = (
                why(trial.trial_id, result) if why is not None else ""
            ) or "it has met RunConfig(stop=...)"
        return decisions, reason

    def _complete(self, trial: Trial, status: str) -> list[Decision]:
        is_error = status == tr.ERROR
        if trial.trial_id not in self._unknown_to_searcher:
            self.searcher.on_trial_complete(trial.trial_id, trial.last_result or None, error=is_error)
        return self.scheduler.on_trial_end(trial.trial_id)

    def _is_void(self, decision: Decision) -> bool:
        """Return whether a decision has no effect."""
        trial = self.state.trials.get(decision.trial)
        if trial is None or trial.is_ended or decision.trial in self.state.stops:
            return True
        is_change = decision.source or decision.config is not None
        return decision.action is Action.CONTINUE and not is_change and trial.status != tr.PAUSED

    def _facts(self, decisions: Iterable[Decision], at: float, reason: str = "") -> list[ev.SweepEvent]:
        """Return decisions as facts, and apply them to the state. Those without effect are omitted."""
        facts: list[ev.SweepEvent] = []
        for decision in decisions:
            if self._is_void(decision):
                continue
            facts.append(self._fact(decision, at, reason))
            self.state.apply(facts[-1])
            if decision.config is not None:
                self.state.trials[decision.trial].config = dict(decision.config)
        return facts

    def _fact(self, decision: Decision, at: float, reason: str = "") -> ev.TrialDecided:
        config, is_exact, key = None, True, ""
        if decision.config is not None:
            config, is_exact = json_form(dict(decision.config))
            if not is_exact:
                name = f"{self.state.trials[decision.trial].name}-{len(self.state.exploits)}-{at}"
                key = self._keep_config(name, decision.config)
        return ev.TrialDecided(
            time=at,
            trial=decision.trial,
            action=decision.action.value,
            source=decision.source,
            source_iteration=self.state.trials[decision.source].iteration if decision.source else 0,
            config=config,
            is_exact=is_exact,
            pickled=key,
            reason=reason,
        )


def _added_values(
    suggested: Mapping[str, Any], filled: Mapping[str, Any], prefix: str = ""
) -> dict[str, Any]:
    """Return the values that a scheduler has added to a configuration, by path."""
    added: dict[str, Any] = {}
    for key, value in filled.items():
        if isinstance(value, Mapping):
            below = suggested.get(key, {})
            added.update(_added_values(below if isinstance(below, Mapping) else {}, value, f"{prefix}{key}/"))
        elif key not in suggested:
            added[f"{prefix}{key}"] = value
    return added


def _without_addresses(form: Any) -> Any:
    """Return the JSON form of a configuration, with objects such as functions shown alike in every process."""
    if isinstance(form, dict):
        return {key: _without_addresses(value) for key, value in form.items()}
    if isinstance(form, list):
        return [_without_addresses(value) for value in form]
    return re.sub(r" at 0x[0-9a-f]+", "", form) if isinstance(form, str) else form
