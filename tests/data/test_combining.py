"""Several datasets as one: the order of rows survives later steps, and blocks of files stay blocks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from powertrain import data
from powertrain.data import Dataset


def files(directory: Path, start: int, groups: int = 4) -> Dataset:
    """Rows in row groups of 5."""
    directory.mkdir(exist_ok=True)
    table = pa.table({"id": range(start, start + 5 * groups)})
    pq.write_table(table, directory / f"{start}.parquet", row_group_size=5)
    return data.read_parquet(str(directory / f"{start}.parquet"))


def randomized(directory: Path) -> Dataset:
    """Blocks of two sources in an order that alternates between them."""
    return files(directory, 0).union(files(directory, 100)).randomize_block_order(seed=1)


def ids(dataset: Dataset) -> list[int]:
    return [row["id"] for row in dataset.take_all()]


def test_blocks_in_random_order_alternate_between_the_sources(tmp_path: Path) -> None:
    """Otherwise the other tests here would prove nothing."""
    parts = [block.part for block in randomized(tmp_path).plan.inspected().blocks]
    assert parts != sorted(parts)
    assert parts != sorted(parts, reverse=True)


def test_zip_pairs_rows_in_the_order_of_randomized_blocks(tmp_path: Path) -> None:
    mixed = randomized(tmp_path)
    expected = ids(mixed)
    zipped = mixed.zip(data.range(len(expected)))
    assert [(row["id"], row["id_1"]) for row in zipped.take_all()] == list(
        zip(expected, range(40), strict=True)
    )
    other = files(tmp_path, 0).union(files(tmp_path, 100)).randomize_block_order(seed=2).zip(data.range(40))
    keys = {each.plan.parts[0].source.cache_key for each in (zipped, other)}
    assert len(keys) == 2
    assert zipped.plan.inspected().fingerprint != other.plan.inspected().fingerprint


@pytest.mark.parametrize(
    ("change", "first", "least", "stop"),
    [
        (lambda whole: whole.filter(expr=pc.field("id") > 3), 40, 4, 200),
        (lambda whole: whole.filter(expr=pc.field("id") > 3).filter(expr=pc.field("id") < 115), 40, 4, 115),
        (lambda whole: whole.limit(33).filter(expr=pc.field("id") > 3), 33, 4, 200),
    ],
)
def test_a_condition_keeps_the_order_of_randomized_blocks(
    tmp_path: Path, change: Callable[[Dataset], Dataset], first: int, least: int, stop: int
) -> None:
    mixed = randomized(tmp_path)
    assert ids(change(mixed)) == [each for each in ids(mixed)[:first] if least <= each < stop]


def test_a_sample_keeps_the_order_of_randomized_blocks(tmp_path: Path) -> None:
    mixed = randomized(tmp_path)
    place = {each: number for number, each in enumerate(ids(mixed))}
    found = [place[each] for each in ids(mixed.random_sample(0.5, seed=3))]
    assert len(found) == 20
    assert found == sorted(found)


def test_a_condition_on_randomized_blocks_reads_nothing_before_it_must(tmp_path: Path) -> None:
    mixed = randomized(tmp_path)
    filtered = mixed.filter(expr=pc.field("id") > 3)
    (tmp_path / "0.parquet").unlink()
    assert filtered.plan.blocks is not None, "the rows were not counted, although a file is missing"


def test_a_condition_on_a_mixture_keeps_the_components_of_randomized_blocks(tmp_path: Path) -> None:
    mixed = randomized(tmp_path).mix(files(tmp_path, 1000, groups=8))
    found = ids(mixed.filter(expr=pc.field("id") >= 0))
    assert found == ids(mixed)


# --------------------------------------------------------------------------- zip


def test_files_beside_rows_in_memory_keep_their_blocks(tmp_path: Path) -> None:
    for zipped in (
        files(tmp_path, 0).zip(data.from_items([{"x": n} for n in range(20)])),
        data.from_items([{"x": n} for n in range(20)]).zip(files(tmp_path, 0)),
    ):
        assert zipped.num_blocks() == 4
        assert [(row["id"], row["x"]) for row in zipped.take_all()] == [(n, n) for n in range(20)]


def test_columns_of_equal_names_get_the_first_free_number() -> None:
    def one(**columns: Any) -> Dataset:
        return data.from_items([columns])

    assert one(x=0).zip(one(x=1), one(x=2)).take_all() == [{"x": 0, "x_1": 1, "x_2": 2}]
    assert one(x=0, x_1=5).zip(one(x=1)).take_all() == [{"x": 0, "x_1": 5, "x_2": 1}]
    assert one(x=0).zip(one(y=1), one(x=2)).take_all() == [{"x": 0, "y": 1, "x_1": 2}]
