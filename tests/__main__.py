"""``python -m tests [what pytest takes]``: all tests, to the last, even where one ends the process that it runs in or
keeps it for ever.

Tests of the Ray engine connect to Ray from the process of the tests. Ray's core ends such a process without a word
(``_Exit(1)``) when one of its own checks fails, and what waits in it cannot be interrupted by pytest's timeout; both
were seen once in some hundred runs, and the results of four thousand tests would be lost with it. So the rest is run by
a new process, beginning with the test that was under way. It is told loudly, and a test that does so again has failed.

Tests with real processes on a machine that does other things too may fail for that alone. A few that failed are run
once more, by themselves and in a new process; which they were is told at the end. More than a few have failed at once.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.progress import ONLY, VARIABLE, Progress

#: pytest's words for "the user has interrupted it" and "no tests were left to run".
_INTERRUPTED, _NOTHING_LEFT = 2, 5
#: How many tests that failed are run once more.
_FEW = 5
#: Seconds for which nothing may happen; pytest's own timeout for a test comes long before.
_PATIENCE = float(os.environ.get("POWERTRAIN_TESTS_PATIENCE", "300"))


@dataclass(frozen=True)
class Outcome:
    """``code`` is pytest's; ``failed`` are tests, of which ``died`` kept or ended their process twice."""

    code: int
    failed: frozenset[str] = frozenset()
    died: bool = False


def main(arguments: list[str]) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # pytest hears it too, and says what there is to say
    with tempfile.TemporaryDirectory(prefix="tests-") as directory:
        return run_all(arguments, Path(directory))


def run_all(arguments: list[str], directory: Path) -> int:
    """The exit code: 0 where every test has passed, if need be when it was run once more."""
    first = _run(arguments, directory / "first")
    if first.died or not 0 < len(first.failed) <= _FEW or first.code == _INTERRUPTED:
        return first.code or (1 if first.failed else 0)
    names = "\n".join(sorted(first.failed))
    print(
        f"\n!!! These have failed, and are run once more by themselves:\n{names}\n",
        file=sys.stderr,
        flush=True,
    )
    (directory / "only").write_text(names)
    second = _run(arguments, directory / "second", {ONLY: str(directory / "only")})
    if second.code == 0 and not second.failed:
        print(
            f"\n!!! These have failed, and passed when they were run once more:\n{names}\n", file=sys.stderr
        )
        return 0
    return second.code or 1


def _run(arguments: list[str], file: Path, variables: dict[str, str] | None = None) -> Outcome:
    """In as many processes as it takes."""
    victims: set[str] = set()
    file.touch()
    while True:
        code = _session(arguments, file, variables or {})
        progress = Progress(file.read_text())
        if progress.is_over:
            code = 0 if code == _NOTHING_LEFT and progress.passed | progress.failed else code
            return Outcome(code, frozenset(progress.failed))
        print(_about(code, progress.running), file=sys.stderr, flush=True)
        if not progress.running or progress.running in victims:
            return Outcome(code or 1, frozenset(progress.failed), died=True)
        victims.add(progress.running)


def _session(arguments: list[str], file: Path, variables: dict[str, str]) -> int:
    command = [sys.executable, "-m", "pytest", "-p", "tests.progress", *arguments]
    with subprocess.Popen(
        command,
        env={**os.environ, **variables, VARIABLE: str(file)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
    ) as process:
        began = time.time()
        while True:
            try:
                return process.wait(timeout=min(5.0, _PATIENCE))
            except subprocess.TimeoutExpired:
                if time.time() - max(began, file.stat().st_mtime) > _PATIENCE:
                    process.send_signal(signal.SIGABRT)  # pytest then shows what each thread is in


def _about(code: int, running: str) -> str:
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    where = f"in {running}" if running else "outside of any test"
    return (
        f"\n!!! The process of the tests ended {where} without a word ({how}). A new one runs what is left.\n"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
