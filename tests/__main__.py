"""``python -m tests [what pytest takes]``: all tests, to the last, even where one ends the process that it runs in.

Tests of the Ray engine connect to Ray from the process of the tests. Ray's core ends such a process without a word
(``_Exit(1)``) when one of its own checks fails, which was seen once in some hundred runs; the results of four thousand
tests would be lost with it. So the rest is run by a new process, beginning with the test that was under way. It is told
loudly, and a test that ends its process again is a failure.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.progress import VARIABLE, Progress

#: pytest's word for "no tests were left to run".
_NOTHING_LEFT = 5


def main(arguments: list[str]) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # pytest hears it too, and says what there is to say
    with tempfile.TemporaryDirectory(prefix="tests-") as directory:
        return run_all(arguments, Path(directory, "progress"))


def run_all(arguments: list[str], file: Path) -> int:
    """The exit code of pytest; 1 where any test of any of the processes has failed."""
    victims: set[str] = set()
    failed: set[str] = set()
    file.touch()
    while True:
        code = _session(arguments, file)
        progress = Progress(file.read_text())
        failed |= progress.failed
        if progress.is_over:
            code = 0 if code == _NOTHING_LEFT and progress.passed else code
            return code or (1 if failed else 0)
        print(_about(code, progress.running), file=sys.stderr, flush=True)
        if not progress.running or progress.running in victims:
            return code or 1
        victims.add(progress.running)


def _session(arguments: list[str], file: Path) -> int:
    command = [sys.executable, "-m", "pytest", "-p", "tests.progress", *arguments]
    with subprocess.Popen(
        command,
        env={**os.environ, VARIABLE: str(file)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
    ) as process:
        return process.wait()


def _about(code: int, running: str) -> str:
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    where = f"in {running}" if running else "outside of any test"
    return (
        f"\n!!! The process of the tests ended {where} without a word ({how}). A new one runs what is left.\n"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
