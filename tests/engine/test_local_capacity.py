"""What the local engine has room for: what the machine has, less what other runs hold."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from powertrain.engine import resources
from powertrain.engine.base import Capacity, Granted, SlotShape, Started, Waiting
from powertrain.engine.local import engine as local_engine
from powertrain.engine.local import ledger
from powertrain.engine.local.engine import LocalEngine
from powertrain.engine.local.warm_server import warm_up
from powertrain.storage.files import private_roots
from powertrain.testing.engine_contract import Stage, program

TWO_CPUS = SlotShape(cpus=2, explicit=True)
MACHINE = resources.Machine(cpus=8, gpus=("Made-up GPU",) * 2, visible=("0", "1"), custom={"license": 3.0})
MakeStage = Callable[[str], Stage]


@pytest.fixture
def make_stage() -> Iterator[MakeStage]:
    """Engines of several runs in this process, on a machine with eight cores and two GPUs."""
    engines: list[LocalEngine] = []

    def make(run: str) -> Stage:
        engines.append(LocalEngine(warm_up(), run=run))
        return Stage(engines[-1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resources, "detect", lambda custom=None: MACHINE)
        patch.setattr(local_engine, "_ledger", ledger.Ledger(private_roots.runtime_root))
        yield make
        for engine in engines:
            engine.close()


def capacities(stage: Stage) -> list[int]:
    return [event.count for event in stage.all_of(Capacity)]


def test_workers_without_named_resources_have_room_on_each_core_and_hold_nothing(
    make_stage: MakeStage,
) -> None:
    one, other = make_stage("one"), make_stage("other")
    other.slots(64)
    one.engine.watch_capacity(SlotShape())
    assert capacities(one) == [MACHINE.cpus]
    assert not (private_roots.runtime_root() / "claims").exists()
    assert "powertrain-capacity" not in {thread.name for thread in threading.enumerate()}


def test_cpus_that_were_named_are_waited_for_and_their_holder_is_named(make_stage: MakeStage) -> None:
    one, other = make_stage("digits"), make_stage("letters")
    slots = one.slots(3, TWO_CPUS)
    other.engine.request(2, TWO_CPUS)
    assert "waiting for 4 CPUs (2 free) held by run digits (pid " in other.wait_for(Waiting).reason
    one.engine.release(slots[:1])
    assert len(other.wait_for(Granted).slots) == 2


def test_custom_resources_are_waited_for(make_stage: MakeStage) -> None:
    shape = SlotShape(custom={"license": 1.0})
    one, other = make_stage("one"), make_stage("other")
    slots = one.slots(2, shape)
    other.engine.request(2, shape)
    assert "waiting for 2 license (1 free) held by run one" in other.wait_for(Waiting).reason
    one.engine.release(slots)
    other.wait_for(Granted)


def test_the_capacity_follows_what_other_runs_take_and_leave(make_stage: MakeStage) -> None:
    one, other = make_stage("one"), make_stage("other")
    one.slots(1, TWO_CPUS)
    one.engine.watch_capacity(TWO_CPUS)
    one.wait_until(lambda: capacities(one) == [4], "the whole machine")
    slots = other.slots(2, TWO_CPUS)
    one.wait_until(lambda: capacities(one) == [4, 2], "the half of it")
    one.slots(1, TWO_CPUS)
    other.engine.release(slots)
    one.wait_until(lambda: capacities(one)[-1] == 4, "the whole machine again, what is held included")


def test_a_slot_counts_as_free_for_others_when_its_process_is_gone(make_stage: MakeStage) -> None:
    one, other = make_stage("one"), make_stage("other")
    slots = one.slots(2, SlotShape(gpus=1))
    for slot in slots:
        one.engine.fork(slot, program("wait"))
        one.wait_for(Started, slot)
    other.engine.watch_capacity(SlotShape(gpus=1))
    other.wait_until(lambda: capacities(other) == [0], "no room")
    one.engine.release(slots)
    other.wait_until(lambda: capacities(other)[-1:] == [2], "both GPUs")


def test_a_closed_engine_holds_and_waits_for_nothing(make_stage: MakeStage) -> None:
    one, other, third = make_stage("one"), make_stage("other"), make_stage("third")
    one.slots(2, SlotShape(gpus=1))
    other.engine.watch_capacity(SlotShape(gpus=1))
    other.engine.request(2, SlotShape(gpus=1))
    third.engine.request(1, SlotShape(gpus=1))
    other.engine.close()
    one.engine.close()
    third.wait_for(Granted)
    assert not other.all_of(Granted)
    third.engine.close()
    assert not (private_roots.runtime_root() / "claims").exists()


def test_what_is_granted_to_an_engine_that_is_closing_is_given_back(make_stage: MakeStage) -> None:
    one, other = make_stage("one"), make_stage("other")
    one.slots(2, SlotShape(gpus=1))
    one.engine.request(1, SlotShape(gpus=1))
    engine = one.engine
    assert isinstance(engine, LocalEngine)
    engine._waiting.clear()  # as it is when the grant is on its way while the engine closes
    engine.close()
    assert len(other.slots(2, SlotShape(gpus=1))) == 2
