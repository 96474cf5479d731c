"""The warm server and its driver: whichever dies, nothing is left."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cloudpickle
import hypothesis
import psutil
import pytest
from hypothesis import strategies as st

from powertrain import tasks
from powertrain.engine import process
from powertrain.engine.base import Exited, ProcessSpec, SlotLost, Started
from powertrain.engine.local import engine as local_engine
from powertrain.engine.local import warm_server
from powertrain.engine.local.engine import LocalEngine
from powertrain.engine.local.warm_server import WarmServer
from powertrain.testing.engine_contract import Stage, is_running, program

#: Seconds within which everything must be gone after a violent end.
GONE_WITHIN = 30.0


def wait_until_gone(pids: list[int], paths: list[Path]) -> None:
    deadline = time.monotonic() + GONE_WITHIN
    while left := [*filter(is_running, pids), *[path for path in paths if path.exists()]]:
        assert time.monotonic() < deadline, f"still there after {GONE_WITHIN:g} s: {left}"
        time.sleep(0.01)


@pytest.fixture
def server() -> Iterator[WarmServer]:
    server = WarmServer()
    yield server
    server.close()
    wait_until_gone([server.pid], [])


@pytest.fixture
def stage(server: WarmServer) -> Iterator[Stage]:
    engine = LocalEngine(server)
    yield Stage(engine)
    engine.close()


def test_a_process_forked_from_a_server_that_is_not_warm_yet_reports_how_long_it_waited(
    server: WarmServer, stage: Stage
) -> None:
    (slot,) = stage.slots()
    stage.run(slot, program("exit_with", 0))
    early = stage.wait_for(Started, slot)
    assert 0 < early.imports <= early.waited
    stage.run(slot, program("exit_with", 0))
    late = stage.all_of(Started, slot)[1]
    assert (late.waited, late.imports) == (0.0, 0.0)


def test_a_killed_server_means_lost_slots_and_no_worker_left(server: WarmServer, stage: Stage) -> None:
    slots = stage.slots(2)
    for slot in slots:
        stage.engine.fork(slot, program("wait"))
        stage.wait_for_output(slot, b"waiting")
    pids = [started.pid for started in stage.all_of(Started)]
    os.kill(server.pid, signal.SIGKILL)
    for slot in slots:
        assert "killed" in stage.wait_for(SlotLost, slot).reason
    wait_until_gone(pids, [])
    assert not stage.all_of(Exited)


def test_a_killed_server_leaves_no_child_of_a_worker_either(server: WarmServer, stage: Stage) -> None:
    (slot,) = stage.slots()
    stage.engine.fork(slot, program("leave_children", "wait"))
    pids = json.loads(stage.wait_for_output(slot, b"waiting").splitlines()[0])
    os.kill(server.pid, signal.SIGKILL)
    stage.wait_for(SlotLost, slot)
    try:
        wait_until_gone(pids, [])
    finally:
        for pid in filter(is_running, pids):
            os.kill(pid, signal.SIGKILL)


def test_children_are_ended_where_the_kernel_ends_their_worker_before_the_driver_notices(
    server: WarmServer, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    (slot,) = stage.slots()
    stage.engine.fork(slot, program("leave_children", "wait"))
    pids = json.loads(stage.wait_for_output(slot, b"waiting").splitlines()[0])
    worker = stage.wait_for(Started, slot).pid
    kill_scope = process.kill_scope

    def kill_scope_late(pid: int) -> None:
        wait_until_gone([worker], [])
        kill_scope(pid)

    monkeypatch.setattr(process, "kill_scope", kill_scope_late)
    os.kill(server.pid, signal.SIGKILL)
    stage.wait_for(SlotLost, slot)
    try:
        wait_until_gone(pids, [])
    finally:
        process.kill_all(filter(is_running, pids))


def test_slots_requested_after_the_server_was_killed_work_again(server: WarmServer, stage: Stage) -> None:
    (slot,) = stage.slots()
    stage.engine.fork(slot, program("wait"))
    stage.wait_for_output(slot, b"waiting")
    os.kill(server.pid, signal.SIGKILL)
    stage.wait_for(SlotLost, slot)
    stage.engine.release([slot])
    (fresh,) = stage.slots()
    assert stage.run(fresh, program("exit_with", 6)).code == 6


def test_what_need_not_be_swept_any_more_outlasts_a_server_that_took_it_over_from_a_killed_one(
    server: WarmServer, stage: Stage, tmp_path: Path
) -> None:
    server.sweep_if_orphaned("run", [str(tmp_path)])
    os.kill(server.pid, signal.SIGKILL)
    server.wait_for_end(GONE_WITHIN)
    (slot,) = stage.slots()
    assert stage.run(slot, program("exit_with", 0)).code == 0, "then it has heard what to sweep"

    server.sweep_if_orphaned("run", [])
    (heir,) = (other for other in warm_server._shared if other.alive and not other.preload)
    heir.close()
    heir.wait_for_end(GONE_WITHIN)
    assert tmp_path.exists()


def test_closing_the_server_ends_what_it_forked(server: WarmServer, stage: Stage) -> None:
    (slot,) = stage.slots()
    stage.engine.fork(slot, program("leave_children", "wait"))
    pids = json.loads(stage.wait_for_output(slot, b"waiting").splitlines()[0])
    server.close()
    wait_until_gone([server.pid, stage.wait_for(Started, slot).pid, *pids], [])


def test_a_server_that_still_imports_is_gone_at_once_when_it_is_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(tmp_path, "torch.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(warm_server, "why_fork_is_unsafe", lambda: "it is started clean here")
    server = WarmServer(preload=["torch"])
    assert is_running(server.pid)
    server.close()
    wait_until_gone([server.pid], [])


def test_a_server_apart_is_no_child_of_this_process_and_ends_what_it_forked_all_the_same() -> None:
    server = WarmServer(apart=True)
    engine = LocalEngine(server)
    stage = Stage(engine)
    try:
        assert server.pid not in {child.pid for child in psutil.Process().children(recursive=True)}
        (slot,) = stage.slots()
        stage.engine.fork(slot, program("leave_children", "wait"))
        pids = json.loads(stage.wait_for_output(slot, b"waiting").splitlines()[0])
    finally:
        server.close()
    wait_until_gone([server.pid, stage.wait_for(Started, slot).pid, *pids], [])
    engine.close()


DRIVER = """
import signal, sys, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the launcher of the tests may have ignored it
sys.modules["torch"] = None
from powertrain.engine.base import Granted, ProcessSpec, SlotShape
from powertrain.engine.local.engine import LocalEngine
from powertrain.engine.local.warm_server import warm_up

