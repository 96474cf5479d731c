"""One launcher's run of the training function, with a conductor that kills ranks and ends the run."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import psutil
from child_process import Ended, run_to_end
from harness import MeasurementFailed
from recovery_scripts.diary import ENTERED, STEPPED, Entry, ask_to_stop, read

SCRIPTS = Path(__file__).resolve().parent
RANKS = (0, 1)
#: Seconds for Powertrain's processes to exit. Peers get longer: the next launcher needs the machine to itself.
_OUR_GRACE, _PEER_GRACE = 5.0, 20.0
_LOOK_EVERY = 0.002

Found = TypeVar("Found")


@dataclass(frozen=True)
class Launcher:
    """A launcher that starts and restarts the training function; its last argument is the directory of the diaries."""

    name: str
    requires: tuple[str, ...]
    command: tuple[str, ...]
    ours: bool = False


POWERTRAIN = Launcher(
    "Powertrain", ("torch", "powertrain"), (sys.executable, str(SCRIPTS / "with_powertrain.py")), ours=True
)
#: In torchrun's favour: by default its workers' store outlives a restart, and then 2 of 4 restarts with gloo failed
#: over and over until the time was up (torch 2.13); the other two took as long as those with a new store.
_NEW_STORE_A_RESTART = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
TORCHRUN_NOTE = (
    f"torchrun runs with {_NEW_STORE_A_RESTART}, which is not its default: with the default, restarts with gloo often "
    "do not come to an end."
)
#: ``-m torch.distributed.run`` is the same program as ``torchrun``.
TORCHRUN = Launcher(
    "torchrun",
    ("torch",),
    (
        *("env", _NEW_STORE_A_RESTART),
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        *("--max-restarts=100", str(SCRIPTS / "with_torchrun.py")),
    ),
)
RAY = Launcher("Ray Train", ("torch", "ray"), (sys.executable, str(SCRIPTS / "with_ray_train.py")))
BARE_FORKS = Launcher("two bare forks", ("torch",), (sys.executable, str(SCRIPTS / "bare_forks.py")))


class _ProgramEnded(Exception):
    """Raised if the program ended while the conductor was waiting."""


class Conductor:
    """Operations of a conducting function: read the ranks' diaries, wait, and kill."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._program_ended = threading.Event()

    def diary(self, rank: int) -> list[Entry]:
        return read(self._directory, rank)

    def steps(self, rank: int) -> list[Entry]:
        return [entry for entry in self.diary(rank) if entry.kind == STEPPED]

    def wait_until(self, moment: float) -> None:
        """Wait until a time of ``time.monotonic()``."""
        if self._program_ended.wait(max(0.0, moment - time.monotonic())):
            raise _ProgramEnded(f"{moment - time.monotonic():.1f} s before the end of the wait")

    def await_(self, what: str, look: Callable[[], Found | None]) -> Found:
        """Poll every two milliseconds for a value; ``what`` names it in errors."""
        while (found := look()) is None:
            if self._program_ended.wait(_LOOK_EVERY):
                raise _ProgramEnded(f"before {what}")
        return found

    def kill(self, rank: int) -> float:
        """Kill the process of a rank after its first step, waiting for one; return the time."""
        process = self.await_(f"rank {rank} lived", lambda: self._living(rank))
        moment = time.monotonic()
        process.send_signal(signal.SIGKILL)
        return moment

    def _living(self, rank: int) -> psutil.Process | None:
        """Return the rank's newest process, once it trains. Never a process from outside this benchmark."""
        entries = self.diary(rank)
        if not entries or entries[-1].kind != STEPPED:
            return None
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(entries[-1].pid)
            ancestors = {parent.pid for parent in process.parents()}
            if os.getpid() in ancestors and process.status() != psutil.STATUS_ZOMBIE:
                return process
        return None

    def end(self) -> None:
        """Tell the ranks to end."""
        ask_to_stop(self._directory)

    def program_ended(self) -> None:
        self._program_ended.set()


@dataclass(frozen=True)
class Conducted(Generic[Found]):
    """The result of the conducting function, the ranks' diaries, and leftovers of the program."""

    found: Found
    diaries: dict[int, list[Entry]]
    left_behind: tuple[str, ...]


def conduct(launcher: Launcher, conducting: Callable[[Conductor], Found], timeout: float) -> Conducted[Found]:
    """Run the launcher to its end while ``conducting`` kills ranks and finally ends it.

    Raises MeasurementFailed if either of the two fails.
    """
    with tempfile.TemporaryDirectory(prefix="ptb-") as place:
        workspace = Path(place)
        directory = workspace / "diaries"
        directory.mkdir()
        conductor = Conductor(directory)
        thread = _Conducting(lambda: conducting(conductor))
        thread.start()
        try:
            ended = run_to_end(
                (*launcher.command, str(directory)),
                workspace=workspace,
                timeout=timeout,
                grace=_OUR_GRACE if launcher.ours else _PEER_GRACE,
            )
        finally:
            conductor.program_ended()
            thread.join()
        diaries = {rank: read(directory, rank) for rank in RANKS}
        return Conducted(thread.found(ended), diaries, _left_behind(launcher, ended))


def _left_behind(launcher: Launcher, ended: Ended) -> tuple[str, ...]:
    """Return leftovers. A peer's files (Ray keeps its session's logs) are not an error; a remaining process always
    is.
    """
    return ended.left_behind if launcher.ours else ended.left_processes


class _Conducting(threading.Thread, Generic[Found]):
    """The conducting function, beside the wait for the program."""

    def __init__(self, conducting: Callable[[], Found]) -> None:
        super().__init__(name="conductor")
        self._conducting = conducting
        self._found: list[Found] = []
        self._problem: BaseException | None = None

    def run(self) -> None:
        try:
            self._found.append(self._conducting())
        except BaseException as problem:
            self._problem = problem

    def found(self, ended: Ended) -> Found:
        if isinstance(self._problem, _ProgramEnded):
            tail = "\n".join(ended.output.splitlines()[-25:])
            raise MeasurementFailed(f"It ended {self._problem}. Its output ends with:\n{tail}")
        if self._problem is not None:
            raise self._problem
        return self._found[0]


def first_step_of_new_process(entries: list[Entry], moment: float) -> tuple[Entry, Entry] | None:
    """Return a rank's recovery after ``moment``: the entry of its function and its first step, both of a new process;
    None if it has not recovered."""
    old = {entry.pid for entry in entries if entry.at <= moment}
    fresh = [entry for entry in entries if entry.pid not in old]
    entered = next((entry for entry in fresh if entry.kind == ENTERED), None)
    stepped = next((entry for entry in fresh if entry.kind == STEPPED), None)
    return (entered, stepped) if entered is not None and stepped is not None else None
