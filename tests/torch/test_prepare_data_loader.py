"""A prepared loader gives each rank its share, keeps every option, and reshuffles by itself."""

from __future__ import annotations

import json
import random
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.torch.lone_rank import counting, session_of
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

from powertrain.data.plan import order
from powertrain.data.plan.order import EpochOrder
from powertrain.data.plan.position import Position
from powertrain.data.rows.device import map_tensors
from powertrain.errors import ConfigError, DataChangedError, DataError, OutsideWorkerError
from powertrain.torch import device as torch_device
from powertrain.torch.data_loader import sharing
from powertrain.torch.data_loader.moving import move_batch
from powertrain.torch.data_loader.prepare import prepare_data_loader
from powertrain.torch.data_loader.shards import StepCut, endless_share, epoch_order, share
from powertrain.worker import session as worker_session
from powertrain.worker.data import batch_plan
from powertrain.worker.place import DataSettings
from powertrain.worker.progress import progress
from powertrain.worker.session import Session

Pair = namedtuple("Pair", "left right")


@pytest.fixture(autouse=True)
def _weight_is_restored() -> Iterator[None]:
    batch_plan.gradient_weight.reset()
    yield
    batch_plan.gradient_weight.reset()


@pytest.fixture
def on_ranks(as_rank: Callable[..., Session]) -> Callable[..., list[Any]]:
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


def together(loaders: list[Any]) -> list[int]:
    """As :func:`shares`, all in one list."""
    return [row for part in shares(loaders) for row in part]