server = warm_up()
server.sweep_if_orphaned("test", [sys.argv[1]])
engine = LocalEngine(server)

def event(event):
    if isinstance(event, Granted):
        engine.fork(event.slots[0], ProcessSpec("powertrain.testing.programs:leave_children", b'"wait"', {}))

def output(slot, data):
    sys.stdout.buffer.write(data)
    sys.stdout.flush()

engine.start(event, output)
print(server.pid, flush=True)
engine.request(1, SlotShape())
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_a_driver_that_dies_leaves_no_process_and_no_directory(
    tmp_path: Path, number: signal.Signals
) -> None:
    swept = tmp_path / "swept"
    (swept / "below").mkdir(parents=True)
    with subprocess.Popen([sys.executable, "-c", DRIVER, str(swept)], stdout=subprocess.PIPE) as driver:
        assert driver.stdout is not None
        server = int(driver.stdout.readline())
        pids = json.loads(driver.stdout.readline())
        assert driver.stdout.readline() == b"waiting\n"
        assert all(map(is_running, [server, *pids]))
        driver.send_signal(number)
        driver.wait()
        wait_until_gone([server, *pids], [swept])


# --------------------------------------------------------------------------- what a worker is and does


def call(function: Callable[..., Any], *args: Any, env: dict[str, str | None] | None = None) -> ProcessSpec:
    """A process that calls ``function`` and leaves its value in the file ``args[0]``."""
    payload = cloudpickle.dumps((args[0], cloudpickle.dumps((function, args, {}))))
    return ProcessSpec(tasks.ENTRY, payload, env or {})


def value_of(path: Path) -> Any:
    ok, value = cloudpickle.loads(path.read_bytes())
    assert ok, value
    return value


VARIABLES = st.dictionaries(st.sampled_from("ABCD"), st.sampled_from(["", "1", "2"]))


@hypothesis.given(VARIABLES, VARIABLES)
def test_changes_lead_from_one_environment_to_the_other(before: dict[str, str], now: dict[str, str]) -> None:
    different = warm_server.changes(before, now)
    assert {name: value for name, value in {**before, **different}.items() if value is not None} == now
    assert all(before.get(name) != value for name, value in different.items())


