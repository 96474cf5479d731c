"""The stage of the stories: fits in this process on the shared warm server, and driver processes of their own.

A driver process gets its own storage, temporary directory and runtime directory, and a variable in its environment
by which every process that comes from it can be found. After each story nothing of it may be left.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

_DRIVERS = Path(__file__).parent / "drivers"
sys.path.insert(0, str(_DRIVERS))  # the drivers' modules serve the tests as well

import story as stage  # noqa: E402

#: How long a story's processes and files may take to go.
_GONE_WITHIN = 5.0
_TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
#: What is the trainer's own among the options of a fit; all others are the run's.
_TRAINER_OPTIONS = (
    "train_loop_config", "backend_config", "resume_from_checkpoint", "metadata", "datasets", "dataset_config",
)  # fmt: skip


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """The story's directory for fits in this process."""
    with pytest.MonkeyPatch.context() as patch:  # undone before the check for what the test left
        patch.setenv("STORY_DIRECTORY", str(tmp_path))
        yield tmp_path


class Fits:
    """Fits in this very process."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def trainer(self, loop: Callable[..., Any], engine: str = "local", **options: Any) -> Any:
        """A trainer of ``loop``; options of the trainer by their names, all others are the run's."""
        from powertrain import DataParallelTrainer

        kind = options.pop("kind", DataParallelTrainer)
        workers = options.pop("workers", 2)
        own = {name: options.pop(name) for name in _TRAINER_OPTIONS if name in options}
        name = options.pop("name", loop.__name__)
        # The warm server is older than the test: its workers do not have this test's variables.
        environment = {"env_vars": {"STORY_DIRECTORY": str(self.directory)}}
        return kind(
            loop,
            scaling_config=stage.scaling(engine, workers),
            run_config=stage.run_config(name, worker_runtime_env=environment, **options),
            **own,
        )

    def outcome(self, loop: Callable[..., Any], engine: str = "local", **options: Any) -> dict[str, Any]:
        return stage.outcome_of(self.trainer(loop, engine, **options).fit)

    def facts(self, name: str) -> list[Any]:
        """The journal of a run."""
        return journal_of(self.directory / "storage" / name)


@pytest.fixture
def fits(directory: Path) -> Fits:
    return Fits(directory)


