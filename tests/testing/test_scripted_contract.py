"""The scripted engine keeps the contract too, so a controller cannot tell it from a real one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from powertrain.engine.base import Engine, Slot, SlotShape
from powertrain.testing.engine_contract import EngineContract, Stage
from powertrain.testing.scripted_engine import ScriptedClaim, ScriptedEngine, ScriptedProcess


def _exit_with(process: ScriptedProcess) -> int:
    return int(json.loads(process.spec.payload))


def _write(process: ScriptedProcess) -> int:
    for text in json.loads(process.spec.payload):
        process.write(text)
    return 0


def _wait(process: ScriptedProcess) -> int:
    process.write("waiting\n")
    process.wait_for()
    return 0


def _raise_error(process: ScriptedProcess) -> int:
    raise RuntimeError("this program was made to fail")


PROGRAMS = {
    f"powertrain.testing.programs:{play.__name__[1:]}": play
    for play in (_exit_with, _write, _wait, _raise_error)
}


def _grant_what_is_free(engine: ScriptedEngine, claim: ScriptedClaim) -> None:
    free = 6 - sum(len(earlier.slots) for earlier in engine.claims)
    if claim.count <= free:
        engine.grant(claim, claim.count)
    else:
        engine.grant(claim, free)
        engine.say_waiting(claim, f"{claim.count - free} slot(s) are not free")


class TestScriptedEngine(EngineContract):
    @pytest.fixture
    def engine(self) -> Iterator[Engine]:
        engine = ScriptedEngine(programs=PROGRAMS, on_request=_grant_what_is_free, most=8)
        yield engine
        engine.close()

    def impossible_request(self) -> tuple[int, SlotShape]:
        return 9, SlotShape()

    def lose(self, engine: Engine, slot: Slot) -> None:
        assert isinstance(engine, ScriptedEngine)
        engine.lose(slot)

    def drain(self, engine: Engine, slot: Slot, deadline: float) -> None:
        assert isinstance(engine, ScriptedEngine)
        engine.drain(slot, deadline)

    def request_that_waits(self, stage: Stage) -> Callable[[], None]:
        engine = stage.engine
        assert isinstance(engine, ScriptedEngine)
        claim = engine.request(8, SlotShape())

        def free() -> None:
            engine.grant(claim, 2)

        return free
