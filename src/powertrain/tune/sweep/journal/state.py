"""The state of a sweep, derived from its journal: a fold over the facts, without side effects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from powertrain.checkpoint.manifest import from_json_value
from powertrain.tune import trial as tr
from powertrain.tune.sweep.journal import events as ev
from powertrain.tune.trial import Trial
from powertrain.values.arguments import plain_scalar


@dataclass
class Exploit:
    """A pending change of a trial: it continues from another trial's checkpoint, with another configuration."""

    source: str
    config: dict[str, Any] | None
    source_iteration: int = 0


@dataclass
class SweepState:
    """The state of a sweep.

    Attributes:
        trials: Trials by id, in order of creation.
        unended: Trials that have not ended.
        exploits: The change of each trial at its next start.
        stops: The reason of each pending stop, by trial.
        is_search_over: Whether no more trials follow.
        starts: Number of drivers so far.
        state: "running", "finished" or "stopped".
        seconds: Total time of its drivers, according to the journal.
    """

    trials: dict[str, Trial] = field(default_factory=dict)
    unended: dict[str, Trial] = field(default_factory=dict)
    exploits: dict[str, Exploit] = field(default_factory=dict)
    stops: dict[str, str] = field(default_factory=dict)
    is_search_over: bool = False
    starts: int = 0
    state: str = "running"
    reason: str = ""
    metric: str = ""
    mode: str = ""
    began: float = 0.0
    seconds: float = 0.0
    _newest: float = 0.0
    #: Loads a configuration that JSON cannot represent; if None, or if it returns None, the readable form is used.
    load_config: Callable[[str], dict[str, Any] | None] | None = None

    def apply(self, event: ev.SweepEvent) -> None:
        """Apply the next fact. Facts about unknown trials are skipped."""
        self._count_time(event)
        if isinstance(event, ev.SweepStarted):
            self.starts, self.state, self.reason = event.start, "running", ""
            self.metric, self.mode = event.metric, event.mode
            for trial in self.unended.values():  # their processes have died with the driver
                if trial.status == tr.RUNNING:
                    trial.status = tr.PENDING
        elif isinstance(event, ev.SearchEnded):
            self.is_search_over = True
        elif isinstance(event, ev.SearchReopened):
            self.is_search_over = False
        elif isinstance(event, ev.SweepEnded):
            self.state, self.reason = event.state, event.reason
        elif isinstance(event, ev.TrialAdded):
            self.trials[event.trial] = self.unended[event.trial] = self._new_trial(event)
        elif event.trial in self.trials:
            self._apply_to_trial(self.trials[event.trial], event)

    def _count_time(self, event: ev.SweepEvent) -> None:
        if isinstance(event, ev.SweepStarted):
            self.began = self.began or event.time
        elif event.time > self._newest:
            self.seconds += event.time - self._newest
        self._newest = max(self._newest, event.time) if not isinstance(event, ev.SweepStarted) else event.time

    def _new_trial(self, event: ev.TrialAdded) -> Trial:
        config = self._config_of(event) or {}
        params = dict(event.params)
        if not event.is_exact and self.load_config is not None:
            params = {path: _value_at(config, path, shown) for path, shown in params.items()}
        return Trial(event.trial, event.number, event.name, config, evaluated_params=params)

    def _config_of(self, event: ev.TrialAdded | ev.TrialDecided) -> dict[str, Any] | None:
        if event.is_exact or self.load_config is None:
            return event.config
        loaded = self.load_config(event.pickled)
        return loaded if loaded is not None else event.config

    def _apply_to_trial(self, trial: Trial, event: ev.SweepEvent) -> None:
        if isinstance(event, ev.TrialStarted):
            trial.status, trial.starts = tr.RUNNING, trial.starts + 1
        elif isinstance(event, ev.TrialReported):
            if trial.add_report(result_of(trial, event)) and trial.status == tr.RUNNING:
                self.exploits.pop(trial.trial_id, None)  # already applied at its start
            trial.seconds = max(trial.seconds, event.seconds)
        elif isinstance(event, ev.TrialDecided):
            self._decide(trial, event)
        elif isinstance(event, ev.TrialFailed):
            trial.num_failures += 1
        elif isinstance(event, ev.TrialEnded):
            trial.status, trial.reason = event.status, event.reason
            trial.num_failures += event.status == tr.ERROR
            self.unended.pop(trial.trial_id, None)
            trial.seconds = max(trial.seconds, event.seconds)
            self.stops.pop(trial.trial_id, None)
            self.exploits.pop(trial.trial_id, None)
            if trial.last_result:
                trial.last_result["done"] = True
        elif isinstance(event, ev.TrialRevived):
            trial.status, trial.reason = tr.PENDING, ""
            self.unended[trial.trial_id] = trial
            if event.fresh_name:
                trial.name, trial.iteration, trial.seconds = event.fresh_name, 0, 0.0
                trial.last_result, trial.metrics, trial.num_failures = {}, {}, 0

    def _decide(self, trial: Trial, event: ev.TrialDecided) -> None:
        if event.action == "stop":
            self.stops[trial.trial_id] = event.reason
            trial.was_stopped_early = True
        elif event.action == "pause":
            trial.status = tr.PAUSED
        else:
            config = self._config_of(event)
            if config is not None:
                trial.config = config
            if event.source or config is not None:
                self.exploits[trial.trial_id] = Exploit(event.source, config, event.source_iteration)
            if trial.status == tr.PAUSED or event.source or config is not None:
                trial.status = tr.PENDING


