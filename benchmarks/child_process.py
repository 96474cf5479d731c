"""Runs one program to its end, watched from outside, and says what it left behind.

The benchmark makes itself the reaper of its descendants (Linux), so a process that outlives the program
becomes a child of the benchmark, whatever it did to its session, title or environment, and is found.
Only what several programs use on purpose, a cluster, is exempt (:func:`outlasting_programs`).
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from harness import MeasurementFailed

#: The moment the program was started on time.monotonic()'s clock, which all processes of a machine share.
STARTED = "BENCHMARK_STARTED"
#: The file into which a program writes what it left where only the program can look: one thing a line.
LEFT = "BENCHMARK_LEFT"

_PR_SET_CHILD_SUBREAPER = 36
_POLL_SECONDS = 0.05
#: torch's own cache of the user, made when an optimizer is first built: the bare process leaves it too.
_TORCH_CACHE = "torchinductor_"
#: Directories of the runtime directory that are made once per user; what lies in them is judged.
_SHARED_ROOMS = ("powertrain",)
#: Each finds processes that are no program's own.
_outlasting: list[Callable[[], set[int]]] = []


@dataclass(frozen=True)
class Ended:
    """How a program ended. ``left_processes`` were killed, ``left_files`` go with the workspace."""

    returncode: int
    output: str
    left_processes: tuple[str, ...]
    left_files: tuple[str, ...]
    #: What the program itself wrote into the file called :data:`LEFT`.
    left_elsewhere: tuple[str, ...] = ()

    @property
    def left_behind(self) -> tuple[str, ...]:
        """Processes, temporary files, sockets, shared memory and what else outlived the program."""
        return self.left_processes + self.left_files + self.left_elsewhere


@contextmanager
def outlasting_programs(find: Callable[[], set[int]]) -> Iterator[None]:
    """While this holds, processes that ``find`` finds are neither awaited nor killed when a program has ended."""
    adopt_orphans()
    _outlasting.append(find)
    try:
        yield
    finally:
        _outlasting.remove(find)


def run_to_end(
    command: Sequence[str],
    *,
    workspace: Path,
    timeout: float,
    grace: float,
    watch: Callable[[int], None] | None = None,
) -> Ended:
    """Runs ``command`` in the empty directory ``workspace`` and returns when all of it is gone.

    Its temporary files and sockets go to directories of the workspace, so what it leaves can be seen.
    Descendants may outlive it by ``grace`` seconds; what is there after that is reported and killed.
    ``watch`` is called with the program's pid twice a second. Raises MeasurementFailed on a timeout or an
    exit code other than 0.
    """
    adopt_orphans()
    environment = _environment(workspace)
    shared_before = _shared_memory()
    log = workspace / "output.log"
    try:
        with log.open("wb") as output:
            environment[STARTED] = repr(time.monotonic())
            program = subprocess.Popen(
                command,
                cwd=workspace,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            in_time = _wait(program, timeout, watch)
    except BaseException:
        _end_descendants(grace=0.0)
        raise
    left_processes = _end_descendants(grace)
    text = log.read_text(errors="replace")
    if not in_time:
        raise MeasurementFailed(
            f"It did not end within {timeout:.0f} s and was killed. Its output ends with:\n{_tail(text)}"
        )
    if program.returncode != 0:
        raise MeasurementFailed(
            f"It ended with exit code {program.returncode}. Its output ends with:\n{_tail(text)}"
        )
    left_files = _files_below(workspace / "tmp") + _files_below(workspace / "run")
    left_files += tuple(f"/dev/shm/{name}" for name in sorted(_shared_memory() - shared_before))
    left_elsewhere = tuple(Path(environment[LEFT]).read_text().splitlines())
    return Ended(program.returncode, text, left_processes, left_files, left_elsewhere)


def _environment(workspace: Path) -> dict[str, str]:
    """This process's environment with every place for temporary things inside the workspace."""
    for name in ("tmp", "run"):
        (workspace / name).mkdir(mode=0o700)
    (workspace / "left").touch()
    own: Mapping[str, str] = {
        "TMPDIR": str(workspace / "tmp"),
        "XDG_RUNTIME_DIR": str(workspace / "run"),
        LEFT: str(workspace / "left"),
        # Without a network the question whether statistics may be sent only costs Ray time.
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    return {**os.environ, **own}


def _wait(program: subprocess.Popen[bytes], timeout: float, watch: Callable[[int], None] | None) -> bool:
    """Waits for the program's end; False where it had to be killed because its time was up."""
    deadline = time.monotonic() + timeout
    while True:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            program.kill()
            program.wait()
            return False
        try:
            program.wait(remaining if watch is None else min(0.5, remaining))
            return True
        except subprocess.TimeoutExpired:
            if watch is not None:
                watch(program.pid)


def adopt_orphans() -> None:
    """Makes this process the parent of every descendant whose own parent ends."""
    if sys.platform != "linux":
        raise MeasurementFailed(
            "Only Linux lets a benchmark see what a program leaves behind. Run it on Linux."
        )
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def _end_descendants(grace: float) -> tuple[str, ...]:
    """Waits up to ``grace`` seconds for all descendants to end, kills the others and names them."""
    deadline = time.monotonic() + grace
    while (living := _living_descendants()) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    names = []
    for process in living:
        with suppress(psutil.Error):
            names.append(f"process {process.pid} ({' '.join(process.cmdline())[:80] or process.name()})")
            process.send_signal(signal.SIGKILL)
    while _living_descendants():
        time.sleep(_POLL_SECONDS)
    return tuple(names)


def _living_descendants() -> list[psutil.Process]:
    """All descendants that have not ended and are to end; those that have are reaped if they are ours to reap."""
    descendants = psutil.Process().children(recursive=True)
    outlasting = {pid for find in _outlasting for pid in find()}  # found later: it knows all of the above
    living = []
    for process in descendants:
        with suppress(psutil.Error):
            if process.status() == psutil.STATUS_ZOMBIE:
                with suppress(ChildProcessError):
                    os.waitpid(process.pid, os.WNOHANG)
            elif process.pid not in outlasting:
                living.append(process)
    return living


def _shared_memory() -> set[str]:
    """Names of this user's shared memory segments."""
    shared = Path("/dev/shm")
    if not shared.is_dir():
        return set()
    names = set()
    for entry in shared.iterdir():
        with suppress(FileNotFoundError):
            if entry.lstat().st_uid == os.getuid():
                names.add(entry.name)
    return names


def _files_below(directory: Path) -> tuple[str, ...]:
    """Everything below ``directory``, relative to the workspace; directories only where they are empty."""
    return tuple(
        str(path.relative_to(directory.parent))
        for path in sorted(directory.rglob("*"))
        if not _belongs_to_the_user(path.relative_to(directory.parent))
        and (not path.is_dir() or not any(path.iterdir()))
    )


def _belongs_to_the_user(path: Path) -> bool:
    """True for what all runs of a user share: torch's cache, and the bare room of a program in run/."""
    place, name, *below = path.parts
    return name.startswith(_TORCH_CACHE) or (place == "run" and name in _SHARED_ROOMS and not below)


def _tail(text: str) -> str:
    """The last lines, enough to see the error."""
    return "\n".join(text.splitlines()[-25:])
