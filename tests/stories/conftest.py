"""The stage of the stories: fits in this process on the shared warm server, and driver processes of their own.

A driver process gets its own storage, temporary directory and runtime directory, and a variable in its environment
by which every process that comes from it can be found. After each story nothing of it may be left. Drivers on this
machine that have torch loaded are forked from one warm process (:mod:`tests.support.warm_python`).

A story plays on the engines that its mark names (:mod:`tests.stories.engines`), "local" where it has none. On Ray what
it starts comes from the cluster and not from the driver, and is looked for there: processes, actors, placement groups.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
from tests.ray_nodes import RayNodes, agent_of, idle_agents
from tests.support.warm_python import MARK, ForkedScript, WarmPython, new_mark, processes_marked
from typer.testing import CliRunner, Result

from powertrain import backend

_DRIVERS = Path(__file__).parent / "drivers"
sys.path.insert(0, str(_DRIVERS))  # the drivers' modules serve the tests as well

import story as stage  # noqa: E402

#: How long a story's processes and files may take to go: a cluster learns of a driver's end by way of its head.
_GONE_WITHIN = {"local": 30.0, "ray": 30.0}
_TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
#: What is the trainer's own among the options of a fit; all others are the run's.
_TRAINER_OPTIONS = (
    "train_loop_config", "backend_config", "torch_config", "resume_from_checkpoint", "metadata", "datasets",
    "dataset_config",
)  # fmt: skip


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest) -> str:
    """The engine that the story plays on. For Ray this process is connected to the session's cluster."""
    name: str = getattr(request, "param", "local")
    if name == "ray":
        pytest.importorskip("ray")
        request.getfixturevalue("ray_cluster")
    return name


@pytest.fixture(autouse=True)
def cluster(request: pytest.FixtureRequest, engine: str) -> Iterator[Cluster | None]:
    """The cluster, for a story on Ray: whatever the story was, nothing of it may be left there."""
    if engine != "ray":
        yield None
        return
    here = Cluster(request.getfixturevalue("ray_cluster"))
    yield here
    _assert_gone(here.left, _GONE_WITHIN["ray"])


class Cluster:
    """The session's Ray, as a story found it."""

    def __init__(self, nodes: RayNodes) -> None:
        self._nodes = nodes
        self._before = {*self._processes(), *self._actors(), *self._groups()}

    @property
    def address(self) -> str:
        return self._nodes.address

    def left(self) -> list[str]:
        """A line for each thing that was not there before the story, other than the agents for this process's next
        run."""
        found = {**self._processes(), **self._actors(), **self._groups()}
        known = self._before | self._of_idle_agents()
        return [line for id, line in found.items() if id not in known]

    def _of_idle_agents(self) -> set[str]:
        """The idle agents of this process, their own processes and their servers."""
        agents = idle_agents()
        pids = set(agents.values())
        servers = {pid for pid in self._nodes.processes_of_runs() if agent_of(pid) in pids}
        return {*agents, *map(str, pids | servers)}

    def _processes(self) -> dict[str, str]:
        """Those on its nodes that are not Ray's own."""
        return {
            str(pid): f"process {pid} on a node: {_command(pid)}" for pid in self._nodes.processes_of_runs()
        }

    def _actors(self) -> dict[str, str]:
        import ray

        table: dict[str, Any] = ray._private.state.actors()
        return {
            id: f"actor {found['ActorClassName']} ({found['State']})"
            for id, found in table.items()
            if found["State"] != "DEAD"
        }

    def _groups(self) -> dict[str, str]:
        from ray.util import placement_group_table

        return {
            id: f"placement group {found['name']} ({found['state']})"
            for id, found in placement_group_table().items()
            if found["state"] != "REMOVED"
        }


