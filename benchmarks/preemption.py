"""A SIGTERM at any moment, to any rank, costs no step: the run saves at its next boundary and ends.

Runs of two or three workers train in short steps with a real all-reduce, alternating between registered state,
``should_checkpoint()`` and ``get_preemption_info()``. At a random time after the first boundary a random rank gets
SIGTERM. The runs that ended as preempted with a committed checkpoint are counted, and the steps of any rank beyond it,
which would be repeated. Other runs get the signal before the first boundary, in the setup or the first step, and must
end cleanly and soon. A run that does not end within its grace period has deadlocked.

The limit of each figure is all runs: the outcome does not depend on chance.

    python benchmarks/preemption.py [--quick] [--json FILE] [--check]
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness import Bound, Outcome, Row, conclude, parse_options

from powertrain import (
    Checkpoint,
    FailureConfig,
    PreemptedError,
    RunConfig,
    ScalingConfig,
)
from powertrain.run import events as ev
from powertrain.run.record import journal
from powertrain.storage import open_storage
from powertrain.torch import TorchTrainer

#: The claims of the issue.
MOMENTS, QUICK_MOMENTS = 100, 10
REDONE_AT_MOST = 1
#: Times before the first boundary.
EARLY, QUICK_EARLY = 30, 4
#: A run that has not ended by then has deadlocked: the grace is 30 s.
DEADLOCKED_AFTER = 60.0
IDIOMS = ("registered", "should_checkpoint", "get_preemption_info")
STEP_SECONDS = 0.01


@dataclass(frozen=True)
class Ended:
    """The end of one run."""

    idiom: str
    workers: int
    rank: int
    #: Seconds from the first boundary (or, before it, from the first process) to the signal, and from it to the end.
    moment: float
    seconds: float
    preempted: bool
    committed_row: int
    steps_made: int
    failures: int

    @property
    def redone(self) -> int:
        return self.steps_made - self.committed_row


def loop(config: dict[str, Any]) -> None:
    """Training function: step until a stop request."""
    import torch
    import torch.distributed as dist

    import powertrain

    rank = powertrain.get_context().get_world_rank()
    board = Path(config["board"])
    (board / f"pid-{rank}").write_text(str(os.getpid()))
    time.sleep(config["set_up"])
    state = {"step": 0}
    if config["idiom"] == "registered":
        powertrain.register_state(state=state)
    with open(board / f"steps-{rank}", "wb", buffering=0) as steps:
        while True:
            dist.all_reduce(torch.ones(8))
            time.sleep(STEP_SECONDS)
            state["step"] += 1
            os.pwrite(steps.fileno(), state["step"].to_bytes(8, "little"), 0)
            asked = {
                "registered": lambda: False,
                "should_checkpoint": powertrain.should_checkpoint,
                "get_preemption_info": lambda: powertrain.get_preemption_info() is not None,
            }[config["idiom"]]()
            if not asked:
                powertrain.report({"step": state["step"]})
                continue
            with powertrain.checkpoint_dir() as directory:
                Path(directory, f"step-{rank}").write_text(str(state["step"]))
                powertrain.report({"step": state["step"]}, checkpoint=Checkpoint.from_directory(directory))


def measure(number: int, chance: random.Random, workspace: Path, *, early: bool) -> Ended:
    """Make one run with a stop request at one time."""
    idiom, workers = IDIOMS[number % len(IDIOMS)], chance.choice((2, 3))
    rank, moment = chance.randrange(workers), chance.uniform(0.0, 0.15 if early else 0.4)
    name = f"{'early' if early else 'run'}-{number}"
    board = workspace / f"board-{name}"
    board.mkdir()
    trainer = TorchTrainer(
        loop,
        train_loop_config={"board": str(board), "idiom": idiom, "set_up": 0.2 if early else 0.0},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            name=name, storage_path=str(workspace), verbose=0, failure_config=FailureConfig(max_failures=0)
        ),
    )
    asked: list[float] = []
    asking = threading.Thread(target=_ask, args=(board, workers, rank, moment, early, asked))
    asking.start()
    try:
        trainer.fit()
        preempted = False
    except PreemptedError:
        preempted = True
    ended = time.monotonic()
    asking.join()
    facts = list(journal.read(open_storage(workspace / name)))
    return Ended(
        idiom=idiom,
        workers=workers,
        rank=rank,
        moment=moment,
        seconds=ended - asked[0] if asked else float("inf"),
        preempted=preempted and facts[-1].state == "preempted",
        committed_row=max((fact.row for fact in facts if isinstance(fact, ev.Committed)), default=0),
        steps_made=max(_steps(board, each) for each in range(workers)),
        failures=sum(isinstance(fact, ev.Failed) for fact in facts),
    )


def _ask(board: Path, workers: int, rank: int, moment: float, early: bool, asked: list[float]) -> None:
    """Send the signal at its time: after every process has started, or after the slowest rank's first boundary."""
    deadline = time.monotonic() + DEADLOCKED_AFTER
    while time.monotonic() < deadline:
        up = all((board / f"pid-{each}").exists() for each in range(workers))
        if up and (early or min(_steps(board, each) for each in range(workers)) > 1):
            break
        time.sleep(0.001)
    time.sleep(moment)
    asked.append(time.monotonic())
    os.kill(int((board / f"pid-{rank}").read_text()), signal.SIGTERM)