def test_what_the_driver_changes_after_the_start_reaches_workers(stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "late_module.py").write_text("value = 5")
    names = ("LATE", "RANK", "PATH")

    def look(_: Path) -> list[Any]:
        import late_module  # type: ignore[import-not-found]

        return [*map(os.environ.get, names), late_module.value]

    (slot,) = stage.slots()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        patch.setenv("LATE", "yes")
        patch.setenv("RANK", "not this")
        patch.delenv("PATH")
        assert stage.run(slot, call(look, tmp_path / "value", env={"RANK": "0"})).code == 0
    assert value_of(tmp_path / "value") == ["yes", "0", None, 5]


def test_threads_and_pools_finish_before_a_worker_ends(stage: Stage, tmp_path: Path) -> None:
    def leave_work(path: Path) -> None:
        def late(name: str) -> None:
            time.sleep(0.3)
            path.with_name(name).touch()

        threading.Thread(target=late, args=("thread",)).start()
        ThreadPoolExecutor(1).submit(late, "pool")

    (slot,) = stage.slots()
    assert stage.run(slot, call(leave_work, tmp_path / "value")).code == 0
    assert (tmp_path / "thread").exists()
    assert (tmp_path / "pool").exists()


# --------------------------------------------------------------------------- forks of the driver and of workers


def output_of(script: str, *arguments: str) -> list[str]:
    """What a driver without torch prints, line by line."""
    code = "import os, sys\nsys.modules['torch'] = None\n" + textwrap.dedent(script)
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True, timeout=30, check=True
    )
    return done.stdout.splitlines()


def test_a_worker_can_have_workers_of_its_own() -> None:
    script = """
        import powertrain

        def outer():
            return powertrain.get(powertrain.remote(lambda: 20 + 1).remote(), timeout=20) * 2

        print(powertrain.get(powertrain.remote(outer).remote(), timeout=25))
    """
    assert output_of(script) == ["42"]


def test_the_end_of_a_forked_child_leaves_the_server_to_its_parent() -> None:
    script = """
        import powertrain
        from powertrain.engine.local.warm_server import warm_up

        before = warm_up().pid
        child = os.fork()
        if child == 0:
            sys.exit(0)
        os.waitpid(child, 0)
        print(powertrain.get(powertrain.remote(lambda: "works").remote(), timeout=20))
        print(warm_up().pid == before)
    """
    assert output_of(script) == ["works", "True"]


def test_the_server_of_a_forked_child_does_not_sweep_for_the_parent(tmp_path: Path) -> None:
    script = """
        import time
        from powertrain.engine.local.warm_server import warm_up

        warm_up().sweep_if_orphaned("parents", [sys.argv[1]])
        child = os.fork()
        if child == 0:
            server = warm_up()
            while server.warmed is None:
                time.sleep(0.01)
            server.close()
            while os.path.exists(f"/proc/{server.pid}"):
                time.sleep(0.01)
            os._exit(0)
        os.waitpid(child, 0)
        print(os.path.exists(sys.argv[1]))
        warm_up().sweep_if_orphaned("parents", [])
    """
    assert output_of(script, str(tmp_path)) == ["True"]


def test_a_server_started_clean_gives_no_warning() -> None:
    ours, theirs = socket.socketpair()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as warned, ours, theirs:
        warnings.simplefilter("always")
        patch.setattr(sys, "executable", shutil.which("true"))
        pid = warm_server._start_clean(theirs, ())
        gc.collect()
    os.waitpid(pid, 0)
    assert not [str(warning.message) for warning in warned if issubclass(warning.category, ResourceWarning)]


# --------------------------------------------------------------------------- a server that does not answer


def test_a_second_kill_ends_a_frozen_server_and_all_that_it_forked(server: WarmServer, stage: Stage) -> None:
    slots = stage.slots(2)
    for slot in slots:
        stage.engine.fork(slot, program("wait"))
        stage.wait_for_output(slot, b"waiting")
    pids = [started.pid for started in stage.all_of(Started)]
    os.kill(server.pid, signal.SIGSTOP)
    stage.engine.signal(slots[0], signal.SIGKILL)
    asked = time.monotonic()
    while time.monotonic() - asked < warm_server._ANSWER_TIMEOUT_S:
        assert all(map(is_running, pids)), "a server that may only be busy is waited for"
        time.sleep(0.01)
    stage.engine.signal(slots[0], signal.SIGKILL)
    for slot in slots:
        stage.wait_for(SlotLost, slot)
    wait_until_gone([server.pid, *pids], [])


