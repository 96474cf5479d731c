"""Rows written to files: whole, all or none, and the same when they are read again."""

from __future__ import annotations

import csv
import datetime
import decimal
import json
import os
import secrets
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.fs
import pyarrow.parquet
import pytest
from tests.data.numbered import Tables, ids, numbered
from tests.s3_server import S3Server

from powertrain.data.dataset import Dataset
from powertrain.data.plan.plan import Part, Plan
from powertrain.errors import DataError
from powertrain.storage.opening import open_storage


def dataset_of(table: pa.Table) -> Dataset:
    return Dataset(Plan((Part(Tables(table)),)))


def written(directory: Path) -> list[Path]:
    """Everything that lies there, hidden or not."""
    return sorted(directory.iterdir())


def read(directory: Path) -> pa.Table:
    return pa.concat_tables([pyarrow.parquet.read_table(path) for path in written(directory)])


def failing_at(number: int) -> Any:
    def fail(row: dict[str, Any]) -> dict[str, Any]:
        if row["id"] == number:
            raise RuntimeError("no more")
        return row

    return fail


def test_rows_are_read_back_as_they_were(tmp_path: Path) -> None:
    numbered(3, 4).write_parquet(str(tmp_path / "new" / "place"))
    assert read(tmp_path / "new" / "place").to_pydict() == {
        "id": list(range(7)),
        "half": [n / 2 for n in range(7)],
    }


def test_types_of_the_source_are_kept(tmp_path: Path) -> None:
    table = pa.table(
        {
            "tokens": pa.array([[1, 2], [3, 4]], pa.list_(pa.int32())),
            "pixels": pa.array([[[1, 2], [3, 4]], [[5, 6], [7, 8]]], pa.list_(pa.list_(pa.uint8()))),
            "fixed": pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float32(), 2)),
            "when": pa.array([datetime.datetime(2024, 1, 1), None], pa.timestamp("us")),
            "day": pa.array([datetime.date(2024, 1, 1)] * 2, pa.date32()),
            "price": pa.array([decimal.Decimal("1.50"), None], pa.decimal128(9, 2)),
            "nested": pa.array([{"a": 1, "b": "x"}, {"a": 2, "b": None}]),
            "flag": pa.array([True, False]),
            "text": pa.array(["a", None]),
        }
    )
    dataset_of(table).write_parquet(str(tmp_path))
    assert read(tmp_path).schema.equals(table.schema)
    assert read(tmp_path).to_pydict() == table.to_pydict()


def test_lists_that_a_function_made_fit_together_whatever_their_lengths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("powertrain.data.output.writing.FILE_BYTES", 1)
    monkeypatch.setattr("powertrain.data.output.tables._MOST_BATCH_ROWS", 2)

    def tokens(batch: dict[str, Any]) -> dict[str, Any]:
        return {"tokens": np.ones((2, 3), np.int64) if batch["id"][0] == 0 else [[1], [1, 2]]}

    numbered(2, 2).map_batches(tokens, batch_size=2).write_parquet(str(tmp_path))
    assert len(written(tmp_path)) == 2
    assert read(tmp_path).column("tokens").to_pylist() == [[1, 1, 1], [1, 1, 1], [1], [1, 2]]


def test_tensors_are_written_as_tensors(tmp_path: Path) -> None:
    numbered(2).map(lambda row: {"image": np.full((2, 3, 4), row["id"], np.uint8)}).write_parquet(
        str(tmp_path)
    )
    found = read(tmp_path)
    assert found.schema.field("image").type == pa.fixed_shape_tensor(pa.uint8(), (2, 3, 4))
    images: Any = found.column("image").chunk(0)
    assert images.to_numpy_ndarray()[1].tolist() == np.ones((2, 3, 4)).tolist()


