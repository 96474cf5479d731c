from __future__ import annotations

import math
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.examples import scaled

from powertrain.run.metrics import points
from powertrain.run.metrics.points import (
    PointRecord,
    concatenate,
    conformed,
    metrics_at,
    name_of_path,
    path_of_name,
    table_of,
    unified,
)

keys = st.text(max_size=4) | st.sampled_from(
    ["rank", "row", "a/b", "a", "b", "\\", "\\rank", "\\more", "/", "$float"]
)
scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=4)
leaves = scalars | st.binary(max_size=3) | st.lists(scalars, max_size=2)
values: st.SearchStrategy[Any] = st.recursive(
    leaves,
    lambda inner: (
        st.dictionaries(keys, inner, max_size=3) | st.dictionaries(st.integers(0, 5), inner, max_size=2)
    ),
    max_leaves=6,
)
metric_dicts = st.dictionaries(keys, values, max_size=4)


def records_of(dicts: list[dict[str, Any]]) -> list[PointRecord]:
    return [PointRecord(0, 0, row, 1.5, False, metrics) for row, metrics in enumerate(dicts, 1)]


def exact(value: Any) -> str:
    """Tells 1 from 1.0 from True and 0.0 from -0.0, and NaN equals NaN; the order of keys does not matter."""
    if isinstance(value, dict):
        return f"{{{sorted((repr(key), exact(item)) for key, item in value.items())}}}"
    return f"[{[exact(item) for item in value]}]" if isinstance(value, list) else repr(value)


@given(st.lists(metric_dicts, max_size=5))
def test_every_dict_comes_back_from_columns_exactly(dicts: list[dict[str, Any]]) -> None:
    table = table_of(records_of(dicts))
    for index, metrics in enumerate(dicts):
        assert exact(metrics_at(table, index)) == exact(metrics)


@given(st.lists(st.lists(metric_dicts, max_size=3), min_size=1, max_size=4), st.sampled_from([0, 1, 2, None]))
@settings(max_examples=scaled(100))
def test_batches_of_any_columns_fit_together_without_loss(
    groups: list[list[dict[str, Any]]], most: int | None
) -> None:
    tables = [table_of(records_of(group)) for group in groups]
    schema = unified([table.schema for table in tables], most=most)
    batches = [conformed(batch, schema) for table in tables for batch in table.to_batches()]
    found = [metrics_at(batch, index) for batch in batches for index in range(batch.num_rows)]
    assert [exact(metrics) for metrics in found] == [exact(metrics) for group in groups for metrics in group]
    assert most is None or len(schema) <= len(points.OWN_COLUMNS) + most + 1


def test_for_reading_whole_and_fractional_numbers_together_are_floats() -> None:
    tables = [table_of(records_of([{"m": value}])) for value in (1, 0.5)]
    together = concatenate([*tables, table_of(records_of([{}]))])
    assert together.schema.field("m").type == pa.float64()
    assert together.column("m").to_pylist() == [1.0, 0.5, None]
    assert points.is_json(concatenate([*tables, table_of(records_of([{"m": "x"}]))]).schema.field("m"))


@given(st.lists(keys, min_size=1, max_size=4))
def test_a_columns_name_gives_its_keys_back(path: list[str]) -> None:
    name = name_of_path(path)
    assert path_of_name(name) == path
    assert name not in (*points.OWN_COLUMNS, points.MORE)


@given(st.lists(keys, min_size=1, max_size=3), st.lists(keys, min_size=1, max_size=3))
def test_different_keys_have_different_columns(one: list[str], other: list[str]) -> None:
    assert (name_of_path(one) == name_of_path(other)) == (one == other)


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        ([1.5, math.nan], pa.float64()),
        ([1, -2], pa.int64()),
        ([True, False], pa.bool_()),
        (["a", ""], pa.string()),
    ],
)
def test_plain_values_have_typed_columns_and_keep_nan(column: list[Any], kind: pa.DataType) -> None:
    table = table_of(records_of([{"m": value} for value in column] + [{}]))
    assert table.schema.field("m").type == kind
    assert not points.is_json(table.schema.field("m"))
    assert table.column("m").null_count == 1


@pytest.mark.parametrize("column", [[1, 1.5], [True, 1], [None, 1.0], [[1], [2]], [2**63], [b"x"], [{}]])
def test_other_and_mixed_values_are_json_text_and_say_so(column: list[Any]) -> None:
    table = table_of(records_of([{"m": value} for value in column]))
    assert table.schema.field("m").type == pa.string()
    assert points.is_json(table.schema.field("m"))


def test_own_columns_come_first_and_a_metric_of_that_name_stands_apart() -> None:
    table = table_of([PointRecord(3, 1, 7, 2.5, True, {"rank": "mine", "rank/x": 1, "at": {"b": 2}})])
    assert table.column_names == ["rank", "attempt", "row", "at", "solo", "\\rank", "rank\\/x", "at/b"]
    assert table.column("rank").to_pylist() == [3]
    assert table.column("\\rank").to_pylist() == ["mine"]


def test_ever_new_keys_do_not_make_ever_more_columns() -> None:
    dicts = [{f"key {row}": row, "loss": 0.5, "nested": {f"n{row}": None}} for row in range(700)]
    table = table_of(records_of(dicts))
    assert table.num_columns < 600
    assert [metrics_at(table, index) for index in range(0, 700, 23)] == dicts[::23]


def test_numpy_scalars_are_kept_as_numbers_and_objects_are_refused() -> None:
    import numpy as np

    (record,) = points.decode_records(
        points.encode_records(records_of([{"a": np.float32(0.5), "b": np.int64(3)}]))
    )
    assert exact(record.metrics) == exact({"a": 0.5, "b": 3})
    with pytest.raises(NotImplementedError, match="object"):
        points.encode_records(records_of([{"a": object()}]))