def _assert_gone(look: Callable[[], list[str]], within: float) -> None:
    deadline = time.monotonic() + within
    while (left := look()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left, f"{within:g} s after the end there is still:\n" + "\n".join(left)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """The story's directory for fits in this process."""
    with pytest.MonkeyPatch.context() as patch:  # undone before the check for what the test left
        patch.setenv("STORY_DIRECTORY", str(tmp_path))
        yield tmp_path


class _WithoutTorch:
    """``sys`` in a process that has not loaded torch."""

    @property
    def modules(self) -> dict[str, Any]:
        return {name: module for name, module in sys.modules.items() if name != "torch"}

    def __getattr__(self, name: str) -> Any:
        return getattr(sys, name)


@pytest.fixture(autouse=True)
def _as_in_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a trainer sees of this process, in which other stories have loaded torch, is what it sees in a script that
    has no need of it: the nodes of a cluster load it for every run of a TorchTrainer, and for no other. It takes four
    seconds for each of them."""
    monkeypatch.setattr(backend, "sys", _WithoutTorch())


class Fits:
    """Fits in this very process, on the story's engine unless another is named."""

    def __init__(self, directory: Path, engine: str) -> None:
        self.directory, self.engine = directory, engine

    def trainer(self, loop: Callable[..., Any], engine: str = "", **options: Any) -> Any:
        """A trainer of ``loop``; options of the trainer by their names, all others are the run's."""
        from powertrain import DataParallelTrainer

        kind = options.pop("kind", DataParallelTrainer)
        workers = options.pop("workers", 2)
        own = {name: options.pop(name) for name in _TRAINER_OPTIONS if name in options}
        name = options.pop("name", loop.__name__)
        return kind(
            loop,
            scaling_config=stage.scaling(engine or self.engine, workers),
            run_config=stage.run_config(name, **options),
            **own,
        )

    def outcome(self, loop: Callable[..., Any], engine: str = "", **options: Any) -> dict[str, Any]:
        return stage.outcome_of(self.trainer(loop, engine, **options).fit)

    def facts(self, name: str) -> list[Any]:
        """The journal of a run."""
        return journal_of(self.directory / "storage" / name)


@pytest.fixture
def fits(directory: Path, engine: str) -> Fits:
    return Fits(directory, engine)


class Driver:
    """One driver process, and what it said."""

    def __init__(
        self, stories: Stories, process: subprocess.Popen[bytes] | ForkedScript, output: Path
    ) -> None:
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

    def await_facts(self, name: str, kind: type[Any], count: int = 1, **fields: Any) -> list[Any]:
        """Wait until the journal of a run holds so many facts of this kind with these values; return all such."""
        found: list[Any] = []

        def are_there() -> bool:
            found[:] = [
                fact
                for fact in journal_of(self._stories.storage / name)
                if isinstance(fact, kind) and all(getattr(fact, n) == v for n, v in fields.items())
            ]
            return len(found) >= count

        self._await(are_there, f"{count} {kind.__name__} {fields}", stage.PATIENCE)
        return found

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

    def __init__(self, engine: str, cluster: Cluster | None, warm: WarmPython) -> None:
        self.engine, self._cluster, self._warm = engine, cluster, warm
        # Not pytest's own: a socket's path must fit into 107 bytes.
        self.root = Path(tempfile.mkdtemp(prefix="st-", dir="/tmp"))
        self.storage, self.temporary, self.runtime = (self.root / n for n in ("storage", "tmp", "run"))
        for place in (self.temporary, self.runtime):
            place.mkdir(mode=0o700)
        self._mark = new_mark()
        self._shared_memory = _shared_memory()
        self._drivers: list[Driver] = []

    def start(
        self,
        scenario: str,
        engine: str = "",
        options: tuple[str, ...] = (),
        terminal: int | None = None,
        torchrun: Sequence[str] = _TORCHRUN,
        shows_there: bool = False,
    ) -> Driver:
        """Start a driver of its own session on the story's engine, unless another is named; ``terminal`` becomes its
        controlling terminal, to which it prints if ``shows_there``."""
        engine = engine or self.engine
        # torchrun's own log directory is kept by torchrun, and no matter of ours.
        launcher = [*torchrun, f"--log-dir={self.root}/torchrun", *options]
        if engine != "torchrun":
            launcher = [sys.executable]
        script = _DRIVERS / "driver.py"
        afresh = (*stage.WITHOUT_TORCH, *stage.ABOUT_THE_INTERPRETER)
        if engine in ("local", "inline") and terminal is None and scenario not in afresh:
            return self._launch_warm(script, (scenario,), self._environment(engine))
        command = [*launcher, str(script), scenario]
        return self._launch(command, self._environment(engine), terminal, shows_there)

    def start_program(self, path: Path, *arguments: str, variables: dict[str, str] | None = None) -> Driver:
        """Start a program that knows nothing of the story, in the story's environment and with these variables."""
        environment = {**self._environment(self.engine), **(variables or {})}
        if self.engine == "local":
            return self._launch_warm(path, arguments, environment)
        return self._launch([sys.executable, str(path), *arguments], environment)

    def start_powertrain(self, *arguments: str, variables: dict[str, str] | None = None) -> Driver:
        """Start the command line as a driver."""
        command = [sys.executable, "-c", "from powertrain.cli.main import main; main()", *arguments]
        return self._launch(command, {**self._environment(self.engine), **(variables or {})})

    def _launch(
        self,
        command: list[str],
        environment: dict[str, str],
        terminal: int | None = None,
        shows_there: bool = False,
    ) -> Driver:
        output = self.root / f"output-{len(self._drivers)}"
        with output.open("wb") as file:
            process = subprocess.Popen(
                command,
                env=environment,
                cwd=self.root,
                stdin=subprocess.DEVNULL if terminal is None else terminal,
                stdout=terminal if shows_there else file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_heed_hangups if terminal is None else _take_terminal,
            )
        self._drivers.append(Driver(self, process, output))
        return self._drivers[-1]

    def _launch_warm(self, script: Path, arguments: Sequence[str], environment: dict[str, str]) -> Driver:
        output = self.root / f"output-{len(self._drivers)}"
        with output.open("wb") as file:
            process = self._warm.start(
                script, *arguments, env=environment, cwd=self.root, output=file.fileno(), mark=self._mark
            )
        self._drivers.append(Driver(self, process, output))
        return self._drivers[-1]

    def facts(self, name: str) -> list[Any]:
        return journal_of(self.storage / name)

    def assert_nothing_left(self) -> None:
        _assert_gone(self._left, _GONE_WITHIN["ray" if self._cluster else "local"])

    def abort(self) -> None:
        """Have every process say where it is, and end."""
        processes = self._processes()
        for pid in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGABRT)
        deadline = time.monotonic() + _GONE_WITHIN["local"]
        while self._processes() and time.monotonic() < deadline:
            time.sleep(0.02)

    def close(self) -> None:
        """End whatever a failed story left, so that it cannot disturb the next."""
        for pid in self._processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for driver in self._drivers:
            driver.process.kill()
            driver.process.wait()
        shutil.rmtree(self.root)

    def _environment(self, engine: str) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "POWERTRAIN_"))}
        return {
            **inherited,
            **({"RAY_ADDRESS": self._cluster.address} if self._cluster else {}),
            MARK: self._mark,
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
        return [*processes, *files, *shared, *(self._cluster.left() if self._cluster else [])]

    def _processes(self) -> list[int]:
        return processes_marked(self._mark)


def _below(place: Path) -> list[Path]:
    """All that lies below ``place``, while others may be removing it."""
    while True:
        with contextlib.suppress(FileNotFoundError):
            return sorted(place.rglob("*"))


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    _heed_hangups()


def _heed_hangups() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which is ignored where the tests were started by nohup


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return "gone by now"


def _shared_memory() -> set[str]:
    """All there is, but for the directories that only hold runs' own, and those that ``tempfile`` has named.

    Nothing of ours has such a name; servers that other tests start have (MLflow's).
    """
    own = f"/dev/shm/powertrain-{os.getuid()}"
    found = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if not name.startswith("tmp")} - {own}
    with contextlib.suppress(FileNotFoundError):
        found |= {f"{own}/{name}" for name in os.listdir(own)}
    return found


