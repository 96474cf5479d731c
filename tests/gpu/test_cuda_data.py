"""Batches on their way to a real GPU. Skipped, visibly, where there is none."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import powertrain
import powertrain.data
from powertrain import RunConfig, ScalingConfig
from powertrain.data.rows.device import DeviceFeed, Handle, lay_out
from powertrain.errors import ConfigError
from powertrain.torch import TorchTrainer

needs_gpu = pytest.mark.skipif(not os.path.exists("/dev/nvidiactl"), reason="this machine has no NVIDIA GPU")


def prefetched(feed: DeviceFeed, batches: Iterator[Any], ahead: int = 3) -> Iterator[Any]:
    """The batches on the device, put by a thread of their own and taken by this one."""
    ready: queue.Queue[Handle | None] = queue.Queue(ahead)

    def put() -> None:
        for batch in batches:
            ready.put(feed.put(batch))
        ready.put(None)

    thread = threading.Thread(target=put)
    thread.start()
    while (handle := ready.get()) is not None:
        yield feed.take(handle)
    thread.join()


def keep_busy(seconds: float = 0.2) -> torch.cuda.Event:
    """Give the current stream something to do; the event says when it is done."""
    torch.cuda._sleep(int(seconds * 1.7e9))
    event = torch.cuda.Event()
    event.record()
    return event


class Pair(NamedTuple):
    left: torch.Tensor
    right: Any


@needs_gpu
def test_batches_arrive_whole_while_the_gpu_computes_and_their_source_is_used_again() -> None:
    source = torch.empty(2_000_000)

    def batches() -> Iterator[dict[str, Any]]:
        for number in range(60):
            source.fill_(number)  # as soon as the last put has returned
            yield {"x": source[: 500_000 + 20_000 * number], "number": number}

    feed = DeviceFeed("cuda", slots=2)
    weight = torch.randn(2048, 2048, device="cuda")
    found = []
    for batch in prefetched(feed, batches()):
        for _ in range(4):
            weight = torch.tanh(weight @ weight)
        x = batch["x"]
        # The sums are not computed yet when the batch is dropped: its memory must not be given to the next.
        found.append((batch["number"], x.numel(), x.min(), x.max(), x.double().sum()))
        del batch, x
    for number, count, least, most, total in found:
        assert count == 500_000 + 20_000 * number
        assert (least.item(), most.item(), total.item()) == (number, number, number * count)
    assert len(found) == 60


@needs_gpu
def test_the_training_thread_waits_for_nothing() -> None:
    feed = DeviceFeed("cuda", slots=2)
    batch = torch.arange(8_000_000, dtype=torch.float32)
    # Memory is pinned and taken from the device on first use, for which the GPU may have to be idle.
    warm = [feed.take(feed.put(batch)) for _ in range(3)]
    del warm
    torch.cuda.synchronize()
    busy = keep_busy(1.0)
    handle = feed.put(batch)
    handle.copied.synchronize()
    assert not busy.query(), "copied while the GPU computes"
    began = time.perf_counter()
    there = feed.take(handle)
    took = time.perf_counter() - began
    assert not busy.query(), "and taken"
    assert took < 0.05
    assert torch.equal(there.cpu(), batch)


@needs_gpu
def test_a_copy_that_is_not_done_is_waited_for_by_the_gpu() -> None:
    feed = DeviceFeed("cuda", slots=1)
    with torch.cuda.stream(feed._stream):
        busy = keep_busy(0.5)
    there = feed.take(feed.put(torch.full((1000,), 7.0)))
    assert not busy.query(), "the copy has not begun"
    assert there.sum().item() == 7000


@needs_gpu
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor(3.5),
        lambda: torch.empty(0, 4),
        lambda: torch.tensor([True, False]),
        lambda: torch.arange(7, dtype=torch.int16),
        lambda: torch.randn(5, dtype=torch.complex64).conj(),
        lambda: torch.randn(3, 3).bfloat16(),
        lambda: torch.arange(24).reshape(4, 6).t(),
        lambda: torch.arange(24).reshape(4, 6)[:, ::2],
        lambda: torch.arange(4).expand(3, 4),
        lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda: torch.eye(4).to_sparse(),
        lambda: torch.randn(3, requires_grad=True),
    ],
)
def test_tensors_of_every_kind_arrive_as_they_are(make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    feed = DeviceFeed("cuda", slots=1)
    there = feed.take(feed.put([torch.ones(3, dtype=torch.uint8), tensor]))[1]
    assert there.device.type == "cuda"
    assert (there.dtype, there.shape, there.layout) == (tensor.dtype, tensor.shape, tensor.layout)
    same = there.to_dense().cpu() if there.is_sparse else there.detach().cpu()
    assert torch.equal(same, tensor.to_dense() if tensor.is_sparse else tensor.detach())
    if tensor.dim() == 4:
        assert there.is_contiguous(memory_format=torch.channels_last)


@needs_gpu
def test_nested_batches_keep_their_shape_and_what_is_no_tensor() -> None:
    on_gpu = torch.ones(2, device="cuda")
    batch = {
        "pair": Pair(torch.ones(2), {"deep": [torch.zeros(3), "text"]}),
        "names": ["a", "b"],
        "gpu": on_gpu,
    }
    feed = DeviceFeed("cuda", slots=2)
    there = feed.take(feed.put(batch))
    assert type(there["pair"]) is Pair
    assert there["pair"].left.device == there["pair"].right["deep"][0].device == feed.device
    assert there["pair"].right["deep"][1] == "text"
    assert there["names"] == ["a", "b"]
    assert there["gpu"] is on_gpu


@needs_gpu
def test_pinned_memory_is_used_again_and_grows_to_the_largest_batch() -> None:
    feed = DeviceFeed("cuda", slots=2)
    assert feed.pinned_bytes == 0
    for size in [1000, 5000, 2000, 3000, 5000, 10]:
        kept = feed.take(feed.put(torch.zeros(size, dtype=torch.uint8)))
    assert 5000 <= feed.pinned_bytes <= 2 * 5120
    assert kept.numel() == 10


@needs_gpu
def test_a_batch_that_cannot_be_copied_leaves_the_feed_usable() -> None:
    feed = DeviceFeed("cuda", slots=1)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            feed.put([torch.ones(1000), torch.ones(1).expand(2**46)])
    assert feed.take(feed.put(torch.ones(10))).sum().item() == 10


@needs_gpu
def test_keeping_a_small_tensor_does_not_keep_the_large_ones_of_its_batch() -> None:
    feed = DeviceFeed("cuda", slots=1)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    kept = [
        feed.take(feed.put({"image": torch.zeros(2**20), "label": torch.zeros(8), "id": torch.zeros(8)}))[
            "label"
        ]
        for _ in range(20)
    ]
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() - before <= 20 * 2048
    scale = torch.ones(1, device="cuda", requires_grad=True)
    kept[0].mul_(scale)  # as any tensor: no view that remembers where it is from
    assert kept[0].requires_grad


@given(st.lists(st.tuples(st.integers(1, 200_000), st.booleans()), max_size=20))
def test_tensors_are_laid_out_aligned_and_without_overlap(tensors: list[tuple[int, bool]]) -> None:
    layout = lay_out([size for size, _ in tensors], [alone for _, alone in tensors])
    spans = sorted((offset, offset + size) for offset, (size, _) in zip(layout.offsets, tensors, strict=True))
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert all(offset % 16 == 0 for offset in layout.offsets)
    assert all(end <= layout.total for _, end in spans)
    for offset, (size, alone) in zip(layout.offsets, tensors, strict=True):
        assert offset >= layout.together if alone else offset + size <= layout.together


def test_only_gpus_are_fed() -> None:
    with pytest.raises(ConfigError, match="created for 'cpu'"):
        DeviceFeed("cpu", slots=2)
    with pytest.raises(ConfigError, match="0 buffers"):
        DeviceFeed("cuda:0", slots=0)


@needs_gpu
def test_batches_of_a_dataset_arrive_on_the_gpu_in_order() -> None:
    rows = powertrain.data.from_numpy({"id": np.arange(5000), "x": np.arange(5000 * 64).reshape(5000, 64)})
    for prefetch in (0, 1, 4):
        seen = []
        for batch in rows.iter_torch_batches(batch_size=256, device="cuda", prefetch_batches=prefetch):
            keep_busy(0.001)
            assert batch["x"].device.type == "cuda"
            assert torch.equal(batch["x"][:, 0], batch["id"] * 64)
            seen.append(batch["id"])
        assert torch.cat(seen).tolist() == list(range(5000))


@needs_gpu
def test_a_worker_finds_batches_on_its_own_gpu(tmp_path: Path) -> None:
    def look(config: dict[str, Any]) -> list[str]:
        shard = powertrain.get_dataset_shard("train")
        return sorted({str(batch["id"].device) for batch in shard.iter_torch_batches(batch_size=8)})

    result = TorchTrainer(
        look,
        scaling_config=ScalingConfig(num_workers=1, use_gpu=True),
        run_config=RunConfig(storage_path=str(tmp_path)),
        datasets={"train": powertrain.data.range(64)},
    ).fit()
    assert result.return_value == ["cuda:0"]
