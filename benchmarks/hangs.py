"""Twelve kinds of hang, each detected in time with the right rank and line; slow phases are not reported.

Every kind is a real run of two or three ranks of which one hangs (``tests/stories/drivers/hanging.py`` has them, which
can be run manually). The time from the last report of any rank to the notice in the run's journal is measured, on a
shared clock. The line that the notice names is compared with the line that hangs.

The limit is the claim itself: 5 s without a step, which cannot be detected earlier.

    python benchmarks/hangs.py [--quick] [--json FILE] [--check]
"""

from __future__ import annotations

import inspect
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from harness import Bound, Outcome, Row, conclude, parse_options

from powertrain import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
from powertrain.result.result import Result
from powertrain.run import events as ev
from powertrain.run.record import journal
from powertrain.storage import open_storage
from powertrain.torch import TorchTrainer

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "stories" / "drivers"))

import hanging

#: The claims of the issue: noticed within 5 s of the last step (steps here are far shorter than a second).
NOTICED_WITHIN = 5.0
KINDS = {
    "missed_all_reduce": 3, "extra_all_reduce": 3, "mismatched_reports": 2, "loader": 2, "collate_in_a_worker": 2,
    "lock": 2, "sleep": 2, "stopped": 2, "c_with_the_lock": 2, "c_without_the_lock": 2, "slow_read": 2,
    "endless_loop": 2,
}  # fmt: skip
QUICK_KINDS = ("missed_all_reduce", "collate_in_a_worker", "lock", "c_with_the_lock")
#: Slow phases, the rank that may be named (None: none), and their duration in seconds.
QUIET: dict[str, tuple[int | None, float]] = {
    "long_first_step": (None, 15.0),
    "long_first_step_of_one": (hanging.CULPRIT, 15.0),
    "evaluation_on_rank_0": (0, 15.0),
    "long_checkpoint": (0, 15.0),
    "paused_debugger": (None, 15.0),
    "steady": (None, 12.0),
}
STOPPED_SECONDS = 4.0


@dataclass(frozen=True)
class Seen:
    """The notices of a run for one kind of hang."""

    kind: str
    #: Seconds from the last report to the notice; infinite without one.
    seconds: float
    right_rank: bool
    right_line: bool
    acted: bool
    message: str


def run(kind: str, workers: int, storage: str, **options: Any) -> tuple[list[Any], bool]:
    """Return the facts of a run, and whether it failed."""
    config = options.pop("config", None)
    trainer = TorchTrainer(
        getattr(hanging, kind),
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(name=kind, storage_path=storage, verbose=0, **options),
    )
    failed = False
    try:
        trainer.fit()
    except TrainingFailedError:
        failed = True
    return list(journal.read(open_storage(Path(storage, kind)))), failed


def hang(kind: str, storage: str) -> Seen:
    """Make a run that hangs, is detected, and is ended a little later."""
    limits = FailureConfig(hang_timeout_s=NOTICED_WITHIN + 4.0, on_hang="fail")
    facts, acted = run(kind, KINDS[kind], storage, failure_config=limits)
    notice = next((fact for fact in facts if isinstance(fact, ev.HangNoticed)), None)
    if notice is None:
        return Seen(kind, float("inf"), False, False, acted, "nothing was said")
    last = float(Result.from_path(Path(storage, kind)).dataframe(ranks="all")["timestamp"].max())
    return Seen(
        kind,
        notice.time - last,
        notice.ranks == (hanging.CULPRIT,),
        (os.path.basename(notice.file), notice.line) == ("hanging.py", line_of(kind)),
        acted,
        notice.message,
    )


def line_of(kind: str) -> int:
    lines = inspect.getsource(hanging).splitlines()
    return 1 + next(number for number, line in enumerate(lines) if re.search(rf"hangs: {kind}\b", line))


def quiet(kind: str, storage: str) -> Seen:
    """Make a run with a slow phase, which ends by itself."""
    culprit, seconds = QUIET[kind]
    stopping = threading.Thread(target=stop_everything) if kind == "steady" else None
    if stopping is not None:
        stopping.start()
    facts, failed = run(kind, 2, storage, config={"seconds": seconds})
    if stopping is not None:
        stopping.join()
    notices = [fact for fact in facts if isinstance(fact, ev.HangNoticed)]
    allowed = {(culprit,)} if culprit is not None else set()
    wrong = [notice for notice in notices if notice.ranks not in allowed]
    withdrawn = sum(isinstance(fact, ev.HangOver) for fact in facts) == len(notices)
    return Seen(kind, 0.0, not wrong, withdrawn, failed, " / ".join(notice.message for notice in notices))


def stop_everything() -> None:
    """Suspend this process and all descendants for a while, as on a busy machine."""
    me = psutil.Process()
    while sum("rank" in child.name() for child in me.children(recursive=True)) < 2:
        time.sleep(0.05)
    time.sleep(3.0)
    helper = os.fork()
    if helper == 0:
        everyone = [me.pid, *(child.pid for child in psutil.Process(me.pid).children(recursive=True))]
        everyone = [pid for pid in everyone if pid != os.getpid()]
        for number, pause in ((signal.SIGSTOP, STOPPED_SECONDS), (signal.SIGCONT, 0.0)):
            for pid in everyone:
                os.kill(pid, number)
            time.sleep(pause)
        os._exit(0)
    os.waitpid(helper, 0)


def all_of(kinds: list[str], look: Callable[[str, str], Seen], storage: str) -> list[Seen]:
    found = []
    for kind in kinds:
        if sys.stderr.isatty():
            print(f"\r\033[K{kind}", end="", file=sys.stderr, flush=True)
        found.append(look(kind, storage))
    return found


def main() -> int:
    options = parse_options(__doc__ or "")
    os.environ.setdefault("STORY_DIRECTORY", tempfile.gettempdir())
    with tempfile.TemporaryDirectory() as storage:
        hangs = all_of(list(QUICK_KINDS if options.quick else KINDS), hang, storage)
        rests = all_of(list(QUIET), quiet, storage)
    return conclude(_outcome(hangs, rests), options)


def _outcome(hangs: list[Seen], rests: list[Seen]) -> Outcome:
    rows = [Row(f"{s.kind}: last step to notice", "Powertrain", "s", [s.seconds], limit="5 s") for s in hangs]
    right = sum(s.right_rank and s.right_line for s in hangs)
    quiet_ones = sum(s.right_rank and s.right_line and not s.acted for s in rests)
    rows += [
        Row(
            "hangs with the right rank and line",
            "Powertrain",
            f"of {len(hangs)}",
            [float(right)],
            limit="all",
        ),
        Row("long pauses left alone", "Powertrain", f"of {len(rests)}", [float(quiet_ones)], limit="all"),
    ]
    bounds = [
        Bound("right rank and line", float(right), at_least=float(len(hangs))),
        Bound("slowest notice, s", max(s.seconds for s in hangs), at_most=NOTICED_WITHIN),
        Bound("hangs ended by on_hang", float(sum(s.acted for s in hangs)), at_least=float(len(hangs))),
        Bound("no act, no wrong culprit, withdrawn", float(quiet_ones), at_least=float(len(rests))),
    ]
    notes = [f"{s.kind}: {s.message}" for s in (*hangs, *rests) if not (s.right_rank and s.right_line)]
    samples = {"hangs": [asdict(s) for s in hangs], "quiet": [asdict(s) for s in rests]}
    return Outcome(
        "Hangs: noticed in time, with the right rank and line", 1, rows, bounds, notes=notes, samples=samples
    )


if __name__ == "__main__":
    raise SystemExit(main())
