"""Delta Lake tables: the rows of one version, with partitions, deletion vectors and columns that were added later."""

from __future__ import annotations

import json
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable, write_deltalake
from pyarrow import fs
from pyroaring import BitMap
from tests.data.formats.reading_all import everything, fingerprint, ids_of_ranks, source_of

from powertrain import data
from powertrain.errors import ArgumentError, DataError, NotSupportedError

WORDS = ["a b/c%d", "x=ü", None]


def numbers(first: int, count: int) -> pa.Table:
    found = range(first, first + count)
    return pa.table(
        {"id": list(found), "word": [WORDS[each % 3] for each in found], "x": [each / 2 for each in found]}
    )


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A table of two versions and 100 rows, with partitions whose values need quoting."""
    place = str(tmp_path / "table")
    write_deltalake(place, numbers(0, 60), partition_by=["word"])
    write_deltalake(place, numbers(60, 40), mode="append")
    return place


def by_id(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: row["id"])


def theirs(path: str, **options: Any) -> list[dict[str, Any]]:
    return by_id(DeltaTable(path, **options).to_pyarrow_table().to_pylist())


def test_rows_are_those_that_deltalake_reads(path: str) -> None:
    dataset = data.read_delta(path, num_cpus=1, concurrency=2)
    source = source_of(dataset)
    assert by_id(everything(source)) == theirs(path)
    assert dataset.count() == 100
    assert dataset.columns() == ["id", "word", "x"]
    assert sorted(everything(source, ["word"]), key=str)[0] == {"word": "a b/c%d"}
    assert everything(source, [])[:1] == [{}]
    assert source.name_row(0, 3).endswith("row group 0, row 3")
    assert len(dataset.input_files()) == 6


def test_files_come_in_the_order_in_which_they_were_added(path: str) -> None:
    before = everything(source_of(data.read_delta(path)))
    assert {row["id"] for row in before[:60]} == set(range(60))
    DeltaTable(path).create_checkpoint()
    assert everything(source_of(data.read_delta(path))) == before


def test_columns_filter_and_paths(path: str) -> None:
    dataset = data.read_delta(
        path, columns=["x", "id", "path"], filter=pc.field("word") == "x=ü", include_paths=True
    )
    rows = by_id(everything(source_of(dataset)))
    assert [row["id"] for row in rows] == list(range(1, 100, 3))
    assert list(rows[0]) == ["x", "id", "path"]
    assert Path(rows[0]["path"]).is_file()
    assert data.read_delta(path).select_columns(["word"]).count() == 100
    with pytest.raises(DataError, match=r"no column 'wrd' in the Delta table.*Did you mean 'word'"):
        data.read_delta(path, columns=["wrd"]).count()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_row_comes_once(path: str, ranks: int) -> None:
    assert sorted(ids_of_ranks(data.read_delta(path, shuffle="files"), ranks, "id")) == list(range(100))


def test_a_table_that_changes_keeps_its_rows(path: str) -> None:
    dataset = data.read_delta(path)
    before = fingerprint(data.read_delta(path))
    DeltaTable(path).delete("id > 50")
    write_deltalake(path, numbers(500, 3), mode="overwrite")
    assert [row["id"] for row in by_id(everything(source_of(dataset)))] == list(range(100))
    assert fingerprint(dataset) == before
    newest = data.read_delta(path)
    assert by_id(everything(source_of(newest))) == numbers(500, 3).to_pylist()
    assert fingerprint(newest) != before


def test_versions_are_read(path: str) -> None:
    first = data.read_delta(path, 0)
    assert by_id(everything(source_of(first))) == theirs(path, version=0)
    assert fingerprint(first) != fingerprint(data.read_delta(path, version=1))
    assert fingerprint(data.read_delta(path)) == fingerprint(data.read_delta(path, version=1))


def test_a_table_elsewhere_has_the_same_fingerprint(path: str, tmp_path: Path) -> None:
    before = fingerprint(data.read_delta(path))
    moved = Path(path).rename(tmp_path / "moved")
    assert fingerprint(data.read_delta(f"file://{moved}")) == before


def test_deleted_and_rewritten_rows_are_gone(path: str) -> None:
    table = DeltaTable(path)
    table.delete("id < 10")
    table.update(updates={"x": "0.25"}, predicate="id = 20")
    assert by_id(everything(source_of(data.read_delta(path)))) == theirs(path)
    assert data.read_delta(path).count() == 90


def test_columns_that_were_added_later_are_null_before(path: str) -> None:
    more = numbers(100, 4).append_column("more", pa.array([["a"], [], None, ["b", "c"]]))
    write_deltalake(path, more, mode="append", schema_mode="merge")
    assert by_id(everything(source_of(data.read_delta(path)))) == theirs(path)


def test_partitions_have_the_types_of_the_table(tmp_path: Path) -> None:
    import datetime

    place = str(tmp_path / "typed")
    days = [datetime.date(2026, 1, 1 + each % 2) for each in range(10)]
    table = pa.table({"id": list(range(10)), "day": days, "part": [each % 3 for each in range(10)]})
    write_deltalake(place, table, partition_by=["day", "part"])
    assert by_id(everything(source_of(data.read_delta(place)))) == table.to_pylist()
    only = data.read_delta(place, columns=["part"], filter=pc.field("day") == days[0])
    assert sorted(row["part"] for row in only.take_all()) == [0, 0, 1, 2, 2]


def test_a_table_without_rows_has_columns(tmp_path: Path) -> None:
    DeltaTable.create(str(tmp_path / "empty"), schema=pa.schema([("id", pa.int64())]))
    dataset = data.read_delta(str(tmp_path / "empty"))
    assert (dataset.count(), dataset.columns()) == (0, ["id"])


def test_a_file_system_of_the_user_opens_the_files(path: str) -> None:
    root = fs.SubTreeFileSystem(path, fs.LocalFileSystem())
    assert by_id(everything(source_of(data.read_delta(path, filesystem=root)))) == theirs(path)


# --------------------------------------------------------------------------- features of tables


def commit(path: str, version: int, *actions: dict[str, Any]) -> None:
    log = Path(path) / "_delta_log" / f"{version:020}.json"
    log.write_text("\n".join(map(json.dumps, actions)))


def protocol(features: list[str]) -> dict[str, Any]:
    found = {
        "minReaderVersion": 3,
        "minWriterVersion": 7,
        "readerFeatures": features,
        "writerFeatures": features,
    }
    return {"protocol": found}


def deletion_vector(path: str, rows: list[int]) -> dict[str, Any]:
    """A deletion vector in a file, after the protocol of Delta Lake."""
    bitmap = BitMap(rows).serialize()
    content = struct.pack("<I", 1681511377) + struct.pack("<Q", 1) + struct.pack("<I", 0) + bitmap
    name = "deletion_vector_00000000-0000-0000-0000-000000000000.bin"
    stored = b"\x01" + struct.pack(">I", len(content)) + content + struct.pack(">I", zlib.crc32(content))
    (Path(path) / name).write_bytes(stored)
    return {
        "storageType": "p",
        "pathOrInlineDv": (Path(path) / name).as_uri(),
        "offset": 1,
        "sizeInBytes": len(content),
        "cardinality": len(rows),
    }


def test_rows_in_deletion_vectors_are_left_out(tmp_path: Path) -> None:
    place = str(tmp_path / "vectors")
    write_deltalake(place, pa.table({"id": list(range(100))}))
    write_deltalake(place, pa.table({"id": list(range(100, 110))}), mode="append")
    before = fingerprint(data.read_delta(place))
    (first,) = (
        action["add"]
        for line in (Path(place) / "_delta_log" / f"{0:020}.json").read_text().splitlines()
        if "add" in (action := json.loads(line))
    )
    gone = [0, 7, 8, 41]
    commit(
        place,
        2,
        protocol(["deletionVectors"]),
        {"remove": {"path": first["path"], "dataChange": True, "deletionTimestamp": 1}},
        {"add": {**first, "deletionVector": deletion_vector(place, gone)}},
    )
    dataset = data.read_delta(place)
    assert dataset.count() == 106
    source = source_of(dataset)
    kept = [each for each in range(110) if each not in gone]
    assert [row["id"] for row in everything(source)] == kept
    assert len(everything(source, [])) == 106
    assert source.name_row(0, 0).endswith("row 1")
    assert sorted(ids_of_ranks(dataset.random_shuffle(seed=1), 3, "id")) == kept
    assert sorted(row["id"] for row in dataset.filter(pc.field("id") < 10).take_all()) == [
        1,
        2,
        3,
        4,
        5,
        6,
        9,
    ]
    assert fingerprint(dataset) != before


def test_features_that_would_give_wrong_rows_are_refused(path: str) -> None:
    commit(path, 2, protocol(["rowTracking-unknown"]))
    with pytest.raises((NotSupportedError, DataError), match="rowTracking-unknown"):
        data.read_delta(path)
    assert data.read_delta(path, version=1).count() == 100


def test_column_mapping_of_an_older_protocol_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "mapped")
    write_deltalake(path, numbers(0, 3))
    lines = (Path(path) / "_delta_log" / f"{0:020}.json").read_text().splitlines()
    (metadata,) = (json.loads(line)["metaData"] for line in lines if "metaData" in line)
    schema = json.loads(metadata["schemaString"])
    for number, field in enumerate(schema["fields"], 1):
        field["metadata"] = {
            "delta.columnMapping.id": number,
            "delta.columnMapping.physicalName": f"col-{number}",
        }
    metadata["schemaString"] = json.dumps(schema)
    metadata["configuration"] = {"delta.columnMapping.mode": "name", "delta.columnMapping.maxColumnId": "3"}
    commit(path, 1, {"protocol": {"minReaderVersion": 2, "minWriterVersion": 5}}, {"metaData": metadata})
    with pytest.raises(NotSupportedError, match=r"requires of its readers: columnMapping.*scan\(\)"):
        data.read_delta(path)


# --------------------------------------------------------------------------- errors


def test_wrong_places_and_versions_are_named(path: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"Delta table '.*nothing' cannot be opened.*Check the path"):
        data.read_delta(str(tmp_path / "nothing"))
    with pytest.raises(DataError, match="at version 99 cannot be opened"):
        data.read_delta(path, version=99)


def test_files_that_were_vacuumed_are_named(path: str) -> None:
    dataset = data.read_delta(path)
    source = source_of(dataset)
    source.inspect()
    for file in dataset.input_files():
        Path(file).unlink()
    with pytest.raises(DataError, match=r"parquet' is gone"):
        everything(source)


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ({"path": ["a", "b"]}, DataError, r"one table is read at a time.*union\(\)"),
        ({"path": 3}, DataError, "not a path"),
        ({"version": "1"}, DataError, "version='1'"),
        ({"columns": "id"}, DataError, "one string"),
        ({"filter": "id > 3"}, DataError, "not an Arrow expression"),
        ({"shuffle": "rows"}, DataError, "shuffle='rows'"),
        ({"filesystem": 3}, DataError, "filesystem=3"),
        ({"catalog": 3}, NotSupportedError, "give the address of the table"),
        ({"partition_filter": 3}, ArgumentError, "unexpected keyword argument 'partition_filter'"),
    ],
)
def test_wrong_arguments_are_refused(
    path: str, given: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        data.read_delta(**{"path": path, **given})


def test_without_deltalake_the_command_that_installs_it_is_given(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "deltalake", None)
    with pytest.raises(
        DataError, match=r"read_delta\(\) needs deltalake.*pip install 'powertrain\[delta\]'\.$"
    ):
        data.read_delta(path)
