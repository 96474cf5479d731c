"""GPUs of this machine pass from one claim to the next only when no process uses them any more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from powertrain.engine import resources
from powertrain.engine.base import EngineEvent, Granted, SlotShape, Started
from powertrain.engine.local import engine as local_engine
from powertrain.engine.local import ledger
from powertrain.engine.local.engine import LocalEngine
from powertrain.engine.local.warm_server import warm_up
from powertrain.storage.files import private_roots
from powertrain.testing.engine_contract import Stage, is_running, program

ONE_GPU = SlotShape(gpus=1.0)


@pytest.fixture
def stage() -> Iterator[Stage]:
    machine = replace(resources.detect(), gpus=("Made-up GPU",) * 2, visible=("0", "1"), uuids=())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resources, "detect", lambda custom=None: machine)
        patch.setattr(local_engine, "_ledger", ledger.Ledger(private_roots.runtime_root))
        engine = LocalEngine(warm_up())
        yield Stage(engine)
        engine.close()


def test_giving_back_one_slot_of_a_claim_does_not_give_away_the_gpus_of_the_others(stage: Stage) -> None:
    kept, given_back = stage.slots(2, ONE_GPU)
    stage.engine.release([given_back])
    stage.engine.request(1, ONE_GPU)
    taken = [slot.gpus for event in stage.all_of(Granted)[1:] for slot in event.slots]
    assert kept.gpus not in taken


def test_a_gpu_is_handed_on_only_when_the_process_that_used_it_is_gone(stage: Stage) -> None:
    slots = stage.slots(2, ONE_GPU)
    for slot in slots:
        stage.engine.fork(slot, program("wait"))
        stage.wait_for_output(slot, b"waiting")
    pids = [started.pid for started in stage.all_of(Started)]
    alive_at_grant: list[int] = []

    def look(event: EngineEvent) -> None:
        if isinstance(event, Granted):
            alive_at_grant.extend(filter(is_running, pids))

    stage.on_event = look
    stage.engine.request(2, ONE_GPU)
    stage.engine.release(slots)
    stage.wait_for(Granted, count=2)
    assert alive_at_grant == []
