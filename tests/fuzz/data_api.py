"""Call the whole public API of ``powertrain.data`` with hostile values, in processes of its own.

``python -m tests.fuzz.data_api --seed 1 --budget 20000`` makes so many calls and prints how they ended. Allowed is that
a call works, raises a PowertrainError, or Python's own TypeError for arguments that the signature does not have. A raw
error from inside, a call that takes too long, and one that ends its process count as findings, and the exit code is 1.
``--only N`` repeats call N of a seed with its traceback.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import selectors
import signal
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Seconds for one call, on a machine that does other things too.
CALL_TIMEOUT_S = 30.0
#: Seconds for a process to import everything.
_START_TIMEOUT_S = 120.0
#: A process may have so much memory: what is asked for beyond it is an error there and not the machine's end.
_MEMORY_BYTES = 12 << 30
_ROOT = Path(__file__).parents[2]
#: Where all threads of a process were shortly before its call took too long.
_STACKS = "stacks.txt"


@dataclass
class Report:
    """How the calls of a session have ended."""

    outcomes: Counter[str] = field(default_factory=Counter)
    #: (number, what was called, what came of it)
    findings: list[tuple[int, str, str]] = field(default_factory=list)

    def note(self, number: int, done: str, outcome: str, finding: str = "") -> None:
        self.outcomes[outcome] += 1
        if finding:
            self.findings.append((number, done, finding))


# --------------------------------------------------------------------------- the process that calls


def work(seed: int, only: int | None) -> None:
    """Do the calls whose numbers come as lines, and answer each with one line of JSON."""
    import gc
    import resource
    import warnings

    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what calls print is no answer
    from tests.fuzz import data_api_cases as cases

    cases.files(os.getcwd())
    targets = cases.targets()
    if only is not None:
        os.dup2(2, 1)
        _one(seed, only, targets, show=True)
        return
    print(json.dumps({"targets": len(targets)}), file=answers, flush=True)
    stacks = open(_STACKS, "w")  # noqa: SIM115  (for as long as the process lives)
    for line in sys.stdin:
        number = int(line)
        stacks.seek(0)
        stacks.truncate()
        faulthandler.dump_traceback_later(CALL_TIMEOUT_S - 5, file=stacks)
        print(json.dumps(_one(seed, number, targets)), file=answers, flush=True)
        cases.DONE.clear()
        if number % 50 == 0:
            gc.collect()


def _one(seed: int, number: int, targets: list[Any], show: bool = False) -> dict[str, Any]:
    from tests.fuzz import data_api_cases as cases

    chance = random.Random(f"{seed}/{number}")
    target = targets[number % len(targets)] if number < len(targets) else chance.choice(targets)
    try:
        cases.call(target, chance)
        return {"done": cases.DONE[-1], "outcome": "works", "finding": ""}
    except BaseException as error:
        if show:
            print(cases.DONE)
            traceback.print_exc()
        finding = cases.verdict(error, target)
        kind = f"raises {type(error).__name__}"
        where = _innermost(error) if finding else ""
        return {
            "done": cases.DONE[-1] if cases.DONE else target.name,
            "outcome": kind,
            "finding": f"{finding}: {_text(error)[:200]} {where}" if finding else "",
        }


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:
        return "<cannot be shown>"


def _innermost(error: BaseException) -> str:
    ours = [
        f"{frame.f_code.co_filename.rpartition('powertrain/')[2]}:{line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if "powertrain/" in frame.f_code.co_filename
    ]
    return f"[{ours[-1]}]" if ours else ""


# --------------------------------------------------------------------------- the process that watches


class Worker:
    """A process that calls, and that is replaced when it hangs or dies."""

    def __init__(self, seed: int, directory: str) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(_ROOT), *sys.path]),
            "TMPDIR": directory,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.data_api", "--worker", "--seed", str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=directory,
            env=environment,
            text=True,
            start_new_session=True,
        )
        self._ready = selectors.DefaultSelector()
        assert self._process.stdout is not None
        self._ready.register(self._process.stdout, selectors.EVENT_READ)
        self.targets = int(self._answer(_START_TIMEOUT_S)["targets"])

    def do(self, number: int) -> dict[str, Any]:
        """The answer to one call; raises TimeoutError or EOFError."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{number}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise EOFError(self._how_it_ended()) from None
        return self._answer(CALL_TIMEOUT_S)

    def _answer(self, seconds: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not self._ready.select(seconds):
            raise TimeoutError
        line = self._process.stdout.readline()
        if not line:
            raise EOFError(self._how_it_ended())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _how_it_ended(self) -> str:
        code = self._process.wait()
        return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"

    def close(self) -> None:
        """End it and whatever it has started."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it was gone already
        self._process.wait()
        self._ready.close()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:
                    pass  # what was not sent yet is of no use any more


def run(seed: int, budget: int, first: int = 0) -> Report:
    """Make ``budget`` calls of this seed, and report."""
    report = Report()
    with tempfile.TemporaryDirectory(prefix="fuzz-data-") as directory:
        for number, answer in _answers(seed, range(first, first + budget), directory):
            report.note(number, answer["done"], answer["outcome"], answer["finding"])
    return report


def _answers(seed: int, numbers: range, directory: str) -> Iterator[tuple[int, dict[str, Any]]]:
    worker: Worker | None = None
    starts, place = 0, ""
    try:
        for number in numbers:
            if worker is None:
                starts += 1
                place = os.path.join(directory, str(starts))
                os.makedirs(place)
                worker = Worker(seed, place)
            try:
                yield number, worker.do(number)
            except (TimeoutError, EOFError) as fault:
                how = "hangs" if isinstance(fault, TimeoutError) else f"crashes: {fault}"
                stacks = Path(place, _STACKS).read_text()
                finding = {"done": f"call {number}", "outcome": how.partition(":")[0]}
                yield number, {**finding, "finding": f"{how}\n{stacks[-3000:]}"}
                worker.close()
                worker = None
    finally:
        if worker is not None:
            worker.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--budget", type=int, default=5000, help="how many calls")
    parser.add_argument("--first", type=int, default=0, help="number of the first call")
    parser.add_argument("--only", type=int, help="repeat this call, with its traceback")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.seed, None)
        return 0
    if options.only is not None:
        with tempfile.TemporaryDirectory(prefix="fuzz-data-") as directory:
            os.chdir(directory)
            work(options.seed, options.only)
        return 0
    report = run(options.seed, options.budget, options.first)
    for outcome, times in report.outcomes.most_common():
        print(f"{times:7}  {outcome}")
    for number, done, finding in report.findings:
        print(f"call {number}: {done}\n    {finding}")
    print(f"{sum(report.outcomes.values())} calls, {len(report.findings)} findings")
    return 1 if report.findings else 0


if __name__ == "__main__":
    sys.exit(main())
