"""Batches that are copied to a real GPU ahead of time, traced. Skipped, visibly, where there is none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(not os.path.exists("/dev/nvidiactl"), reason="this machine has no NVIDIA GPU")

torch = pytest.importorskip("torch")

from tests.data.small_source import numbered  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from powertrain import trace  # noqa: E402
from powertrain.data.plan.prepared import Prepared  # noqa: E402
from powertrain.data.shard import DataShard  # noqa: E402
from powertrain.torch import device  # noqa: E402
from powertrain.torch.data_loader.prepare import prepare_data_loader  # noqa: E402
from powertrain.trace.recording import current, patches, phases  # noqa: E402
from powertrain.trace.recording.phases import RECORD_SIZE, StepRecord  # noqa: E402
from powertrain.trace.recording.recorder import Recorder  # noqa: E402
from powertrain.worker import session  # noqa: E402
from powertrain.worker.data.shards import RecordedWaits  # noqa: E402
from powertrain.worker.place import Place  # noqa: E402
from powertrain.worker.progress import Gate  # noqa: E402
from powertrain.worker.session import Session  # noqa: E402

#: Bytes of a batch: some milliseconds over PCI Express.
LARGE = 256 * 2**20
WIDTH = 1024
#: About 0.1 s of an idle GPU at 1.7 GHz.
CYCLES = int(0.1 * 1.7e9)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    service: Any = SimpleNamespace(row=0, post=lambda message: None)
    monkeypatch.setattr(device, "_settings", device._Settings())
    monkeypatch.setattr(session, "_session", Session(Place(rank=0, world_size=1), service, Gate()))
    yield begin()
    patches.uninstall()
    current.use(None)


def begin() -> Recorder:
    """A new one, which times every step on the device until it knows what is usual."""
    recorder = Recorder()
    current.use(recorder)
    trace.init()
    return recorder


def steps_over(recorder: Recorder, batches: Any, cycles: int = 0) -> list[StepRecord]:
    model = torch.nn.Linear(1, 1).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for batch in batches:
        optimizer.zero_grad()
        if cycles:
            torch.cuda._sleep(cycles)
        model(batch.flatten()[:1].float()).sum().backward()
        optimizer.step()
    recorder.flush()
    torch.cuda.synchronize()
    data = recorder.drain(0)[1]
    return [phases.unpack_from(data, at) for at in range(0, len(data), RECORD_SIZE)]


def has_own_times(step: StepRecord) -> bool:
    """And not those that are usual: not every step is timed."""
    return step.flags & (phases.TIMED_ON_DEVICE | phases.AS_USUAL_ON_DEVICE) == phases.TIMED_ON_DEVICE


def prepared(rows_of_batch: int, count: int = 6) -> Any:
    rows = torch.ones(count * rows_of_batch, LARGE // 4 // rows_of_batch).pin_memory()
    # Whole batches of pinned memory, which are not made anew.
    cut = [rows[at : at + rows_of_batch] for at in range(0, len(rows), rows_of_batch)]
    made: DataLoader[Any] = DataLoader(
        TensorDataset(torch.arange(len(rows))),
        batch_size=rows_of_batch,
        collate_fn=lambda found: cut[int(found[0][0]) // rows_of_batch],
    )
    return prepare_data_loader(made)


def test_the_gpu_waits_for_a_copy_ahead_only_where_it_has_nothing_else_to_do(
    recorder: Recorder,
) -> None:
    idle = steps_over(recorder, prepared(4))
    assert sum(step.samples for step in idle) == 24
    timed = [step for step in idle[1:] if has_own_times(step)]
    assert timed
    exposed = sorted(step.device[phases.H2D] for step in timed)[len(timed) // 2]
    assert exposed > 1e-3, "256 MiB take longer than that"
    busy = steps_over(begin(), prepared(4), CYCLES)
    timed = [step for step in busy[1:] if has_own_times(step)]
    assert timed
    assert sorted(step.device[phases.H2D] for step in timed)[len(timed) // 2] < exposed / 2
    assert all(step.phases[phases.H2D] < 0.05 for step in busy[1:]), "this thread waits for no copy"
    assert not any(step.flags & phases.PAGEABLE for step in idle + busy)


def test_batches_of_a_shard_are_on_the_gpu_and_its_thread_copies_nothing(
    recorder: Recorder, tmp_path: Path
) -> None:
    inspected = numbered([60]).inspected()
    shard = DataShard(
        Prepared("train", inspected, 7, True, inspected.fingerprint),
        cache_directory=str(tmp_path),
        disk_bytes=2**20,
        memory_bytes=2**26,
        device="cuda",
        watch=RecordedWaits(),
    )
    try:
        batches = shard.iter_torch_batches(
            batch_size=10, collate_fn=lambda rows: torch.ones(len(rows["id"]), WIDTH)
        )
        found = steps_over(recorder, batches, CYCLES)
    finally:
        shard.close()
    assert [step.samples for step in found] == [10] * 6
    assert all(0 < step.phases[phases.H2D] < 0.05 for step in found)
    assert not any(step.flags & phases.PAGEABLE for step in found)
