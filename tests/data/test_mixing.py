"""Mixtures, zips and unions: each row once per epoch at any world sizes, in an order that follows from the data."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.data.numbered import numbered as numbered_dataset
from tests.data.small_source import NumberedBlocks
from tests.data.test_shard import in_step, shards
from tests.support.examples import scaled

from powertrain import data
from powertrain.data.dataset import Dataset
from powertrain.data.plan.mixing import SHORTEST, Interleaving, shortened_counts
from powertrain.data.plan.plan import Part, Plan
from powertrain.errors import DataError

COUNTS = st.lists(st.integers(0, 60), min_size=1, max_size=4)
WEIGHT = st.floats(0.01, 10, allow_nan=False)


class Shifted(NumberedBlocks):
    """Numbered rows that begin at a number of their own, so that rows of two sources differ."""

    def __init__(self, sizes: Sequence[int], first: int) -> None:
        super().__init__(sizes)
        self.first = first
        self.fingerprint = f"{first}-{self.fingerprint}"[:32]

    def read(self, block: int, columns: Sequence[str] | None = None) -> Any:
        import pyarrow as pa

        for batch in super().read(block, columns):
            yield pa.record_batch({"id": pa.array(np.asarray(batch.column(0)) + self.first)})


def component(sizes: Sequence[int], number: int, shuffled: bool) -> Dataset:
    return Dataset(Plan((Part(Shifted(sizes, number * 1000)),), shuffled=shuffled, seed=number))


def committed_rows(plan: Plan, tmp_path: Path, chances: st.DataObject, epochs: int = 2) -> list[int]:
    """The committed rows of a run that is killed and restarted with other world sizes and batches."""
    sequence: list[int] = []
    state: Any = None
    rounds = 0
    while (state or {"epoch": 0})["epoch"] < epochs:
        rounds += 1
        world, batch = chances.draw(st.integers(1, 5)), chances.draw(st.integers(1, 40))
        steps = chances.draw(st.integers(1, 5)) if rounds < 12 else 10**6
        with shards(plan, world, tmp_path, state) as ranks:
            made = list(itertools.islice(in_step(ranks, global_batch_size=batch), steps + 1))
            committed = made[:steps]  # what came after the commit is redone by the next session
            sequence += [row for rows, _ in committed for row in rows]
            state = committed[-1][1] if len(made) > steps else ranks[0].state_dict()
    assert state["position"] == 0
    return sequence


@pytest.mark.smoke
@settings(deadline=None, max_examples=scaled(30), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=4), min_size=2, max_size=3).filter(
        lambda sizes: any(map(sum, sizes))
    ),
    weights=st.lists(WEIGHT, min_size=3, max_size=3),
    shuffled=st.lists(st.booleans(), min_size=3, max_size=3),
    chances=st.data(),
)
def test_a_mixture_has_each_row_once_per_epoch_over_any_restarts(
    tmp_path: Path,
    sizes: list[list[int]],
    weights: list[float],
    shuffled: list[bool],
    chances: st.DataObject,
) -> None:
    parts = [component(size, number, shuffled[number]) for number, size in enumerate(sizes)]
    plan = parts[0].mix(*parts[1:], weights=weights[: len(parts)]).plan
    everything = [number * 1000 + row for number, size in enumerate(sizes) for row in range(sum(size))]
    rows = committed_rows(plan, tmp_path, chances)
    total = len(everything)
    assert sorted(rows[:total]) == everything
    assert sorted(rows[total : 2 * total]) == everything


@settings(deadline=None, max_examples=scaled(20), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.lists(st.integers(1, 15), min_size=1, max_size=4), cuts=st.data(), shuffled=st.booleans())
def test_zipped_rows_come_once_per_epoch_and_stay_together(
    tmp_path: Path, sizes: list[int], cuts: st.DataObject, shuffled: bool
) -> None:
    total = sum(sizes)
    left = component(sizes, 1, False)
    middle = cuts.draw(st.integers(0, total))
    right = component([middle, total - middle], 2, False).rename_columns({"id": "other"})
    zipped = left.zip(right)
    plan = (zipped.random_shuffle(seed=3) if shuffled else zipped).plan
    rows = committed_rows(plan, tmp_path, cuts)
    assert sorted(rows[:total]) == sorted(rows[total:]) == [1000 + row for row in range(total)]
    pairs = zipped.take_all()
    assert [row["other"] - row["id"] for row in pairs] == [1000] * total


@settings(deadline=None, max_examples=scaled(20), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.lists(st.integers(0, 15), min_size=1, max_size=3), min_size=2, max_size=3),
    chances=st.data(),
)
def test_a_union_has_each_row_once_per_epoch_over_any_restarts(
    tmp_path: Path, sizes: list[list[int]], chances: st.DataObject
) -> None:
    everything = [number * 1000 + row for number, size in enumerate(sizes) for row in range(sum(size))]
    if not everything:
        return
    parts = [component(size, number, number == 0) for number, size in enumerate(sizes)]
    rows = committed_rows(parts[0].union(*parts[1:]).plan, tmp_path, chances)
    assert sorted(rows[: len(everything)]) == sorted(rows[len(everything) :]) == everything


# --------------------------------------------------------------------------- the order of a mixture


@settings(deadline=None, max_examples=scaled(60))
@given(counts=COUNTS.filter(sum), weights=st.lists(WEIGHT, min_size=4, max_size=4))
def test_slots_and_rows_of_components_correspond(counts: list[int], weights: list[float]) -> None:
    order = Interleaving(counts, weights[: len(counts)])
    slots = np.arange(order.rows)
    components, rows = order.components(slots)
    for number, count in enumerate(counts):
        mine = components == number
        assert rows[mine].tolist() == list(range(count))  # each row once, in order
        assert order.slots(number, rows[mine]).tolist() == slots[mine].tolist()


@settings(deadline=None, max_examples=scaled(30))
@given(weights=st.lists(st.floats(0.05, 1), min_size=2, max_size=4), slots=st.integers(1, 500))
def test_every_beginning_of_a_mixture_has_the_shares_of_the_weights(weights: list[float], slots: int) -> None:
    components, _ = Interleaving([10_000] * len(weights), weights).components(np.arange(slots))
    for number, weight in enumerate(weights):
        assert abs((components == number).sum() - slots * weight / sum(weights)) <= len(weights)


def test_large_mixtures_are_resolved_where_they_are_read() -> None:
    order = Interleaving([2**38, 2**20], [0.9, 0.1])
    slots = np.array([0, 2**20, 2**37, 2**38 + 2**20 - 1])
    components, rows = order.components(slots)
    for slot, number, row in zip(slots, components, rows, strict=True):
        assert order.slots(int(number), np.array([row])).tolist() == [slot]


def test_weights_that_are_far_apart_leave_no_slot_without_a_row() -> None:
    order = Interleaving((10, 10**9), [0.999999999, 1e-9])
    slots = np.arange(5 * 10**8, 5 * 10**8 + 4000)
    components, rows = order.components(slots)
    assert set(components.tolist()) == {1}
    assert rows.tolist() == (slots - 10).tolist()


def test_the_rows_that_functions_leave_count_for_the_weights() -> None:
    few = data.range(1000).filter(lambda row: row["id"] % 10 == 0)
    many = data.range(1000).flat_map(lambda row: [{"id": -1 - row["id"]}] * 2)
    mixed = few.mix(many, weights=[1, 1])
    assert mixed.count() == 2100
    ids = [row["id"] for row in mixed.take_all()]
    assert sum(each >= 0 for each in ids[:200]) == 100
    shuffled = few.random_shuffle(seed=1).mix(data.range(100), weights=[1, 1]).iter_batches(batch_size=200)
    assert len({tuple(batch["id"].tolist()) for _ in range(2) for batch in shuffled}) == 2


def test_rows_of_a_mixture_are_computed_about_once_by_each_rank(tmp_path: Path) -> None:
    """A rank has rows of all lanes in each step, and results wait until the lane's next rows are needed."""
    computed = []

    def note(batch: dict[str, Any]) -> dict[str, Any]:
        computed.append(len(batch["id"]))
        return batch

    parts = [component([50] * 32, number, shuffled=True) for number in range(2)]
    mixed = parts[0].mix(parts[1]).map_batches(note, batch_size=25)
    with shards(mixed.plan, 16, tmp_path) as ranks:
        rows = sum(len(batch["id"]) for batch in ranks[0].iter_batches(batch_size=7))
    assert rows > 0
    assert sum(computed) <= 3200


