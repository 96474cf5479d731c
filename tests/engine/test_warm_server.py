"""The warm server and its driver: whoever dies, nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from powertrain.engine.base import Exited, SlotLost, Started
from powertrain.engine.local import LocalEngine, WarmServer
from powertrain.testing.engine_contract import Stage, is_running, program

#: Seconds within which everything must be gone after a violent end.
GONE_WITHIN = 5.0


def wait_until_gone(pids: list[int], paths: list[Path]) -> None:
    deadline = time.monotonic() + GONE_WITHIN
    while left := [*filter(is_running, pids), *[path for path in paths if path.exists()]]:
        assert time.monotonic() < deadline, f"still there after {GONE_WITHIN:g} s: {left}"
        time.sleep(0.01)


@pytest.fixture
def server() -> Iterator[WarmServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torch", None)  # a server without torch is warm at once
        server = WarmServer()
    yield server
    server.close()
    wait_until_gone([server.pid], [])


@pytest.fixture
def stage(server: WarmServer) -> Iterator[Stage]:
    engine = LocalEngine(server)
    yield Stage(engine)
    engine.close()


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


def test_slots_requested_after_the_server_was_killed_work_again(server: WarmServer, stage: Stage) -> None:
    (slot,) = stage.slots()
    stage.engine.fork(slot, program("wait"))
    stage.wait_for_output(slot, b"waiting")
    os.kill(server.pid, signal.SIGKILL)
    stage.wait_for(SlotLost, slot)
    stage.engine.release([slot])
    (fresh,) = stage.slots()
    assert stage.run(fresh, program("exit_with", 6)).code == 6


def test_closing_the_server_ends_what_it_forked(server: WarmServer, stage: Stage) -> None:
    (slot,) = stage.slots()
    stage.engine.fork(slot, program("leave_children", "wait"))
    pids = json.loads(stage.wait_for_output(slot, b"waiting").splitlines()[0])
    server.close()
    wait_until_gone([server.pid, stage.wait_for(Started, slot).pid, *pids], [])


DRIVER = """
import sys, time
sys.modules["torch"] = None
from powertrain.engine.base import Granted, ProcessSpec, SlotShape
from powertrain.engine.local import LocalEngine, warm_up

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
