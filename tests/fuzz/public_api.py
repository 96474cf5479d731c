"""Call the whole public API of the loop and the driver with hostile values: no hang, no crash, no raw error.

    python -m tests.fuzz.public_api --seed 1 --budget 5000 [--place loop] [--only report]

Each case is made from the seed and its number alone, so one that fails can be made again (``--first N --budget 1``).
Cases run in child processes, the loop's in an inline run there. A child writes a line when a case begins and one when
it ends; one that writes nothing for :data:`CASE_TIMEOUT_S` hangs, one that ends by itself has crashed. Either is
counted, and a new child goes on with the next case.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

#: Seconds for one call. Calls that wait do so for a second at most.
CASE_TIMEOUT_S = 60.0
#: Seconds until a child has imported torch and opened its run.
START_TIMEOUT_S = 180.0
#: Cases of one child: its run's rows and checkpoints pile up.
CASES_PER_CHILD = 250
PLACES = ("driver", "loop", "ranks")


@dataclass(frozen=True)
class Finding:
    """A case that ended in neither a value nor a clear error."""

    number: int
    case: str
    what: str

    def __str__(self) -> str:
        return f"case {self.number}: {self.case}: {self.what}"


# --------------------------------------------------------------------------- in the child


def make_case(place: str, seed: int, number: int, only: str = "") -> tuple[str, Any, dict[str, Any]]:
    """The case's name, its target and its arguments."""
    from tests.fuzz import public_api_targets as targets
    from tests.fuzz import public_api_values as values

    source = random.Random(f"{place}/{seed}/{number}")
    chosen = targets.DRIVER if place == "driver" else targets.LOOP
    target = source.choice([t for t in chosen if only in t.name])
    arguments = dict(target.good())
    named = []
    changed = source.sample(target.parameters, min(len(target.parameters), source.choice((1, 1, 1, 2, 3))))
    for parameter in changed:
        name, value = values.pick(source)
        if name not in target.spared.get(parameter, ()):
            arguments[parameter] = value
            named.append(f"{parameter}=<{name}>")
    return f"{target.name}({', '.join(named)})", target, arguments


def run_cases(place: str, seed: int, numbers: range, only: str, tell: Any) -> None:
    """Run cases in this process; ``tell`` is called before and after each."""
    from tests.fuzz import public_api_values as values

    for number in numbers:
        case, target, arguments = make_case(place, seed, number, only)
        tell({"begins": number, "case": case})
        error = None
        try:
            target.call(**arguments)
        except BaseException as raised:
            error = raised
        tell({"ends": number, "what": values.verdict(error, target.allowed)})
        error = None


