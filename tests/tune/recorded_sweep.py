"""Sweeps as their directories tell them, written by hand: ``sweep.json`` and a journal, and no trial directories."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from powertrain.checkpoint.manifest import to_json_value
from powertrain.run.record.journal import Journal
from powertrain.run.record.journal_lines import as_line
from powertrain.storage import Storage
from powertrain.storage.sealed import seal_json
from powertrain.tune import trial as tr
from powertrain.tune.sweep.journal import events as ev
from powertrain.tune.sweep.journal.state import json_form

RECORD: dict[str, Any] = {
    "name": "sweep",
    "prefix": "abcde",
    "trainable": "train",
    "engine": "local",
    "param_space": {"lr": "loguniform(0.0001, 0.1)", "layers": {"grid_search": [1, 2]}, "seed": 7},
    "metric": ["loss"],
    "mode": ["min"],
    "num_samples": 4,
    "scheduler": "ASHAScheduler",
    "searcher": "BasicVariantGenerator",
    "run_config": {},
    "versions": {"powertrain": "0.1.0", "python": "3.11"},
    "started_by": {"user": "ada", "host": "here", "pid": 42, "argv": ["train.py"]},
    "started": 1.0,
}


def started(at: float, *, start: int = 1, host: str = "", pid: int = 0) -> ev.SweepStarted:
    return ev.SweepStarted(
        time=at,
        start=start,
        host=host or socket.gethostname(),
        pid=pid or os.getpid(),
        metric="loss",
        mode="min",
    )


def trial_id(number: int) -> str:
    return f"abcde_{number:05d}"


def trial_name(number: int) -> str:
    return f"train_{trial_id(number)}"


def trial_facts(
    number: int,
    params: Mapping[str, Any],
    losses: Sequence[float],
    *,
    at: float,
    status: str = tr.TERMINATED,
    is_stopped_early: bool = False,
    reason: str = "",
    metric: str = "loss",
) -> list[ev.SweepEvent]:
    """The facts of one trial that reports a loss each second; ``status`` RUNNING for one that has not ended."""
    own = trial_id(number)
    drawn = json_form(dict(params))[0]
    facts: list[ev.SweepEvent] = [
        ev.TrialAdded(
            time=at, trial=own, number=number, name=trial_name(number), config=dict(drawn), params=drawn
        ),
        ev.TrialStarted(time=at, trial=own),
    ]
    for row, loss in enumerate(losses, 1):
        metrics = to_json_value({metric: loss})
        facts.append(
            ev.TrialReported(time=at + row, trial=own, iteration=row, seconds=float(row), metrics=metrics)
        )
    end = at + len(losses)
    if is_stopped_early:
        facts.append(ev.TrialDecided(time=end, trial=own, action="stop"))
    if status in tr.ENDED:
        facts.append(
            ev.TrialEnded(time=end, trial=own, status=status, reason=reason, seconds=float(len(losses)))
        )
    return facts


def write_sweep(
    place: Storage,
    trials: Sequence[Sequence[ev.SweepEvent]],
    *,
    start: ev.SweepStarted | None = None,
    state: str = "finished",
    record: Mapping[str, Any] = RECORD,
) -> None:
    """Write a sweep of these trials; ``state`` is "" where its driver has not left it."""
    place.put("sweep.json", seal_json(json.dumps(dict(record), indent=2).encode()))
    facts: list[ev.SweepEvent] = [start or started(time.time() - 60)]
    facts += [fact for trial in trials for fact in trial]
    last = max(fact.time for fact in facts)
    if state == "finished":
        facts.append(ev.SearchEnded(time=last))
    if state:
        facts.append(ev.SweepEnded(time=last, state=state, reason="" if state == "finished" else "why"))
    journal = Journal(place, 1, lambda fact: as_line(ev.encode_event(fact)), ())
    for fact in facts:
        journal.append(fact)
    journal.close()
