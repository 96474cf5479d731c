"""The diagnosis of the steps so far, for the training loop: ``summary()`` and ``final_summary()``.

In a rank it covers the whole run, read from the run's directory; if that is not local, and in a plain script, only this
process.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from typing import Any

import msgspec
import numpy as np

from powertrain.diagnosis.card import render
from powertrain.diagnosis.final import is_telling
from powertrain.diagnosis.goodput import training_share
from powertrain.diagnosis.recorded import report_of
from powertrain.diagnosis.report import diagnose
from powertrain.diagnosis.summary import Report
from powertrain.diagnosis.tables.samples import SAMPLE, samples_of
from powertrain.diagnosis.tables.steps import RECORD, aligned
from powertrain.errors import OutsideWorkerError, StorageError
from powertrain.trace import store
from powertrain.trace.machine.devices import peak_flops
from powertrain.trace.recording import current, ring, standalone
from powertrain.trace.recording.phases import REPORT
from powertrain.trace.recording.recorder import Recorder
from powertrain.trace.recording.standalone import RecordedProcess
from powertrain.worker import session as worker_session
from powertrain.worker.session import Session

#: Seconds to wait for other ranks' steps once the own have arrived; ranks send theirs each second.
_OTHER_RANKS_TIMEOUT_S = 3.0
#: Steps that a rank may not have turned into records yet while it waits for this one.
_UNRECORDED_STEPS = 50
#: The prefix of the keys of :func:`summary`.
_PREFIX = "trace"


def final_summary(
    *,
    timeout_sec: float = 30.0,
    poll_interval_sec: float = 0.1,
    print_text: bool = False,
    rank0_only: bool = True,
) -> dict[str, Any] | None:
    """Return the content of ``final_summary.json`` for all steps so far.

    In a rank, recording continues, and the call waits until the records of the ranks are on disk. In a plain script,
    the call ends recording, and later calls return the same.

    Args:
        timeout_sec: Seconds to wait for the records of the ranks, at most.
        poll_interval_sec: Seconds between two checks.
        print_text: Print the card too.
        rank0_only: Return None on other ranks than the first.

    Returns:
        The summary as plain values; None on other ranks, and in a rank that is not traced.

    Raises:
        OutsideWorkerError: Nothing was ever recorded. It is a RuntimeError.

    Example::

        summary = powertrain.trace.final_summary(print_text=True)
    """
    report = _report(rank0_only, timeout_sec, poll_interval_sec, final=True)
    if report is not None and print_text:
        print(render(report))
    return None if report is None else msgspec.to_builtins(report)


def summary(
    *,
    timeout_sec: float = 30.0,
    poll_interval_sec: float = 0.1,
    print_text: bool = False,
    rank0_only: bool = True,
) -> dict[str, Any] | None:
    """Return a few plain values of :func:`final_summary` by name, for experiment trackers; recording continues.

    Args:
        timeout_sec: As for :func:`final_summary`, like the arguments below.
        poll_interval_sec: Likewise.
        print_text: Likewise.
        rank0_only: Likewise.

    Returns:
        The values by names such as "trace/step_ms"; None where :func:`final_summary` returns None.

    Raises:
        OutsideWorkerError: Nothing was ever recorded. It is a RuntimeError.

    Example::

        wandb.log(powertrain.trace.summary() or {})
    """
    report = _report(rank0_only, timeout_sec, poll_interval_sec, final=False)
    if report is not None and print_text:
        print(render(report))
    return None if report is None else flat(report)


def flat(report: Report) -> dict[str, Any]:
    """Return the first finding, times in milliseconds, and throughput, each under its own key."""
    values: dict[str, Any] = {"steps": report.steps, "step_ms": report.step_seconds * 1e3}
    if report.findings:
        first = report.findings[0]
        values |= {"kind": first.kind, "severity": first.severity, "phase": first.phase, "cost": first.cost}
        values |= {"summary": first.summary, "action": first.action}
    for time_of in report.phases:
        values[f"{time_of.phase}_ms"] = time_of.seconds * 1e3
        values[f"{time_of.phase}_share"] = time_of.share
    speeds = msgspec.structs.asdict(report.throughput)
    values |= {name: speed for name, speed in speeds.items() if speed}
    if report.time:
        values["goodput"] = training_share(report.time)
    return {f"{_PREFIX}/{name}": value for name, value in values.items()}


def say(kept: RecordedProcess) -> None:
    """Print the card of a plain script, if it has made enough steps for one."""
    report = _report_of(kept)
    if is_telling(report):
        print(render(report), file=sys.stderr)


# --------------------------------------------------------------------------- of a rank, of a script


def _report(rank0_only: bool, timeout: float, every: float, *, final: bool) -> Report | None:
    if worker_session.in_worker():
        session = worker_session.current("final_summary")
        recorder = current.recording()
        is_asked = session.place.rank == 0 or not rank0_only
        if recorder is None or session.service.tracing is None or not is_asked:
            return None
        if final:
            recorder.flush()
        else:
            recorder.process_marks()
        with recorder.phase(REPORT):
            return _of_run(session, recorder, time.monotonic() + timeout, every)
    if rank0_only and standalone.own_rank() != 0:
        return None
    return _of_script(final)


def _of_script(final: bool) -> Report:
    own, recorder = standalone.newest(), current.recording()
    if own is not None:
        if final:
            standalone.end()
        return _report_of(own.kept())
    if recorder is None:
        raise OutsideWorkerError(
            "Nothing is recorded in this process, so there is nothing to summarize. Call powertrain.trace.init() "
            "before the training loop, or give the loop to a trainer."
        )
    recorder.flush()
    return _report_of(_in_ring(recorder, standalone.own_rank()))


def _in_ring(recorder: Recorder, rank: int) -> RecordedProcess:
    """Return the newest steps, without draining the ring."""
    _, steps = ring.read_ring(recorder._ring.buffer)
    return RecordedProcess(rank, socket.gethostname(), steps, b"", {})


def _report_of(kept: RecordedProcess, *notes: str) -> Report:
    hosts = {kept.rank: kept.host}
    return diagnose(
        aligned({kept.rank: np.frombuffer(kept.steps, RECORD)}, hosts),
        samples_of({kept.rank: np.frombuffer(kept.samples, SAMPLE)}, hosts),
        seen=kept.seen,
        step_flops={kept.rank: float(kept.facts.get("step_flops") or 0)},
        peak_flops=peak_flops(str(kept.facts.get("device") or "")),
        devices={kept.rank: kept.facts},
        notes=notes,
    )


# --------------------------------------------------------------------------- of a whole run


def _of_run(session: Session, recorder: Recorder, until: float, every: float) -> Report:
    place = session.place
    if session.storage.local_path("telemetry") is not None and not place.run.filesystem:
        tracing = session.service.tracing
        if recorder.steps and tracing is not None and not tracing.is_over:
            _wait(session, recorder.steps, until, every)
        with contextlib.suppress(StorageError):  # no records yet
            return report_of(session.storage, place.run.name, place.attempt)
    note = f"Only rank {place.rank} is covered: the records of the other ranks are not accessible here."
    return _report_of(_in_ring(recorder, place.rank), note)


def _wait(session: Session, steps: int, until: float, every: float) -> None:
    """Wait until this rank's first ``steps`` steps and about as many of the others' are on disk; or for the timeout."""
    place, size = session.place, -1
    while time.monotonic() < until:
        there = sum(entry.size for entry in session.storage.list("telemetry"))
        if there != size:
            size = there
            reached = _reached(store.read(session.storage).steps.get(place.attempt, {}))
            if reached.get(place.rank, -1) >= steps:
                if (
                    sum(number >= steps - _UNRECORDED_STEPS for number in reached.values())
                    >= place.world_size
                ):
                    return
                until = min(until, time.monotonic() + _OTHER_RANKS_TIMEOUT_S)
        time.sleep(every)


def _reached(records: dict[int, Any]) -> dict[int, int]:
    """Return the known number of steps by rank."""
    return {rank: int(table["step"][-1]) + 1 for rank, table in records.items() if len(table)}