def test_types_that_do_not_fit_are_refused_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("powertrain.data.output.writing.FILE_BYTES", 1)
    monkeypatch.setattr("powertrain.data.output.materialized.BLOCK_BYTES", 1)
    monkeypatch.setattr("powertrain.data.output.tables._MOST_BATCH_ROWS", 2)

    def changing(batch: dict[str, Any]) -> dict[str, Any]:
        return {"x": np.array([1, 2]) if batch["id"][0] == 0 else np.array([0.5, 1.5])}

    dataset = numbered(2, 2).map_batches(changing, batch_size=2)
    with pytest.raises(DataError, match=r"'x' has the type int64.*materialize") as error:
        dataset.write_parquet(str(tmp_path))
    assert "double" in str(error.value)
    assert written(tmp_path) == []
    dataset.materialize().write_parquet(str(tmp_path))
    assert read(tmp_path).column("x").to_pylist() == [1.0, 2.0, 0.5, 1.5]


def test_a_second_write_adds_files_after_the_first(tmp_path: Path) -> None:
    numbered(3).write_parquet(str(tmp_path))
    numbered(2).write_parquet(str(tmp_path))
    assert read(tmp_path).column("id").to_pylist() == [0, 1, 2, 0, 1]


def test_overwriting_leaves_only_new_files_and_spares_those_of_other_kinds(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    numbered(3).write_parquet(str(tmp_path))
    numbered(2).write_parquet(str(tmp_path), mode="overwrite")
    (tmp_path / "notes.txt").rename(tmp_path.parent / "notes.txt")
    assert read(tmp_path).column("id").to_pylist() == [0, 1]


def test_a_failed_overwrite_leaves_the_old_files(tmp_path: Path) -> None:
    numbered(3).write_parquet(str(tmp_path))
    with pytest.raises(DataError, match="no more"):
        numbered(9).map(failing_at(8)).write_parquet(str(tmp_path), mode="overwrite")
    assert read(tmp_path).column("id").to_pylist() == [0, 1, 2]


def test_modes_ignore_and_error(tmp_path: Path) -> None:
    numbered(3).write_parquet(str(tmp_path), mode="error")
    numbered(2).write_parquet(str(tmp_path), mode="ignore")
    assert read(tmp_path).num_rows == 3
    with pytest.raises(DataError, match=r"already has 1 \.parquet files"):
        numbered(2).write_parquet(str(tmp_path), mode="error")
    with pytest.raises(DataError, match="mode='replace'"):
        numbered(2).write_parquet(str(tmp_path), mode="replace")


def test_a_function_that_fails_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("powertrain.data.output.writing.FILE_BYTES", 1)
    monkeypatch.setattr("powertrain.data.output.tables._MOST_BATCH_ROWS", 2)
    seen: list[int] = []

    def watching(row: dict[str, Any]) -> dict[str, Any]:
        seen.append(len(written(tmp_path)))
        return failing_at(90)(row)

    with pytest.raises(DataError, match="no more"):
        numbered(100).map(watching).write_parquet(str(tmp_path))
    assert max(seen) > 1, "some files were written before it failed"
    assert written(tmp_path) == []


def test_files_are_hidden_until_all_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("powertrain.data.output.writing.FILE_BYTES", 1)
    monkeypatch.setattr("powertrain.data.output.tables._MOST_BATCH_ROWS", 2)
    visible: list[str] = []

    def watching(row: dict[str, Any]) -> dict[str, Any]:
        visible.extend(path.name for path in written(tmp_path) if not path.name.startswith("."))
        return row

    numbered(100).map(watching).write_parquet(str(tmp_path))
    assert visible == []
    assert len(written(tmp_path)) == 50


def test_the_number_of_rows_of_a_file_can_be_bounded(tmp_path: Path) -> None:
    numbered(10).write_parquet(str(tmp_path), max_rows_per_file=4)
    assert [pyarrow.parquet.read_metadata(path).num_rows for path in written(tmp_path)] == [4, 4, 2]
    with pytest.raises(DataError, match="min_rows_per_file=5 is more"):
        numbered(10).write_parquet(str(tmp_path), min_rows_per_file=5, max_rows_per_file=4)
    with pytest.raises(DataError, match="max_rows_per_file=0"):
        numbered(10).write_parquet(str(tmp_path), max_rows_per_file=0)


def test_files_are_not_smaller_than_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("powertrain.data.output.writing.FILE_BYTES", 1)
    monkeypatch.setattr("powertrain.data.output.tables._MOST_BATCH_ROWS", 2)
    numbered(10).write_parquet(str(tmp_path), min_rows_per_file=4)
    assert [pyarrow.parquet.read_metadata(path).num_rows for path in written(tmp_path)] == [4, 4, 2]


def test_arguments_of_arrow_are_passed_on(tmp_path: Path) -> None:
    numbered(10).write_parquet(str(tmp_path), row_group_size=3, compression="gzip")
    metadata = pyarrow.parquet.read_metadata(written(tmp_path)[0])
    assert metadata.num_row_groups == 4
    assert metadata.row_group(0).column(0).compression == "GZIP"
    with pytest.raises(TypeError, match="compresion"):
        numbered(10).write_parquet(str(tmp_path), compresion="gzip")


def test_no_rows_are_a_file_with_columns(tmp_path: Path) -> None:
    numbered(3).limit(0).write_parquet(str(tmp_path))
    assert read(tmp_path).schema.names == ["id", "half"]
    assert read(tmp_path).num_rows == 0


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="is a file"):
        numbered(3).write_parquet(str(tmp_path / "file"))


