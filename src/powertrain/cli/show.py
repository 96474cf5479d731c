"""``powertrain show``: one run, with its attempts, checkpoints, last metrics and failures; or one sweep."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from powertrain.checkpoint.committed import committed
from powertrain.checkpoint.manifest import Manifest
from powertrain.cli.common import arguments
from powertrain.cli.common.output import print_json, print_lines
from powertrain.errors import StorageError
from powertrain.lookup.asking import how_it_stands
from powertrain.lookup.finding import find_run_or_sweep
from powertrain.lookup.summaries import RunSummary, ago, summarize
from powertrain.lookup.watching import RunWatch
from powertrain.run import events as ev
from powertrain.run import lifecycle
from powertrain.run.checkpoints.unsaved import UnsavedCheckpoint
from powertrain.run.metrics import reading
from powertrain.run.record import journal
from powertrain.run.remote import protocol
from powertrain.run.startup import report as startup_report
from powertrain.storage import Storage
from powertrain.storage.addresses import without_secrets
from powertrain.terminal.failures import failure_report
from powertrain.terminal.text import counted, data_size, duration, metric_pairs, rank_list
from powertrain.worker.data.shards import in_words, positions_in

if TYPE_CHECKING:
    from powertrain.diagnosis.finding import Finding
    from powertrain.diagnosis.summary import Report


def show(
    run: arguments.Run,
    storage: arguments.Storage = "",
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Show one run: state, progress, attempts, checkpoints, last metrics, diagnosis, failures.

    Of a sweep: its search space, its trials, and the best of them.
    """
    found = find_run_or_sweep(run, storage)
    if found.is_sweep:
        from powertrain.cli.common.sweeps import show_sweep

        show_sweep(found, as_json=json)
        return
    name, place, uri = found.name, found.place, without_secrets(found.place.uri)
    events = RunWatch(found).look()
    if not events:
        raise StorageError(f"The run at {uri} cannot be shown: it has no journal.")
    last = reading.last_of_rank(place, journal.replay(events), 0) or {}
    stands = how_it_stands(found.live) if found.live is not None else None
    report, trouble = _diagnosis(place, name)
    findings = [trouble] if trouble else [f"{one.kind}: {one.summary}" for one in _findings(report)]
    summary = summarize(name, events, stands.row if stands is not None else 0)
    if json:
        print_json(as_json(summary, uri, events, committed(place), last, findings, stands, report))
        return
    print_lines(describe(summary, uri, events, committed(place), last, time.time(), findings, stands, report))


def describe(
    summary: RunSummary,
    uri: str,
    events: Sequence[ev.Event],
    manifests: Sequence[Manifest],
    last: Mapping[str, Any],
    now: float,
    findings: Sequence[str] = (),
    stands: protocol.Description | None = None,
    report: Report | None = None,
) -> list[str]:
    """Return the run as lines of text; ``stands`` is the status of a live run on this machine."""
    reason = journal.replay(events).reason
    lines = [
        f"run       {summary.name}",
        f"path      {uri}",
        f"state     {summary.state}" + (f": {reason}" if reason else ""),
        f"started   {ago(summary.started, now)}, ran for {duration(summary.seconds)}",
        f"workers   {summary.world_size}",
        f"rows      {summary.rows}",
    ]
    lines += _queue(events) if summary.state == lifecycle.WAITING else []
    lines += _now(stands) if stands is not None else []
    lines += _efficiency(report) if report is not None else []
    if manifests and (data := in_words(positions_in(manifests[-1].extras))):
        lines.append(f"data      {data}")
    lines += _section("attempts", _attempts(events))
    lines += _section("start-up", startup_report.section(_starts(events)))
    lines += _section("checkpoints", [_checkpoint(manifest) for manifest in manifests])
    lines += _section(
        "checkpoints that were not saved", [_unsaved(one) for one in journal.replay(events).unsaved]
    )
    values = [f"{key} = {value}" for key, value in metric_pairs(last, limit=100)]
    lines += _section("last metrics of rank 0", values)
    lines += _section("diagnosis", findings)
    lines += _section("notices", _notices(events))
    return lines + _section("failures", _failures(events))


def _queue(events: Sequence[ev.Event]) -> list[str]:
    """Return the resources that a queued run waits for."""
    kinds = (ev.SlotsWaited, ev.SlotsRequested, ev.AttemptStarted, ev.Ended)
    newest = next((event for event in reversed(events) if isinstance(event, kinds)), None)
    return [f"queue     {newest.reason}"] if isinstance(newest, ev.SlotsWaited) else []