# -- shares


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_row_comes_exactly_once_when_ranks_divide_them(
    on_ranks: Callable[..., list[Any]], world_size: int, shuffle: bool
) -> None:
    loaders = on_ranks(lambda: DataLoader(counting(24), batch_size=4, shuffle=shuffle), world_size)
    parts = shares(loaders)
    assert sorted(row for part in parts for row in part) == list(range(24))
    assert {len(part) for part in parts} == {24 // world_size}
    assert [len(loader) for loader in loaders] == [24 // world_size // 4] * world_size
    if not shuffle:
        steps = np.arange(24).reshape(-1, world_size, 4)
        assert parts == [steps[:, rank].flatten().tolist() for rank in range(world_size)]


def weighed(loader: Any) -> list[tuple[list[int], float]]:
    """The rows of each batch of one iteration, and what they count for."""
    return [(torch.as_tensor(batch).flatten().tolist(), batch_plan.gradient_weight.value) for batch in loader]


def test_the_last_step_has_what_is_left_and_its_parts_count_by_their_rows(
    on_ranks: Callable[..., list[Any]],
) -> None:
    parts = [weighed(loader) for loader in on_ranks(lambda: DataLoader(counting(17), batch_size=4), 3)]
    assert [len(part) for part in parts] == [2, 2, 2]
    assert [rows for part in parts for rows, weight in part[:1]] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
    ]
    assert [part[0][1] for part in parts] == [1.0, 1.0, 1.0]
    assert [part[1] for part in parts] == [([12], 0.6), ([13, 14], 1.2), ([15, 16], 1.2)]


def test_a_rank_without_a_row_gets_a_filler_that_counts_nothing(on_ranks: Callable[..., list[Any]]) -> None:
    parts = [weighed(loader) for loader in on_ranks(lambda: DataLoader(counting(7), batch_size=2), 3)]
    assert [part[-1] for part in parts] == [([6], 0.0), ([6], 0.0), ([6], 3.0)]


def test_drop_last_leaves_the_smaller_step_out(on_ranks: Callable[..., list[Any]]) -> None:
    loaders = on_ranks(lambda: DataLoader(counting(17), batch_size=4, drop_last=True), 2)
    assert sorted(together(loaders)) == list(range(16))
    loaders = on_ranks(lambda: DataLoader(counting(17), batch_size=3, drop_last=True), 2, tail="partial")
    assert sorted(together(loaders)) == list(range(17)), "tail= says otherwise"
    assert [len(loader) for loader in loaders] == [3, 3]


def test_the_order_is_that_of_powertrains_own_data(on_ranks: Callable[..., list[Any]]) -> None:
    loaders = on_ranks(lambda: DataLoader(counting(50), batch_size=4, shuffle=True), 3, seed=7)
    steps = list(zip(*[weighed(loader) for loader in loaders], strict=True))
    found = [row for step in steps for rows, weight in step if weight for row in rows]
    expected = EpochOrder([50], seed=7, epoch=0, shuffle="rows")
    assert found == expected.locate(np.arange(50)).offsets.tolist()


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_global_batch_has_the_same_rows_at_any_number_of_workers(
    on_ranks: Callable[..., list[Any]], shuffle: bool
) -> None:
    def steps(world_size: int) -> list[set[int]]:
        make = lambda: DataLoader(counting(45), batch_size=1, shuffle=shuffle)  # noqa: E731
        loaders = on_ranks(make, world_size, global_batch_size=10, seed=3)
        assert {len(loader) for loader in loaders} == {5}
        assert {loader.batch_size for loader in loaders} == {-(-10 // world_size)}
        together = zip(*[weighed(loader) for loader in loaders], strict=True)
        return [{row for rows, weight in step if weight for row in rows} for step in together]

    assert steps(1) == steps(2) == steps(3) == steps(16)


def test_carried_rows_begin_the_next_epoch(on_ranks: Callable[..., list[Any]]) -> None:
    loaders = on_ranks(lambda: DataLoader(counting(10), batch_size=2), 2, tail="carry")
    first, second, third = (
        [
            list(step)
            for step in zip(*[[rows for rows, _ in weighed(loader)] for loader in loaders], strict=True)
        ]
        for _ in range(3)
    )
    assert first == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert second == [[[8, 9], [0, 1]], [[2, 3], [4, 5]], [[6, 7], [8, 9]]]
    assert third == first


@given(
    st.integers(1, 40),
    st.integers(1, 12),
    st.sampled_from(["partial", "drop", "carry"]),
    st.sampled_from(["none", "rows", "blocks"]),
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=6),
)
def test_committed_rows_of_an_epoch_are_every_row_once_whatever_restarts_there_are(
    rows: int, batch: int, tail: Any, shuffle: str, attempts: list[tuple[int, int]]
) -> None:
    """Each attempt has another number of ranks and is killed after some steps; the last one reads to the end."""
    position, seen = 0, []
    start = Position(epoch=3, position=0, seed=5, lanes=4, shuffle=shuffle, fingerprint="", rows=rows)
    for number, (world_size, kill_after) in enumerate([*attempts, (3, 10**9)]):
        last = number == len(attempts)
        cuts = [StepCut(rows, batch * world_size, tail, rank, world_size) for rank in range(world_size)]
        for _ in range(min(cuts[0].steps(position), 10**9 if last else kill_after)):
            step = [cut.indices(position, lambda ago: epoch_order(start, ago)) for cut in cuts]
            weights = [cut.weight(position) for cut in cuts]
            assert sum(weights) == pytest.approx(world_size)
            assert {
                len({cut.steps(position) for cut in cuts}),
                len({cut.after(position) for cut in cuts}),
            } == {1}
            taken = [row for mine, weight in zip(step, weights, strict=True) if weight for row in mine]
            assert len(taken) == cuts[0].after(position) - position
            seen += taken
            position = cuts[0].after(position)
    left = {"partial": 0, "drop": rows - position, "carry": -cuts[0].carried(position)}[tail]
    assert len(seen) == len(set(seen)) == rows - left
    assert left < batch * 3


@given(st.integers(1, 9), st.integers(1, 13), st.integers(1, 4))
def test_carrying_loses_and_repeats_nothing_over_epochs(rows: int, batch: int, world_size: int) -> None:
    cuts = [StepCut(rows, batch, "carry", rank, world_size) for rank in range(world_size)]
    position, seen = 0, []
    for epoch in range(8):
        start = Position(
            epoch=epoch, position=position, seed=1, lanes=1, shuffle="rows", fingerprint="", rows=rows
        )
        for _ in range(cuts[0].steps(position)):
            for cut in cuts:
                if cut.weight(position):
                    seen += cut.indices(position, lambda ago: epoch_order(start, ago))  # noqa: B023
            position = cuts[0].after(position)
        position = cuts[0].carried(position)
    expected = [
        row
        for epoch in range(8)
        for row in EpochOrder([rows], seed=1, epoch=epoch, shuffle="rows").locate(np.arange(rows)).offsets
    ]
    assert seen == expected[: len(seen)]
    assert len(expected) - len(seen) == -position < batch


def test_very_many_rows_are_shuffled_in_pieces(
    on_ranks: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "ROWS_IN_ONE_PERMUTATION", 500)
    monkeypatch.setattr(order, "MOST_SHUFFLED", 64)
    loaders = on_ranks(lambda: DataLoader(counting(1001), batch_size=32, shuffle=True), 3)
    assert {loader.state_dict()["shuffle"] for loader in loaders} == {"blocks"}
    first, second = (together(loaders) for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(1001))
    assert first != second


def test_millions_of_rows_begin_without_a_permutation_of_them_all(
    on_ranks: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    permutation = order.permutation
    monkeypatch.setattr(
        order,
        "permutation",
        lambda size, *key: made.append(size) or permutation(size, *key),
    )
    count = 2**24 + 1
    loader = on_ranks(lambda: DataLoader(counting(count), batch_size=4, shuffle=True), 8)[3]
    batch = next(iter(loader)).tolist()
    assert len(set(batch)) == 4
    assert 0 <= min(batch) <= max(batch) < count
    assert sum(made) < count // 4, "this rank's lanes only"


# -- where it stands


def place_of(loader: Any) -> tuple[int, int]:
    state = loader.state_dict()
    return state["epoch"], state["position"]


def test_the_state_is_that_of_the_last_batch_handed_out(on_ranks: Callable[..., list[Any]]) -> None:
    loader = on_ranks(lambda: DataLoader(counting(10), batch_size=2), 2)[0]
    assert (place_of(loader), loader.epoch) == ((0, 0), 0)
    batches = iter(loader)
    assert place_of(loader) == (0, 0)
    assert [(next(batches).tolist(), place_of(loader)) for _ in range(3)] == [
        ([0, 1], (0, 4)),
        ([4, 5], (0, 8)),
        ([8], (0, 10)),
    ]
    assert loader.epoch == 0, "its end has not been seen yet"
    assert list(batches) == []
    assert (place_of(loader), loader.epoch) == ((1, 0), 1)
    with pytest.raises(StopIteration):
        next(batches)
    assert place_of(loader) == (1, 0)


def test_an_abandoned_epoch_is_followed_by_the_next(on_ranks: Callable[..., list[Any]]) -> None:
    loader = on_ranks(lambda: DataLoader(counting(10)), 1)[0]
    for row in loader:
        if row == 1:
            break
    assert place_of(loader) == (1, 0)
    iter(loader)
    assert place_of(loader) == (1, 0), "dropped before its first batch, so it was not begun"
    kept = iter(loader)
    next(kept), next(kept)
    assert place_of(loader) == (1, 2)
    again = iter(loader)
    next(again), next(again)
    assert place_of(loader) == (2, 2), "a new iteration gives the live one up"
    next(kept)
    assert place_of(loader) == (2, 2), "and what is left of that does not count"
    again.close()
    assert place_of(loader) == (3, 0)


@pytest.mark.parametrize(
    "options", [{"num_workers": 2, "prefetch_factor": 4}, {"num_workers": 1, "persistent_workers": True}]
)
def test_what_loader_processes_fetch_ahead_does_not_count(
    on_ranks: Callable[..., list[Any]], options: dict[str, Any]
) -> None:
    make = lambda **options: DataLoader(counting(40), batch_size=2, shuffle=True, **options)  # noqa: E731
    plain = on_ranks(lambda: make(), 2, seed=4)[1]
    expected = [rows(plain) for _ in range(3)]
    loader = on_ranks(lambda: make(**options), 2, seed=4)[1]
    got = []
    for batch in loader:
        got += batch.tolist()
        if len(got) == 6:
            state = loader.state_dict()
            assert (state["epoch"], state["position"]) == (0, 12)
            break
    assert got == expected[0][:6]
    assert rows(loader) == expected[1], "the next epoch after one that was given up"
    loader.load_state_dict(state)
    assert rows(loader) == expected[0][6:]
    assert rows(loader) == expected[1]


@given(data=st.data())
def test_a_loader_goes_on_at_any_number_of_workers(data: Any) -> None:
    count, batch = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 5))
    state: dict[str, Any] | None = None
    epochs: dict[int, list[int]] = {0: [], 1: []}
    while state is None or state["epoch"] < 2:
        world_size = data.draw(st.integers(1, 4))
        loaders: list[Any] = []
        for rank in range(world_size):
            worker_session.open_session(session_of(rank, world_size))
            loaders.append(
                prepare_data_loader(DataLoader(counting(count), batch_size=batch, shuffle=True), seed=9)
            )
        worker_session.close_session()
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        laps = [iter(loader) for loader in loaders]
        for _ in range(data.draw(st.integers(1, 12))):
            epoch, batches = loaders[0].epoch, list[tuple[Any, float]]()
            for lap in laps:
                batches.append((next(lap, None), batch_plan.gradient_weight.value))
            if batches[0][0] is None:
                assert all(batch is None for batch, _ in batches), "all ranks make equally many steps"
                break
            epochs.setdefault(epoch, []).extend(
                row for batch, weight in batches if weight for row in batch.tolist()
            )
        states = [loader.state_dict() for loader in loaders]
        assert all(other == states[0] for other in states), "the same on every rank"
        state = states[0]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(count))
    assert count < 12 or epochs[0] != epochs[1]


