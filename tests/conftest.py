"""What holds for every test: its tier, its own storage, its deadline, and that it leaves nothing behind."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from tests.other_user import OtherUser
from tests.ray_autoscaled import RayAutoscaled
from tests.ray_nodes import RayNodes
from tests.s3_server import Proxy, S3Server
from tests.support import deadlines, durations, scheduling, tiers
from tests.support.leftovers import Surroundings, clusters
from tests.support.warm_python import WarmPython

for _name, _examples in {"dev": 20, "ci": 100, "nightly": 1000}.items():
    hypothesis.settings.register_profile(
        _name, deadline=None, max_examples=_examples, derandomize=_name == "ci"
    )
hypothesis.settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev")
)

#: Standard error of this process, which pytest redirects during tests.
_STDERR = pytest.StashKey[int]()
#: The file with the groups of tests, in the main process of a session with several workers.
_GROUPS = pytest.StashKey[Path]()
#: The files with slow tests.
_SLOW_FILES = pytest.StashKey[Collection[str]]()


# --------------------------------------------------------------------------- tiers, workers, deadlines


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options of this file."""
    help = "seconds after a test's timeout until its process is ended"
    parser.addini(deadlines.GRACE, help, default=str(deadlines.GRACE_S))


def pytest_configure(config: pytest.Config) -> None:
    """Declare the markers, and keep standard error for what is written when a test hangs."""
    # Threads of OpenMP spin while they wait: with several workers on a few cores, most of the time of a small model.
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # which torch reads when it is imported
    for marker in tiers.MARKERS:
        config.addinivalue_line("markers", marker)
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        config.stash[_GROUPS] = scheduling.make_groups_file()
    config.stash[_STDERR] = os.dup(sys.__stderr__.fileno() if sys.__stderr__ is not None else 2)
    if (
        signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    ):  # in the background of a shell; drivers would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Close what :func:`pytest_configure` has opened."""
    os.close(config.stash[_STDERR])
    if _GROUPS in config.stash:
        config.stash[_GROUPS].unlink(missing_ok=True)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files without a test of the tier that is run."""
    if collection_path.suffix != ".py" or config.option.markexpr not in (tiers.REST, tiers.REST_ON_RAY):
        return None
    if not collection_path.is_relative_to(config.rootpath):
        return None
    if _SLOW_FILES not in config.stash:
        config.stash[_SLOW_FILES] = tiers.slow_files(durations.recorded())
    file = collection_path.relative_to(config.rootpath).as_posix()
    text = collection_path.read_text("utf-8")
    return tiers.is_left_out(file, text, config.option.markexpr, config.stash[_SLOW_FILES]) or None


@pytest.hookimpl(tryfirst=True)  # before -m chooses among the markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark every test; on a worker begin with what takes longest."""
    seconds = durations.recorded()
    tiers.mark(items, seconds)
    if config.option.markexpr not in (tiers.REST, tiers.REST_ON_RAY):
        mistakes = tiers.left_out_by_mistake(items, seconds)
        assert not mistakes, (
            f"tiers.is_left_out() would leave out these tests of `make test-rest`: {mistakes}"
        )
    if hasattr(config, "workerinput"):
        items[:] = scheduling.in_order(items, seconds)
        scheduling.write_groups(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> scheduling.ByFile:
    """Return the scheduler for runs with several workers."""
    return scheduling.ByFile(config, log)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Run a test with its deadline."""
    with deadlines.ending_the_process(item, item.config.stash[_STDERR]):
        return (yield)


class _Failures:
    """Prints each failure as soon as it is known: a session that is ended from outside never comes to its summary."""

    def __init__(self, terminal: Any) -> None:
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Print which test has failed, where and why."""
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            why = f"{crash.path}:{crash.lineno}: {crash.message}" if crash else report.longreprtext
            self._terminal.write_line(f"\nFAILED {report.nodeid} ({report.when}): {why[:2000]}")


@pytest.hookimpl(trylast=True)  # after pytest's own terminal
def pytest_sessionstart(session: pytest.Session) -> None:
    """Print failures while the session goes on, where there is a terminal: not in xdist's workers."""
    terminal = session.config.pluginmanager.getplugin("terminalreporter")
    if terminal is not None and not hasattr(session.config, "workerinput"):
        session.config.pluginmanager.register(_Failures(terminal))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Refuse a test that would be run again without a reason."""
    unsteady = item.get_closest_marker("unsteady")
    if unsteady is not None and not unsteady.kwargs.get("reason"):
        pytest.fail(f"{item.name} is marked as unsteady without a reason", pytrace=False)


# --------------------------------------------------------------------------- around every test


@pytest.fixture(scope="session", autouse=True)
def _own_runtime_directory() -> Iterator[None]:
    """Sockets of this session lie apart from any other's; the path is short because sockets need that."""
    directory = tempfile.mkdtemp(prefix="pt-")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", directory)
        patch.setenv("XDG_CONFIG_HOME", f"{directory}/config")
        # The clusters of these tests go without tokens. A process that once began to use them would go on for good.
        patch.setenv("RAY_AUTH_MODE", "disabled")
        yield
    shutil.rmtree(directory)


@pytest.fixture(scope="module", autouse=True)
def _own_signal_handlers() -> Iterator[None]:
    """Connecting to Ray sets a handler for SIGTERM, and leaving does not take it back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        if handler is not None:  # which is one that was not set by Python
            signal.signal(number, handler)


@pytest.fixture(scope="session")
def _numbered_directories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """New paths in the session's own directory. pytest's ``mktemp`` lists all earlier ones for each new one."""
    base = tmp_path_factory.getbasetemp()
    return (base / str(number) for number in itertools.count())


@pytest.fixture
def tmp_path(_numbered_directories: Iterator[Path]) -> Path:
    """A new, empty directory."""
    path = next(_numbered_directories)
    path.mkdir(mode=0o700)
    return path


@pytest.fixture(autouse=True)
def _own_storage(monkeypatch: pytest.MonkeyPatch, _numbered_directories: Iterator[Path]) -> None:
    """Runs without a storage path go to a directory of this test."""
    path = next(_numbered_directories)
    path.mkdir(mode=0o700)
    monkeypatch.setenv("POWERTRAIN_STORAGE", str(path))


@pytest.fixture(autouse=True)
def _nothing_left_behind(_own_storage: None) -> Iterator[None]:
    """Fails the test that leaves a process, a thread, a variable, a directory or a file behind."""
    before = Surroundings()
    yield
    left = before.leftovers()
    assert not left, "the test left something behind:\n" + "\n".join(f"- {line}" for line in left)


@pytest.fixture(autouse=True)
def _traced_as_before() -> Iterator[None]:
    """Tests of debuggers remove the trace function of their thread: that of `make coverage`, for all later tests."""
    before = sys.gettrace()
    yield
    if sys.gettrace() is not before:
        sys.settrace(before)


@pytest.fixture(autouse=True)
def _no_usage_poller() -> Iterator[None]:
    """Tests disconnect with ``ray.shutdown()``; a thread of Ray Data that calls Ray afterwards ends the process."""
    yield
    if "ray.data" in sys.modules:
        from powertrain.engine.ray.client import stop_usage_poller

        stop_usage_poller()


@pytest.fixture
def mount_small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a file system of so many bytes ("256k", "8m") for one test; skips where that is not allowed."""
    disk = tmp_path / "disk"

    def mount(size: str) -> Path:
        disk.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)]
        mounted = subprocess.run(command, capture_output=True)
        if mounted.returncode != 0:
            pytest.skip("a small file system cannot be mounted here: " + mounted.stderr.decode())
        return disk

    yield mount
    if disk.is_mount():
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.fixture
def other_user() -> OtherUser:
    """Another user of this machine; skips the test where only root could become one."""
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    return OtherUser()


