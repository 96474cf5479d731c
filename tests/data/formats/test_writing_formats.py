"""Rows written in other tools' formats: read again as they were, all or none."""

from __future__ import annotations

import io
import sqlite3
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from PIL import Image
from tests.data.formats.test_tfrecords import EXAMPLE
from tests.s3_server import S3Server

from powertrain import data
from powertrain.data.output.formats.partitions import partitions
from powertrain.data.sources.formats.tfrecords import record_ends
from powertrain.errors import DataError


def rows_of(dataset: Any) -> list[dict[str, Any]]:
    return [{name: _plain(value) for name, value in row.items()} for row in dataset.iter_rows()]


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def files(directory: Path) -> list[str]:
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())


# --------------------------------------------------------------------------- TFRecords


def test_tfrecords_are_read_back(tmp_path: Path) -> None:
    rows = [
        {"id": number, "x": number / 4, "text": f"t{number}".encode(), "many": [number] * (number % 3)}
        for number in range(9)
    ]
    data.from_items(rows).write_tfrecords(str(tmp_path), num_rows_per_file=1)
    assert rows_of(data.read_tfrecords(str(tmp_path))) == rows


def test_examples_are_those_that_google_reads(tmp_path: Path) -> None:
    table = pa.table(
        {
            "flag": [True, None],
            "text": ["ä", "b"],
            "fixed": pa.array([[1.5, 2.5], [3.5, 4.5]], pa.list_(pa.float64(), 2)),
            "nothing": pa.nulls(2),
        }
    )
    pixels = np.arange(12, dtype=np.int32).reshape(2, 2, 3)
    data.from_arrow(table).zip(data.from_numpy({"pixels": pixels})).write_tfrecords(str(tmp_path))
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    places, end = record_ends(content)
    assert end == len(content)
    first, second = (EXAMPLE.FromString(content[start:stop]).features.feature for start, stop in places)
    assert list(first["flag"].int64_list.value) == [1]
    assert "flag" not in second
    assert "nothing" not in first
    assert list(first["text"].bytes_list.value) == ["ä".encode()]
    assert list(second["fixed"].float_list.value) == [3.5, 4.5]
    (tensor,) = first["pixels"].bytes_list.value
    # DT_INT32, the shape (2, 3), and the bytes of the values.
    assert (
        tensor
        == b"\x08\x03" + b"\x12\x08\x12\x02\x08\x02\x12\x02\x08\x03" + b"\x22\x18" + pixels[0].tobytes()
    )


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (pa.table({"x": [{"a": 1}]}), "'x' has the type struct<a: int64>"),
        (pa.table({"x": pa.array([2**63], pa.uint64())}), "integers of 64 bits"),
        (pa.table({"x": [[1, None]]}), "null within a list"),
        (pa.table({"x": [["a", None]]}), "null within a list"),
        (pa.table({"x": [[0.5, None]]}), "null within a list"),
    ],
)
def test_what_tfrecords_cannot_hold_is_refused_and_nothing_is_left(
    tmp_path: Path, table: pa.Table, words: str
) -> None:
    with pytest.raises(DataError, match=words):
        data.from_arrow(table).write_tfrecords(str(tmp_path))
    assert files(tmp_path) == []


# --------------------------------------------------------------------------- WebDatasets


def test_webdatasets_are_read_back(tmp_path: Path) -> None:
    rows = [
        {
            "__key__": f"a/{number:03d}",
            "txt": f"t{number}",
            "cls": number,
            "json": {"k": [number, None]},
            "npy": [[number, 1], [2, 3]],
            "mp": {"z": number},
            "png": np.full((2, 3 + number, 3), number, np.uint8).tolist(),
            "bin": bytes([number]),
        }
        for number in range(5)
    ]
    arrays = [{**row, "npy": np.array(row["npy"]), "png": np.array(row["png"], np.uint8)} for row in rows]
    data.from_items(arrays).write_webdataset(str(tmp_path), min_rows_per_file=5)
    found = rows_of(data.read_webdataset(str(tmp_path)))
    assert [{name: row[name] for name in rows[0]} for row in found] == rows


