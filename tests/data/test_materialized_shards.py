"""A rank's rows all at once: each row in one rank, the same after a restart, and nothing moves."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.data.fed import FakeIterator, Opened, numbers
from tests.data.small_source import numbered
from tests.data.test_shard import shards
from tests.support.examples import scaled

from powertrain.errors import DataError


def rows_of(shard: Any) -> list[int]:
    return shard.materialize().to_pandas()["id"].tolist()


@settings(deadline=None, max_examples=scaled(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    blocks=st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(sum),
    world=st.integers(1, 5),
    shuffled=st.booleans(),
)
def test_each_row_is_in_one_rank_and_again_after_a_restart(
    tmp_path: Path, blocks: list[int], world: int, shuffled: bool
) -> None:
    plan = numbered(blocks, shuffled=shuffled)
    with shards(plan, world, tmp_path) as made:
        found = [rows_of(shard) for shard in made]
        assert sorted(itertools.chain(*found)) == list(range(sum(blocks)))
        state = made[0].state_dict()
        assert state["position"] == 0, "the loop still gets the first epoch"
    with shards(plan, world, tmp_path, {**state, "epoch": 3, "position": min(4, sum(blocks))}) as resumed:
        assert [rows_of(shard) for shard in resumed] == found


def test_a_loop_over_batches_goes_on_where_it_was(tmp_path: Path) -> None:
    with shards(numbered([10], shuffled=False), 1, tmp_path) as [shard]:
        batches = iter(shard.iter_batches(batch_size=4))
        first = next(batches)["id"].tolist()
        assert rows_of(shard) == list(range(10))
        assert first + [row for batch in batches for row in batch["id"].tolist()] == list(range(10))


def test_a_dataset_that_is_not_divided_is_whole_in_every_rank(tmp_path: Path) -> None:
    with shards(numbered([3, 4], shuffled=False), 2, tmp_path, split=False) as made:
        assert [rows_of(shard) for shard in made] == [list(range(7))] * 2


def test_a_rank_without_rows_has_the_columns(tmp_path: Path) -> None:
    with shards(numbered([1], shuffled=False), 2, tmp_path) as made:
        frames = [shard.materialize().to_pandas() for shard in made]
    assert sorted(map(len, frames)) == [0, 1]
    assert list(frames[0].columns) == list(frames[1].columns)


def test_rows_of_a_dataset_of_rays_are_one_epoch(opened: Opened) -> None:
    shard = opened(FakeIterator(*numbers(3, 2)))
    assert rows_of(shard) == [0, 1, 2, 3, 4]
    assert rows_of(shard) == [0, 1, 2, 3, 4]


def test_tensors_of_tensorflow_say_how_to_install_it_where_it_is_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with shards(numbered([3], shuffled=False), 1, tmp_path) as [shard]:
        with pytest.raises(DataError, match=r"to_tf needs tensorflow.*: pip install tensorflow tf-keras"):
            shard.to_tf("id", "id")
        with pytest.raises(DataError, match="iter_tf_batches needs tensorflow"):
            shard.iter_tf_batches()