def test_a_local_shuffle_of_a_mixture_is_refused() -> None:
    mixed = data.range(10).mix(data.range(10))
    with pytest.raises(DataError, match="local_shuffle_buffer_size=5 cannot shuffle a mixture"):
        mixed.iter_batches(local_shuffle_buffer_size=5)


def test_the_shortest_component_can_end_a_mixture() -> None:
    assert shortened_counts([10, 100], [1.0, 2.0]) == (10, 19)
    assert shortened_counts([0, 100], [1.0, 2.0]) == (0, 0)
    mixed = data.range(10).mix(
        data.range(100), weights=[1, 2], stopping_condition=data.MixStoppingCondition.STOP_ON_SHORTEST
    )
    assert mixed.count() == len(mixed.take_all()) == 29
    shuffled = data.range(10).mix(
        data.range(100).random_shuffle(seed=1), weights=[1, 2], stopping_condition=SHORTEST
    )
    batches = shuffled.iter_batches(batch_size=29)
    first, second = ([batch["id"].tolist() for batch in batches] for _ in range(2))
    assert first != second


def test_what_follows_a_mixture_keeps_its_rows() -> None:
    mixed = data.range(8).mix(numbered_dataset(5, 7).select_columns(["id"]), weights=[1, 1])
    ids = [row["id"] for row in mixed.take_all()]
    assert ids[:6] == [0, 0, 1, 1, 2, 2]
    assert [row["id"] for row in mixed.limit(5).take_all()] == ids[:5]
    assert [row["id"] for part in mixed.split(3) for row in part.take_all()] == ids
    assert [row["id"] for row in mixed.map(lambda row: row).take_all()] == ids
    assert mixed.filter(lambda row: row["id"] < 2).count() == 4
    assert Counter(row["id"] for row in mixed.random_shuffle(seed=1).take_all()) == Counter(ids)
    assert [row["id"] for row in mixed.union(data.range(1)).take_all()] == [*ids, 0]
    assert len(mixed.mix(data.range(3)).take_all()) == 23
    assert mixed.map_batches(lambda batch: batch, batch_size=3).count() == 20
    assert "mixed by" in repr(mixed)


