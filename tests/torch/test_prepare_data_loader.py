"""A prepared loader gives each rank its share, keeps every option, and reshuffles by itself."""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from powertrain.errors import ConfigError, OutsideWorkerError
from powertrain.torch import prepare
from powertrain.torch.prepare import endless_share, map_tensors, move_batch, prepare_data_loader, share
from powertrain.worker.progress import progress

Pair = namedtuple("Pair", "left right")


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Be this rank of that many."""

    def become(rank: int, world_size: int) -> None:
        context = SimpleNamespace(get_world_rank=lambda: rank, get_world_size=lambda: world_size)
        monkeypatch.setattr(prepare, "_context", lambda: context)

    monkeypatch.setattr(prepare, "_settings", prepare._Settings())
    become(0, 1)
    return become


@pytest.fixture
def on_ranks(as_rank: Callable[[int, int], None]) -> Callable[..., list[Any]]:
    """The loader each of ``world_size`` ranks gets; ranks are in different random states, as in a run."""

    def prepared(make: Callable[[], DataLoader[Any]], world_size: int, **options: Any) -> list[Any]:
        loaders = []
        for rank in range(world_size):
            as_rank(rank, world_size)
            loaders.append(prepare_data_loader(make(), **options))
        return loaders

    return prepared


def rows(loader: Any) -> list[int]:
    """All rows of one iteration; datasets here give their own index."""
    return [int(row) for batch in loader for row in torch.as_tensor(batch).flatten()]


def shares(loaders: list[Any]) -> list[list[int]]:
    """One iteration of every rank, each with random numbers of its own."""
    answers = []
    for rank, loader in enumerate(loaders):
        torch.manual_seed(1000 + rank), random.seed(rank), np.random.seed(rank)
        answers.append(rows(loader))
    return answers


# -- shares


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_row_comes_exactly_once_when_ranks_divide_them(
    on_ranks: Callable[..., list[Any]], world_size: int, shuffle: bool
) -> None:
    loaders = on_ranks(lambda: DataLoader(range(24), batch_size=4, shuffle=shuffle), world_size)
    parts = shares(loaders)
    assert sorted(row for part in parts for row in part) == list(range(24))
    assert {len(part) for part in parts} == {24 // world_size}
    assert [len(loader) for loader in loaders] == [24 // world_size // 4] * world_size
    if not shuffle:
        assert parts == [list(range(24))[rank::world_size] for rank in range(world_size)]


@pytest.mark.parametrize("drop_last", [False, True])
def test_ranks_get_equally_many_rows_where_they_do_not_divide(
    on_ranks: Callable[..., list[Any]], drop_last: bool
) -> None:
    parts = shares(on_ranks(lambda: DataLoader(range(10), batch_size=1, drop_last=drop_last), 3))
    every = {row for part in parts for row in part}
    assert {len(part) for part in parts} == {3 if drop_last else 4}
    assert every == set(range(9)) if drop_last else every == set(range(10))


def test_each_iteration_is_a_new_epoch_and_set_epoch_is_honoured(on_ranks: Callable[..., list[Any]]) -> None:
    make = lambda: DataLoader(range(32), batch_size=4, shuffle=True)  # noqa: E731
    (loader, _), (told, _) = on_ranks(make, 2), on_ranks(make, 2)
    epochs = [rows(loader) for _ in range(4)]
    assert len({tuple(epoch) for epoch in epochs}) == 4, "the order differs from epoch to epoch"
    told.sampler.set_epoch(2)
    assert rows(told) == epochs[2]
    assert rows(told) == epochs[3], "counting goes on from what was set"
    told.sampler.set_epoch(0)
    assert rows(told) == epochs[0]


def test_a_new_epoch_is_disjoint_between_ranks_too(on_ranks: Callable[..., list[Any]]) -> None:
    loaders = on_ranks(lambda: DataLoader(range(12), batch_size=2, shuffle=True), 3)
    first, second = shares(loaders), shares(loaders)
    for parts in (first, second):
        assert sorted(row for part in parts for row in part) == list(range(12))
    assert first != second


def test_the_users_generator_decides_the_order(on_ranks: Callable[..., list[Any]]) -> None:
    def orders(seed: int) -> list[list[int]]:
        make = lambda: DataLoader(range(16), shuffle=True, generator=torch.Generator().manual_seed(seed))  # noqa: E731
        return shares(on_ranks(make, 2))

    assert orders(1) == orders(1)
    assert orders(1) != orders(2)


def test_a_lone_workers_order_follows_manual_seed(on_ranks: Callable[..., list[Any]]) -> None:
    orders = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        orders.append(rows(on_ranks(lambda: DataLoader(range(16), shuffle=True), 1)[0]))
    assert orders[0] == orders[1] != orders[2]


def test_reproducibilitys_seed_decides_the_order(
    on_ranks: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def order(seed: int) -> list[int]:
        monkeypatch.setattr(prepare, "_settings", prepare._Settings(seed=seed))
        return shares(on_ranks(lambda: DataLoader(range(16), shuffle=True), 2))[0]

    assert order(1) == order(1) != order(2)


def test_add_dist_sampler_false_gives_every_rank_all_rows(on_ranks: Callable[..., list[Any]]) -> None:
    loaders = on_ranks(lambda: DataLoader(range(6)), 2, add_dist_sampler=False)
    assert shares(loaders) == [list(range(6))] * 2
    assert type(loaders[0].sampler) is SequentialSampler


def test_a_distributed_sampler_of_the_users_is_kept(on_ranks: Callable[..., list[Any]]) -> None:
    own = DistributedSampler(range(6), num_replicas=2, rank=1, shuffle=False)  # type: ignore[arg-type]
    make = lambda: DataLoader(range(6), sampler=own)  # noqa: E731
    assert on_ranks(make, 2)[0].sampler is own
    batches = BatchSampler(own, 2, False)
    assert on_ranks(lambda: DataLoader(range(6), batch_sampler=batches), 2)[0].batch_sampler is batches


# -- custom samplers


class Backwards(Sampler[int]):
    def __init__(self, count: int) -> None:
        self.count, self.epochs = count, [0]

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count - 1, -1, -1))

    def __len__(self) -> int:
        return self.count

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class RandomBatches:
    """Batches of unequal sizes in random order, as length-bucketing samplers give them."""

    def __iter__(self) -> Iterator[list[int]]:
        batches = [[0, 1, 2], [3], [4, 5], [6, 7, 8, 9]]
        random.shuffle(batches)
        return iter(batches)

    def __len__(self) -> int:
        return 4


def test_a_custom_sampler_is_shared_in_its_own_order(on_ranks: Callable[..., list[Any]]) -> None:
    samplers: list[Backwards] = []

    def make() -> DataLoader[Any]:
        samplers.append(Backwards(8))
        return DataLoader(range(8), sampler=samplers[-1], batch_size=2)

    loaders = on_ranks(make, 2)
    assert shares(loaders) == [[7, 5, 3, 1], [6, 4, 2, 0]]
    assert len(loaders[0]) == 2
    shares(loaders)
    assert samplers[0].epochs[-1] == 1, "its own set_epoch is called"


def test_a_random_sampler_draws_alike_on_every_rank_and_anew_each_epoch(
    on_ranks: Callable[..., list[Any]],
) -> None:
    loaders = on_ranks(lambda: DataLoader(range(20), sampler=SubsetRandomSampler(range(10, 20))), 2)
    first, second = shares(loaders), shares(loaders)
    assert sorted(first[0] + first[1]) == list(range(10, 20))
    assert sorted(second[0] + second[1]) == list(range(10, 20))
    assert first != second


def test_drawing_leaves_the_ranks_own_random_numbers_alone(on_ranks: Callable[..., list[Any]]) -> None:
    loader = on_ranks(lambda: DataLoader(range(20), sampler=SubsetRandomSampler(range(20))), 2)[1]
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    expected = (torch.rand(1).item(), random.random(), np.random.rand())
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    list(loader.sampler)
    assert (torch.rand(1).item(), random.random(), np.random.rand()) == expected


@pytest.mark.parametrize(
    "make_sampler",
    [
        lambda: WeightedRandomSampler([1.0] * 10, 12),
        lambda: RandomSampler(range(10), replacement=True, num_samples=12),  # type: ignore[arg-type]
        lambda: RandomSampler(range(10), num_samples=12),  # type: ignore[arg-type]
    ],
)
def test_samplers_that_choose_how_many_rows_keep_their_number(
    on_ranks: Callable[..., list[Any]], make_sampler: Callable[[], Any]
) -> None:
    loaders = on_ranks(lambda: DataLoader(range(10), sampler=make_sampler(), batch_size=2), 2)
    assert [len(loader) for loader in loaders] == [3, 3]
    assert [len(part) for part in shares(loaders)] == [6, 6]


def test_a_plain_batch_sampler_is_rebuilt_over_the_share(on_ranks: Callable[..., list[Any]]) -> None:
    batches = lambda: BatchSampler(SequentialSampler(range(12)), 3, drop_last=True)  # type: ignore[arg-type]  # noqa: E731
    loaders = on_ranks(lambda: DataLoader(range(12), batch_sampler=batches()), 2)
    assert shares(loaders) == [list(range(0, 12, 2)), list(range(1, 12, 2))]
    assert [batch.tolist() for batch in loaders[0]] == [[0, 2, 4], [6, 8, 10]]


def test_a_custom_batch_samplers_batches_are_shared_whole(on_ranks: Callable[..., list[Any]]) -> None:
    loaders = on_ranks(lambda: DataLoader(range(10), batch_sampler=RandomBatches()), 2)
    got = [[batch.tolist() for batch in loader] for loader in loaders]
    assert [len(part) for part in got] == [2, 2] == [len(loader) for loader in loaders]
    assert sorted(map(len, got[0] + got[1])) == [1, 2, 3, 4]
    loaders[0].sampler.set_epoch(3)


def test_without_automatic_batching_rows_are_shared_one_by_one(on_ranks: Callable[..., list[Any]]) -> None:
    assert shares(on_ranks(lambda: DataLoader(range(4), batch_size=None), 2)) == [[0, 2], [1, 3]]


@given(st.integers(0, 40), st.integers(1, 9), st.booleans())
def test_shares_are_equal_and_cover_everything(count: int, world_size: int, drop_last: bool) -> None:
    drawn = list(range(count))
    parts = [list(share(drawn, rank, world_size, drop_last)) for rank in range(world_size)]
    every = [row for part in parts for row in part]
    assert len({len(part) for part in parts}) == 1
    if drop_last:
        assert sorted(every) == drawn[: count - count % world_size]
    else:
        assert set(every) == set(drawn)
        assert len(every) == -(-count // world_size) * world_size


@given(st.integers(0, 40), st.integers(1, 9))
def test_shares_of_an_unsized_sampler_are_equal_and_disjoint(count: int, world_size: int) -> None:
    parts = [list(endless_share(iter(range(count)), rank, world_size)) for rank in range(world_size)]
    assert sorted(row for part in parts for row in part) == list(range(count - count % world_size))


# -- options and the loader's face


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


def test_an_iterable_dataset_is_left_alone_with_one_warning(on_ranks: Callable[..., list[Any]]) -> None:
    with pytest.warns(UserWarning, match="Stream is an IterableDataset") as caught:
        loaders = on_ranks(lambda: DataLoader(Stream()), 2)
    assert len(caught) == 1, "rank 0 says it for all"
    assert shares(loaders) == [[0, 1, 2, 3]] * 2


def keep(batch: list[int]) -> list[int]:
    return batch


def noted(worker_id: int) -> None:
    """A user's worker_init_fn."""


