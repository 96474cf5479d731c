"""The Ray engine keeps the contract, on a real cluster of several raylets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.ray_nodes import RayNodes

from powertrain.engine.base import Capacity, Engine, Slot, SlotLost, SlotShape
from powertrain.engine.local.runtime_directories import make_runtime_directory, remove_runtime_directory
from powertrain.testing.engine_contract import PATIENCE, ProcessContract, Stage

pytest.importorskip("ray")
ONE_CUSTOM = SlotShape(cpus=0.0, custom={"custom": 4.0}, explicit=True)


@pytest.fixture
def runtime() -> Iterator[Path]:
    directory = make_runtime_directory("contract")
    yield directory
    remove_runtime_directory(directory)


def await_free(shape: SlotShape) -> None:
    """Wait until there is room for a slot of this shape."""
    from powertrain.engine.ray import capacity, client

    deadline = time.monotonic() + PATIENCE
    while capacity.fitting(client.nodes(), shape, 1) == 0:
        assert time.monotonic() < deadline, client.nodes()
        time.sleep(0.02)


class TestRayEngine(ProcessContract):
    @pytest.fixture
    def engine(self, ray_cluster: RayNodes, runtime: Path) -> Iterator[Engine]:
        from powertrain.engine.ray.engine import RayEngine
        from powertrain.engine.ray.options import RayOptions

        self.cluster = ray_cluster
        options = RayOptions(run="contract", runtime_dir=str(runtime))
        self.other = RayEngine(options)
        self.other.start(lambda _: None, lambda *_: None)
        engine = RayEngine(options)
        yield engine
        engine.close()
        self.other.close()

    def impossible_request(self) -> tuple[int, SlotShape]:
        return 100, SlotShape(placement="STRICT_PACK")

    def request_that_waits(self, stage: Stage) -> Callable[[], None]:
        slots = stage.slots(1, ONE_CUSTOM)
        stage.engine.request(1, ONE_CUSTOM)
        return lambda: stage.engine.release(slots)

    def changing_capacity(self, stage: Stage) -> tuple[SlotShape, Callable[[], None]]:
        await_free(ONE_CUSTOM)  # Ray may still count as held what the test before has released

        def change() -> None:
            self.other.request(1, ONE_CUSTOM)

        return ONE_CUSTOM, change

    def lose(self, engine: Engine, slot: Slot) -> None:
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(engine._placing.holder_of(slot).group.group)  # type: ignore[attr-defined]

    def test_a_slot_of_an_elastic_run_is_lost_with_the_actor_that_holds_its_resources(
        self, stage: Stage
    ) -> None:
        import ray

        (slot,) = stage.slots(1, SlotShape(gang=False))
        ray.kill(stage.engine._placing.holder_of(slot).actor)  # type: ignore[attr-defined]
        assert "held its resources" in stage.wait_for(SlotLost, slot).reason

    def test_resources_that_this_process_has_just_released_count_as_free(self, stage: Stage) -> None:
        await_free(ONE_CUSTOM)
        stage.engine.release(stage.slots(1, ONE_CUSTOM))  # Ray counts them as held for a tenth of a second
        stage.engine.watch_capacity(ONE_CUSTOM, 1)
        assert stage.wait_for(Capacity).count == 1
