"""Decoded blocks are cached under a key, and positions hold a fingerprint: other rows must have another one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyarrow import csv, json

from powertrain import data
from powertrain.data.datasource.partitioning import Partitioning


def key_of(dataset: data.Dataset) -> str:
    return dataset.plan.parts[0].source.cache_key


def fingerprint_of(dataset: data.Dataset) -> str:
    return dataset.plan.inspected().fingerprint


def long_lists() -> tuple[list[int], list[int]]:
    """Lists of 30 numbers that differ in the middle, which Arrow does not print."""
    one, other = list(range(30)), list(range(30))
    other[15] = 99
    return one, other


def test_conditions_that_differ_in_the_middle_of_a_long_list_keep_their_own_rows(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": range(100)}), tmp_path / "x.parquet")
    whole = data.read_parquet(str(tmp_path))
    one, other = (whole.filter(expr=pc.field("id").isin(values)) for values in long_lists())
    assert key_of(one) != key_of(other)
    assert fingerprint_of(one) != fingerprint_of(other), (
        "a changed list must not resume as if it were the same"
    )
    assert [row["id"] for row in one.union(other).take_all()] == [*long_lists()[0], *sorted(long_lists()[1])]


def test_the_same_long_list_has_the_same_fingerprint(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": range(100)}), tmp_path / "x.parquet")
    one, _ = long_lists()
    found = {
        fingerprint_of(data.read_parquet(str(tmp_path)).filter(expr=pc.field("id").isin(values)))
        for values in (one, list(one), pa.array([7, *one])[1:])
    }
    assert len(found) == 1


def test_one_file_in_two_encodings_has_two_texts(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes("é\n".encode())
    path = str(tmp_path / "x.txt")
    one, other = data.read_text(path), data.read_text(path, encoding="latin-1")
    assert key_of(one) != key_of(other)
    [batch] = one.union(other).iter_batches(batch_size=2)
    assert list(batch["text"]) == ["é", "é".encode().decode("latin-1")]


def test_empty_lines_are_there_where_they_are_not_dropped(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("a\n\nb\n")
    path = str(tmp_path / "x.txt")
    assert key_of(data.read_text(path)) != key_of(data.read_text(path, drop_empty_lines=False))


def _pair(read: Callable[..., data.Dataset], one: dict[str, Any], other: dict[str, Any]) -> Any:
    return lambda path: (read(path, **one), read(path, **other))


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("a;b,c\n1;2,3\n", _pair(data.read_csv, {}, {"parse_options": csv.ParseOptions(delimiter=";")})),
        (
            "a\nx\n",
            _pair(
                data.read_csv,
                {},
                {"convert_options": csv.ConvertOptions(null_values=["x"], strings_can_be_null=True)},
            ),
        ),
        ("a\né\n", _pair(data.read_csv, {}, {"read_options": csv.ReadOptions(encoding="latin-1")})),
        (
            '{"a": 1}\n',
            _pair(
                data.read_json,
                {},
                {"parse_options": json.ParseOptions(explicit_schema=pa.schema([("a", pa.float32())]))},
            ),
        ),
        ('{"a": 1}\n', _pair(data.read_json, {}, {"lines": False})),
    ],
)
def test_options_of_a_format_are_part_of_the_key(tmp_path: Path, text: str, read: Any) -> None:
    (tmp_path / "x").write_bytes(text.encode())
    one, other = read(str(tmp_path / "x"))
    again, _ = read(str(tmp_path / "x"))
    assert key_of(one) != key_of(other)
    assert key_of(one) == key_of(again)


def test_a_handler_that_cannot_be_pickled_still_has_a_key(tmp_path: Path) -> None:
    import threading

    (tmp_path / "x").write_text("a,b\n1,2\n3\n")
    lock = threading.Lock()

    def skip(row: Any) -> Literal["skip"]:
        with lock:
            return "skip"

    options = csv.ParseOptions(invalid_row_handler=skip)
    assert data.read_csv(str(tmp_path / "x"), parse_options=options).take_all() == [{"a": 1, "b": 2}]


@pytest.mark.parametrize("kind", ["parquet", "npy", "csv"])
def test_columns_of_paths_are_part_of_the_key(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "k=1"
    place.mkdir()
    if kind == "parquet":
        pq.write_table(pa.table({"a": [1]}), place / "x.parquet")
    elif kind == "npy":
        np.save(place / "x.npy", np.arange(2))
    else:
        (place / "x.csv").write_text("a\n1\n")
    read: dict[str, Any] = {"parquet": data.read_parquet, "npy": data.read_numpy, "csv": data.read_csv}
    hive = read[kind](str(tmp_path), partitioning=Partitioning("hive"))
    named = read[kind](str(tmp_path), partitioning=Partitioning("dir", field_names=["k"]))
    assert key_of(hive) != key_of(named)
    assert {row["k"] for row in hive.union(named).take_all()} == {"1", "k=1"}