def test_the_weights_are_part_of_the_fingerprint() -> None:
    one, other = (data.range(8).mix(data.range(9), weights=weights) for weights in ([1, 2], [2, 1]))
    again = data.range(8).mix(data.range(9), weights=[0.5, 1])
    assert one.plan.inspected().fingerprint != other.plan.inspected().fingerprint
    assert one.plan.inspected().fingerprint == again.plan.inspected().fingerprint
    assert one.plan.inspected().fingerprint != data.range(8).union(data.range(9)).plan.inspected().fingerprint


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: data.range(3).mix(data.range(3), weights=[1]), "one for each of the 2 datasets"),
        (lambda: data.range(3).mix(data.range(3), weights=[1, 0]), "numbers above 0"),
        (lambda: data.range(3).mix(data.range(3), weights=[1, 1e-12]), "too far apart"),
        (lambda: data.range(3).mix(data.range(3), stopping_condition="never"), "stopping_condition='never'"),
        (lambda: data.range(3).mix(cast(Any, [1])), "takes datasets, and got a list"),
        (lambda: data.range(3).zip(data.range(4)), "same number of rows, and these have 3, 4"),
        (lambda: data.range(3).zip(), "no other dataset"),
        (
            lambda: data.range(3).mix(data.range(3), stopping_condition=SHORTEST).random_shuffle(),
            "before mix",
        ),
    ],
)
def test_what_cannot_be_combined_is_said(call: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        call()


def test_zipped_columns_of_one_name_get_numbers_and_shuffled_rows_are_kept_first() -> None:
    three = data.range(4).zip(data.range(4), data.range(4).map(lambda row: {"id": row["id"] * 10}))
    assert three.take(2) == [{"id": 0, "id_1": 0, "id_2": 0}, {"id": 1, "id_1": 1, "id_2": 10}]
    shuffled = data.range(50).random_shuffle(seed=2)
    pairs = shuffled.zip(shuffled).take_all()
    assert all(row["id"] == row["id_1"] for row in pairs)
    assert three.select_columns(["id_2"]).take_all() == [{"id_2": n * 10} for n in range(4)]
    assert three.count() == 4
