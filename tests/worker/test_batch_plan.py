"""A global batch stays whole at any number of ranks: no sample is lost or counts twice, and the mean is the mean."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powertrain.errors import ConfigError
from powertrain.worker.data.batch_plan import (
    BatchPlan,
    GradientWeight,
    MicroBatch,
    plan,
)

TOTALS = st.integers(1, 500)
WORLD_SIZES = st.integers(1, 64)
LIMITS = st.none() | st.integers(1, 80)


def plans(total: int, world_size: int, limit: int | None) -> list[BatchPlan]:
    return [plan(total, rank, world_size, limit) for rank in range(world_size)]


# -- samples


@given(TOTALS, WORLD_SIZES, LIMITS)
def test_every_sample_belongs_to_one_rank_in_order(total: int, world_size: int, limit: int | None) -> None:
    covered: list[int] = []
    for part in plans(total, world_size, limit):
        covered += range(part.start, part.start + part.samples)
    assert covered == list(range(total))


@given(TOTALS, WORLD_SIZES)
def test_a_ranks_part_is_cut_as_the_data_order_cuts_it(total: int, world_size: int) -> None:
    for rank, part in enumerate(plans(total, world_size, None)):
        assert part.start == math.floor(rank * total / world_size)
        assert part.start + part.samples == math.floor((rank + 1) * total / world_size)


@given(TOTALS, WORLD_SIZES)
def test_weights_add_up_to_the_world_size_and_are_all_one_or_none(total: int, world_size: int) -> None:
    weights = [part.weight for part in plans(total, world_size, None)]
    assert math.isclose(sum(weights), world_size, rel_tol=1e-12)
    assert {weight == 1.0 for weight in weights} == {total % world_size == 0}


# -- passes


@given(TOTALS, WORLD_SIZES, LIMITS)
def test_every_rank_makes_equally_many_passes_and_no_more_than_needed(
    total: int, world_size: int, limit: int | None
) -> None:
    parts = plans(total, world_size, limit)
    largest = max(part.samples for part in parts)
    needed = 1 if limit is None else math.ceil(largest / limit)
    assert {part.accumulation_steps for part in parts} == {needed}
    assert {len(part) for part in parts} == {len(list(part)) for part in parts} == {needed}


@given(TOTALS, WORLD_SIZES, LIMITS)
def test_passes_hold_the_ranks_samples_within_the_limit_and_near_equal(
    total: int, world_size: int, limit: int | None
) -> None:
    for part in plans(total, world_size, limit):
        sizes, counted = part.micro_batches, [micro.samples for micro in part]
        assert sum(counted) == part.samples
        assert all(size >= 1 and (limit is None or size <= limit) for size in sizes)
        assert max(counted) - min(counted) <= 1
        assert counted == sorted(counted), "those that are only filled come first"
        assert [max(count, 1) for count in counted] == list(sizes), "what has nothing to do passes one row"


@given(TOTALS, WORLD_SIZES, LIMITS)
def test_iterating_gives_the_passes_with_their_places(total: int, world_size: int, limit: int | None) -> None:
    for part in plans(total, world_size, limit):
        rows: list[int] = []
        for index, micro in enumerate(part):
            assert (micro.index, micro.is_last) == (index, index == len(part) - 1)
            assert (micro.size, micro.loss_scale) == (part.micro_batches[index], part.loss_scales[index])
            assert 0 <= micro.start < total, "there is a row even for a filler"
            rows += range(micro.start, micro.start + micro.samples)
        assert rows == list(range(part.start, part.start + part.samples))


@given(st.lists(st.floats(-1000, 1000), min_size=1, max_size=200), WORLD_SIZES, LIMITS)
def test_weighted_means_of_means_are_the_mean(
    values: list[float], world_size: int, limit: int | None
) -> None:
    average = 0.0
    for part in plans(len(values), world_size, limit):
        mine = 0.0
        for micro in part:
            rows = values[micro.start : micro.start + micro.size]
            mine += math.fsum(rows) / len(rows) * micro.loss_scale
        average += mine * part.weight / world_size
    scale = max(1.0, max(abs(value) for value in values))
    assert abs(average - math.fsum(values) / len(values)) <= 1e-12 * scale


def test_sixteen_samples_of_three_ranks_in_passes_of_two() -> None:
    first, second, third = plans(16, 3, 2)
    assert [part.micro_batches for part in (first, second, third)] == [(1, 2, 2), (1, 2, 2), (2, 2, 2)]
    assert (first.weight, third.weight) == (15 / 16, 18 / 16)
    assert second.loss_scales == (0.2, 0.4, 0.4)
    assert list(second)[1] == MicroBatch(1, start=6, size=2, samples=2, loss_scale=0.4, is_last=False)


def test_a_rank_with_too_few_samples_begins_with_passes_that_count_nothing() -> None:
    assert plan(5, 0, 2, 1).micro_batches == (1, 1, 1)
    assert plan(5, 0, 2, 1).loss_scales == (0.0, 0.5, 0.5)


def test_a_rank_without_samples_gets_a_filler_that_counts_nothing() -> None:
    empty = plan(2, 0, 3)
    assert (empty.samples, empty.weight, empty.micro_batches, empty.loss_scales) == (0, 0.0, (1,), (0.0,))


@given(TOTALS, LIMITS)
def test_alone_the_weight_is_one(total: int, limit: int | None) -> None:
    assert plan(total, 0, 1, limit).weight == 1.0


def test_a_plan_says_its_weight_whenever_a_step_begins() -> None:
    said: list[float] = []
    training, evaluation = (dataclasses.replace(plan(total, 0, 2), begin=said.append) for total in (3, 5))
    for each in (training, evaluation, training):
        list(each)
    assert said == [training.weight, evaluation.weight, training.weight]


# -- bad input


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, 0, 1), r"batch_plan\(global_batch_size=0\) cannot be used: .*out of range.* at least 1"),
        ((-3, 0, 1), r"global_batch_size=-3"),
        ((2.5, 0, 1), r"global_batch_size=2\.5.*not a whole number"),
        (("8", 0, 1), r"global_batch_size='8'.*not a whole number"),
        ((True, 0, 1), r"global_batch_size=True.*not a whole number"),
        ((None, 0, 1), r"global_batch_size=None.*not a whole number"),
        ((8, 0, 1, 0), r"max_micro_batch=0.*at least 1"),
        ((8, 0, 1, 1.0), r"max_micro_batch=1\.0.*not a whole number"),
        ((8, 2, 2), r"rank=2.*from 0 to 1"),
        ((8, 0, 0), r"world_size=0.*at least 1"),
    ],
)
def test_what_is_no_positive_whole_number_is_refused_by_name(arguments: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan(*arguments)


# -- the weight in force


def test_a_waiting_callback_is_called_once_before_the_first_uneven_weight_holds() -> None:
    weight, seen = GradientWeight(), list[object]()
    weight.when_uneven(lambda: seen.append(weight.value))
    weight.set(1.0)
    assert seen == []
    for value in (0.5, 1.0, 1.5):
        weight.set(value)
    assert (seen, weight.value) == ([1.0], 1.5)
    weight.set(1.0)
    weight.when_uneven(lambda: seen.append("late"))
    assert seen == [1.0, "late"], "there was one already"


def test_a_weight_that_cannot_be_applied_is_refused_every_time_and_changes_nothing() -> None:
    def refuse() -> None:
        raise ConfigError("no")

    weight = GradientWeight()
    weight.when_uneven(refuse)
    for _ in range(2):
        with pytest.raises(ConfigError):
            weight.set(0.5)
        assert weight.value == 1.0
    weight.reset()
    weight.set(0.5)
    assert weight.value == 0.5, "after a reset nobody waits"