def result_of(trial: Trial, event: ev.TrialReported) -> dict[str, Any]:
    """Return a report in the form for searchers, schedulers and callbacks."""
    return {
        **from_json_value(event.metrics),
        "training_iteration": event.iteration,
        "time_total_s": event.seconds,
        "time_this_iter_s": event.seconds - float(trial.last_result.get("time_total_s", 0.0)),
        "timestamp": int(event.time),
        "trial_id": trial.trial_id,
        "done": False,
        "config": trial.config,
    }


def _value_at(config: Any, path: str, otherwise: Any) -> Any:
    """Return the value of a configuration at "a/b"; the default if it is missing."""
    value = config
    for part in path.split("/"):
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, (list, tuple)) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        else:
            return otherwise
    return value


def replay(
    events: Iterable[ev.SweepEvent], load_config: Callable[[str], dict[str, Any] | None] | None = None
) -> SweepState:
    """Return the state after some facts.

    Args:
        events: The facts.
        load_config: Loads a configuration that JSON cannot represent; if None, or if it returns None, the
            readable form is used.
    """
    state = SweepState(load_config=load_config)
    for event in events:
        state.apply(event)
    return state


def json_form(value: Any) -> tuple[Any, bool]:
    """Return the JSON form of a configuration value, and whether it is lossless."""
    if value is None or type(value) in (bool, str):
        return value, True
    if type(value) is int:
        return value, abs(value) < 2**53
    if type(value) is float:
        return (value, True) if value == value and abs(value) != float("inf") else (repr(value), False)
    if type(value) is dict:
        parts = {str(key): json_form(item) for key, item in value.items()}
        is_exact = all(type(key) is str for key in value) and all(exact for _, exact in parts.values())
        return {key: form for key, (form, _) in parts.items()}, is_exact
    if type(value) in (list, tuple):
        items = [json_form(item) for item in value]
        return [form for form, _ in items], type(value) is list and all(exact for _, exact in items)
    plain = plain_scalar(value)  # of NumPy or torch
    if plain is not value and type(plain) in (bool, int, float, str):
        return json_form(plain)[0], False
    if isinstance(value, int):  # of a subclass
        return int(value), False
    if isinstance(value, float):
        return json_form(float(value))[0], False
    from powertrain.text.reprs import short_repr

    return short_repr(value), False
