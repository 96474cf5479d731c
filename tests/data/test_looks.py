"""Iterations that are given up early: a look at one batch costs nothing, and rows that are lost are warned about."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from tests.data.fed import FakeIterator, numbers
from tests.data.small_source import numbered
from tests.data.test_shard import ids, shards

from powertrain import data
from powertrain.data.collate_fn import ArrowBatchCollateFn, pad
from powertrain.errors import DataError

# --------------------------------------------------------------------------- a look


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_look_at_one_batch_does_not_count_as_an_epoch(tmp_path: Any, prefetch: int) -> None:
    warned: list[str] = []
    with shards(numbered([40]), 1, tmp_path, warn=warned.append) as [shard]:
        loader = shard.iter_batches(batch_size=10, prefetch_batches=prefetch)
        looked_at = ids(next(iter(loader)))
        iter(loader)  # nothing was requested of it at all
        assert (shard.epoch, shard.state_dict()["position"]) == (0, 0)
        epoch = [row for batch in loader for row in ids(batch)]
        assert epoch[:10] == looked_at
        assert sorted(epoch) == list(range(40))
        assert shard.epoch == 1
    assert warned == []


def test_a_look_after_a_resume_does_not_cost_the_rest_of_the_epoch(tmp_path: Any) -> None:
    with shards(numbered([40]), 1, tmp_path) as [shard]:
        iterator = iter(shard.iter_batches(batch_size=10))
        first = ids(next(iterator)) + ids(next(iterator))
        state = shard.state_dict()
        del iterator
    with shards(numbered([40]), 1, tmp_path, state) as [shard]:
        next(iter(shard.iter_batches(batch_size=5)))
        assert (shard.epoch, shard.state_dict()["position"]) == (0, 20)
        rest = [row for batch in shard.iter_batches(batch_size=10) for row in ids(batch)]
    assert sorted(first + rest) == list(range(40))


def test_a_look_before_the_checkpoint_is_asked_for_leaves_its_position_valid(tmp_path: Any) -> None:
    with shards(numbered([40]), 1, tmp_path) as [shard]:
        list(shard.iter_batches(batch_size=10))
        saved = shard.state_dict()
    answers = iter([None, None, saved])
    with shards(numbered([40]), 1, tmp_path) as [shard]:
        shard._reader.hooks.resume = lambda: next(answers)
        next(iter(shard.iter_batches(batch_size=10)))
        next(shard.iter_rows())
        assert shard.epoch == 1, "what was saved holds, once the loop has asked for it"


def test_two_looks_in_a_row_are_warned_about_once(tmp_path: Any) -> None:
    warned: list[str] = []
    with shards(numbered([40]), 1, tmp_path, warn=warned.append) as [shard]:
        loader = shard.iter_batches(batch_size=10)
        looks = [ids(next(iter(loader))) for _ in range(4)]
    assert looks == [looks[0]] * 4
    assert len(warned) == 1
    assert "the same first batch" in warned[0]


def test_epochs_moves_on_after_a_look(tmp_path: Any) -> None:
    with shards(numbered([40]), 1, tmp_path) as [shard]:
        seen, kept = [], []
        for epoch in shard.epochs(3):
            kept.append(iter(shard.iter_batches(batch_size=10)))
            seen.append((epoch, shard.epoch, tuple(ids(next(kept[-1])))))
    assert [(epoch, there) for epoch, there, _ in seen] == [(0, 0), (1, 1), (2, 2)]
    assert len({rows for _, _, rows in seen}) == 3


# --------------------------------------------------------------------------- a rest that is not read


def test_an_epoch_that_is_broken_off_is_warned_about_once_when_the_next_begins(tmp_path: Any) -> None:
    warned: list[str] = []
    with shards(numbered([40]), 1, tmp_path, warn=warned.append) as [shard]:
        for _ in range(3):
            for number, _ in enumerate(shard.iter_batches(batch_size=10)):
                if number == 1:
                    break
        assert shard.epoch == 3
    assert len(warned) == 1
    assert "given up in epoch 0 after 20 of 40 rows, and the next one begins epoch 1" in warned[0]
    assert "shard.peek()" in warned[0]


def test_what_is_closed_on_purpose_or_read_to_its_last_batch_is_not_warned_about(tmp_path: Any) -> None:
    warned: list[str] = []
    with shards(numbered([40]), 1, tmp_path, warn=warned.append) as [shard]:
        closed = iter(shard.iter_batches(batch_size=10))
        next(closed), next(closed)
        closed.close()
        to_its_last = iter(shard.iter_batches(batch_size=20))
        next(to_its_last), next(to_its_last)
        del to_its_last
        assert shard.epoch == 2
        list(shard.iter_batches(batch_size=10))
    assert warned == []


# --------------------------------------------------------------------------- peek


def test_peek_gives_what_the_loop_gets_next_and_moves_nothing(tmp_path: Any) -> None:
    with shards(numbered([40]), 2, tmp_path) as ranks:
        began: list[Any] = []
        for rank in ranks:
            rank._reader.hooks.began = began.append
        for rank in ranks:
            assert isinstance(rank.peek()["id"], torch.Tensor)
            ahead = rank.peek(global_batch_size=10)["id"].tolist()
            assert began == []
            assert (rank.epoch, rank.state_dict()["position"]) == (0, 0)
            loader = rank.iter_batches(global_batch_size=10)
            given = []
            for batch in loader:
                given.append(ids(batch))
                following = loader.peek()["id"].tolist()
                given.append(following)
            assert given[0] == ahead
            assert given[1:-1:2] == given[2::2], "in a loop it is the batch after this one"
            assert given[-1] == ids(next(iter(rank.iter_batches(global_batch_size=10)))), "of the next epoch"
            began.clear()


def test_peek_takes_the_options_of_the_loop(tmp_path: Any) -> None:
    with shards(numbered([40]), 1, tmp_path) as [shard]:
        assert shard.peek(batch_size=7, collate_fn=lambda batch: len(batch["id"])) == 7
        assert shard.peek(batch_size=3, dtypes=torch.float64)["id"].dtype == torch.float64
        assert isinstance(shard.peek(batch_size=3, batch_format="pyarrow"), pa.Table)
        with pytest.raises(DataError, match="batch_size=0"):
            shard.peek(batch_size=0)
        with pytest.raises(TypeError, match="unknown_option"):
            shard.peek(unknown_option=1)
        with pytest.raises(DataError, match="no batch to look at"):
            shard.peek(batch_size=41, tail="drop")
        iterator = iter(shard.iter_batches(batch_size=10))
        next(iterator)
        with pytest.raises(DataError, match="is under way"):
            shard.peek(batch_size=10, seed=99)
        assert len(list(iterator)) == 3


def test_peek_looks_past_a_filter(tmp_path: Any) -> None:
    dataset = data.range(100).filter(lambda row: row["id"] >= 50)
    assert dataset.iter_batches(batch_size=10).peek()["id"].tolist() == list(range(50, 60))


# --------------------------------------------------------------------------- Ray's rows


def test_a_look_at_streamed_rows_does_not_count_and_a_rest_is_warned_about(opened: Any) -> None:
    warned: list[str] = []
    shard = opened(FakeIterator(*numbers(40)), warn=warned.append)
    assert shard.peek(batch_size=3)["id"].tolist() == [0, 1, 2]
    assert shard.peek(batch_size=3, batch_format="numpy")["id"].tolist() == [0, 1, 2]
    next(iter(shard.iter_batches(batch_size=10)))
    assert (shard.epoch, shard.kept(), warned) == (0, {"epoch": 0}, [])
    for number, _ in enumerate(shard.iter_batches(batch_size=10)):
        if number == 1:
            with pytest.raises(DataError, match="while an epoch is under way"):
                shard.peek()
            break
    assert (shard.epoch, warned) == (1, [])
    assert sum(len(batch["id"]) for batch in shard.iter_batches(batch_size=10)) == 40
    assert len(warned) == 1
    assert "given up in epoch 0 after 2 batches" in warned[0]
    assert shard.epoch == 2


# --------------------------------------------------------------------------- StopIteration


class Stops:
    """Raises at the fourth batch."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error, self.calls = error, 0

    def __call__(self, batch: Any) -> Any:
        self.calls += 1
        if self.calls > 3:
            raise self.error
        return batch