def test_a_file_system_of_pyarrow_can_be_written_to(tmp_path: Path) -> None:
    numbered(3).write_parquet(str(tmp_path / "there"), filesystem=pyarrow.fs.LocalFileSystem())
    assert read(tmp_path / "there").column("id").to_pylist() == [0, 1, 2]
    with pytest.raises(DataError, match="no more"):
        numbered(3).map(failing_at(2)).write_parquet(
            str(tmp_path / "x"), filesystem=pyarrow.fs.LocalFileSystem()
        )
    assert not (tmp_path / "x").exists() or written(tmp_path / "x") == []


def test_rows_go_to_an_object_store(s3: S3Server) -> None:
    place = s3.uri(f"data/{secrets.token_hex(4)}")
    numbered(3).write_parquet(place)
    (entry,) = open_storage(place).list()
    content = pa.BufferReader(open_storage(place).get(entry.key))
    assert pyarrow.parquet.read_table(content).column("id").to_pylist() == [0, 1, 2]
    with pytest.raises(DataError, match="no more"):
        numbered(9).map(failing_at(8)).write_parquet(place, max_rows_per_file=2)
    assert open_storage(place).list() == [entry]
    numbered(1).write_parquet(place, mode="overwrite")
    assert entry not in open_storage(place).list()


# --------------------------------------------------------------------------- text


def test_csv_has_a_header_and_a_line_per_row(tmp_path: Path) -> None:
    numbered(2, 1).map(lambda row: {**row, "text": f'a "{row["id"]}",\nb'}).write_csv(str(tmp_path))
    (path,) = written(tmp_path)
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["id"] for row in rows] == ["0", "1", "2"]
    assert rows[1]["text"] == 'a "1",\nb'


def test_csv_takes_arguments_of_arrow(tmp_path: Path) -> None:
    options = pyarrow.csv.WriteOptions(include_header=False, delimiter=";")
    numbered(2).write_csv(str(tmp_path), write_options=options)
    assert written(tmp_path)[0].read_text().splitlines() == ["0;0", "1;0.5"]


