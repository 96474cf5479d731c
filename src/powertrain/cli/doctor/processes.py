"""Facts about torch and its collectives, gathered in processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from powertrain.cli.doctor.device_verdicts import CollectiveFacts

#: Importing torch takes seconds on a busy machine, and minutes from a cold network disk.
_IMPORT_TIMEOUT_S = 120.0
_COLLECTIVE_TIMEOUT_S = 180.0
_CHILD = "powertrain.cli.doctor.child"
#: Characters of a process's error output that are looked at.
_ERROR_CHARACTERS = 4000


@dataclass(frozen=True)
class TorchFacts:
    """What a new process that imports torch finds; ``failure`` is why it could not."""

    failure: str = ""
    cuda: str | None = None
    count: int = 0
    error: str = ""
    unsafe: str = ""
    nccl: bool = False


def gather_torch() -> TorchFacts:
    """Import torch in a new process and return what it says."""
    with tempfile.TemporaryFile() as errors, _started(["torch"], errors) as process:
        try:
            output, _ = process.communicate(timeout=_IMPORT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return TorchFacts(failure=f"it had not ended after {_IMPORT_TIMEOUT_S:.0f} s")
        if process.returncode != 0:
            return TorchFacts(failure=_why_ended(process.returncode, errors))
        return TorchFacts(**json.loads(output.splitlines()[-1]))


def gather_collective(backend: str, world_size: int) -> CollectiveFacts:
    """Run an all_reduce of ``world_size`` processes on this machine."""
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="powertrain-doctor-"))
        meeting = str(Path(directory, "meeting"))
        errors = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(world_size)]
        processes = [
            stack.enter_context(
                _started(["collective", backend, str(rank), str(world_size), meeting], errors[rank])
            )
            for rank in range(world_size)
        ]
        error = _await_all(processes, errors)
    return CollectiveFacts(backend, world_size, error, time.monotonic() - started)


def _await_all(processes: list[subprocess.Popen[bytes]], errors: Sequence[IO[bytes]]) -> str:
    """Wait for the ranks; return why one failed, without waiting for the others then."""
    deadline = time.monotonic() + _COLLECTIVE_TIMEOUT_S
    waiting = dict(enumerate(processes))
    while waiting:
        for rank, process in list(waiting.items()):
            with contextlib.suppress(subprocess.TimeoutExpired):
                if code := process.wait(timeout=0.05):
                    return f"rank {rank}: {_why_ended(code, errors[rank])}"
                del waiting[rank]
        if time.monotonic() > deadline:
            return f"rank {min(waiting)} had not ended after {_COLLECTIVE_TIMEOUT_S:.0f} s"
    return ""


@contextlib.contextmanager
def _started(arguments: list[str], errors: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process of :mod:`child`, and end it and its children when the block ends."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}
    process = subprocess.Popen(
        [sys.executable, "-m", _CHILD, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        env=environment,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _why_ended(code: int, errors: IO[bytes]) -> str:
    """Return the last line of an exception, or the signal, of a process that failed."""
    errors.seek(0)
    text = errors.read()[-_ERROR_CHARACTERS:].decode("utf-8", "replace")
    lines = [line.strip() for line in text.splitlines() if line and not line[0].isspace()]
    raised = [
        line for line in lines if line.partition(":")[0].rpartition(".")[2].endswith(("Error", "Exception"))
    ]
    if raised or (lines and code > 0):
        return (raised or lines)[-1].rstrip(". ")
    if code < 0:
        return f"it was ended by {signal.Signals(-code).name}"
    return f"it exited with {code}"