@pytest.fixture
def shared_directory() -> Iterator[Path]:
    """A directory that every user can write to, sticky as ``/tmp`` is, with a short path for sockets."""
    with tempfile.TemporaryDirectory(prefix="pt-shared-") as name:
        os.chmod(name, 0o1777)
        yield Path(name)


@pytest.fixture(scope="session")
def _s3_of_session() -> Iterator[S3Server]:
    """One S3 server for the whole session: each takes more than a second of processor time to start."""
    with S3Server() as server:
        yield server


@pytest.fixture(scope="module")
def s3(_s3_of_session: S3Server) -> S3Server:
    """An S3 server that is empty at the beginning of each file of tests."""
    _s3_of_session.empty()
    return _s3_of_session


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[Proxy]:
    """A way to the S3 server that can be made to misbehave."""
    with Proxy(s3.port) as proxy:
        yield proxy


@pytest.fixture(scope="session")
def warm_python() -> Iterator[WarmPython]:
    """Starts scripts that have torch loaded from the start, each in a process of its own."""
    with WarmPython() as python:
        yield python


@pytest.fixture(scope="session")
def ray_nodes() -> Iterator[RayNodes]:
    """A Ray of a head and one node with eight CPUs, for the whole session. A test that adds a node removes it again."""
    nodes = RayNodes()
    clusters.append(nodes.pid)
    try:
        nodes.add(num_cpus=8, resources={"custom": 4})
        yield nodes
    finally:
        nodes.close()
        clusters.remove(nodes.pid)


@pytest.fixture(scope="module")
def ray_cluster(ray_nodes: RayNodes) -> Iterator[RayNodes]:
    """The same, with this process connected to it."""
    import ray

    from powertrain.engine.ray.client import connect

    with pytest.MonkeyPatch.context() as patch:
        # A thread of Ray's prints what became of nodes of earlier tests: amid what a test captures.
        patch.setattr(ray._private.worker, "print_to_stdstream", lambda *_, **__: None)
        connect(ray_nodes.address)
        yield ray_nodes
        ray.shutdown()


@pytest.fixture(scope="module")
def ray_autoscaled(request: pytest.FixtureRequest) -> Iterator[RayAutoscaled]:
    """A Ray that adds nodes of one CPU by itself, for a file of tests; its options may be given as a parameter."""
    cluster = RayAutoscaled(**getattr(request, "param", {}))
    clusters.append(cluster.pid)
    try:
        yield cluster
    finally:
        cluster.close()
        clusters.remove(cluster.pid)
