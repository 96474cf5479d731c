"""``powertrain show``: one run, with its attempts, checkpoints, last metrics and failures."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import typer

from powertrain.checkpoint.commit import committed
from powertrain.checkpoint.manifest import Manifest
from powertrain.cli import arguments
from powertrain.cli.ls import RunSummary, ago, default_storage, run_names, summarize
from powertrain.errors import StorageError
from powertrain.run import events as ev
from powertrain.run import journal, metrics
from powertrain.storage import Storage, open_storage
from powertrain.terminal import counted, data_size, duration, failure_report, metric_pairs
from powertrain.worker.shards import in_words, positions_in


def show(
    run: arguments.Run,
    storage: arguments.Storage = "",
) -> None:
    """Show one run: state, attempts, checkpoints, last metrics, what was found, failures."""
    name, place = find_run(run, storage)
    events = journal.read(place)
    if not events:
        raise StorageError(_not_a_run(run, storage))
    last = metrics.last_of_rank(place, journal.replay(events), 0)
    summary, found = summarize(name, events), _findings(place, name)
    for line in describe(summary, place.uri, events, committed(place), last, time.time(), found):
        typer.echo(line)


def find_run(run: str, storage: str) -> tuple[str, Storage]:
    """The name and the storage of ``run``: below the storage path, or itself a path when it has a slash."""
    if storage or "/" not in run:
        return run, open_storage(storage or default_storage()).child(run)
    path = run.rstrip("/")
    return os.path.basename(path), open_storage(path)


def _not_a_run(run: str, storage: str) -> str:
    if not storage and "/" in run:
        return f"There is no run at {run!r}: it has no journal. Give the directory that holds journal/."
    place = open_storage(storage or default_storage())
    names = run_names(place)
    there = f"It has {', '.join(map(repr, names[:10]))}" if names else "It has no run at all"
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return (
        f"There is no run {run!r} in {place.uri}. {there}{more}. "
        "Name one of its runs, or another place with --storage."
    )


def describe(
    summary: RunSummary,
    uri: str,
    events: Sequence[ev.Event],
    manifests: Sequence[Manifest],
    last: Mapping[str, Any],
    now: float,
    findings: Sequence[str] = (),
) -> list[str]:
    """The run in lines of text."""
    reason = journal.replay(events).reason
    lines = [
        f"run       {summary.name}",
        f"path      {uri}",
        f"state     {summary.state}" + (f": {reason}" if reason else ""),
        f"started   {ago(summary.started, now)}, went on for {duration(summary.seconds)}",
        f"workers   {summary.world_size}",
        f"rows      {summary.rows}",
    ]
    if manifests and (data := in_words(positions_in(manifests[-1].extras))):
        lines.append(f"data      {data}")
    lines += _section("attempts", _attempts(events))
    lines += _section("checkpoints", [_checkpoint(manifest) for manifest in manifests])
    values = [f"{key} = {value}" for key, value in metric_pairs(last, limit=100)]
    lines += _section("last metrics of rank 0", values)
    lines += _section("diagnosis", findings)
    lines += _section("notices", _notices(events))
    return lines + _section("failures", _failures(events))


def _findings(place: Storage, name: str) -> list[str]:
    """What is wrong with how the run spends its time, a line each; ``powertrain diagnose`` says all of it.

    Never raises: the rest of what is known of a run does not depend on it.
    """
    from powertrain.diagnosis import final

    try:
        report = final.report_of(place, name)
        if report is not None:
            return [f"{found.kind}: {found.summary}" for found in report.findings]
        place.modified(final.SUMMARY)
        return [f"{final.SUMMARY} cannot be read, and nothing else was recorded of the run's steps"]
    except FileNotFoundError:  # neither is there
        return []
    except Exception as error:
        reason = " ".join(str(error).split())
        return [f"what was recorded of the run's steps cannot be read: {type(error).__name__}: {reason}"]


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return ["", title, *(f"  {line}" for line in lines)] if lines else []


def _attempts(events: Sequence[ev.Event]) -> list[str]:
    """One line for each attempt: its size, where it began, how it ended."""
    lines: dict[int, str] = {}
    current = -1
    for event in events:
        if isinstance(event, ev.AttemptStarted):
            current = event.attempt
            workers = counted(event.world_size, "worker")
            source = f" after {event.checkpoint}" if event.checkpoint else ""
            lines[current] = f"{current}: {workers}, from row {event.first_row}{source}"
        elif isinstance(event, (ev.Failed, ev.Lost)) and event.attempt in lines:
            word = "failed" if isinstance(event, ev.Failed) else "lost its slots"
            lines[event.attempt] += f"; {word}, then {event.decision.replace('_', ' ')}: {event.reason}"
        elif isinstance(event, ev.Resized) and event.attempt in lines:
            lines[event.attempt] += f"; then {counted(event.world_size, 'worker')}: {event.reason}"
        elif isinstance(event, ev.Ended) and current in lines:
            lines[current] += f"; {event.state} after {duration(event.seconds)}"
    return list(lines.values())


def _checkpoint(manifest: Manifest) -> str:
    files = counted(len(manifest.files), "file")
    return f"{manifest.name}: row {manifest.row}, {files}, {data_size(manifest.bytes)}"


def _notices(events: Sequence[ev.Event]) -> list[str]:
    """What loomed: ends that were announced, and hangs, with what became of them."""
    lines: list[str] = []
    for event in events:
        if isinstance(event, ev.Notified):
            lines.append(f"attempt {event.attempt}: {event.reason}")
        elif isinstance(event, ev.HangNoticed):
            first, *rest = event.message.splitlines()
            lines += [f"attempt {event.attempt}: {first}", *(f"  {line.strip()}" for line in rest)]
            lines.append(f"  all stacks: {event.stacks}")
        elif isinstance(event, ev.HangOver):
            lines.append(f"  it moved again after {duration(event.seconds)}")
    return lines


def _failures(events: Sequence[ev.Event]) -> list[str]:
    """Each attempt that ended badly, told as at the time."""
    lines = []
    for event in events:
        if isinstance(event, ev.Failed):
            first, *rest = failure_report(event.failures).splitlines()
            lines += [f"attempt {event.attempt}: {first}", *(f"  {line}" for line in rest)]
    return lines