def child(place: str, seed: int, numbers: range, only: str) -> None:
    """Run cases where they belong: here, or in the function of a run."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the calls print is not for the parent
    if place == "driver":
        run_cases(place, seed, numbers, only, lambda line: print(json.dumps(line), file=out, flush=True))
    else:
        lines = os.path.join(os.getcwd(), "lines")
        os.mkfifo(lines)
        forwarding = threading.Thread(target=_forward, args=(lines, out))
        forwarding.start()
        _run_in_ranks(2 if place == "ranks" else 0, seed, numbers, only, lines)
        forwarding.join()
    print(json.dumps({"over": True}), file=out, flush=True)


def _forward(lines: str, out: Any) -> None:
    """Copy what rank 0 writes until it has ended."""
    with open(lines) as written:
        for line in written:
            print(line, end="", file=out, flush=True)


def _run_in_ranks(workers: int, seed: int, numbers: range, only: str, lines: str) -> None:
    from powertrain import RunConfig, ScalingConfig, get_context
    from powertrain.torch import TorchConfig, TorchTrainer

    def in_a_run() -> None:
        """Every rank makes the same calls; rank 0 tells of them."""
        if get_context().get_world_rank() != 0:
            run_cases("loop", seed, numbers, only, lambda _: None)
            return
        with open(lines, "w") as out:
            run_cases("loop", seed, numbers, only, lambda line: print(json.dumps(line), file=out, flush=True))

    TorchTrainer(
        in_a_run,
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(name="fuzz", storage_path=os.path.join(os.getcwd(), "runs")),
        torch_config=TorchConfig(backend="gloo"),
    ).fit()


# --------------------------------------------------------------------------- in the parent


class _Child:
    """A child process and the lines it has written."""

    def __init__(self, place: str, seed: int, numbers: range, only: str, scratch: str) -> None:
        command = [sys.executable, "-m", "tests.fuzz.public_api", "--child", place, "--seed", str(seed)]
        command += ["--first", str(numbers.start), "--budget", str(len(numbers)), "--only", only]
        root = os.getcwd()
        self._log = open(os.path.join(scratch, "output"), "w+b")  # noqa: SIM115 (closed by close)
        self.process = subprocess.Popen(
            command,
            cwd=scratch,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([root, *sys.path]),
                "HOME": scratch,
                "POWERTRAIN_STORAGE": scratch,
                "OMP_NUM_THREADS": "1",
            },
        )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def next_line(self, timeout: float) -> dict[str, Any] | None:
        """The next line; None when the process has ended. Raises ``queue.Empty`` after ``timeout`` seconds."""
        line = self._lines.get(timeout=timeout)
        return json.loads(line) if line is not None else None

    def tail(self) -> str:
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - 1500))
        return self._log.read().decode("utf-8", "replace")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._log.close()


def fuzz(place: str, seed: int, numbers: range, only: str = "") -> Iterator[Finding | str]:
    """Run the cases; gives "returned" or "refused" for each that ended well, else a finding."""
    at = numbers.start
    while at < numbers.stop:
        part = range(at, min(at + CASES_PER_CHILD, numbers.stop))
        with tempfile.TemporaryDirectory(prefix="pt-fuzz-", ignore_cleanup_errors=True) as scratch:
            runner = _Child(place, seed, part, only, scratch)
            try:
                at = yield from _follow(runner, part)
            finally:
                runner.close()


def _follow(runner: _Child, part: range) -> Generator[Finding | str, None, int]:
    """Read what a child writes to its end; returns the number of the next case."""
    at, case, timeout = part.start, "the start of the process", START_TIMEOUT_S
    while True:
        try:
            line = runner.next_line(timeout)
        except queue.Empty:
            yield Finding(at, case, f"hangs: no answer within {timeout:g} s\n{runner.tail()}")
            return at + 1
        if line is None:
            yield Finding(at, case, f"the process ended with {runner.process.wait()}\n{runner.tail()}")
            return at + 1
        if "over" in line:
            return part.stop
        if "begins" in line:
            at, case, timeout = line["begins"], line["case"], CASE_TIMEOUT_S
        elif line["what"] in ("returned", "refused"):
            yield line["what"]
            at, case = at + 1, "after the last case"
        else:
            yield Finding(at, case, line["what"])
            at, case = at + 1, "after the last case"


def main(arguments: list[str]) -> int:
    """The command line; returns how many findings there were, at most 100."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.public_api", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--budget", type=int, default=1000, help="cases in each place")
    parser.add_argument(
        "--place", choices=PLACES, help="the driver, an inline loop, or two ranks; default: all"
    )
    parser.add_argument("--only", default="", help="only callables whose name has this in it")
    parser.add_argument("--child", choices=PLACES, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    numbers = range(options.first, options.first + options.budget)
    if options.child:
        child(options.child, options.seed, numbers, options.only)
        return 0
    findings = 0
    for place in [options.place] if options.place else PLACES:
        counts: Counter[str] = Counter()
        for outcome in fuzz(place, options.seed, numbers, options.only):
            counts[outcome if isinstance(outcome, str) else "found"] += 1
            if isinstance(outcome, Finding):
                findings += 1
                print(f"{place}: {outcome}", flush=True)
        print(
            f"{place}: {sum(counts.values())} cases, "
            + ", ".join(f"{n} {w}" for w, n in sorted(counts.items()))
        )
    return min(findings, 100)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
