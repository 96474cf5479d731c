"""The scripted engine keeps the contract too, so a controller cannot tell it from a real one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
from tests.support.scripted_engine import ScriptedClaim, ScriptedEngine
from tests.support.scripted_worker import ScriptedProcess

from powertrain.engine.base import Capacity, Engine, EngineEvent, Inspection, Slot, SlotShape
from powertrain.testing.engine_contract import EngineContract, Stage, program
from powertrain.wire.values import ProcessStack


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

    def changing_capacity(self, stage: Stage) -> tuple[SlotShape, Callable[[], None]]:
        engine = stage.engine
        assert isinstance(engine, ScriptedEngine)
        engine.tell_capacity(6)
        return SlotShape(), lambda: engine.tell_capacity(8)

    def request_that_waits(self, stage: Stage) -> Callable[[], None]:
        engine = stage.engine
        assert isinstance(engine, ScriptedEngine)
        claim = engine.request(8, SlotShape())

        def free() -> None:
            engine.grant(claim, 2)

        return free


class Listener:
    """A started engine and its events."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.events: list[EngineEvent] = []
        engine.start(self.events.append, lambda _slot, _data: None)


def test_a_scripted_engine_without_capacity_events_reports_none() -> None:
    engine = ScriptedEngine()
    told = Listener(engine).events
    engine.watch_capacity(SlotShape(gpus=1.0))
    assert engine.watched == SlotShape(gpus=1.0)
    assert told == []
    engine.tell_capacity(3)
    engine.tell_capacity(3)
    engine.close()
    assert told == [Capacity(3)], "the same number twice is no change"


def test_what_is_seen_of_a_played_process_is_the_scripts_to_say() -> None:
    engine = ScriptedEngine(programs=PROGRAMS)
    Listener(engine)
    (slot,) = engine.grant(engine.request(1, SlotShape()), 1)
    engine.fork(slot, program("wait"))
    played = engine.forked[0]
    stack = ProcessStack(pid=played.pid, title="rank 0", state="stopped", threads=[])
    played.state, played.debugged, played.stacks = "stopped", True, (stack,)
    assert engine.inspect(slot) == Inspection(played.pid, "stopped", (), debugged=True)
    assert engine.inspect(slot, stacks=True).processes == (stack,)
    engine.close()