def _now(stands: protocol.Description) -> list[str]:
    """Return the current activity of a live run."""
    row = f"row {stands.row}, {duration(stands.row_age)} ago" if stands.row_age >= 0 else "no row yet"
    lines = [f"now       {row}"]
    if stands.awaited:
        lines.append(f"waiting   for {rank_list(stands.awaited)} at row {stands.row + 1}")
    if stands.uploads:
        waiting = f"{counted(stands.uploads, 'checkpoint')} ({data_size(stands.upload_bytes)})"
        lines.append(f"uploads   {waiting} uploading for {duration(stands.upload_age)}")
    if stands.debugged:
        lines.append(f"debugger  attached to {rank_list(stands.debugged)}")
    return lines


def as_json(
    summary: RunSummary,
    uri: str,
    events: Sequence[ev.Event],
    manifests: Sequence[Manifest],
    last: Mapping[str, Any],
    findings: Sequence[str] = (),
    stands: protocol.Description | None = None,
    report: Report | None = None,
) -> dict[str, Any]:
    """Return the content of :func:`describe` for JSON."""
    state = journal.replay(events)
    return {
        **asdict(summary),
        "path": uri,
        "reason": state.reason,
        "now": stands,
        "attempts": [event for event in events if isinstance(event, ev.AttemptStarted)],
        "startup": _starts(events),
        "checkpoints": [
            {"name": m.name, "row": m.row, "files": len(m.files), "bytes": m.bytes, "metrics": m.metrics}
            for m in manifests
        ],
        "unsaved_checkpoints": [asdict(one) for one in state.unsaved],
        "metrics": dict(last),
        "diagnosis": list(findings),
        "throughput": report.throughput if report is not None else None,
        "time": report.time if report is not None else [],
        "failures": [event for event in events if isinstance(event, (ev.Failed, ev.Lost))],
    }


def _diagnosis(place: Storage, name: str) -> tuple[Report | None, str]:
    """Return the diagnosis, of which ``powertrain diagnose`` prints all; or None and the reason, "" for no telemetry.

    Never raises: the other sections do not depend on it.
    """
    from powertrain.diagnosis import final

    try:
        report = final.report_of(place, name)
        if report is not None:
            return report, ""
        place.modified(final.SUMMARY)
        return None, f"{final.SUMMARY} cannot be read, and the run has no other record of its steps"
    except FileNotFoundError:  # neither exists
        return None, ""
    except Exception as error:
        reason = " ".join(str(error).split())
        return None, f"the record of the run's steps cannot be read: {type(error).__name__}: {reason}"


def _findings(report: Report | None) -> Sequence[Finding]:
    return report.findings if report is not None else ()


def _efficiency(report: Report) -> list[str]:
    """Return the speed of the run, and how much of its time it trained."""
    from powertrain.diagnosis.card import speed_line, time_line

    named = {"speed": speed_line(report), "goodput": time_line(report)}
    return [f"{name:<10}{line}" for name, line in named.items() if line]


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return ["", title, *(f"  {line}" for line in lines)] if lines else []


def _starts(events: Sequence[ev.Event]) -> list[ev.StartupMeasured]:
    """Return the start-up times of each attempt; old journals have them only in part."""
    return [
        event
        for event in events
        if isinstance(event, ev.StartupMeasured) and startup_report.has_phases(event)
    ]


def _attempts(events: Sequence[ev.Event]) -> list[str]:
    """Return one line for each attempt: its size, first row and end."""
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


def _unsaved(lost: UnsavedCheckpoint) -> str:
    place = f" (place: {lost.place})" if lost.place and lost.place not in lost.reason else ""
    return f"{lost.name or 'no name'}: row {lost.row}, {lost.reason}{place}"


def _notices(events: Sequence[ev.Event]) -> list[str]:
    """Return preemption notices and hangs, with their outcome."""
    lines: list[str] = []
    for event in events:
        if isinstance(event, ev.Notified):
            lines.append(f"attempt {event.attempt}: {event.reason}")
        elif isinstance(event, ev.HangNoticed):
            first, *rest = event.message.splitlines() or [""]
            lines += [f"attempt {event.attempt}: {first}", *(f"  {line.strip()}" for line in rest)]
            lines.append(f"  all stacks: {event.stacks}")
        elif isinstance(event, ev.HangOver):
            lines.append(f"  progress resumed after {duration(event.seconds)}")
    return lines


def _failures(events: Sequence[ev.Event]) -> list[str]:
    """Return the failure report of each failed attempt."""
    lines = []
    for event in events:
        if isinstance(event, ev.Failed):
            first, *rest = failure_report(event.failures).splitlines()
            lines += [f"attempt {event.attempt}: {first}", *(f"  {line}" for line in rest)]
    return lines
