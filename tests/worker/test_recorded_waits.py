"""What a recorder learns of shards: how long the loop waited for rows, how many came, how long they were made."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from tests.data.small_source import numbered
from torch.utils.data import DataLoader, IterableDataset

from powertrain.data.plan.prepared import Prepared
from powertrain.data.ray.shard import StreamedShard
from powertrain.data.shard import DataShard
from powertrain.engine.ray.feed import Feed
from powertrain.errors import DataError
from powertrain.trace.recording import current, patch_choice, patches, phases
from powertrain.trace.recording.phases import StepRecord
from powertrain.trace.recording.recorder import Recorder
from powertrain.worker.data.shards import RecordedWaits

#: Longer than anything else in a step on a busy machine.
LONG = 0.03
ROWS = 40


@pytest.fixture(autouse=True)
def recorder() -> Iterator[Recorder]:
    recorder = Recorder()
    current.use(recorder)
    yield recorder
    current.use(None)


class CountedWaits(RecordedWaits):
    def __init__(self) -> None:
        self.waits = 0

    def wait(self) -> int:
        self.waits += 1
        return super().wait()


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[Callable[..., DataShard]]:
    made: list[DataShard] = []

    def make(rank: int = 0, world_size: int = 1, rows: int = ROWS) -> DataShard:
        inspected = numbered([rows]).inspected()
        made.append(
            DataShard(
                Prepared("train", inspected, 7, True, inspected.fingerprint),
                rank=rank,
                world_size=world_size,
                cache_directory=str(tmp_path / "cache"),
                disk_bytes=2**20,
                memory_bytes=2**26,
                watch=CountedWaits(),
            )
        )
        return made[-1]

    yield make
    for one in made:
        one.close()


class FourTables:
    """What a ``ray.data.DataIterator`` is to a feed; each of its tables is made for a while."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def iter_batches(self, **_: Any) -> Iterator[pa.Table]:
        for first in range(0, ROWS, 10):
            time.sleep(self.seconds)
            yield pa.table({"id": list(range(first, first + 10))})


@pytest.fixture
def stream(tmp_path: Path) -> Iterator[Callable[[float], StreamedShard]]:
    opened: list[Any] = []

    def make(seconds: float) -> StreamedShard:
        feed = Feed(FourTables(seconds), str(tmp_path / "feed.sock"))
        shard = StreamedShard("train", str(tmp_path / "feed.sock"), watch=CountedWaits())
        opened.extend((shard, feed))
        return shard

    yield make
    for one in opened:
        one.close()


def slowly(rows: Any) -> Any:
    time.sleep(LONG)
    return torch.as_tensor(rows["id"])


def steps_over(recorder: Recorder, batches: Any, seconds: float = 0.0) -> list[StepRecord]:
    """The steps of a loop that does something with each batch for a while."""
    optimizer = object()
    for _ in batches:
        time.sleep(seconds)
        recorder.optimizer_begins(optimizer)
        recorder.optimizer_ended(optimizer)
    recorder.flush()
    assert recorder.enter(phases.INPUT) == 0, "nothing is waited for any more"
    recorder.leave(0)
    data = recorder.drain(0)[1]
    return [phases.unpack_from(data, at) for at in range(0, len(data), phases.RECORD_SIZE)]


def waited(steps: list[StepRecord]) -> list[float]:
    """In units of LONG, the shortest first."""
    return sorted(step.phases[phases.INPUT] / LONG for step in steps)


def test_a_batch_made_when_it_is_asked_for_is_waited_for_as_long_as_it_is_made(
    recorder: Recorder, shard: Callable[..., DataShard]
) -> None:
    found = steps_over(
        recorder, shard().iter_torch_batches(batch_size=10, prefetch_batches=0, collate_fn=slowly)
    )
    assert [step.samples for step in found] == [10] * 4
    assert waited(found)[0] > 0.9
    assert all(step.fetch == pytest.approx(step.phases[phases.INPUT], abs=LONG / 2) for step in found[1:])


def test_a_batch_made_ahead_says_how_long_that_took_and_no_thread_waits(
    recorder: Recorder, shard: Callable[..., DataShard]
) -> None:
    batches = shard().iter_torch_batches(batch_size=5, prefetch_batches=3, collate_fn=slowly)
    found = steps_over(recorder, batches, seconds=3 * LONG)
    assert [step.samples for step in found] == [5] * 8
    assert all(step.fetch > 0.9 * LONG for step in found[1:])
    assert waited(found)[4] < 0.5


