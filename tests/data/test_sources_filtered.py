"""Rows that fit a condition, samples of rows, other columns."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import cloudpickle
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import powertrain.data
from powertrain.data.sources.base import Source
from powertrain.data.sources.files.files import file_paths
from powertrain.data.sources.files.parquet import ParquetSource
from powertrain.data.sources.filtered import FilteredSource, ProjectedSource, SampledSource, columns_of
from powertrain.data.sources.memory import RangeSource, TableSource
from powertrain.errors import DataError


def everything(found: Source, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
    rows = []
    for block, known in enumerate(found.inspect().blocks):
        batches = list(found.read(block, columns))
        assert sum(batch.num_rows for batch in batches) == known.rows
        assert all(batch.num_rows for batch in batches)
        if columns is None:
            assert all(batch.schema.equals(found.inspect().schema) for batch in batches)
        rows += [row for batch in batches for row in batch.to_pylist()]
    return rows


def test_only_rows_for_which_the_condition_is_true_are_there() -> None:
    table = pa.table({"a": [1, None, 3, 4], "b": ["x", "y", "y", "x"]})
    found = FilteredSource(TableSource(table), pc.field("a") > 1)
    assert everything(found) == [{"a": 3, "b": "y"}, {"a": 4, "b": "x"}]
    assert everything(found, ["b"]) == [{"b": "y"}, {"b": "x"}]
    assert found.name_row(0, 1) == "row 3"
    again = cloudpickle.loads(cloudpickle.dumps(found))
    assert again._facts == found.inspect()
    assert everything(again) == everything(found)


@given(st.lists(st.one_of(st.none(), st.integers(0, 9)), max_size=50), st.integers(0, 9))
def test_what_is_counted_is_what_is_read(values: list[int | None], least: int) -> None:
    found = FilteredSource(TableSource(pa.table({"a": pa.array(values, pa.int64())})), pc.field("a") >= least)
    assert [row["a"] for row in everything(found)] == [v for v in values if v is not None and v >= least]


def test_counting_reads_only_the_columns_of_the_condition(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": range(100), "b": ["x"] * 100}), tmp_path / "x.parquet", row_group_size=10)
    inner = _Watched(ParquetSource(file_paths(tmp_path, None)))
    found = FilteredSource(inner, pc.field("a") < 50)
    found.inspect()
    assert set(inner.asked) == {("a",)}
    assert sum(block.rows for block in found.inspect().blocks) == 50
    assert len(found.inspect().blocks) == 10, "blocks that have lost all rows stay"


class _Watched(Source):
    """Writes down which columns are read."""

    def __init__(self, inner: Source) -> None:
        self._inner = inner
        self.asked: list[tuple[str, ...] | None] = []

    def inspect(self) -> Any:
        return self._inner.inspect()

    def read(self, block: int, columns: Sequence[str] | None = None) -> Any:
        self.asked.append(None if columns is None else tuple(columns))
        return self._inner.read(block, columns)

    def name_row(self, block: int, row: int) -> str:
        return self._inner.name_row(block, row)


def test_conditions_say_which_columns_they_need() -> None:
    fields: list[tuple[str, pa.DataType]] = [
        ("a", pa.int64()),
        ("b", pa.string()),
        ("s", pa.struct([("x", pa.int64())])),
    ]
    schema = pa.schema(fields)
    assert columns_of((pc.field("a") > 1) & pc.field("b").isin(["x"]), schema) == ("a", "b")
    assert columns_of(pc.field("s", "x") == 1, schema) == ("s",)
    assert columns_of(pc.scalar(True), schema) == ("a",)


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        (pc.field("c") > 1, ["does not fit the data", "'a' (int64), 'b' (string)"]),
        (pc.field("b") > 1, ["does not fit the data"]),
        (pc.field("a") + 1, ["gives int64 and not true or false"]),
    ],
)
def test_conditions_that_do_not_fit_are_refused(expression: Any, words: list[str]) -> None:
    found = FilteredSource(TableSource(pa.table({"a": [1], "b": ["x"]})), expression)
    with pytest.raises(DataError) as caught:
        found.inspect()
    assert not [word for word in words if word not in str(caught.value)], caught.value


def test_another_condition_is_another_fingerprint(tmp_path: Path) -> None:
    inner = RangeSource(10)
    prints = {FilteredSource(inner, pc.field("id") < n).inspect().fingerprint for n in (3, 4)}
    assert len(prints) == 2
    assert not prints & {inner.inspect().fingerprint}


def test_a_published_source_keeps_its_rows(tmp_path: Path) -> None:
    inner = TableSource(pa.table({"a": range(20), "b": range(20)}))
    stacked = ProjectedSource(
        SampledSource(FilteredSource(inner, pc.field("a") > 3), 0.5, seed=1), ["b"], {"b": "c"}
    )
    expected = everything(stacked)
    published = cloudpickle.loads(cloudpickle.dumps(stacked.publish(str(tmp_path))))
    assert len(list(tmp_path.iterdir())) == 1
    assert everything(published) == expected
    assert published.inspect() == stacked.inspect()
    assert len(expected) == 8
    assert published.in_memory


# --------------------------------------------------------------------------- samples


@given(
    st.integers(0, 200),
    st.integers(1, 40),
    st.one_of(st.floats(0, 1), st.fractions(0, 1, max_denominator=50)),
    st.integers(0, 3),
)
def test_a_sample_and_its_complement_part_the_rows(
    rows: int, block_rows: int, fraction: float | Fraction, seed: int
) -> None:
    inner = RangeSource(rows, block_rows)
    sample, others = (SampledSource(inner, fraction, seed, complement) for complement in (False, True))
    chosen = [row["id"] for row in everything(sample)]
    left = [row["id"] for row in everything(others)]
    assert chosen == sorted(chosen)
    assert sorted(chosen + left) == list(range(rows))
    exact = fraction if isinstance(fraction, Fraction) else Fraction(str(fraction))
    assert len(chosen) == int(rows * exact)
    for block, known in zip(sample.inspect().blocks, inner.inspect().blocks, strict=True):
        assert abs(block.rows - known.rows * exact) < 1, "each block gives its share"


def test_a_sample_depends_on_the_seed_alone() -> None:
    def ids(seed: int) -> list[int]:
        return [row["id"] for row in everything(SampledSource(RangeSource(100), 0.29, seed))]

    assert ids(1) == ids(1) != ids(2)
    assert len(ids(1)) == 29
    found = SampledSource(RangeSource(100), 0.29, 1)
    assert found.name_row(0, 3) == f"number {ids(1)[3]}"
    with pytest.raises(DataError, match=r"1\.5 of the rows"):
        SampledSource(RangeSource(100), 1.5, 1)


# --------------------------------------------------------------------------- columns


def test_columns_are_chosen_ordered_and_renamed() -> None:
    inner = TableSource(pa.table({"a": [1], "b": [2], "c": [3]}))
    found = ProjectedSource(inner, ["c", "a"], {"a": "x"})
    assert found.inspect().schema.names == ["c", "x"]
    assert everything(found) == [{"c": 3, "x": 1}]
    assert everything(found, ["x"]) == [{"x": 1}]
    swapped = ProjectedSource(inner, None, {"a": "b", "b": "a"})
    assert everything(swapped) == [{"b": 1, "a": 2, "c": 3}]


@pytest.mark.parametrize(
    ("columns", "renames", "words"),
    [
        (["aa"], {}, r"no column 'aa'.*Did you mean"),
        (["a"], {"b": "x"}, "no column 'b' in the data that is left"),
        (None, {"a": "b"}, "several columns 'b'"),
    ],
)
def test_columns_that_cannot_be_are_refused(columns: Any, renames: dict[str, str], words: str) -> None:
    inner = TableSource(pa.table({"aab": [1], "a": [1], "b": [2]}))
    with pytest.raises(DataError, match=words):
        ProjectedSource(inner, columns, renames).inspect()


def test_a_choice_of_columns_makes_blocks_smaller_where_they_lie_apart(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": range(100), "b": range(100)}), tmp_path / "x.parquet")
    whole = ParquetSource(file_paths(tmp_path, None))
    assert ProjectedSource(whole, ["a"]).inspect().blocks[0].nbytes == whole.inspect().blocks[0].nbytes // 2


def test_columns_that_change_places_are_not_taken_for_each_other(tmp_path: Path) -> None:
    """Decoded blocks are cached under a name: what two projections of the same data give must not share one."""
    pq.write_table(pa.table({"a": [1, 2], "b": [3, 4]}), tmp_path / "rows.parquet")
    plain = powertrain.data.read_parquet(str(tmp_path))
    swapped = plain.rename_columns({"a": "b", "b": "a"})
    keys = {
        source.cache_key
        for dataset in (plain, swapped, swapped.filter(expr=pc.field("a") > 0))
        for source in [dataset.select_columns(["a", "b"]).plan.parts[0].source]
    }
    assert len(keys) == 3
    assert plain.plan.inspected().fingerprint == swapped.plan.inspected().fingerprint
