"""The local engine keeps the contract, with real processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from powertrain.engine import resources
from powertrain.engine.base import Engine, Exited, SlotShape, Started
from powertrain.engine.local import engine as local_engine
from powertrain.engine.local import ledger
from powertrain.engine.local.engine import LocalEngine
from powertrain.engine.local.warm_server import warm_up
from powertrain.storage.files import private_roots
from powertrain.testing.engine_contract import PATIENCE, ProcessContract, Stage, program
from powertrain.trace.machine import processes

ONE_GPU = SlotShape(gpus=1.0)


def await_state(pid: int, state: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while processes.state(pid) != state:
        assert time.monotonic() < deadline, f"process {pid} is {processes.state(pid)}, not {state}"
        time.sleep(0.01)


class TestLocalEngine(ProcessContract):
    @pytest.fixture
    def engine(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
        machine = replace(resources.detect(), gpus=("Made-up GPU",), visible=("0",), uuids=())
        monkeypatch.setattr(resources, "detect", lambda custom=None: machine)
        monkeypatch.setattr(local_engine, "_ledger", ledger.Ledger(private_roots.runtime_root))
        engine, self.other_run = LocalEngine(warm_up()), LocalEngine(warm_up())
        yield engine
        engine.close()
        self.other_run.close()

    def request_that_waits(self, stage: Stage) -> Callable[[], None]:
        slots = stage.slots(1, ONE_GPU)
        stage.engine.request(1, ONE_GPU)
        return lambda: stage.engine.release(slots)

    def changing_capacity(self, stage: Stage) -> tuple[SlotShape, Callable[[], None]]:
        def change() -> None:
            self.other_run.request(1, ONE_GPU)

        return ONE_GPU, change

    def test_a_process_that_has_ended_is_in_doubt_until_its_exit_is_reported(
        self, stage: Stage, engine: LocalEngine
    ) -> None:
        (slot,) = stage.slots()
        engine.fork(slot, program("wait"))
        pid = stage.wait_for(Started, slot).pid
        assert not engine.is_in_doubt(time.monotonic())
        os.kill(engine._server.pid, signal.SIGSTOP)
        try:
            await_state(engine._server.pid, "stopped")
            os.kill(pid, signal.SIGKILL)
            await_state(pid, "zombie")
            assert engine.is_in_doubt(time.monotonic())
            assert not engine.is_in_doubt(time.monotonic() - local_engine._EXIT_REPORT_TIMEOUT_S)
        finally:
            os.kill(engine._server.pid, signal.SIGCONT)
        stage.wait_for(Exited, slot)
        stage.wait_until(lambda: not engine.is_in_doubt(time.monotonic()), "the end of the doubt")