def test_batches_made_together_share_the_time(recorder: Recorder, shard: Callable[..., DataShard]) -> None:
    """Narrow rows are gathered for several steps at once; what that took is not counted for each of them."""
    began = time.perf_counter()
    found = steps_over(recorder, shard(rows=8000).iter_batches(batch_size=10, prefetch_batches=2))
    assert [step.samples for step in found] == [10] * 800
    # Threads make them, at most four at a time.
    assert 0 < sum(step.fetch for step in found) < 4 * (time.perf_counter() - began)


def test_a_row_that_counts_nothing_is_no_sample(recorder: Recorder, shard: Callable[..., DataShard]) -> None:
    found = steps_over(recorder, shard(rank=0, world_size=3).iter_batches(global_batch_size=39))
    assert [step.samples for step in found] == [13, 0], "of 40 rows, the last one is another rank's"


def test_single_rows_are_reported_as_their_block_comes(
    recorder: Recorder, shard: Callable[..., DataShard]
) -> None:
    one = shard(rows=4000)
    found = steps_over(recorder, one.iter_rows())
    assert sum(step.samples for step in found) == len(found) == 4000
    assert isinstance(one.watch, CountedWaits)
    assert one.watch.waits < 100


def test_tokens_are_counted_where_models_of_text_read_them(
    recorder: Recorder, shard: Callable[..., DataShard]
) -> None:
    batches = shard().iter_torch_batches(
        batch_size=10, collate_fn=lambda rows: {"input_ids": torch.ones(len(rows["id"]), 6)}
    )
    assert [step.tokens for step in steps_over(recorder, batches)] == [60] * 4


def test_a_shard_within_torchs_loader_is_counted_once(
    recorder: Recorder, shard: Callable[..., DataShard]
) -> None:
    one = shard()

    class Rows(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(one.iter_torch_batches(batch_size=10, prefetch_batches=0, collate_fn=slowly))

    patches.install(recorder, patch_choice.choose())
    try:
        found = steps_over(recorder, DataLoader(Rows(), batch_size=None))
    finally:
        patches.uninstall()
    assert [step.samples for step in found] == [10] * 4
    assert waited(found)[0] > 0.9


@pytest.mark.parametrize("prefetch", [0, 2])
def test_rows_that_ray_takes_long_for_are_waited_for(
    recorder: Recorder, stream: Callable[[float], StreamedShard], prefetch: int
) -> None:
    found = steps_over(recorder, stream(LONG).iter_batches(batch_size=10, prefetch_batches=prefetch))
    assert [step.samples for step in found] == [10] * 4
    assert waited(found)[1] > 0.6
    assert sorted(step.fetch for step in found)[1] > 0.6 * LONG


def test_rows_that_ray_has_are_made_ahead(
    recorder: Recorder, stream: Callable[[float], StreamedShard]
) -> None:
    batches = stream(0.0).iter_torch_batches(batch_size=5, prefetch_batches=3, collate_fn=slowly)
    found = steps_over(recorder, batches, seconds=2 * LONG)
    assert [step.samples for step in found] == [5] * 8
    assert all(step.fetch > 0.9 * LONG for step in found)
    assert waited(found)[4] < 0.5


def test_single_rows_of_rays_are_reported_in_batches(
    recorder: Recorder, stream: Callable[[float], StreamedShard]
) -> None:
    shard = stream(0.0)
    found = steps_over(recorder, shard.iter_rows())
    assert sum(step.samples for step in found) == len(found) == ROWS
    assert isinstance(shard.watch, CountedWaits)
    assert shard.watch.waits < 5


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_wait_that_ends_with_an_error_is_over(
    recorder: Recorder, shard: Callable[..., DataShard], prefetch: int
) -> None:
    def fail(rows: Any) -> Any:
        raise ValueError("this batch cannot be made")

    with pytest.raises((ValueError, DataError), match="this batch cannot be made"):
        next(iter(shard().iter_torch_batches(batch_size=10, prefetch_batches=prefetch, collate_fn=fail)))
    assert recorder.enter(phases.FORWARD) == 0


def test_without_a_recorder_rows_come_all_the_same(
    shard: Callable[..., DataShard], stream: Callable[[float], StreamedShard]
) -> None:
    current.use(None)
    for one in (shard(), stream(0.0)):
        rows = [row for batch in one.iter_batches(batch_size=8) for row in batch["id"].tolist()]
        assert sorted(rows) == list(range(ROWS))
    assert current.recording() is None