class StopsOnArrow(ArrowBatchCollateFn):
    def __call__(self, batch: Any) -> Any:
        return next(iter(()))


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("error", [StopIteration, SystemExit])
def test_a_collate_fn_that_ends_the_epoch_is_an_error(
    tmp_path: Any, prefetch: int, error: type[BaseException]
) -> None:
    with shards(numbered([100]), 1, tmp_path) as [shard]:
        options: dict[str, Any] = {"batch_size": 10, "prefetch_batches": prefetch}
        for _ in range(2):
            with pytest.raises(
                DataError, match=rf"collate_fn Stops.* failed at .*test_looks.py.*{error.__name__}"
            ):
                list(shard.iter_torch_batches(collate_fn=Stops(error), **options))
        with pytest.raises(DataError, match="collate_fn StopsOnArrow"):
            list(shard.iter_torch_batches(collate_fn=StopsOnArrow(), **options))


def test_other_errors_of_a_collate_fn_stay_what_they_are(tmp_path: Any) -> None:
    with shards(numbered([100]), 1, tmp_path) as [shard], pytest.raises(KeyError):
        list(shard.iter_torch_batches(batch_size=10, collate_fn=Stops(KeyError)))


class Items:
    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Any:
        if index == 30:
            raise StopIteration
        return {"x": index}


def stop(row: Any) -> Any:
    if np.any(np.asarray(row["id"]) == 30):
        raise StopIteration
    return row


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: data.range(60).map(stop), r"map\(stop\) failed"),
        (lambda: data.range(60).map_batches(stop, batch_size=5), r"map_batches\(stop\) failed"),
        (lambda: data.range(60).filter(stop), r"filter\(stop\) failed"),
        (lambda: data.range(60).flat_map(stop), r"flat_map\(stop\) failed"),
        (lambda: data.from_torch(Items()), "__getitem__ failed"),
    ],
)
def test_a_function_that_raises_stop_iteration_is_named(make: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        make().take_all()


def test_built_in_collate_functions_are_as_they_were(tmp_path: Any) -> None:
    with shards(numbered([10]), 1, tmp_path) as [shard]:
        assert len(list(shard.iter_torch_batches(batch_size=5, collate_fn=pad()))) == 2
