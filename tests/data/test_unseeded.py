"""Rows picked or kept without a seed: the same data gives the same rows at every start of a program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.data.numbered import ids

from powertrain import data
from powertrain.data.dataset import Dataset
from powertrain.data.plan.changes import changed_message
from powertrain.data.plan.position import Position
from powertrain.data.plan.prepared import Prepared


def noisy(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"id": row["id"], "noise": rng.normal()}


def odd(row: dict[str, Any]) -> bool:
    return bool(row["id"] % 2)


WAYS = {
    "limit": lambda whole: [whole.random_shuffle().limit(30)],
    "limit of an unknown count": lambda whole: [whole.filter(odd).random_shuffle().limit(20)],
    "split": lambda whole: whole.random_shuffle().split(3),
    "split at indices": lambda whole: whole.random_shuffle().split_at_indices([10, 70]),
    "split proportionately": lambda whole: whole.random_shuffle().split_proportionately([0.5]),
    "materialize": lambda whole: [whole.random_shuffle().materialize()],
    "materialized random numbers": lambda whole: [whole.map(noisy).materialize()],
    "train and test": lambda whole: whole.train_test_split(0.2, shuffle=True),
    "train and test of a shuffled one": lambda whole: whole.random_shuffle().train_test_split(13),
    "train and test of an unknown count": lambda whole: whole.filter(odd).train_test_split(0.2, shuffle=True),
    "repartition": lambda whole: [whole.filter(odd).repartition(3, shuffle=True)],
}


@pytest.fixture
def files(tmp_path: Path) -> str:
    for number in range(3):
        rows = pa.table({"id": pa.array(np.arange(number * 33, number * 33 + 33))})
        pq.write_table(rows, tmp_path / f"{number}.parquet", row_group_size=8)
    return str(tmp_path)


@pytest.mark.parametrize("way", WAYS)
def test_the_same_data_gives_the_same_rows_at_every_start(files: str, way: str) -> None:
    first, second = (WAYS[way](data.read_parquet(files)) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert one.plan.inspected().fingerprint == other.plan.inspected().fingerprint
        assert sorted(ids(one)) == sorted(ids(other))


def test_a_split_parts_all_rows_and_other_data_is_split_otherwise(files: str, tmp_path: Path) -> None:
    train, test = data.read_parquet(files).train_test_split(0.2, shuffle=True)
    assert sorted(ids(train) + ids(test)) == list(range(99))
    assert sorted(ids(test)) != list(range(79, 99))
    pq.write_table(pa.table({"id": pa.array(np.arange(99, 120))}), tmp_path / "3.parquet")
    _, more = data.read_parquet(files).train_test_split(20, shuffle=True)
    assert sorted(ids(more)) != sorted(ids(test))


def test_epochs_of_an_unseeded_part_are_still_shuffled_by_the_run(files: str) -> None:
    part = data.read_parquet(files).random_shuffle().limit(30)
    assert part.plan.shuffled
    assert part.plan.seed is None


def prepared(dataset: Dataset) -> Prepared:
    inspected = dataset.plan.inspected()
    return Prepared("train", inspected, 0, True, inspected.fingerprint)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda whole: whole.train_test_split(0.2, shuffle=True)[0], "drawn at random"),
        (
            lambda whole: whole.train_test_split(0.2, shuffle=True)[0],
            "would train on rows that were held out",
        ),
        (lambda whole: whole.random_shuffle().limit(9).select_columns(["id"]), "drawn at random"),
        (lambda whole: whole.map(noisy).materialize(), "parameter rng"),
        (lambda whole: whole, "Files were added, removed or written anew"),
    ],
)
def test_the_message_of_changed_data_names_the_cause(files: str, make: Any, words: str) -> None:
    found = prepared(make(data.read_parquet(files)))
    message = changed_message(found, Position.beginning(found))
    assert words in message
    assert "rows as before, but not the same ones" in message
