"""The content of ``sweep.json``: the sweep's arguments, user and versions."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from powertrain.config.json import to_json
from powertrain.config.run import RunConfig
from powertrain.driver.checks import user
from powertrain.text.redaction import redact_values
from powertrain.tune.sweep.journal.state import json_form
from powertrain.version import __version__

if TYPE_CHECKING:
    from powertrain.tune.config import TuneConfig
    from powertrain.tune.sweep.judge import Judge


def describe_sweep(
    name: str,
    trainable: str,
    engine: str,
    space: Mapping[str, Any],
    tune: TuneConfig,
    run: RunConfig,
    judge: Judge,
) -> dict[str, Any]:
    """Return the record of a sweep, without secrets."""
    record = {
        "name": name,
        "prefix": judge.prefix,
        "trainable": trainable,
        "engine": engine,
        "param_space": json_form(dict(space))[0],
        "metric": as_list(tune.metric or judge.scheduler.metric or judge.searcher.metric),
        "mode": as_list(tune.mode or judge.scheduler.mode or judge.searcher.mode),
        "num_samples": tune.num_samples,
        "scheduler": type(judge.scheduler).__name__,
        "searcher": type(judge.searcher).__name__,
        "run_config": to_json(run),
        "versions": {"powertrain": __version__, "python": platform.python_version()},
        "started_by": {"user": user(), "host": platform.node(), "pid": os.getpid(), "argv": sys.argv[:1]},
        "started": time.time(),
    }
    return cast("dict[str, Any]", redact_values(record))


def objective_of(judge: Judge, tune: TuneConfig) -> tuple[str | None, str | None]:
    """Return the metric and mode of comparison: the scheduler's, those of ``tune``, or the searcher's."""
    return (
        judge.scheduler.metric or first_of(tune.metric or judge.searcher.metric),
        judge.scheduler.mode or first_of(tune.mode or judge.searcher.mode),
    )


def first_of(value: Any) -> str | None:
    """Return a metric or mode; the first of several."""
    first: str | None = value[0] if isinstance(value, list) else value
    return first


def as_list(value: Any) -> list[str]:
    """Return metrics or modes as a list; [] for none."""
    return list(value) if isinstance(value, list) else [value] if value else []