def test_every_option_is_kept(on_ranks: Callable[..., list[Any]]) -> None:
    generator = torch.Generator()
    options: dict[str, Any] = {
        "batch_size": 3,
        "num_workers": 1,
        "collate_fn": keep,
        "pin_memory": True,
        "drop_last": True,
        "timeout": 7,
        "generator": generator,
        "prefetch_factor": 3,
        "persistent_workers": True,
        "pin_memory_device": "cuda",
        "in_order": False,
    }
    dataset = TensorDataset(torch.arange(12))
    context = torch.multiprocessing.get_context("spawn")
    loader = on_ranks(
        lambda: DataLoader(dataset, multiprocessing_context=context, worker_init_fn=noted, **options), 2
    )[0]
    assert isinstance(loader, DataLoader)
    assert {name: getattr(loader, name) for name in options} == options
    assert loader.dataset is dataset
    assert loader.multiprocessing_context is context
    assert loader.worker_init_fn.then is noted
    assert (loader.batch_sampler.batch_size, loader.batch_sampler.drop_last) == (3, True)


def test_a_subclass_keeps_its_own_ways_and_the_original_is_untouched(
    on_ranks: Callable[..., list[Any]],
) -> None:
    class Doubling(DataLoader[Any]):
        extra = "here"

        def __iter__(self) -> Any:
            return (batch * 2 for batch in super().__iter__())

    original = Doubling(range(4))
    loader = on_ranks(lambda: original, 2)[0]
    assert rows(loader) == [0, 4]
    assert loader.extra == "here"
    assert rows(original) == [0, 2, 4, 6]


