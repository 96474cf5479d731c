"""A prepared loader, traced: each batch counts once, with its rows, where the training thread waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from powertrain.torch import device as torch_device
from powertrain.torch.data_loader import loader as prepared_loader
from powertrain.torch.data_loader import moving, prepare
from powertrain.torch.data_loader.prepare import prepare_data_loader
from powertrain.trace.recording import current, patch_choice, patches, phases
from powertrain.trace.recording.phases import StepRecord
from powertrain.trace.recording.recorder import Recorder
from powertrain.worker import session
from powertrain.worker.data import batch_plan
from powertrain.worker.place import Place
from powertrain.worker.progress import Gate
from powertrain.worker.session import Session

#: Longer than anything else in a step on a busy machine.
LONG = 0.03


@pytest.fixture(autouse=True)
def rank_of_two(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Be the first of two ranks."""
    service: Any = SimpleNamespace(row=0, post=lambda message: None)
    monkeypatch.setattr(torch_device, "_settings", torch_device._Settings())
    monkeypatch.setattr(session, "_session", Session(Place(rank=0, world_size=2), service, Gate()))
    yield
    batch_plan.gradient_weight.reset()


@pytest.fixture(autouse=True)
def recorder() -> Iterator[Recorder]:
    recorder = Recorder()
    current.use(recorder)
    patches.install(recorder, patch_choice.choose())
    yield recorder
    patches.uninstall()
    current.use(None)


def slow_stack(rows: list[Any]) -> torch.Tensor:
    time.sleep(LONG)
    return torch.stack([row for (row,) in rows])


def loader(rows: int, collate: Callable[[list[Any]], Any], **options: Any) -> DataLoader[Any]:
    made: DataLoader[Any] = DataLoader(
        TensorDataset(torch.ones(rows, 4)), batch_size=4, collate_fn=collate, **options
    )
    return prepare_data_loader(made)


def trained(recorder: Recorder, batches: Any, seconds: float = 0.0) -> list[StepRecord]:
    """The steps of a loop over batches that computes for a while on each."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows in batches:
        model(rows).sum().backward()
        time.sleep(seconds)
        optimizer.step()
    recorder.flush()
    data = recorder.drain(0)[1]
    return [phases.unpack_from(data, at) for at in range(0, len(data), phases.RECORD_SIZE)]


def test_a_batch_made_in_the_loop_is_waited_for_as_long_as_it_is_made(recorder: Recorder) -> None:
    found = trained(recorder, loader(20, slow_stack))
    assert [step.samples for step in found] == [4, 4, 2], "of 8 rows of a step, and 4 of the last"
    assert all(step.phases[phases.INPUT] > 0.9 * LONG for step in found)
    assert all(step.fetch == pytest.approx(step.phases[phases.INPUT], abs=LONG / 2) for step in found[1:])


def test_loader_processes_say_how_long_they_made_a_batch_that_was_not_waited_for(
    recorder: Recorder,
) -> None:
    found = trained(recorder, loader(48, slow_stack, num_workers=1, prefetch_factor=4), seconds=2 * LONG)
    assert [step.samples for step in found] == [4] * 6
    assert all(step.fetch > 0.9 * LONG for step in found)
    waited = sorted(step.phases[phases.INPUT] for step in found)
    assert waited[2] < 0.5 * LONG, "batches were made while the loop computed"


class _Stream:
    """Stands for a GPU's, and never happens."""

    def __init__(self, device: Any) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass


def test_with_copies_ahead_each_batch_counts_once_and_copying_is_no_waiting_for_input(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow_copy(batch: Any, *_: Any) -> Any:
        time.sleep(LONG)
        return batch

    monkeypatch.setattr(torch.cuda, "Stream", _Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", _Stream)
    monkeypatch.setattr(moving, "move_batch", slow_copy)
    monkeypatch.setattr(prepared_loader, "move_batch", slow_copy)
    monkeypatch.setattr(prepare, "device_of_loader", lambda: torch.device("cuda", 0))
    fast = lambda rows: torch.stack([row for (row,) in rows])  # noqa: E731
    found = trained(recorder, loader(32, fast))
    assert len(found) == 4
    assert sum(step.samples for step in found) == 16
    assert all(step.phases[phases.H2D] > 0.9 * LONG for step in found[:-1])
    waited = sorted(step.phases[phases.INPUT] for step in found)
    assert waited[2] < 0.5 * LONG, "copying is no waiting for input"


def test_what_a_loader_gives_without_a_recorder_is_the_same(recorder: Recorder) -> None:
    patches.uninstall()
    current.use(None)
    assert [len(rows) for rows in loader(20, slow_stack)] == [4, 4, 2]
    assert current.recording() is None
    assert recorder.steps == 0