def _steps(board: Path, rank: int) -> int:
    try:
        return int.from_bytes((board / f"steps-{rank}").read_bytes()[:8], "little")
    except FileNotFoundError:
        return 0


def main() -> int:
    options = parse_options(__doc__ or "")
    chance = random.Random(20_261_115)
    late: list[Ended] = []
    early: list[Ended] = []
    with tempfile.TemporaryDirectory() as directory:
        for number in range(QUICK_MOMENTS if options.quick else MOMENTS):
            late.append(measure(number, chance, Path(directory), early=False))
            _progress(number, late[-1])
        for number in range(QUICK_EARLY if options.quick else EARLY):
            early.append(measure(number, chance, Path(directory), early=True))
            _progress(number, early[-1])
    return conclude(_outcome(late, early), options)


def _progress(number: int, ended: Ended) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{number + 1}: {ended}", end="", file=sys.stderr, flush=True)


def _outcome(late: list[Ended], early: list[Ended]) -> Outcome:
    whole = [e for e in late if e.preempted and e.committed_row > 0]
    clean = [e for e in early if e.preempted and not e.failures]
    stuck = sum(e.seconds > DEADLOCKED_AFTER for e in (*late, *early))
    rows = [
        Row("preempted with a commit", "Powertrain", f"of {len(late)}", [float(len(whole))], limit="all"),
        Row("steps redone", "Powertrain", "steps", [float(e.redone) for e in late], limit="0"),
        Row("signal to the end of fit()", "Powertrain", "s", [e.seconds for e in late], limit="one step"),
        Row(
            "ended cleanly before any boundary",
            "Powertrain",
            f"of {len(early)}",
            [float(len(clean))],
            limit="all",
        ),
        Row("signal to the end before any boundary", "Powertrain", "s", [e.seconds for e in early]),
    ]
    bounds = [
        Bound("runs with a committed checkpoint", float(len(whole)), at_least=float(len(late))),
        Bound("steps redone, worst run", float(max(e.redone for e in late)), at_most=float(REDONE_AT_MOST)),
        Bound("clean ends before the first boundary", float(len(clean)), at_least=float(len(early))),
        Bound("deadlocks", float(stuck), at_most=0.0),
    ]
    samples = {"after": [asdict(e) for e in late], "before": [asdict(e) for e in early]}
    title = "SIGTERM at a random moment to a random rank"
    return Outcome(title, len(late), rows, bounds, samples=samples)


if __name__ == "__main__":
    raise SystemExit(main())