def test_samples_get_keys_of_their_own_and_nulls_are_left_out(tmp_path: Path) -> None:
    dataset = data.from_items([{"txt": "a", "bin": b""}, {"txt": None, "bin": b"x"}])
    for _ in range(2):
        dataset.write_webdataset(str(tmp_path), encoder=None)
    names = []
    for path in tmp_path.iterdir():
        with tarfile.open(path) as archive:
            names += archive.getnames()
    assert len(set(names)) == 6
    assert sum(name.endswith(".txt") for name in names) == 2


def test_encoders_of_users_are_applied_in_order(tmp_path: Path) -> None:
    def shout(sample: dict[str, Any]) -> dict[str, Any]:
        return {**sample, "txt": sample["txt"].upper()}

    dataset = data.from_items([{"__key__": "1", "txt": "a", "cls": 3}])
    dataset.write_webdataset(str(tmp_path), encoder=[shout, True])
    (row,) = data.read_webdataset(str(tmp_path)).take_all()
    assert (row["txt"], row["cls"]) == ("A", 3)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"x": 3}, "'x' holds a int"),
        ({"cls": "three"}, "'cls' has a value that cannot be written as 'cls'"),
        ({"__key__": "a.b", "txt": "x"}, "'a.b' of '__key__'"),
        ({"__key__": 3, "txt": "x"}, "3 of '__key__'"),
        ({"txt": None}, "no value in any of its columns"),
        ({"a/txt": "x"}, "'a/txt' cannot be the ending"),
    ],
)
def test_what_a_sample_cannot_hold_is_refused(tmp_path: Path, row: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        data.from_items([row]).write_webdataset(str(tmp_path))
    assert files(tmp_path) == []


def test_two_samples_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="Two rows have the '__key__' 'a'"):
        data.from_items([{"__key__": "a", "txt": "1"}] * 2).write_webdataset(str(tmp_path))
    with pytest.raises(DataError, match="encoder=3"):
        data.from_items([{"txt": "1"}]).write_webdataset(str(tmp_path), encoder=3)  # type: ignore[arg-type]


# --------------------------------------------------------------------------- images


def test_images_of_any_sizes_are_files_in_the_order_of_the_rows(tmp_path: Path) -> None:
    pixels = [np.full((2 + number % 2, 3, 3), number, np.uint8) for number in range(12)]
    data.from_items([{"image": each, "id": 1} for each in pixels]).write_images(
        str(tmp_path / "png"), "image"
    )
    found = [row["image"].tolist() for row in data.read_images(str(tmp_path / "png")).iter_rows()]
    assert found == [each.tolist() for each in pixels]
    data.read_images(str(tmp_path / "png")).write_images(
        str(tmp_path / "jpg"), column="image", file_format="jpg"
    )
    with Image.open(min((tmp_path / "jpg").iterdir())) as image:
        assert (image.format, image.size) == ("JPEG", (3, 2))


def test_what_is_no_image_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be written as an image of the format 'png'"):
        data.from_items([{"image": "text"}]).write_images(str(tmp_path), "image")
    with pytest.raises(DataError, match="no column 'picture'"):
        data.from_items([{"image": 1}]).write_images(str(tmp_path), "picture")
    with pytest.raises(DataError, match="not a format"):
        data.from_items([{"image": 1}]).write_images(str(tmp_path), "image", "../x")
    data.range(0).write_images(str(tmp_path), "id")
    assert files(tmp_path) == []


# --------------------------------------------------------------------------- ORC and databases


def test_orc_files_are_read_back(tmp_path: Path) -> None:
    rows = [{"id": number, "tags": ["a"] * (number % 3)} for number in range(10)]
    data.from_items(rows).write_orc(str(tmp_path), arrow_orc_args_fn=lambda: {"compression": "zstd"})
    assert rows_of(data.read_orc(str(tmp_path))) == rows
    with pytest.raises(DataError, match="compression='nothing'"):
        data.from_items(rows).write_orc(str(tmp_path), compression="nothing")
    assert len(files(tmp_path)) == 1