class Driver:
    """One driver process, and what it said."""

    def __init__(self, stories: Stories, process: subprocess.Popen[bytes], output: Path) -> None:
        self._stories, self.process, self._output = stories, process, output

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def await_told(self, *names: str, within: float = stage.PATIENCE) -> None:
        """Wait until the story has come so far; fails at once when the driver has ended instead."""
        self._await(lambda: all((self._stories.root / name).exists() for name in names), names, within)

    def await_fact(self, name: str, kind: str, within: float = stage.PATIENCE) -> None:
        """Wait until the journal of a run holds a fact of this kind."""
        run = self._stories.storage / name
        self._await(lambda: any(type(f).__name__ == kind for f in journal_of(run)), kind, within)

    def _await(self, come: Callable[[], bool], what: Any, within: float) -> None:
        deadline = time.monotonic() + within
        while not come():
            if self.process.poll() is not None and not come():
                pytest.fail(f"the driver ended with {self.process.returncode} before {what}:\n{self.output}")
            if time.monotonic() > deadline:
                self._fail_with_stacks(f"not within {within:g} s: {what}")
            time.sleep(0.01)

    def _fail_with_stacks(self, problem: str) -> NoReturn:
        """Fail, with the stack of every thread of the story's processes in the output."""
        self._stories.abort()
        pytest.fail(f"{problem}\n{self.output}")

    def interrupt(self) -> None:
        """Ctrl-C, as the terminal sends it: to the driver's whole group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def ended(self, within: float = stage.PATIENCE) -> int:
        """The exit code, once it has ended."""
        try:
            return self.process.wait(within)
        except subprocess.TimeoutExpired:
            self._fail_with_stacks(f"the driver has not ended within {within:g} s")

    def outcome(self, rank: int = 0, within: float = stage.PATIENCE) -> dict[str, Any]:
        """What the driver left as its outcome, once it has ended."""
        self.ended(within)
        file = self._stories.root / f"outcome-{rank}.json"
        if not file.exists():
            pytest.fail(f"the driver left no outcome (exit code {self.process.returncode}):\n{self.output}")
        outcome: dict[str, Any] = json.loads(file.read_text())
        return outcome


class Stories:
    """Starts drivers in a directory of their own and sees what they leave."""

    def __init__(self) -> None:
        # Not pytest's own: a socket's path must fit into 107 bytes.
        self.root = Path(tempfile.mkdtemp(prefix="st-", dir="/tmp"))
        self.storage, self.temporary, self.runtime = (self.root / n for n in ("storage", "tmp", "run"))
        for place in (self.temporary, self.runtime):
            place.mkdir(mode=0o700)
        self._marker = f"POWERTRAIN_STORY={uuid.uuid4().hex}"
        self._shared_memory = _shared_memory()
        self._drivers: list[Driver] = []

    def start(
        self, scenario: str, engine: str = "local", options: tuple[str, ...] = (), terminal: int | None = None
    ) -> Driver:
        """Start a driver of its own session; ``terminal`` becomes its controlling terminal."""
        output = self.root / f"output-{len(self._drivers)}"
        # torchrun's own log directory is kept by torchrun, and no matter of ours.
        launcher = [*_TORCHRUN, f"--log-dir={self.root}/torchrun", *options]
        if engine != "torchrun":
            launcher = [sys.executable]
        with output.open("wb") as file:
            process = subprocess.Popen(
                [*launcher, str(_DRIVERS / "driver.py"), scenario],
                env=self._environment(engine),
                cwd=self.root,
                stdin=subprocess.DEVNULL if terminal is None else terminal,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=None if terminal is None else _take_terminal,
            )
        self._drivers.append(Driver(self, process, output))
        return self._drivers[-1]

    def facts(self, name: str) -> list[Any]:
        return journal_of(self.storage / name)

    def assert_nothing_left(self) -> None:
        deadline = time.monotonic() + _GONE_WITHIN
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not left, f"{_GONE_WITHIN:g} s after the end there is still:\n" + "\n".join(left)

    def abort(self) -> None:
        """Have every process say where it is, and end."""
        processes = self._processes()
        for pid in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGABRT)
        deadline = time.monotonic() + _GONE_WITHIN
        while self._processes() and time.monotonic() < deadline:
            time.sleep(0.02)

    def close(self) -> None:
        """End whatever a failed story left, so that it cannot disturb the next."""
        for pid in self._processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for driver in self._drivers:
            driver.process.wait()
        shutil.rmtree(self.root)

    def _environment(self, engine: str) -> dict[str, str]:
        marker, value = self._marker.split("=")
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "POWERTRAIN_"))}
        return {
            **inherited,
            marker: value,
            "STORY_DIRECTORY": str(self.root),
            "STORY_ENGINE": engine,
            "PYTHONFAULTHANDLER": "1",
            "TMPDIR": str(self.temporary),
            "TORCHINDUCTOR_CACHE_DIR": str(self.root / "inductor"),  # torch's own, and meant to stay
            "XDG_RUNTIME_DIR": str(self.runtime),
        }

    def _left(self) -> list[str]:
        files = [
            f"file {path}"
            for place in (self.temporary, self.runtime)
            for path in _below(place)
            if path != self.runtime / "powertrain"
        ]
        processes = [f"process {pid}: {_command(pid)}" for pid in self._processes()]
        new = _shared_memory() - self._shared_memory
        shared = [f"shared memory {path}" for path in sorted(new) if not _used_by_others(path)]
        return [*processes, *files, *shared]

    def _processes(self) -> list[int]:
        found = []
        for entry in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if entry.isdigit() and self._marker.encode() in Path("/proc", entry, "environ").read_bytes():
                    found.append(int(entry))
        return found


def _below(place: Path) -> list[Path]:
    """All that lies below ``place``, while others may be removing it."""
    while True:
        with contextlib.suppress(FileNotFoundError):
            return sorted(place.rglob("*"))


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return "gone by now"


def _shared_memory() -> set[str]:
    """All there is, but for the directories that only hold runs' own."""
    own = f"/dev/shm/powertrain-{os.getuid()}"
    found = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")} - {own}
    with contextlib.suppress(FileNotFoundError):
        found |= {f"{own}/{name}" for name in os.listdir(own)}
    return found


def _used_by_others(path: str) -> bool:
    """True when a process that is alive has the file mapped: ours are all gone by now, so it is a neighbour's.

    A run's directory there carries the number of the process that made it.
    """
    maker = os.path.basename(path).rsplit("-", 2)[1:2]
    if maker and maker[0].isdigit() and int(maker[0]) != os.getpid() and Path("/proc", maker[0]).exists():
        return True
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if entry.isdigit() and path in Path("/proc", entry, "maps").read_text():
                return True
    return False


def journal_of(run: Path) -> list[Any]:
    from powertrain.run import journal
    from powertrain.storage import open_storage

    return list(journal.read(open_storage(run)))


@pytest.fixture
def stories() -> Iterator[Stories]:
    """Drivers of their own; whatever the story was, nothing may be left."""
    here = Stories()
    try:
        yield here
        here.assert_nothing_left()
    finally:
        here.close()


@pytest.fixture(autouse=True)
def _no_new_shared_memory() -> Iterator[None]:
    before = _shared_memory()
    yield
    deadline = time.monotonic() + _GONE_WITHIN
    while left := [path for path in _shared_memory() - before if not _used_by_others(path)]:
        assert time.monotonic() < deadline, f"shared memory is left: {left}"
        time.sleep(0.05)