def test_attributes_are_set_on_the_real_loader(on_ranks: Callable[..., list[Any]]) -> None:
    loader = on_ranks(lambda: DataLoader(range(4)), 1)[0]
    loader.collate_fn = lambda batch: torch.tensor([9])
    assert rows(loader) == [9, 9, 9, 9]
    with pytest.raises(ValueError, match="should not be set after"):
        loader.batch_size = 5


def test_batches_are_counted_as_they_are_given(on_ranks: Callable[..., list[Any]]) -> None:
    loader = on_ranks(lambda: DataLoader(range(6)), 2)[0]
    before = progress.batches
    batches = iter(loader)
    next(batches)
    assert progress.batches == before + 1
    list(batches)
    assert progress.batches == before + 3


class Draws(Dataset[Any]):
    """Random numbers of the loader's own processes."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([torch.rand(1).item(), random.random(), np.random.rand()])


def draws_of(rank: int) -> Any:
    """What rank ``rank`` of 2 augments with, when all ranks set one seed."""
    context = SimpleNamespace(get_world_rank=lambda: rank, get_world_size=lambda: 2)
    prepare._context = lambda: context  # type: ignore[assignment,return-value]
    torch.manual_seed(0)
    loader = DataLoader(Draws(), batch_size=None, num_workers=1, persistent_workers=True)
    loader = prepare_data_loader(loader)
    return [row.tolist() for _ in range(2) for row in loader]


def test_loader_processes_of_two_ranks_draw_differently(forked: Callable[[int], Any]) -> None:
    group = forked(2)
    (first, again), (second, _) = (group.execute_single(rank, draws_of, rank) for rank in range(2))
    assert all(a != b for a, b in zip(first, second, strict=True)), "torch, random and numpy all differ"
    assert first != again
    assert group.execute_single(1, draws_of, 1)[0] == second, "and repeat themselves from one seed"


def test_anything_but_a_data_loader_is_refused(as_rank: Any) -> None:
    with pytest.raises(ConfigError, match="was given a list; it takes a torch DataLoader"):
        prepare_data_loader([1, 2])  # type: ignore[arg-type]


def test_outside_a_worker_the_device_is_refused_before_cuda_is_touched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> None:
        raise OutsideWorkerError("get_context() was called outside a worker")

    monkeypatch.setattr(prepare, "_context", refuse)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("CUDA was looked for"))
    with pytest.raises(OutsideWorkerError):
        prepare.get_device()


def test_a_worker_without_a_gpu_has_the_cpu(as_rank: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert prepare.get_device() == torch.device("cpu")
    assert prepare.get_devices() == [torch.device("cpu")]


def test_a_worker_with_two_gpus_has_both_from_its_current_one_on(
    as_rank: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert prepare.get_devices() == [torch.device("cuda", 2)]
    monkeypatch.setattr(prepare, "_settings", prepare._Settings(gpus=2))
    assert prepare.get_devices() == [torch.device("cuda", 2), torch.device("cuda", 3)]


# -- moving batches


@dataclass(frozen=True)
class Sample:
    image: torch.Tensor
    name: str
    size: int = field(init=False, default=3)


class Mover:
    """Moves itself, as graph batches and tokenizer outputs do."""

    def __init__(self) -> None:
        self.device: Any = None

    def to(self, device: torch.device) -> Mover:
        self.device = device
        return self


def test_nested_batches_are_moved_whole_and_keep_their_shape() -> None:
    tensor = torch.zeros(1)
    default: Any = defaultdict(list, {"d": tensor})
    batch = {
        "tuple": (tensor, [tensor, "text"], None),
        "pair": Pair(tensor, {"deep": tensor}),
        "sample": Sample(tensor, "cat"),
        "ordered": OrderedDict(a=tensor),
        "default": default,
        "mover": Mover(),
        "number": 3,
    }
    moved = move_batch(batch, torch.device("meta"))
    found: list[str] = []
    map_tensors(moved, lambda t: found.append(t.device.type))
    assert found == ["meta"] * 7
    assert moved["tuple"][1][1] == "text"
    assert moved["tuple"][2] is None
    assert moved["number"] == 3
    assert type(moved["pair"]) is Pair
    assert type(moved["ordered"]) is OrderedDict
    assert type(moved["default"]) is defaultdict
    assert (moved["sample"].name, moved["sample"].size) == ("cat", 3)
    assert moved["mover"].device == torch.device("meta")
    assert batch["sample"].image is tensor, "the original stays"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("auto_transfer", [True, False])
@pytest.mark.parametrize("pin_memory", [True, False])
def test_batches_arrive_whole_on_the_gpu(
    on_ranks: Callable[..., list[Any]], auto_transfer: bool, pin_memory: bool
) -> None:
    data = torch.arange(40 * 50_000, dtype=torch.float32).reshape(40, -1)
    make = lambda: DataLoader(TensorDataset(data), batch_size=4, pin_memory=pin_memory)  # noqa: E731
    loader = on_ranks(make, 1, auto_transfer=auto_transfer)[0]
    sums = []
    for (batch,) in loader:
        assert batch.device.type == "cuda"
        sums.append(batch.double().sum() + torch.zeros_like(batch).sum())
        del batch
    assert [value.item() for value in sums] == [part.double().sum().item() for part in data.split(4)]
    assert len(sums) == len(loader) == 10