def test_a_second_kill_leaves_a_server_that_answers(server: WarmServer, stage: Stage) -> None:
    """The process it was meant for may take its time to go."""
    first, second = stage.slots(2)
    for slot in (first, second):
        stage.engine.fork(slot, program("wait"))
        stage.wait_for_output(slot, b"waiting")
    child = next(iter(server._children.values()))
    server.kill("nothing of that name", signal.SIGKILL)
    child.unanswered_since = time.monotonic() - 2 * warm_server._ANSWER_TIMEOUT_S
    id = next(iter(server._children))
    server._handle(server._protocol.Signalled(id=id))
    stage.engine.signal(first, signal.SIGKILL)
    assert stage.wait_for(Exited, first).code == -signal.SIGKILL
    assert server.alive
    assert is_running(server.pid)


def test_closing_an_engine_ends_what_a_frozen_server_has_forked(
    server: WarmServer, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_engine, "CLOSE_TIMEOUT_S", 1.2 * warm_server._ANSWER_TIMEOUT_S)
    (slot,) = stage.slots()
    stage.engine.fork(slot, program("wait"))
    stage.wait_for_output(slot, b"waiting")
    (started,) = stage.all_of(Started)
    os.kill(server.pid, signal.SIGSTOP)
    stage.engine.close()
    wait_until_gone([server.pid, started.pid], [])


def test_closing_a_frozen_server_thaws_it_so_that_it_can_end(server: WarmServer) -> None:
    deadline = time.monotonic() + 30
    while server.warmed is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(server.pid, signal.SIGSTOP)
    server.close()
    wait_until_gone([server.pid], [])


# --------------------------------------------------------------------------- commands that the server does not read yet


def in_time(action: Callable[[], None]) -> None:
    """Call ``action``, which must not wait for the server."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive(), "it waits for a server that is frozen"


@pytest.fixture
def crowded(server: WarmServer, stage: Stage) -> Iterator[WarmServer]:
    """A frozen server that has more commands to read than its socket holds."""
    while server.warmed is None:
        time.sleep(0.01)
    os.kill(server.pid, signal.SIGSTOP)

    def crowd() -> None:
        for _ in range(2000):
            server.kill("nothing of that name", signal.SIGTERM)

    in_time(crowd)
    yield server
    with contextlib.suppress(ProcessLookupError):
        os.kill(server.pid, signal.SIGCONT)


def test_a_signal_reaches_its_process_once_the_server_reads_again(
    server: WarmServer, stage: Stage, request: pytest.FixtureRequest
) -> None:
    (slot,) = stage.slots()
    stage.engine.fork(slot, program("wait"))
    stage.wait_for_output(slot, b"waiting")
    request.getfixturevalue("crowded")
    in_time(lambda: stage.engine.signal(slot, signal.SIGTERM))
    os.kill(server.pid, signal.SIGCONT)
    assert stage.wait_for(Exited, slot).code == -signal.SIGTERM


def test_a_fork_and_the_signal_after_it_reach_the_server_in_their_order(
    crowded: WarmServer, stage: Stage
) -> None:
    first, second = stage.slots(2)
    before = len(os.listdir("/proc/self/fd"))
    in_time(lambda: stage.engine.fork(first, program("wait")))
    in_time(lambda: stage.engine.signal(first, signal.SIGTERM))
    in_time(lambda: stage.engine.fork(second, program("exit_with", 3)))
    os.kill(crowded.pid, signal.SIGCONT)
    assert stage.wait_for(Exited, first).code == -signal.SIGTERM
    assert stage.wait_for(Exited, second).code == 3
    assert not crowded._commands
    deadline = time.monotonic() + GONE_WITHIN
    while len(left := os.listdir("/proc/self/fd")) > before:
        assert time.monotonic() < deadline, f"something that was queued is still open: {left}"
        time.sleep(0.01)


def test_what_was_queued_for_a_server_that_is_killed_is_lost_with_it(
    crowded: WarmServer, stage: Stage
) -> None:
    (slot,) = stage.slots()
    in_time(lambda: stage.engine.fork(slot, program("wait")))
    os.kill(crowded.pid, signal.SIGKILL)
    stage.wait_for(SlotLost, slot)
    assert not crowded._commands


def test_a_command_that_is_larger_than_the_socket_is_refused_at_once(
    crowded: WarmServer,
) -> None:
    spec = ProcessSpec(tasks.ENTRY, b"", {"LARGE": "x" * (1 << 20)})
    with pytest.raises(OSError, match="Message too long"):
        crowded.fork("large", spec, os.open(os.devnull, os.O_WRONLY), lambda *_: None, lambda *_: None)
    assert not crowded._children
