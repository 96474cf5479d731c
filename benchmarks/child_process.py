"""Run one program to its end, observed from outside, and report leftovers.

The benchmark makes itself the subreaper of its descendants (Linux), so a process that outlives the program becomes a
child of the benchmark, whatever its session, title or environment, and is found. Only processes shared by several
programs, such as a cluster, are exempt (:func:`outlasting_programs`).
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from harness import MeasurementFailed

#: The moment the program was started on time.monotonic()'s clock, which all processes of a machine share.
STARTED = "BENCHMARK_STARTED"
#: Environment variable of the file to which a program writes leftovers that only it can see, one per line.
LEFT = "BENCHMARK_LEFT"

_PR_SET_CHILD_SUBREAPER = 36
_POLL_SECONDS = 0.05
#: torch's own cache of the user, made when an optimizer is first built: the bare process leaves it too.
_TORCH_CACHE = "torchinductor_"
#: Subdirectories of the runtime directory that exist once per user; their content is checked.
_SHARED_ROOMS = ("powertrain",)
#: Functions that find processes not owned by one program.
_outlasting: list[Callable[[], set[int]]] = []


@dataclass(frozen=True)
class Ended:
    """The end of a program. ``left_processes`` were killed, ``left_files`` are removed with the workspace."""

    returncode: int
    output: str
    left_processes: tuple[str, ...]
    left_files: tuple[str, ...]
    #: Leftovers that the program itself wrote to the file :data:`LEFT`.
    left_elsewhere: tuple[str, ...] = ()

    @property
    def left_behind(self) -> tuple[str, ...]:
        """Return processes, temporary files, sockets, shared memory and other leftovers of the program."""
        return self.left_processes + self.left_files + self.left_elsewhere


@contextmanager
def outlasting_programs(find: Callable[[], set[int]]) -> Iterator[None]:
    """Exempt processes that ``find`` returns from being awaited or killed, within the block."""
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
    """Run ``command`` in the empty directory ``workspace``; return when all its processes are gone.

    Its temporary files and sockets go to directories of the workspace, so leftovers can be detected. Descendants may
    outlive it by ``grace`` seconds; later ones are reported and killed. ``watch`` is called with the program's pid
    twice a second. Raises MeasurementFailed on a timeout or an exit code other than 0.
    """
    adopt_orphans()
    _exit_on_sigterm()
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
    """Return this process's environment with all temporary directories inside the workspace."""
    for name in ("tmp", "run"):
        (workspace / name).mkdir(mode=0o700)
    (workspace / "left").touch()
    own: Mapping[str, str] = {
        "TMPDIR": str(workspace / "tmp"),
        "XDG_RUNTIME_DIR": str(workspace / "run"),
        LEFT: str(workspace / "left"),
        # Without a network, Ray's usage-statistics prompt only costs time.
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    return {**os.environ, **own}


def _wait(program: subprocess.Popen[bytes], timeout: float, watch: Callable[[int], None] | None) -> bool:
    """Wait for the program's end; return False if it was killed on timeout."""
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


def _exit_on_sigterm() -> None:
    """Let SIGTERM raise SystemExit, so that a benchmark that is ended ends its programs and removes their files."""
    is_main_thread = threading.current_thread() is threading.main_thread()
    if is_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent ends."""
    if sys.platform != "linux":
        raise MeasurementFailed(
            "Only Linux lets a benchmark see what a program leaves behind. Run it on Linux."
        )
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def _end_descendants(grace: float) -> tuple[str, ...]:
    """Wait up to ``grace`` seconds for all descendants to end, kill the others and name them."""
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
    """Return all descendants that should end and have not; own ended children are reaped."""
    descendants = psutil.Process().children(recursive=True)
    outlasting = {pid for find in _outlasting for pid in find()}  # defined last: it uses all of the above
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
    """Return the names of this user's shared memory segments."""
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
    """Yield all files below ``directory``, relative to the workspace; directories only if they are empty."""
    return tuple(
        str(path.relative_to(directory.parent))
        for path in sorted(directory.rglob("*"))
        if not _belongs_to_the_user(path.relative_to(directory.parent))
        and (not path.is_dir() or not any(path.iterdir()))
    )


def _belongs_to_the_user(path: Path) -> bool:
    """Return whether a path is shared by all runs of a user: torch's cache, and a program's empty directory in run/."""
    place, name, *below = path.parts
    return name.startswith(_TORCH_CACHE) or (place == "run" and name in _SHARED_ROOMS and not below)


def _tail(text: str) -> str:
    """Return the last lines, enough to show the error."""
    return "\n".join(text.splitlines()[-25:])