def test_a_state_is_small_and_plain(on_ranks: Callable[..., list[Any]]) -> None:
    class LongNamed(Stored):
        pass

    LongNamed.__name__ = "A" * 500
    loader = on_ranks(lambda: DataLoader(LongNamed(2**40), shuffle=True), 1, seed=2**53 - 1)[0]
    loader.sampler.set_epoch(10**6)
    state = loader.state_dict()
    assert set(state) == {"v", "epoch", "position", "seed", "lanes", "shuffle", "fingerprint", "rows"}
    assert len(json.dumps(state)) <= 400


class Stored(Dataset[int]):
    """Gives its own index."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


def test_a_position_in_other_data_is_refused(on_ranks: Callable[..., list[Any]]) -> None:
    state = on_ranks(lambda: DataLoader(Stored(10)), 1)[0].state_dict()
    loader = on_ranks(lambda: DataLoader(Stored(11)), 1)[0]
    with pytest.raises(
        DataChangedError, match="it was a Stored with 10 rows and is a Stored with 11 rows now"
    ):
        loader.load_state_dict(state)
    with pytest.raises(DataChangedError, match="is a range with 10 rows now"):
        on_ranks(lambda: DataLoader(counting(10)), 1)[0].load_state_dict(state)
    assert rows(loader) == list(range(11)), "and changes nothing"


def test_changed_data_may_begin_its_epoch_again(as_rank: Callable[..., Session]) -> None:
    loader = prepare_data_loader(DataLoader(Stored(10)))
    batches = iter(loader)
    next(batches)
    as_rank(0, 1, data=DataSettings(on_change="restart_epoch"))
    changed: Any = prepare_data_loader(DataLoader(Stored(11)))
    state = {**loader.state_dict(), "epoch": 4}  # type: ignore[attr-defined]
    with pytest.warns(UserWarning, match="Epoch 4 begins again from its start"):
        changed.load_state_dict(state)
    assert place_of(changed) == (4, 0)


@pytest.mark.parametrize("state", [{}, None, {"epoch": 3}, {"v": 2}])
def test_what_is_no_state_is_refused(on_ranks: Callable[..., list[Any]], state: Any) -> None:
    loader = on_ranks(lambda: DataLoader(counting(10)), 1)[0]
    if state == {"v": 2}:
        state = {**loader.state_dict(), **state}
    with pytest.raises(DataError):
        loader.load_state_dict(state)


def test_an_epoch_under_way_goes_on_as_it_was_begun(on_ranks: Callable[..., list[Any]]) -> None:
    shuffled = on_ranks(lambda: DataLoader(counting(20), batch_size=4, shuffle=True), 1)[0]
    first, rest = rows(shuffled), []
    shuffled.sampler.set_epoch(0)
    batches = iter(shuffled)
    next(batches)
    plain = on_ranks(lambda: DataLoader(counting(20), batch_size=4), 1)[0]
    plain.load_state_dict(shuffled.state_dict())
    rest = rows(plain)
    assert rest == first[4:]
    assert rows(plain) == list(range(20)), "the next is its own again"
    other = on_ranks(lambda: DataLoader(counting(20), batch_size=4, shuffle=True), 1, seed=77)[0]
    with pytest.raises(DataError, match="cannot continue with seed 77"):
        other.load_state_dict(shuffled.state_dict())


def test_epochs_go_on_where_the_loader_is(on_ranks: Callable[..., list[Any]]) -> None:
    loader = on_ranks(lambda: DataLoader(counting(4), batch_size=2), 1)[0]
    seen = []
    for epoch in loader.epochs(3):
        for batch in loader:
            seen.append((epoch, loader.epoch, batch.tolist()))
            if epoch == 1:
                state = loader.state_dict()
                break
    assert seen == [(0, 0, [0, 1]), (0, 0, [2, 3]), (1, 1, [0, 1]), (2, 2, [0, 1]), (2, 2, [2, 3])]
    assert list(loader.epochs(3)) == []
    loader.load_state_dict(state)
    assert [(epoch, rows(loader)) for epoch in loader.epochs(3)] == [(1, [2, 3]), (2, [0, 1, 2, 3])]
    assert list(loader.epochs(6)) == [3, 4, 5], "also where nobody reads"


# -- after a restart


def test_a_restarted_run_goes_on_by_itself(as_rank: Callable[..., Session]) -> None:
    make = lambda: DataLoader(counting(24), batch_size=2, shuffle=True)  # noqa: E731
    session = as_rank(0, 2)
    train, evaluation, third = (
        prepare_data_loader(make()),
        prepare_data_loader(make()),
        prepare_data_loader(make(), name="mine"),
    )
    whole = rows(prepare_data_loader(make(), add_dist_sampler=True))
    rows(evaluation), rows(third)
    batches = iter(train)
    seen = next(batches).tolist()
    saved = session.data.positions()
    assert set(saved) == {"loader", "loader-2", "mine", "loader-3"}
    session = as_rank(0, 2, saved)
    session.data.on_checkpoint_requested()
    again: Any = prepare_data_loader(make())
    assert again.epoch == 0
    assert seen + rows(again) == whole
    assert place_of(prepare_data_loader(make())) == (1, 0)


def test_a_loader_that_is_not_used_yet_keeps_its_saved_place(as_rank: Callable[..., Session]) -> None:
    prepared: Any = prepare_data_loader(DataLoader(counting(24)))
    saved = {"loader": {**prepared.state_dict(), "epoch": 3, "position": 7}}
    session = as_rank(0, 1, saved)
    loader: Any = prepare_data_loader(DataLoader(counting(24)))
    session.data.described()
    session.data.on_checkpoint_requested()
    session.data.described()
    assert session.data.positions() == saved
    assert place_of(loader) == (3, 7)
    assert rows(loader) == list(range(7, 24))
    assert session.data.positions()["loader"]["epoch"] == 4
    assert session.service.said == []  # type: ignore[attr-defined]


def test_a_loop_that_never_loads_its_checkpoint_begins_anew_with_a_warning(
    as_rank: Callable[..., Session],
) -> None:
    prepared: Any = prepare_data_loader(DataLoader(counting(24)))
    session = as_rank(0, 1, {"loader": {**prepared.state_dict(), "epoch": 3, "position": 7}})
    loader = prepare_data_loader(DataLoader(counting(24)))
    assert rows(loader) == list(range(24))
    assert len(session.service.said) == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("told", "expected"), [(3, list(range(7, 24))), (4, list(range(24))), (0, list(range(24)))]
)
def test_set_epoch_of_the_epoch_under_way_goes_on_with_its_rest(
    as_rank: Callable[..., Session], told: int, expected: list[int]
) -> None:
    prepared: Any = prepare_data_loader(DataLoader(counting(24)))
    session = as_rank(0, 1, {"loader": {**prepared.state_dict(), "epoch": 3, "position": 7}})
    session.data.on_checkpoint_requested()
    loader: Any = prepare_data_loader(DataLoader(counting(24)))
    loader.sampler.set_epoch(told)
    assert rows(loader) == expected
    assert place_of(loader) == (told + 1, 0)


def test_each_loader_has_a_name_of_its_own(as_rank: Callable[..., Session]) -> None:
    session = as_rank(0, 1)
    first = prepare_data_loader(DataLoader(counting(4)), name="loader")
    second: Any = prepare_data_loader(DataLoader(counting(4)))
    iter(second)
    assert set(session.data.positions()) == {"loader-2"}
    with pytest.raises(ConfigError, match=r"name='loader'\) was called twice"):
        prepare_data_loader(DataLoader(counting(4)), name="loader")
    with pytest.raises(ConfigError, match=r"name=''"):
        prepare_data_loader(DataLoader(counting(4)), name="")
    assert first is not second


def test_a_loader_prepared_anew_in_each_epoch_goes_on_with_the_next_one(
    as_rank: Callable[..., Session],
) -> None:
    session = as_rank(0, 1)
    orders = []
    for epoch in range(3):
        loader: Any = prepare_data_loader(DataLoader(counting(40), batch_size=40, shuffle=True))
        assert loader.epoch == epoch
        [batch] = loader
        orders.append(tuple(batch.tolist()))
        other: Any = prepare_data_loader(DataLoader(counting(7)))  # an evaluation between, over other data
        assert len(list(other)) == 7
        del loader, other
    assert len(set(orders)) == 3
    positions = session.data.positions()
    assert {name: state["epoch"] for name, state in positions.items()} == {"loader": 3, "loader-2": 3}


def test_a_loop_that_goes_on_has_the_failed_batch_behind_it(as_rank: Callable[..., Session]) -> None:
    class Broken(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> int:
            if index == 3:
                raise KeyError(index)
            return index

    as_rank(0, 1)
    loader: Any = prepare_data_loader(DataLoader(Broken(), batch_size=2))
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(KeyError):
        next(iterator)
    assert next(iterator).tolist() == [4, 5]
    assert loader.state_dict()["position"] == 6


def test_a_custom_sampler_begins_its_epoch_again(on_ranks: Callable[..., list[Any]]) -> None:
    make = lambda: DataLoader(counting(20), sampler=SubsetRandomSampler(range(20)), batch_size=2)  # noqa: E731
    loaders = on_ranks(make, 2)
    shares(loaders)
    second = shares(loaders)
    batches = iter(loaders[0])
    next(batches)
    assert place_of(loaders[0]) == (2, 0)
    again = on_ranks(make, 2, seed=0)
    for loader in again:
        loader.load_state_dict({**loaders[0].state_dict(), "epoch": 1})
    assert shares(again) == second


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(counting(8), sampler=Backwards(8)),
        lambda: DataLoader(counting(8), sampler=DistributedSampler(counting(8), 2, 0)),
    ],
)
def test_shares_of_equal_size_count_the_same(on_ranks: Callable[..., list[Any]], make: Any) -> None:
    loader = on_ranks(make, 2)[0]
    batch_plan.gradient_weight.set(0.5)
    assert {weight for _, weight in weighed(loader)} == {1.0}


def test_where_every_rank_has_all_rows_the_weight_is_the_users(on_ranks: Callable[..., list[Any]]) -> None:
    loader = on_ranks(lambda: DataLoader(counting(8)), 2, add_dist_sampler=False)[0]
    batch_plan.gradient_weight.set(0.5)
    assert {weight for _, weight in weighed(loader)} == {0.5}


def test_preparing_twice_is_once(on_ranks: Callable[..., list[Any]]) -> None:
    loader = on_ranks(lambda: DataLoader(counting(8)), 2)[0]
    assert prepare_data_loader(loader) is loader


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda: DataLoader(counting(8)), {"tail": "keep"}, "tail='keep'"),
        (lambda: DataLoader(counting(8)), {"global_batch_size": 0}, "global_batch_size=0"),
        (lambda: DataLoader(counting(8)), {"seed": -1}, "seed=-1"),
        (lambda: DataLoader(counting(8), batch_size=None), {"global_batch_size": 4}, "makes no batches"),
        (
            lambda: DataLoader(counting(8), sampler=Backwards(8)),
            {"global_batch_size": 4},
            "a sampler of its own",
        ),
        (lambda: DataLoader(Stream()), {"tail": "drop"}, "Stream is an IterableDataset"),
        (
            lambda: DataLoader(counting(8)),
            {"tail": "drop", "add_dist_sampler": False},
            "add_dist_sampler=False leaves",
        ),
    ],
)
def test_an_option_that_could_do_nothing_is_refused(
    on_ranks: Callable[..., list[Any]], make: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        on_ranks(make, 2, **options)


# -- epochs


def test_each_iteration_is_a_new_epoch_and_set_epoch_is_honoured(on_ranks: Callable[..., list[Any]]) -> None:
    make = lambda: DataLoader(counting(32), batch_size=4, shuffle=True)  # noqa: E731
    (loader, _), (told, _) = on_ranks(make, 2), on_ranks(make, 2)
    epochs = [rows(loader) for _ in range(4)]
    assert len({tuple(epoch) for epoch in epochs}) == 4, "the order differs from epoch to epoch"
    told.sampler.set_epoch(2)
    assert rows(told) == epochs[2]
    assert rows(told) == epochs[3], "counting goes on from what was set"
    told.sampler.set_epoch(0)
    assert rows(told) == epochs[0]


def test_a_new_epoch_is_disjoint_between_ranks_too(on_ranks: Callable[..., list[Any]]) -> None:
    loaders = on_ranks(lambda: DataLoader(counting(12), batch_size=2, shuffle=True), 3)
    first, second = shares(loaders), shares(loaders)
    for parts in (first, second):
        assert sorted(row for part in parts for row in part) == list(range(12))
    assert first != second


def test_the_users_generator_decides_the_order(on_ranks: Callable[..., list[Any]]) -> None:
    def orders(seed: int) -> list[list[int]]:
        make = lambda: DataLoader(counting(16), shuffle=True, generator=torch.Generator().manual_seed(seed))  # noqa: E731
        return shares(on_ranks(make, 2))

    assert orders(1) == orders(1)
    assert orders(1) != orders(2)


def test_a_lone_workers_order_follows_manual_seed(on_ranks: Callable[..., list[Any]]) -> None:
    orders = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        orders.append(rows(on_ranks(lambda: DataLoader(counting(16), shuffle=True), 1)[0]))
    assert orders[0] == orders[1] != orders[2]


def test_reproducibilitys_seed_decides_the_order(
    on_ranks: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def order(seed: int) -> list[int]:
        monkeypatch.setattr(torch_device, "_settings", torch_device._Settings(seed=seed))
        return shares(on_ranks(lambda: DataLoader(counting(16), shuffle=True), 2))[0]

    assert order(1) == order(1) != order(2)


def test_add_dist_sampler_false_gives_every_rank_all_rows(on_ranks: Callable[..., list[Any]]) -> None:
    loaders = on_ranks(lambda: DataLoader(counting(6)), 2, add_dist_sampler=False)
    assert shares(loaders) == [list(range(6))] * 2
    assert type(loaders[0].sampler) is SequentialSampler


def test_a_distributed_sampler_of_the_users_is_kept(on_ranks: Callable[..., list[Any]]) -> None:
    own: DistributedSampler[Any] = DistributedSampler(counting(6), num_replicas=2, rank=1, shuffle=False)
    make = lambda: DataLoader(counting(6), sampler=own)  # noqa: E731
    assert on_ranks(make, 2)[0].sampler is own
    batches = BatchSampler(own, 2, False)
    assert on_ranks(lambda: DataLoader(counting(6), batch_sampler=batches), 2)[0].batch_sampler is batches


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
        return DataLoader(counting(8), sampler=samplers[-1], batch_size=2)

    loaders = on_ranks(make, 2)
    assert shares(loaders) == [[7, 5, 3, 1], [6, 4, 2, 0]]
    assert len(loaders[0]) == 2
    shares(loaders)
    assert samplers[0].epochs[-1] == 1, "its own set_epoch is called"


def test_a_random_sampler_draws_alike_on_every_rank_and_anew_each_epoch(
    on_ranks: Callable[..., list[Any]],
) -> None:
    loaders = on_ranks(lambda: DataLoader(counting(20), sampler=SubsetRandomSampler(range(10, 20))), 2)
    first, second = shares(loaders), shares(loaders)
    assert sorted(first[0] + first[1]) == list(range(10, 20))
    assert sorted(second[0] + second[1]) == list(range(10, 20))
    assert first != second


def test_drawing_leaves_the_ranks_own_random_numbers_alone(on_ranks: Callable[..., list[Any]]) -> None:
    loader = on_ranks(lambda: DataLoader(counting(20), sampler=SubsetRandomSampler(range(20))), 2)[1]
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    expected = (torch.rand(1).item(), random.random(), np.random.rand())
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    list(loader.sampler)
    assert (torch.rand(1).item(), random.random(), np.random.rand()) == expected


@pytest.mark.parametrize(
    "make_sampler",
    [
        lambda: WeightedRandomSampler([1.0] * 10, 12),
        lambda: RandomSampler(range(10), replacement=True, num_samples=12),
        lambda: RandomSampler(range(10), num_samples=12),
    ],
)
def test_samplers_that_choose_how_many_rows_keep_their_number(
    on_ranks: Callable[..., list[Any]], make_sampler: Callable[[], Any]
) -> None:
    loaders = on_ranks(lambda: DataLoader(counting(10), sampler=make_sampler(), batch_size=2), 2)
    assert [len(loader) for loader in loaders] == [3, 3]
    assert [len(part) for part in shares(loaders)] == [6, 6]


def test_a_plain_batch_sampler_is_rebuilt_over_the_share(on_ranks: Callable[..., list[Any]]) -> None:
    batches = lambda: BatchSampler(SequentialSampler(range(12)), 3, drop_last=True)  # noqa: E731
    loaders = on_ranks(lambda: DataLoader(counting(12), batch_sampler=batches()), 2)
    assert shares(loaders) == [[0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11]]
    assert [batch.tolist() for batch in loaders[0]] == [[0, 1, 2], [6, 7, 8]]


def test_a_custom_batch_samplers_batches_are_shared_whole(on_ranks: Callable[..., list[Any]]) -> None:
    loaders = on_ranks(lambda: DataLoader(counting(10), batch_sampler=RandomBatches()), 2)
    got = [[batch.tolist() for batch in loader] for loader in loaders]
    assert [len(part) for part in got] == [2, 2] == [len(loader) for loader in loaders]
    assert sorted(map(len, got[0] + got[1])) == [1, 2, 3, 4]
    loaders[0].sampler.set_epoch(3)


def test_without_automatic_batching_rows_are_shared_one_by_one(on_ranks: Callable[..., list[Any]]) -> None:
    assert shares(on_ranks(lambda: DataLoader(counting(4), batch_size=None), 2)) == [[0, 2], [1, 3]]


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
    with pytest.warns(
        UserWarning, match=r"begins again from its start.*every worker will read all"
    ) as caught:
        loaders = on_ranks(lambda: DataLoader(Stream()), 2)
    assert len(caught) == 1, "rank 0 says it for all"
    assert shares(loaders) == [[0, 1, 2, 3]] * 2
    assert place_of(loaders[0]) == (1, 0), "epochs are counted all the same"


@pytest.mark.parametrize(("world_size", "options"), [(1, {}), (2, {"add_dist_sampler": False})])
def test_an_iterable_dataset_that_needs_no_shares_still_cannot_go_on_exactly(
    on_ranks: Callable[..., list[Any]], world_size: int, options: dict[str, Any]
) -> None:
    with pytest.warns(UserWarning, match="no position can be kept") as caught:
        on_ranks(lambda: DataLoader(Stream()), world_size, **options)
    assert len(caught) == 1
    assert "every worker" not in str(caught[0].message)


class Endless:
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


def test_a_sampler_without_a_length_is_reported(on_ranks: Callable[..., list[Any]]) -> None:
    with pytest.warns(
        UserWarning, match=r"Endless has no length.*must draw the same on all 2 workers"
    ) as caught:
        loaders = on_ranks(lambda: DataLoader(counting(5), sampler=Endless()), 2)
    assert len(caught) == 1
    assert shares(loaders) == [[0, 2], [1, 3]]


def test_batches_in_any_order_have_no_position(on_ranks: Callable[..., list[Any]]) -> None:
    with pytest.warns(UserWarning, match="in_order=False") as caught:
        loader = on_ranks(lambda: DataLoader(counting(9), num_workers=2, in_order=False), 2)[0]
    assert len(caught) == 1
    batches = iter(loader)
    next(batches)
    assert place_of(loader) == (0, 0)
    assert len(list(batches)) == 4
    assert place_of(loader) == (1, 0)


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
    with pytest.warns(UserWarning, match="in_order=False"):
        loader = on_ranks(
            lambda: DataLoader(dataset, multiprocessing_context=context, worker_init_fn=noted, **options), 2
        )[0]
    assert isinstance(loader, DataLoader)
    assert {name: getattr(loader, name) for name in options} == options
    assert loader.dataset is dataset
    assert loader.multiprocessing_context is context
    init, batches = cast("Any", loader.worker_init_fn), cast("Any", loader.batch_sampler)
    assert init.then is noted
    assert (batches.batch_size, batches.drop_last) == (3, True)


def test_a_subclass_keeps_its_own_ways_and_the_original_is_untouched(
    on_ranks: Callable[..., list[Any]],
) -> None:
    class Doubling(DataLoader[Any]):
        extra = "here"

        def __iter__(self) -> Any:
            return (batch * 2 for batch in super().__iter__())

    original = Doubling(counting(4))
    loader = on_ranks(lambda: original, 2)[0]
    assert rows(loader) == [0, 4]
    assert loader.extra == "here"
    assert rows(original) == [0, 2, 4, 6]


def test_attributes_are_set_on_the_real_loader(on_ranks: Callable[..., list[Any]]) -> None:
    loader = on_ranks(lambda: DataLoader(counting(4)), 1)[0]
    loader.collate_fn = lambda batch: torch.tensor([9])
    assert rows(loader) == [9, 9, 9, 9]
    with pytest.raises(ValueError, match="should not be set after"):
        loader.batch_size = 5


def test_batches_are_counted_as_they_are_given(on_ranks: Callable[..., list[Any]]) -> None:
    loader = on_ranks(lambda: DataLoader(counting(6)), 2)[0]
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
    worker_session.open_session(session_of(rank, 2))
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


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("get_device", ()),
        ("get_devices", ()),
        ("prepare_model", (torch.nn.Linear(1, 1),)),
        ("accelerate", ()),
    ],
)
def test_what_was_called_outside_a_worker_is_named_before_cuda_is_touched(
    monkeypatch: pytest.MonkeyPatch, name: str, arguments: tuple[Any, ...]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("CUDA was looked for"))
    with pytest.raises(OutsideWorkerError, match=rf"^{name}\(\) was called outside a training worker"):
        getattr(import_module("powertrain.torch"), name)(*arguments)


def test_a_worker_without_a_gpu_has_the_cpu(as_rank: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert torch_device.get_device() == torch.device("cpu")
    assert torch_device.get_devices() == [torch.device("cpu")]


def test_a_worker_with_two_gpus_has_both_from_its_current_one_on(
    as_rank: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert torch_device.get_devices() == [torch.device("cuda", 2)]
    monkeypatch.setattr(torch_device, "_settings", torch_device._Settings(gpus=2))
    assert torch_device.get_devices() == [torch.device("cuda", 2), torch.device("cuda", 3)]


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
