"""Iceberg tables: the rows of one snapshot, without those that were deleted."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.expressions import EqualTo
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.table import DataScan, FileScanTask, Table
from pyiceberg.types import LongType
from pyiceberg.utils.concurrent import ExecutorFactory
from tests.data.formats.reading_all import everything, fingerprint, ids_of_ranks, source_of

from powertrain import data
from powertrain.errors import ArgumentError, DataError, NotSupportedError

#: Its types are those of a model of pydantic, and not of its constructor.
equal_to: Any = EqualTo


def numbers(first: int, count: int) -> pa.Table:
    found = range(first, first + count)
    return pa.table(
        {"id": list(found), "name": [f"n{each}" for each in found], "part": [each % 3 for each in found]}
    )


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    """PyIceberg keeps a pool of threads for the rest of the process."""
    yield
    if ExecutorFactory._instance is not None:
        ExecutorFactory._instance.shutdown()
        ExecutorFactory._instance = None


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, str]:
    warehouse = tmp_path / "warehouse"
    warehouse.mkdir()
    return {
        "name": "local",
        "type": "sql",
        "uri": f"sqlite:///{tmp_path}/catalog.db",
        "warehouse": warehouse.as_uri(),
    }


@pytest.fixture
def catalog(settings: dict[str, str]) -> Iterator[Catalog]:
    found = load_catalog(**settings)
    found.create_namespace("db")
    yield found
    found.close()


@pytest.fixture
def table(catalog: Catalog) -> Table:
    """A table of two files, 100 rows and three snapshots."""
    made = catalog.create_table("db.rows", schema=numbers(0, 1).schema)
    made.append(numbers(0, 60))
    made.append(numbers(60, 41))
    made.delete("id = 100")
    return made


def read(settings: dict[str, str], **options: Any) -> data.Dataset:
    return data.read_iceberg(**{"table_identifier": "db.rows", "catalog_kwargs": settings, **options})


def by_id(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: row["id"])


def test_rows_are_those_that_pyiceberg_reads(table: Table, settings: dict[str, str]) -> None:
    dataset = read(settings, num_cpus=1, override_num_blocks=2)
    source = source_of(dataset)
    assert everything(source) == table.scan().to_arrow().to_pylist()
    assert (dataset.count(), len(source.inspect().blocks)) == (100, 2)
    assert dataset.columns() == ["id", "name", "part"]
    assert by_id(everything(source, ["part", "id"]))[1] == {"part": 1, "id": 1}
    assert everything(source, [])[:1] == [{}]
    assert source.name_row(0, 3).endswith(".parquet, row 3")


@pytest.mark.parametrize("condition", ["id >= 40 and part = 1", equal_to("part", 2), "id < 30"])
def test_columns_and_filter_are_applied_by_pyiceberg(
    table: Table, settings: dict[str, str], condition: Any
) -> None:
    dataset = read(settings, row_filter=condition, selected_fields=("name", "id"))
    theirs = table.scan(row_filter=condition, selected_fields=("name", "id")).to_arrow()
    assert everything(source_of(dataset)) == theirs.to_pylist()
    assert dataset.count() == theirs.num_rows
    names = [row["name"] for row in dataset.select_columns(["name"]).take_all()]
    assert names == theirs["name"].to_pylist()


def test_a_limit_of_the_scan_is_that_of_all_rows(table: Table, settings: dict[str, str]) -> None:
    assert (
        read(settings, scan_kwargs={"limit": 70, "case_sensitive": False}, row_filter="ID >= 0").count() == 70
    )


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("condition", [None, "part = 1"])
def test_every_row_comes_once(
    table: Table, settings: dict[str, str], ranks: int, condition: str | None
) -> None:
    dataset = read(settings, row_filter=condition).random_shuffle(seed=2)
    wanted = [each for each in range(100) if condition is None or each % 3 == 1]
    assert sorted(ids_of_ranks(dataset, ranks, "id")) == wanted


def test_a_table_that_changes_keeps_its_rows(table: Table, settings: dict[str, str]) -> None:
    dataset = read(settings)
    before = fingerprint(read(settings))
    table.delete("id < 50")
    with table.update_schema() as update:
        update.add_column("more", LongType())
    table.append(numbers(500, 3).append_column("more", pa.array([1, 2, 3])))
    assert [row["id"] for row in by_id(everything(source_of(dataset)))] == list(range(100))
    assert fingerprint(dataset) == before
    newest = read(settings)
    assert by_id(everything(source_of(newest))) == by_id(table.scan().to_arrow().to_pylist())
    assert fingerprint(newest) != before


def test_snapshots_are_read(table: Table, settings: dict[str, str]) -> None:
    first = table.metadata.snapshots[0].snapshot_id
    dataset = read(settings, snapshot_id=first)
    assert everything(source_of(dataset)) == table.scan(snapshot_id=first).to_arrow().to_pylist()
    assert dataset.count() == read(settings, scan_kwargs={"snapshot_id": first}).count() == 60
    assert fingerprint(dataset) != fingerprint(read(settings))


def test_filters_are_part_of_the_fingerprint(table: Table, settings: dict[str, str]) -> None:
    assert fingerprint(read(settings, row_filter="id < 9")) != fingerprint(
        read(settings, row_filter="id < 10")
    )
    assert fingerprint(read(settings)) == fingerprint(read(settings, selected_fields=("id",)))


def test_partitioned_tables_are_read(catalog: Catalog, settings: dict[str, str]) -> None:
    made = catalog.create_table("db.rows", schema=numbers(0, 1).schema)
    with made.update_spec() as update:
        update.add_identity("part")
    made.append(numbers(0, 50))
    dataset = read(settings, row_filter="part = 1")
    assert len(source_of(dataset).inspect().blocks) == 1
    assert by_id(everything(source_of(dataset))) == [
        row for row in numbers(0, 50).to_pylist() if row["part"] == 1
    ]


def test_a_table_without_snapshots_has_columns_and_stays_empty(
    catalog: Catalog, settings: dict[str, str]
) -> None:
    made = catalog.create_table("db.rows", schema=numbers(0, 1).schema)
    dataset = read(settings)
    made.append(numbers(0, 5))
    assert (dataset.count(), dataset.columns()) == (0, ["id", "name", "part"])
    assert read(settings).count() == 5


def test_deleted_positions_are_left_out(
    table: Table, settings: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyIceberg writes no files of deletes, so one is put into its plan."""
    plan = DataScan.plan_files
    first = next(iter(table.scan().plan_files()))
    gone = [0, 5, 6]
    place = tmp_path / "deletes.parquet"
    pq.write_table(pa.table({"file_path": [first.file.file_path] * 3, "pos": gone}), place)
    deletes = DataFile.from_args(
        content=DataFileContent.POSITION_DELETES,
        file_path=place.as_uri(),
        file_format=FileFormat.PARQUET,
        record_count=3,
        file_size_in_bytes=place.stat().st_size,
    )

    def with_deletes(scan: DataScan) -> list[FileScanTask]:
        tasks = list(plan(scan))
        tasks[0].delete_files.add(deletes)
        return tasks

    before = fingerprint(read(settings))
    whole = table.scan().to_arrow().to_pylist()
    monkeypatch.setattr(DataScan, "plan_files", with_deletes)
    dataset = read(settings)
    assert everything(source_of(dataset)) == [row for place, row in enumerate(whole) if place not in gone]
    assert dataset.count() == 97
    assert fingerprint(dataset) != before
    some = read(settings, row_filter="part = 0", selected_fields=("name",))
    assert everything(source_of(some)) == table.scan("part = 0", ("name",)).to_arrow().to_pylist()


