"""``python -m tests [what pytest takes]``: all tests, in two processes side by side, to the last, even where one ends
the process that it runs in or keeps it for ever.

Most tests wait for other processes. So those that need Ray run beside all others; each line says which it is of.

Tests of the Ray engine connect to Ray from the process of the tests. Ray's core ends such a process without a word
(``_Exit(1)``) when one of its own checks fails, and what waits in it cannot be interrupted by pytest's timeout; both
were seen once in some hundred runs, and the results of four thousand tests would be lost with it. So the rest is run by
a new process, beginning with the test that was under way. It is told loudly, and a test that does so again has failed.

Tests with real processes on a machine that does other things too may fail for that alone. A few that failed are run
once more, when nothing else runs; which they were is told at the end. More than a few have failed at once.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.progress import ONLY, SHARE, SHARES, VARIABLE, Progress

#: pytest's words for "some tests have failed" and "no tests were left to run".
_FAILED, _NOTHING_LEFT = 1, 5
#: How many tests that failed are run once more.
_FEW = 8
#: Seconds for which nothing may happen; pytest's own timeout for a test comes long before.
_PATIENCE = float(os.environ.get("POWERTRAIN_TESTS_PATIENCE", "300"))


@dataclass(frozen=True)
class Outcome:
    """``code`` is pytest's, of a run in which some tests have ``failed``, and which came to its end or not."""

    code: int
    failed: frozenset[str] = frozenset()
    is_complete: bool = False


def main(arguments: list[str]) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # pytest hears it too, and says what there is to say
    with tempfile.TemporaryDirectory(prefix="tests-") as directory:
        return run_all(arguments, Path(directory))


def run_all(arguments: list[str], directory: Path) -> int:
    """The exit code: 0 where every test has passed, if need be when it was run once more."""
    first = merged(_side_by_side(arguments, directory))
    if first.code != _FAILED or not first.is_complete or not 0 < len(first.failed) <= _FEW:
        return first.code
    names = "\n".join(sorted(first.failed))
    _shout(f"These have failed, and are run once more by themselves:\n{names}")
    (directory / "only").write_text(names)
    second = _Session(arguments, directory / "second", variables={ONLY: str(directory / "only")}).run()
    if second.code == 0 and second.is_complete:
        _shout(f"These have failed, and passed when they were run once more:\n{names}")
    return second.code or (0 if second.is_complete else _FAILED)


def merged(outcomes: Sequence[Outcome]) -> Outcome:
    """Of shares of one run: one without a test is none, unless all are."""
    codes = [outcome.code for outcome in outcomes]
    bad = [code for code in codes if code not in (0, _NOTHING_LEFT)]
    failed = frozenset().union(*(outcome.failed for outcome in outcomes))
    return Outcome(max(bad, default=min(codes)), failed, all(outcome.is_complete for outcome in outcomes))


def _side_by_side(arguments: list[str], directory: Path) -> list[Outcome]:
    sessions = [_Session(arguments, directory / share, {SHARE: share}, f"{share}: ") for share in SHARES]
    with ThreadPoolExecutor(len(sessions)) as pool:
        return list(pool.map(_Session.run, sessions))


@dataclass
class _Session:
    """Some tests, in one process after the other until all were run."""

    arguments: list[str]
    #: Where it is written down how far they have come.
    file: Path
    variables: dict[str, str] = field(default_factory=dict)
    #: Before each line that is printed.
    prefix: str = ""

    def run(self) -> Outcome:
        victims: set[str] = set()
        self.file.touch()
        while True:
            code = self._process()
            progress = Progress(self.file.read_text())
            if progress.is_over:
                code = 0 if code == _NOTHING_LEFT and progress.passed | progress.failed else code
                code = code or (_FAILED if progress.failed else 0)
                return Outcome(code, frozenset(progress.failed), progress.is_complete)
            _shout(_about(code, progress.running))
            if not progress.running or progress.running in victims:
                return Outcome(code or _FAILED, frozenset(progress.failed))
            victims.add(progress.running)

    def _process(self) -> int:
        colors = ["--color=yes"] if sys.stdout.isatty() else []
        with subprocess.Popen(
            [sys.executable, "-m", "pytest", "-p", "tests.progress", *colors, *self.arguments],
            env={**_own_environment(), **self.variables, VARIABLE: str(self.file)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
        ) as process:
            relay = threading.Thread(target=self._relay, args=(process,), daemon=True)
            relay.start()
            code = self._wait(process)
            # What a killed process leaves running may hold the pipe open: it is not waited for.
            relay.join(5.0)
            return code

    def _wait(self, process: subprocess.Popen[bytes]) -> int:
        began = time.time()
        while True:
            try:
                return process.wait(timeout=min(5.0, _PATIENCE))
            except subprocess.TimeoutExpired:
                written = self.file.stat()
                # Before the first test everything is imported, and all tests are collected.
                patience = _PATIENCE if written.st_size else 10 * _PATIENCE
                if time.time() - max(began, written.st_mtime) > patience:
                    process.send_signal(signal.SIGABRT)  # pytest then shows what each thread is in

    def _relay(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            sys.stdout.buffer.write(self.prefix.encode() + line)
            sys.stdout.buffer.flush()


def _own_environment() -> dict[str, str]:
    """Without what is said to the tests around these, where this is called by one of them."""
    return {name: value for name, value in os.environ.items() if name not in (ONLY, SHARE)}


def _about(code: int, running: str) -> str:
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    where = f"in {running}" if running else "outside of any test"
    return f"The process of the tests ended {where} without a word ({how}). A new one runs what is left."


def _shout(text: str) -> None:
    print(f"\n!!! {text}\n", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
