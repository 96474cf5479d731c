"""Sweeps in ``ls`` and ``show``: tables, lines and JSON."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from powertrain.cli.common.output import cell, print_json, print_line, print_lines, print_table, style_of
from powertrain.errors import StorageError
from powertrain.lookup.finding import FoundRun
from powertrain.lookup.summaries import UNREADABLE, ago
from powertrain.lookup.sweeps import SweepSummary, SweepWatch, objective, read_record, summary_of
from powertrain.storage.addresses import without_secrets
from powertrain.terminal.text import duration
from powertrain.tune.reporter.table import error_table, find_best, summary_line, trial_table
from powertrain.tune.trial import Trial


def print_summaries(sweeps: Sequence[SweepSummary]) -> None:
    """Print the table of the sweeps of a storage path."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("sweep", "state"):
        table.add_column(column, overflow="fold")
    table.add_column("trials", justify="right")
    for column in ("best", "started", "process"):
        table.add_column(column)
    now = time.time()
    for sweep in sweeps:
        style = "green" if sweep.state == "running" else style_of(sweep.state)
        if sweep.state == UNREADABLE:
            table.add_row(cell(sweep.name), sweep.state, "", "", "", "", style=style)
            continue
        total = "?" if sweep.total is None else str(sweep.total)
        process = f"pid {sweep.pid}" if sweep.pid else ""
        cells = (
            sweep.name,
            sweep.state,
            f"{sweep.done}/{total}",
            sweep.best,
            ago(sweep.started, now),
            process,
        )
        table.add_row(*map(cell, cells), style=style)
    print_table(table)


# --------------------------------------------------------------------------- one sweep


def show_sweep(found: FoundRun, *, as_json: bool) -> None:
    """Print a sweep: its arguments, its trials, and its state."""
    watch = SweepWatch(found)
    watch.look()
    uri = without_secrets(found.place.uri)
    if watch.start is None:
        raise StorageError(f"The sweep at {uri} cannot be shown: it has no journal.")
    record = read_record(found)
    summary = summary_of(found, watch, record)
    metric, mode = objective(watch.sweep, record)
    if as_json:
        print_json(_as_json(summary, uri, watch, record, metric, mode))
        return
    print_lines(describe_sweep(summary, uri, watch, record, time.time()))
    print_line("")
    width = shutil.get_terminal_size((100, 24)).columns
    table = trial_table(
        watch.trials, metric=metric or None, mode=mode or None, sort_by_metric=True, width=width
    )
    print_table(table, width)
    failed = error_table(watch.trials)
    if failed is not None:
        print_line("")
        print_table(failed, width)
    print_line("")
    elapsed = summary.seconds if summary.state == "running" else None
    print_line(
        summary_line(
            watch.trials, total=summary.total, metric=metric or None, mode=mode or None, elapsed=elapsed
        )
    )
    if text := watch.continuing():
        print_line(text)


def describe_sweep(
    summary: SweepSummary, uri: str, watch: SweepWatch, record: Mapping[str, Any], now: float
) -> list[str]:
    """Return the arguments and the state of the sweep as lines of text."""
    reason, starts = watch.sweep.reason, watch.sweep.starts
    times = f", {starts} starts" if starts > 1 else ""
    lines = [
        f"sweep      {summary.name}",
        f"path       {uri}",
        f"state      {summary.state}" + (f": {reason}" if reason else ""),
        f"started    {ago(summary.started, now)}, ran for {duration(summary.seconds)}{times}",
    ]
    if summary.pid:
        lines.append(f"process    {summary.pid}")
    if by := record.get("started_by"):
        lines.append(f"by         {_starter(by)}")
    metric, mode = objective(watch.sweep, record)
    samples = record.get("num_samples")
    search = [str(record.get("searcher") or "")]
    search += [f"{samples} samples"] if isinstance(samples, int) and samples > 0 else []
    search += [f"{mode} {metric}".strip()] if metric else []
    lines += [
        f"trainable  {record.get('trainable') or 'unknown'}",
        f"search     {', '.join(filter(None, search)) or 'unknown'}",
        f"scheduler  {record.get('scheduler') or 'unknown'}",
    ]
    space = [f"  {path} = {value}" for path, value in _flat(record.get("param_space"))]
    return [*lines, "", "space", *space] if space else lines


def _starter(by: Any) -> str:
    if not isinstance(by, Mapping):
        return str(by)
    script = by.get("argv")
    name = f", {script[0]}" if isinstance(script, list) and script else ""
    return f"{by.get('user')}@{by.get('host')} pid {by.get('pid')}{name}"


def _flat(space: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in space.items() if isinstance(space, Mapping) else ():
        if isinstance(value, Mapping) and list(value) == ["grid_search"]:
            yield f"{prefix}{key}", f"grid_search({value['grid_search']})"
        elif isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", str(value)


def _as_json(
    summary: SweepSummary, uri: str, watch: SweepWatch, record: Mapping[str, Any], metric: str, mode: str
) -> dict[str, Any]:
    best = find_best(watch.trials, metric, mode)
    return {
        **asdict(summary),
        "path": uri,
        "reason": watch.sweep.reason,
        "metric": metric,
        "mode": mode,
        "best": best.name if best is not None else None,
        "record": dict(record),
        "trials": [_trial_as_json(trial) for trial in watch.trials],
    }


def _trial_as_json(trial: Trial) -> dict[str, Any]:
    result = {key: value for key, value in trial.last_result.items() if key not in ("config", "trial_id")}
    return {
        "trial_id": trial.trial_id,
        "name": trial.name,
        "status": trial.status,
        "reason": trial.reason,
        "was_stopped_early": trial.was_stopped_early,
        "params": trial.evaluated_params,
        "config": trial.config,
        "iteration": trial.iteration,
        "starts": trial.starts,
        "seconds": trial.seconds,
        "metrics": result or None,
    }