def test_csv_refuses_columns_that_it_has_no_form_for(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'tokens'.*drop_columns"):
        numbered(2).map(lambda row: {"tokens": [1, 2]}).write_csv(str(tmp_path))
    assert written(tmp_path) == []


def test_json_has_an_object_per_line(tmp_path: Path) -> None:
    def everything(row: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": row["id"],
            "text": "ä\n",
            "nan": float("nan"),
            "nothing": None,
            "tokens": [1, 2],
            "nested": {"a": [0.5], "b": {"c": "d"}},
            "image": np.zeros((1, 2, 2), np.uint8),
        }

    numbered(2).map(everything).write_json(str(tmp_path))
    lines = written(tmp_path)[0].read_text(encoding="utf-8").splitlines()
    assert len(lines) == 2
    first = json.loads(lines[0])
    assert {name: first[name] for name in ("id", "text", "nan", "nothing", "tokens", "nested")} == {
        "id": 0,
        "text": "ä\n",
        "nan": None,
        "nothing": None,
        "tokens": [1, 2],
        "nested": {"a": [0.5], "b": {"c": "d"}},
    }
    assert np.array(first["image"]).sum() == 0


def test_json_writes_times_and_decimals_as_text_and_refuses_bytes(tmp_path: Path) -> None:
    table = pa.table(
        {
            "when": pa.array([datetime.datetime(2024, 1, 2, 3, 4, 5)], pa.timestamp("us")),
            "price": pa.array([decimal.Decimal("1.50")]),
        }
    )
    dataset_of(table).write_json(str(tmp_path))
    assert json.loads(written(tmp_path)[0].read_text()) == {"when": "2024-01-02T03:04:05", "price": "1.50"}
    with pytest.raises(DataError, match="'raw' holds bytes"):
        dataset_of(pa.table({"raw": [b"x"]})).write_json(str(tmp_path / "other"))


def test_a_shuffled_dataset_is_written_in_its_order(tmp_path: Path) -> None:
    dataset = numbered(50, 50).random_shuffle(seed=1)
    dataset.write_parquet(str(tmp_path))
    assert read(tmp_path).column("id").to_pylist() == ids(dataset)
    assert os.listdir(tmp_path)


def test_json_has_nested_lists_for_tensors(tmp_path: Path) -> None:
    tensors = np.arange(8).reshape(2, 2, 2)
    dataset_of(pa.table({"x": pa.FixedShapeTensorArray.from_numpy_ndarray(tensors)})).write_json(
        str(tmp_path)
    )
    lines = [json.loads(line) for line in written(tmp_path)[0].read_text().splitlines()]
    assert [line["x"] for line in lines] == tensors.tolist()


@pytest.mark.parametrize(
    "values",
    [pa.array([[b"x"]]), pa.array([{"a": b"x"}]), pa.array([b"ab"], pa.binary(2)), pa.array([[[b"x"]]])],
)
def test_json_refuses_bytes_at_any_depth(values: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="The column 's' holds bytes, and JSON has no form for them"):
        dataset_of(pa.table({"s": values})).write_json(str(tmp_path))
    assert os.listdir(tmp_path) == []


def test_csv_takes_bytes_that_are_text_and_refuses_others(tmp_path: Path) -> None:
    dataset_of(pa.table({"s": ["ä".encode()], "f": pa.array([b"ab"], pa.binary(2))})).write_csv(
        str(tmp_path / "a")
    )
    assert written(tmp_path / "a")[0].read_text(encoding="utf-8") == '"s","f"\n"ä","ab"\n'
    with pytest.raises(DataError, match="The column 's' holds bytes that are no text in UTF-8"):
        dataset_of(pa.table({"s": [b"\xff"]})).write_csv(str(tmp_path / "b"))
    assert os.listdir(tmp_path / "b") == []


@pytest.mark.parametrize("method", ["write_parquet", "write_csv"])
def test_arguments_that_arrow_does_not_know_are_refused_before_a_row_is_made(
    method: str, tmp_path: Path
) -> None:
    seen: list[Any] = []
    watched = numbered(3).map(lambda row: seen.append(row) or row)
    with pytest.raises(TypeError, match=rf"{method}\(\) was given compresion='gzip'.* those of pyarrow\."):
        getattr(watched, method)(str(tmp_path), compresion="gzip")
    assert seen == []
