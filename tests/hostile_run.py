"""Strings and run directories that an enemy wrote, to be looked at by every reader."""

from __future__ import annotations

import dataclasses
import gzip
import json
import re
import time

import msgspec
from tests.diagnosis import synthetic
from tests.diagnosis.run_directory import record

from powertrain.checkpoint import manifest as mf
from powertrain.diagnosis.finding import Finding
from powertrain.diagnosis.summary import PhaseTime, RankTimes, Report, to_json
from powertrain.run import events as ev
from powertrain.run.metrics.points import PointRecord
from powertrain.run.metrics.store import MetricsStore
from powertrain.run.record import profiles
from powertrain.storage import Storage
from powertrain.wire.from_worker import Profiled

#: Clears the screen, sets the title, moves back, begins forged lines in every way there is, turns text around, and is
#: full of markup.
HOSTILE = (
    "evil\x1b[2J\x1b[1A\x1b]0;title\x07\x1b]8;;http://x\x1b\\\x1b[31m\x9b2J\x9d0;t\x9c\x08\x7f\x00"
    "\r\nFORGED\nFORGED\x0bFORGED\x0cFORGED\x1cFORGED\x85FORGED\u2028FORGED\u2029FORGED\rFORGED"
    "\u202e\u2066\u200f\ufeff[red]markup[/red][link=http://x]l[/link]:smile: end"
)
#: The same as a file's name: without NUL and "/", and with a byte that is no text.
HOSTILE_NAME = HOSTILE.replace("\0", "").replace("/", "").replace("\u2029FORGED", "") + "\udcff"

_UNSAFE = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)


def is_harmless(text: str) -> bool:
    """True when no terminal would act on any character of ``text`` but its line ends."""
    return _UNSAFE.search(text) is None


def write_hostile_run(place: Storage, *, ended: bool) -> None:
    """A run with :data:`HOSTILE` in every text that its files hold. Its metrics and steps are whole."""
    steps = synthetic.run(7, ranks=2, steps=60)
    record(place, dataclasses.replace(steps, hosts=tuple(HOSTILE for _ in steps.hosts)))
    _append(place, _facts(ended))
    store = MetricsStore(place, 1)
    points = {HOSTILE: 1.0, "nested": {HOSTILE: HOSTILE}}
    store.add([PointRecord(rank=0, attempt=0, row=1, at=time.time(), solo=False, metrics=points)])
    store.close()
    place.put("run.json", json.dumps({"name": HOSTILE, "run_config": {HOSTILE: HOSTILE}}).encode())
    place.put("logs/attempt-0/rank-0.log", HOSTILE.encode() + b"\n\x1b[32mgreen\x1b[0m\n")
    place.put("stacks/attempt-0-hang-1.txt", HOSTILE.encode() + b"\n")
    place.put("final_summary.json", to_json(_summary()))
    profiles.keep(place, 0, 0, Profiled(ask=0, steps=1, step_seconds=1.0, trace=_trace(), memory=b"x"))
    name = "checkpoint_000001"
    files = [mf.ManifestFile(name="model", size=1, xxh3="0", rank=0)]
    manifest = mf.Manifest(
        name=name, row=1, attempt=0, metrics={HOSTILE: HOSTILE}, world_size=1, lease=1, parent="", created=1.0,
        files=files, metadata={HOSTILE: HOSTILE}, link=1,
    )  # fmt: skip
    place.put(f"checkpoints/{name}/{mf.MANIFEST_NAME}", mf.encode(manifest))


def _trace() -> bytes:
    event = {"ph": "X", "tid": HOSTILE, "ts": 1.0, "dur": 2.0, "args": {"External id": 1}}
    events = [
        {**event, "cat": category, "name": HOSTILE}
        for category in ("cpu_op", "kernel", "cuda_runtime", HOSTILE)
    ]
    lines = {"lines": [HOSTILE], "operators": {"1": 0}}
    return gzip.compress(json.dumps({"powertrain": lines, "traceEvents": events}).encode())


