"""Batches that are filled up where functions leave rows out or add some: positions lose no row and repeat none."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.data.test_shard import shards
from tests.support.examples import scaled

from powertrain import data
from powertrain.data import Dataset
from powertrain.data.plan.position import Position
from powertrain.errors import DataError

CHANGES: dict[str, Callable[[Dataset], Dataset]] = {
    "filter": lambda whole: whole.filter(lambda row: row["id"] % 3 != 1),
    "flat_map": lambda whole: whole.flat_map(lambda row: [{"id": row["id"] * 10 + n} for n in range(row["id"] % 4)]),
    "batches": lambda whole: whole.map_batches(lambda batch: {"id": np.repeat(batch["id"], 2)[::3]}, batch_size=7),
}  # fmt: skip


def read(batches: Any) -> list[int]:
    return [number for batch in batches for number in batch["id"].tolist()]


def read_some(batches: Any, count: int) -> tuple[list[int], dict[str, Any]]:
    """Return the rows of some batches, and the position after them."""
    iterator = iter(batches)
    found = read(itertools.islice(iterator, count))
    state = json.loads(json.dumps(batches.state_dict()))
    iterator.close()
    return found, state


@settings(deadline=None, max_examples=scaled(12))
@given(
    st.sampled_from(sorted(CHANGES)),
    st.booleans(),
    st.integers(1, 9),
    st.integers(1, 9),
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
)
@example("flat_map", True, 7, 2, [1, 1])
@example("filter", False, 4, 4, [1])
def test_rows_come_once_over_restarts_in_mid_epoch(
    change: str, shuffled: bool, size: int, other_size: int, stops: list[int]
) -> None:
    dataset = CHANGES[change](data.range(40))
    if shuffled:
        dataset = dataset.random_shuffle(seed=4)
    whole = read(dataset.iter_batches(batch_size=size))
    found, state = read_some(dataset.iter_batches(batch_size=size), stops[0])
    for stop in stops[1:]:
        batches = dataset.iter_batches(batch_size=other_size)
        batches.load_state_dict(state)
        more, state = read_some(batches, stop)
        found += more
    assert len(json.dumps(state)) <= 400
    last = dataset.iter_batches(batch_size=size)
    last.load_state_dict(state)
    if state["epoch"] == 0:
        found += read(last)
    assert len(found) >= len(whole)
    if shuffled:
        assert sorted(found[: len(whole)]) == sorted(whole)
    else:
        assert found[: len(whole)] == whole


def test_rows_that_fill_no_batch_are_carried_into_the_next_epoch() -> None:
    batches = CHANGES["filter"](data.range(20)).iter_batches(batch_size=4, tail="carry")
    whole = [n for n in range(20) if n % 3 != 1]
    assert read(batches) + read(batches) + read(batches) == (whole * 4)[: 4 * (3 * len(whole) // 4)]


def test_a_position_between_made_rows_is_refused_in_a_run(tmp_path: Path) -> None:
    dataset = CHANGES["filter"](data.range(20))
    batches = dataset.iter_batches(batch_size=4)
    _, state = read_some(batches, 1)
    assert state["skip"] > 0
    with shards(dataset.plan, 2, tmp_path) as [first, _]:
        first.load_state_dict({**state, "seed": first.state_dict()["seed"]})
        with pytest.raises(DataError, match="which only reading alone can continue"):
            iter(first.iter_batches(batch_size=4))


@pytest.mark.parametrize(
    "wrong", [{"skip": -1, "step": 4}, {"skip": 1, "step": 0}, {"skip": True, "step": 1}, {"skip": 1}]
)
def test_odd_numbers_of_consumed_rows_are_refused(wrong: dict[str, Any]) -> None:
    state = data.range(20).iter_batches().state_dict()
    with pytest.raises(DataError, match="state_dict"):
        Position.from_dict({**state, **wrong}, "train")
