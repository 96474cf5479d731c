"""The local engine keeps the contract, with real processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from powertrain.engine import local, resources
from powertrain.engine.base import Engine, SlotShape
from powertrain.engine.local import LocalEngine, warm_up
from powertrain.testing.engine_contract import ProcessContract, Stage


class TestLocalEngine(ProcessContract):
    @pytest.fixture
    def engine(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
        machine = replace(resources.detect(), gpus=("Made-up GPU",), visible=("0",))
        monkeypatch.setattr(resources, "detect", lambda custom=None: machine)
        monkeypatch.setattr(local, "_ledger", resources.Ledger())
        engine = LocalEngine(warm_up())
        yield engine
        engine.close()

    def request_that_waits(self, stage: Stage) -> Callable[[], None]:
        shape = SlotShape(gpus=1.0)
        slots = stage.slots(1, shape)
        stage.engine.request(1, shape)
        return lambda: stage.engine.release(slots)