def test_rows_go_into_a_database_all_or_none(tmp_path: Path) -> None:
    path = tmp_path / "rows.db"

    def connect() -> sqlite3.Connection:
        return sqlite3.connect(path)

    def stored() -> list[Any]:
        connection = connect()
        try:
            return connection.execute("SELECT * FROM t ORDER BY id").fetchall()
        finally:
            connection.close()

    with connect() as connection:
        connection.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, x REAL, name TEXT)")
    connection.close()
    rows = [{"id": number, "x": number / 2, "name": f"n{number}"} for number in range(3000)]
    data.from_items(rows).write_sql("INSERT INTO t VALUES (?, ?, ?)", connect)
    assert stored() == [tuple(row.values()) for row in rows]
    again = [{**row, "id": number + 3000 if number < 2500 else 0} for number, row in enumerate(rows)]
    with pytest.raises(DataError, match=r"write_sql.*failed in the database: IntegrityError"):
        data.from_items(again).write_sql("INSERT INTO t VALUES (?, ?, ?)", connect)
    assert len(stored()) == 3000
    assert rows_of(data.read_sql("SELECT * FROM t ORDER BY id", connect)) == rows
    for wrong in (("", connect), ("INSERT", 3)):
        with pytest.raises(DataError, match="Give a"):
            data.range(1).write_sql(*wrong)


# --------------------------------------------------------------------------- partitions


def test_partitioned_files_are_read_back_with_their_columns(tmp_path: Path) -> None:
    rows = [
        {"id": number, "year": 2025 + number % 2, "who": [None, "a/b c"][number % 3 == 0]}
        for number in range(12)
    ]
    data.from_items(rows).write_parquet(str(tmp_path), partition_cols=["year", "who"])
    assert {name.rpartition("/")[0] for name in files(tmp_path)} == {
        f"year={year}/who={who}" for year in (2025, 2026) for who in ("__HIVE_DEFAULT_PARTITION__", "a%2Fb c")
    }
    found = rows_of(data.read_parquet(str(tmp_path)))
    assert sorted(found, key=lambda row: row["id"]) == [{**row, "year": str(row["year"])} for row in rows]
    with pytest.raises(DataError, match="already has 4"):
        data.from_items(rows).write_parquet(str(tmp_path), mode="error")
    data.from_items(rows[:1]).write_parquet(str(tmp_path), partition_cols="year", mode="overwrite")
    assert [name.rpartition("/")[0] for name in files(tmp_path)] == ["year=2025"]


def test_names_of_columns_never_lead_out_of_the_directory(tmp_path: Path) -> None:
    data.from_items([{"id": 1, "../up": "../../x"}]).write_parquet(
        str(tmp_path / "here"), partition_cols=["../up"]
    )
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
    assert rows_of(data.read_parquet(str(tmp_path / "here"))) == [{"id": 1, "../up": "../../x"}]


def test_partitions_keep_the_order_of_rows_within_each() -> None:
    table = pa.table({"k": [2, 1, 2, 1, 2], "v": [0, 1, 2, 3, 4]})
    assert {name: part.to_pydict() for name, part in partitions(table, ["k"])} == {
        "k=2": {"v": [0, 2, 4]},
        "k=1": {"v": [1, 3]},
    }
    assert [name for name, _ in partitions(table, [])] == [""]


@pytest.mark.parametrize(
    ("columns", "words"),
    [(["x"], "no column 'x'"), (["id", "tags"], "all columns"), (["tags"], "plain values")],
)
def test_columns_that_cannot_be_directories_are_refused(
    tmp_path: Path, columns: list[str], words: str
) -> None:
    with pytest.raises(DataError, match=words):
        data.from_items([{"id": 1, "tags": ["a"]}]).write_parquet(str(tmp_path), partition_cols=columns)
    assert files(tmp_path) == []


def test_partitions_in_a_bucket(s3: S3Server) -> None:
    place = s3.uri("partitioned")
    data.from_items([{"id": number, "k": number % 2} for number in range(6)]).write_parquet(
        place, partition_cols=["k"]
    )
    found = rows_of(data.read_parquet(place))
    assert sorted(row["id"] for row in found if row["k"] == "1") == [1, 3, 5]
    data.from_items([{"id": 7, "k": 1}]).write_parquet(place, mode="overwrite", partition_cols=["k"])
    assert rows_of(data.read_parquet(place)) == [{"id": 7, "k": "1"}]


def test_arguments_of_arrow_may_come_from_a_function(tmp_path: Path) -> None:
    data.range(5).write_parquet(str(tmp_path), arrow_parquet_args_fn=lambda: {"compression": "gzip"})
    (path,) = tmp_path.iterdir()
    column = pyarrow.parquet.ParquetFile(path).metadata.row_group(0).column(0)
    assert column.compression == "GZIP"
    assert io.BytesIO(path.read_bytes()).read(4) == b"PAR1"