def _append(place: Storage, facts: list[ev.Event]) -> None:
    lines = b"".join(msgspec.json.encode(fact) + b"\n" for fact in facts)
    place.put("journal/0002-000001.jsonl", lines)


def _facts(ended: bool) -> list[ev.Event]:
    at = time.time() - 100
    failure = ev.WorkerFailure(
        rank=1, kind="raised", summary=HOSTILE, error_type=HOSTILE, message=HOSTILE, traceback=HOSTILE, file=HOSTILE,
        line=1, function=HOSTILE, source=HOSTILE, host=HOSTILE, pid=1,
    )  # fmt: skip
    died = ev.WorkerFailure(rank=0, kind="hung", summary=HOSTILE, message=HOSTILE, traceback=HOSTILE)
    facts: list[ev.Event] = [
        ev.RunStarted(
            time=at, name=HOSTILE, lease=2, host=HOSTILE, pid=1, version=HOSTILE, engine=HOSTILE, checkpoint=HOSTILE
        ),
        ev.SlotsRequested(time=at, attempt=0, count=2),
        ev.SlotsWaited(time=at, attempt=0, granted=0, count=2, reason=HOSTILE),
        ev.AttemptStarted(
            time=at, attempt=0, world_size=2, first_row=1, checkpoint=HOSTILE, hosts=(HOSTILE, HOSTILE)
        ),
        ev.WorkerStarted(time=at, attempt=0, rank=0, pid=1, host=HOSTILE),
        ev.StartupMeasured(
            time=at, attempt=0, seconds=3.0, world_size=2, path={HOSTILE: 2.0}, ranks=(0,), phases={HOSTILE: (2.0,)},
            spread={HOSTILE: (1.0, 2.0, 3.0)}, waited_for=HOSTILE, loaded=HOSTILE, engine=HOSTILE, phase=HOSTILE,
        ),
        ev.TrainingStarted(time=at, attempt=0),
        ev.Committed(time=at, attempt=0, row=1, checkpoint=HOSTILE, bytes=1, files=1),
        ev.UploadLagged(time=at, attempt=0, row=1, seconds=1.0, waiting=1, bytes=1, reason=HOSTILE),
        ev.CheckpointFailed(time=at, attempt=0, row=1, checkpoint=HOSTILE, reason=HOSTILE),
        ev.ValidationEnded(
            time=at, checkpoint=HOSTILE, row=1, status=HOSTILE, metrics={HOSTILE: 1.0}, reason=HOSTILE
        ),
        ev.Notified(time=at, attempt=0, ranks=(0,), reason=HOSTILE),
        ev.HangNoticed(
            time=at, attempt=0, row=1, ranks=(0,), waiting=(1,), seconds=1.0, message=HOSTILE, file=HOSTILE,
            function=HOSTILE, source=HOSTILE, stacks=HOSTILE,
        ),
        ev.Warned(time=at, message=HOSTILE),
        ev.Failed(time=at, attempt=0, failures=(failure, died), decision=HOSTILE, reason=HOSTILE),
        ev.Resized(time=at, attempt=0, world_size=3, reason=HOSTILE),
    ]  # fmt: skip
    return [*facts, ev.Ended(time=at + 9, state="failed", reason=HOSTILE)] if ended else facts


def _summary() -> Report:
    finding = Finding(
        kind=HOSTILE, severity=HOSTILE, summary=HOSTILE, action=HOSTILE, phase=HOSTILE, hosts=(HOSTILE,),
        evidence={HOSTILE: HOSTILE},
    )  # fmt: skip
    phases = (PhaseTime(HOSTILE, 1.0, 1.0),)
    ranks = (RankTimes(rank=0, host=HOSTILE, step_seconds=1.0, phases=phases),)
    return Report(
        name=HOSTILE,
        findings=(finding,),
        steps=60,
        step_seconds=1.0,
        phases=phases,
        ranks=ranks,
        notes=(HOSTILE,),
    )