def test_equality_deletes_are_refused(
    table: Table, settings: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(scan: DataScan) -> None:
        raise ValueError("PyIceberg does not yet support equality deletes")

    monkeypatch.setattr(DataScan, "plan_files", fail)
    with pytest.raises(DataError, match=r"'db\.rows' cannot be planned.*equality deletes"):
        read(settings).count()


def test_what_is_sent_to_ranks_is_small(table: Table, settings: dict[str, str]) -> None:
    import pickle

    source = source_of(read(settings))
    whole = len(pickle.dumps(source))
    source.inspect()
    assert len(pickle.dumps(source)) < whole
    assert all(file.lower_bounds is None for file in (task.file for task in source._tasks))  # type: ignore[attr-defined]


def test_wrong_names_are_named(table: Table, settings: dict[str, str]) -> None:
    with pytest.raises(DataError, match=r"Iceberg table 'db\.none' cannot be loaded.*Check table_identifier"):
        read(settings, table_identifier="db.none")
    with pytest.raises(DataError, match=r"has no snapshot 3: .*The newest are: "):
        read(settings, snapshot_id=3)
    with pytest.raises(DataError, match=r"Could not find field with name nothing.*Check row_filter"):
        read(settings, row_filter="nothing = 3").count()
    with pytest.raises(DataError, match=r"Could not find column: 'nam'.*selected_fields"):
        read(settings, selected_fields=("nam",)).count()
    with pytest.raises(DataError, match=r"the catalog 'absent' cannot be loaded.*Check catalog_kwargs"):
        read(settings, catalog_kwargs={"name": "absent"})


def test_a_file_that_is_gone_is_named(table: Table, settings: dict[str, str]) -> None:
    source = source_of(read(settings))
    source.inspect()
    for task in table.scan().plan_files():
        Path(task.file.file_path.removeprefix("file://")).unlink()
    with pytest.raises(DataError, match=r"'db\.rows' cannot be read at snapshot.*\.parquet"):
        everything(source)


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ({"table_identifier": ""}, DataError, "not a name of a table"),
        ({"snapshot_id": "x"}, DataError, "snapshot_id='x'"),
        ({"selected_fields": "id"}, DataError, "one string"),
        ({"scan_kwargs": {"limt": 3}}, ArgumentError, "'limt', which is not known"),
        ({"scan_kwargs": 3}, DataError, "scan_kwargs=3"),
        ({"catalog": 3}, NotSupportedError, "give catalog_kwargs"),
    ],
)
def test_wrong_arguments_are_refused(
    settings: dict[str, str], given: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        read(settings, **given)


def test_without_pyiceberg_the_command_that_installs_it_is_given(
    settings: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyiceberg.catalog", None)
    with pytest.raises(
        DataError, match=r"read_iceberg\(\) needs PyIceberg.*pip install 'powertrain\[iceberg\]'\.$"
    ):
        read(settings)
