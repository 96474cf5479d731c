"""Runs one program in a process and a directory of its own, and finds the processes that it leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs"
#: An environment variable that every process of one program inherits.
_MARK = "MIGRATION_PROGRAM"
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


def run(text: str, directory: Path, timeout_s: float, environment: Mapping[str, str] | None = None) -> Ended:
    """Run the text of a program in an empty directory, and wait until its processes are gone.

    Args:
        text: The program.
        directory: The directory it is written to and started in.
        timeout_s: When to end it.
        environment: Variables to set besides those of this process.

    Returns:
        How it ended; a program that took too long has the code of its SIGKILL.
    """
    script = directory / "program.py"
    script.write_text(text, "utf-8")
    mark = uuid.uuid4().hex
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, str(script)],
        cwd=directory,
        env={**os.environ, **(environment or {}), _MARK: mark},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        output += f"\nended after {timeout_s:g} s"
    except BaseException:  # Ctrl-C and SIGTERM: the program ends with its caller
        process.kill()
        process.wait()
        raise
    seconds = time.monotonic() - began
    return Ended(process.returncode, output, seconds, _outliving(mark))


def _outliving(mark: str) -> list[str]:
    deadline = time.monotonic() + _EXIT_TIMEOUT_S
    while (left := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(_POLL_INTERVAL_S)
    return left


def _marked(mark: str) -> list[str]:
    """Return the command lines of the living processes whose environment has the mark."""
    wanted = f"{_MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found.append(f"{entry.name}: {command}")
        except OSError:  # it has exited meanwhile, or belongs to another user
            continue
    return found
