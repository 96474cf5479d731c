"""Meeting in torchrun's store, when ranks do not come or the store goes. The real torchrun is in the stories."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from powertrain.engine import torchrun
from powertrain.engine.base import Granted, SlotLost, SlotShape
from powertrain.errors import EngineError

PATIENCE = 20.0


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    """Undone before the check for what the test left."""
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture
def store(patch: pytest.MonkeyPatch) -> list[Any]:
    """A store as torchrun's agent hosts it; dropping the only entry ends it."""
    import torch

    distributed: Any = torch.distributed
    hosted = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in {
        "TORCHELASTIC_RUN_ID": "job",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(hosted.port),
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "GROUP_RANK": "0",
    }.items():
        patch.setenv(name, value)
    patch.setattr(torchrun, "_fits", 0)
    patch.setattr(torchrun, "_POLL_INTERVAL", timedelta(seconds=0.1))
    holder = [hosted]
    del hosted
    return holder


@pytest.fixture
def engine(store: list[Any]) -> Iterator[torchrun.TorchrunEngine]:
    engine = torchrun.TorchrunEngine(lambda: None)
    yield engine
    engine.close()


@pytest.mark.parametrize(
    ("visible", "local_rank", "gpu"),
    [(None, "1", "1"), ("6,7", "1", "7"), ("6, 7", "1", "7"), ("6", "1", "1")],
)
def test_the_gpu_of_a_rank_is_the_one_that_its_agent_gives_it(
    patch: pytest.MonkeyPatch, visible: str | None, local_rank: str, gpu: str
) -> None:
    patch.setenv("LOCAL_RANK", local_rank)
    patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        patch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert torchrun.own_gpu() == gpu


@pytest.mark.usefixtures("store")
def test_a_restart_finds_the_name_that_its_fit_had(patch: pytest.MonkeyPatch) -> None:
    assert torchrun.agreed_name("first") == "first"
    patch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert torchrun.agreed_name("second") == "first"
    torchrun.TorchrunStore.next()
    assert torchrun.agreed_name("third") == "third", "the next fit is another run"
    patch.setenv("TORCHELASTIC_RUN_ID", "another job")
    assert torchrun.agreed_name("fourth") == "fourth"


def test_a_rank_that_never_joins_is_an_error(
    engine: torchrun.TorchrunEngine, patch: pytest.MonkeyPatch
) -> None:
    patch.setattr(torchrun, "_JOIN_TIMEOUT", timedelta(seconds=0.2))
    engine.request(2, SlotShape())
    with pytest.raises(EngineError, match=r"Rank 1 did not join") as error:
        engine.serve()
    assert "Every rank must call fit()" in str(error.value)


def test_a_rank_that_never_joins_does_not_hold_up_the_end(engine: torchrun.TorchrunEngine) -> None:
    engine.request(2, SlotShape())
    engine.close()
    assert not any(thread.is_alive() for thread in engine._threads)


def test_when_the_store_goes_the_other_ranks_are_lost(
    engine: torchrun.TorchrunEngine, store: list[Any], patch: pytest.MonkeyPatch
) -> None:
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    engine.start(events.put, lambda *_: None)
    engine.request(2, SlotShape())
    patch.setenv("RANK", "1")
    engine._meeting.again().join()
    granted = events.get(timeout=PATIENCE)
    assert isinstance(granted, Granted)
    store.clear()
    lost = events.get(timeout=PATIENCE)
    assert isinstance(lost, SlotLost)
    assert lost.slot is granted.slots[1]
    assert "store cannot be reached" in lost.reason
    with pytest.raises(EngineError, match="--max-restarts"):
        engine.request(2, SlotShape())
