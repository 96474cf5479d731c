"""The file ``pbt_policy_<trial>.txt`` of each trial of a population: the values of its training, with their times.

A line is a JSON list, in Ray's order: the number and drawn values of the trial that changes, those of its source, the
steps of both, the configuration of the source, and the one that the trial continues with. The lines of the source come
first: together they are the history of the state. ``PopulationBasedTrainingReplay`` repeats them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from powertrain.errors import StorageError
from powertrain.storage import Storage
from powertrain.text.errors import describe_error
from powertrain.text.loggers import module_logger
from powertrain.tune.sweep.journal import events as ev
from powertrain.tune.trial import Trial

_logger = module_logger(__name__)


@dataclass
class _History:
    """The history of a trial.

    Attributes:
        tag: Its number and drawn values.
        config: Its configuration, in the form of the journal.
        row: The newest row that it has reported.
        ahead: Steps of its state beyond its rows: those of the trials that it continued from.
        lines: Its policy.
    """

    tag: str
    config: dict[str, Any]
    row: int = 0
    ahead: int = 0
    lines: tuple[str, ...] = field(default_factory=tuple)


class Policies:
    """The policies of a sweep, derived from its facts. Pure."""

    def __init__(self) -> None:
        self._trials: dict[str, _History] = {}

    def apply(self, event: ev.SweepEvent) -> str:
        """Apply the next fact; return the trial whose policy has changed, or ""."""
        if isinstance(event, ev.TrialAdded):
            tag = Trial(event.trial, event.number, "", {}, evaluated_params=dict(event.params)).experiment_tag
            self._trials[event.trial] = _History(tag, event.config)
        elif isinstance(event, ev.TrialReported) and event.trial in self._trials:
            history = self._trials[event.trial]
            history.row = max(history.row, event.iteration)
        elif isinstance(event, ev.TrialRevived) and event.fresh_name and event.trial in self._trials:
            history = self._trials[event.trial]
            history.row, history.ahead, history.lines = 0, 0, ()
            return event.trial
        elif isinstance(event, ev.TrialDecided) and event.config is not None and event.trial in self._trials:
            return self._change(self._trials[event.trial], event)
        return ""

    def text(self, trial: str) -> str:
        """Return the policy of a trial."""
        return "".join(self._trials[trial].lines)

    def _change(self, history: _History, event: ev.TrialDecided) -> str:
        source = self._trials.get(event.source)
        if source is None or event.config is None:
            return ""
        steps, source_steps = history.row + history.ahead, event.source_iteration + source.ahead
        entry = [history.tag, source.tag, steps, source_steps, source.config, event.config]
        history.lines = (*source.lines, json.dumps(entry) + "\n")
        history.config, history.ahead = event.config, source_steps - history.row
        return event.trial


def with_policies(
    record: Callable[[ev.SweepEvent], None],
    storage: Storage,
    earlier: Iterable[ev.SweepEvent],
    is_wanted: bool = True,
) -> Callable[[ev.SweepEvent], None]:
    """Return a function that records a fact, and writes the changed policy to the sweep's directory.

    Args:
        record: Writes a fact to the journal.
        storage: The sweep's.
        earlier: The facts of earlier drivers. Policies that these may not have written are written again.
        is_wanted: False to return ``record`` unchanged.
    """
    if not is_wanted:
        return record
    policies = Policies()
    for trial in {policies.apply(event) for event in earlier} - {""}:
        _write(storage, trial, policies)

    def record_with_policy(event: ev.SweepEvent) -> None:
        record(event)
        if trial := policies.apply(event):
            _write(storage, trial, policies)

    return record_with_policy


def _write(storage: Storage, trial: str, policies: Policies) -> None:
    key = f"pbt_policy_{trial}.txt"
    try:
        storage.put(key, policies.text(trial).encode())
    except (OSError, StorageError) as error:  # the journal is complete, and the sweep can continue
        _logger.warning("%s could not be written: %s.", key, describe_error(error))
