"""Runs one program in a process and a directory of its own, and finds the processes that it leaves behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.warm_python import MARK, ForkedScript, WarmPython, new_mark, processes_marked

PROGRAMS = Path(__file__).parent / "programs"
#: How long processes of a program may take to exit after its last line.
_EXIT_TIMEOUT_S = 20.0
_POLL_INTERVAL_S = 0.02


@dataclass(frozen=True)
class Ended:
    """How a program ended."""

    code: int
    output: str
    seconds: float
    #: The command lines of processes that outlived it.
    left_running: list[str]


def names() -> list[str]:
    """Return the names of all programs, such as ``"checkpoints/rank_zero"``."""
    return sorted(str(path.relative_to(PROGRAMS).with_suffix("")) for path in PROGRAMS.glob("*/*.py"))


def read(name: str) -> str:
    """Return the text of a program, as its Ray user wrote it."""
    return (PROGRAMS / f"{name}.py").read_text("utf-8")


def run(
    text: str,
    directory: Path,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    warm: WarmPython | None = None,
) -> Ended:
    """Run the text of a program in an empty directory, and wait until its processes are gone.

    Args:
        text: The program.
        directory: The directory it is written to and started in.
        timeout_s: When to end it.
        environment: Variables to set besides those of this process.
        warm: Forks the program, with torch and Powertrain loaded; without it a fresh interpreter runs it.

    Returns:
        How it ended; a program that took too long has the code of its SIGKILL.
    """
    script, output = directory / "program.py", directory / ".output"
    script.write_text(text, "utf-8")
    mark = new_mark()
    env = {**os.environ, **(environment or {}), MARK: mark}
    began = time.monotonic()
    with output.open("wb") as file:
        process: subprocess.Popen[bytes] | ForkedScript
        if warm is not None:
            process = warm.start(script, env=env, cwd=directory, output=file.fileno(), mark=mark)
        else:
            process = subprocess.Popen(
                [sys.executable, str(script)],
                cwd=directory,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
    note = ""
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        note = f"\nended after {timeout_s:g} s"
    except BaseException:  # Ctrl-C and SIGTERM: the program ends with its caller
        process.kill()
        process.wait()
        raise
    seconds, code = time.monotonic() - began, process.returncode
    assert code is not None
    left = _outliving(mark)
    return Ended(code, output.read_text(errors="replace") + note, seconds, left)


def _outliving(mark: str) -> list[str]:
    """Return lines about the processes that a program has left running, and end them."""
    deadline = time.monotonic() + _EXIT_TIMEOUT_S
    while (left := processes_marked(mark)) and time.monotonic() < deadline:
        time.sleep(_POLL_INTERVAL_S)
    lines = [f"{pid}: {_command(pid)}" for pid in left]
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return lines


def _command(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has exited meanwhile
        return ""
    return command.replace(b"\0", b" ").decode(errors="replace")