def _is_locked(directory: str) -> bool:
    """True when a live process holds the directory, or has removed it meanwhile."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _used_by_others(path: str) -> bool:
    """True when a process that is alive has the file mapped: ours are all gone by now, so it is a neighbour's.

    A run's directory there carries the number of the process that made it, and the root of a cluster run is locked by
    its processes.
    """
    if "-run-" in path and _is_locked(path):
        return True
    maker = os.path.basename(path).rsplit("-", 2)[1:2]
    if maker and maker[0].isdigit() and int(maker[0]) != os.getpid() and Path("/proc", maker[0]).exists():
        return True
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if entry.isdigit() and path in Path("/proc", entry, "maps").read_text():
                return True
    return False


def journal_of(run: Path) -> list[Any]:
    from powertrain.run.record import journal
    from powertrain.storage import open_storage

    return list(journal.read(open_storage(run)))


@pytest.fixture
def stories(engine: str, cluster: Cluster | None, warm_python: WarmPython) -> Iterator[Stories]:
    """Drivers of their own; whatever the story was, nothing may be left."""
    here = Stories(engine, cluster, warm_python)
    try:
        yield here
        here.assert_nothing_left()
    finally:
        here.close()


@pytest.fixture(params=["here", "on ray"])
def place(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where tasks and actors run. This process is connected for one story only."""
    import powertrain

    if request.param == "here":
        yield "here"
        return
    pytest.importorskip("ray")
    nodes = request.getfixturevalue("ray_nodes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONBREAKPOINT", "")  # Ray changes it, and leaves it changed
        powertrain.init(address=nodes.address)
        try:
            yield "on ray"
        finally:
            powertrain.shutdown()


@pytest.fixture(autouse=True)
def _no_new_shared_memory() -> Iterator[None]:
    before = _shared_memory()
    yield
    deadline = time.monotonic() + _GONE_WITHIN["local"]
    while left := [path for path in _shared_memory() - before if not _used_by_others(path)]:
        assert time.monotonic() < deadline, f"shared memory is left: {left}"
        time.sleep(0.05)


@pytest.fixture
def at_another_terminal(stories: Any) -> Iterator[Callable[..., Result]]:
    """Runs ``powertrain`` as the user whose drivers these are."""

    from powertrain.cli.main import app

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, list(arguments), catch_exceptions=False)

    with pytest.MonkeyPatch.context() as patch:  # undone before the check for what the test left
        patch.setenv("XDG_RUNTIME_DIR", str(stories.runtime))
        yield run
