"""Queries to databases, and ORC files."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import orc
from tests.data.formats.reading_all import everything, fingerprint, ids_of_ranks, source_of

from powertrain import data
from powertrain.data.sources.files.files import file_paths
from powertrain.data.sources.formats import sql
from powertrain.data.sources.formats.orc import OrcSource
from powertrain.errors import DataError


@pytest.fixture
def database(tmp_path: Path) -> Callable[[], sqlite3.Connection]:
    path = tmp_path / "rows.db"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE t (id INTEGER, name TEXT, x REAL)")
    connection.executemany(
        "INSERT INTO t VALUES (?, ?, ?)",
        [(number, None if number % 5 else f"n{number}", number / 2) for number in range(50)],
    )
    connection.commit()
    connection.close()
    return lambda: sqlite3.connect(path)


def test_the_rows_of_a_query_are_rows(database: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql, "_ROWS_AT_A_TIME", 7)
    dataset = data.read_sql(
        "SELECT * FROM t WHERE id < ? ORDER BY id", database, sql_params=(30,), num_cpus=1
    )
    assert dataset.count() == 30
    rows = everything(source_of(dataset))
    assert rows[4:6] == [{"id": 4, "name": None, "x": 2.0}, {"id": 5, "name": "n5", "x": 2.5}]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_row_comes_once_and_the_query_runs_once(database: Any, ranks: int) -> None:
    calls = []

    def connect() -> Any:
        calls.append(1)
        return database()

    dataset = data.read_sql("SELECT * FROM t", connect).random_shuffle(seed=1)
    assert sorted(ids_of_ranks(dataset, ranks, "id")) == list(range(50))
    assert dataset.count() == 50
    assert calls == [1]


def test_the_fingerprint_is_that_of_the_rows(database: Any) -> None:
    up = data.read_sql("SELECT * FROM t ORDER BY id", database)
    down = data.read_sql("SELECT * FROM t ORDER BY id DESC", database)
    assert fingerprint(up) == fingerprint(data.read_sql("SELECT * FROM t ORDER BY id ASC", database))
    assert fingerprint(up) != fingerprint(down)


def test_a_query_without_rows_has_columns(database: Any) -> None:
    dataset = data.read_sql("SELECT id, name FROM t WHERE id < 0", database)
    assert (dataset.count(), dataset.columns()) == (0, ["id", "name"])


class NoConnection:
    pass


@pytest.mark.parametrize(
    ("query", "factory", "words"),
    [
        ("SELECT * FROM absent_table", None, "failed in the database: OperationalError: no such table"),
        ("DELETE FROM t", None, "statement without rows"),
        ("SELECT id, id FROM t", None, "two columns 'id'"),
        ("SELECT 1", NoConnection, "NoConnection without cursor"),
        ("SELECT 1", lambda: 1 / 0, "could not connect.*ZeroDivisionError"),
    ],
)
def test_failures_of_the_database_are_said(database: Any, query: str, factory: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        data.read_sql(query, factory or database).count()
    assert database().execute("SELECT count(*) FROM t").fetchone() == (50,)  # rolled back


@pytest.mark.parametrize(("query", "factory"), [("", print), (3, print), ("SELECT 1", 3)])
def test_wrong_arguments_are_refused(query: Any, factory: Any) -> None:
    with pytest.raises(DataError, match="Give a"):
        data.read_sql(query, factory)


# --------------------------------------------------------------------------- ORC


def orc_file(path: Path, first: int, count: int, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    numbers = range(first, first + count)
    table = pa.table({"id": list(numbers), "tags": [["a"] * (number % 3) for number in numbers]})
    orc.write_table(table, str(path), **options)
    return path


def test_stripes_are_blocks_and_directories_are_columns(tmp_path: Path) -> None:
    orc_file(tmp_path / "year=2025/a.orc", 0, 20_000, stripe_size=1, batch_size=1024)
    orc_file(tmp_path / "year=2026/b.orc", 20_000, 5)
    dataset = data.read_orc(str(tmp_path), include_paths=True)
    source = source_of(dataset)
    assert len(source.inspect().blocks) > 2
    rows = everything(source)
    assert [row["id"] for row in rows] == list(range(20_005))
    assert (rows[5]["tags"], rows[5]["year"], rows[-1]["year"]) == (["a", "a"], "2025", "2026")
    assert Path(rows[-1]["path"]).name == "b.orc"
    assert everything(source, ["year", "id"])[-1] == {"year": "2026", "id": 20_004}
    assert everything(source, ["year"])[0] == {"year": "2025"}
    assert everything(source, [])[:1] == [{}]
    assert source.name_row(len(source.inspect().blocks) - 1, 2).endswith("b.orc, row 2")


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_row_of_orc_comes_once(tmp_path: Path, ranks: int) -> None:
    orc_file(tmp_path / "a.orc", 0, 30)
    orc_file(tmp_path / "b.orc", 30, 11)
    assert sorted(ids_of_ranks(data.read_orc(str(tmp_path), shuffle="files"), ranks, "id")) == list(range(41))


def test_damaged_and_different_orc_files_are_refused(tmp_path: Path) -> None:
    path = orc_file(tmp_path / "a.orc", 0, 100)
    before = fingerprint(data.read_orc(str(path)))
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DataError, match=r"ORC file .*a\.orc' cannot be read.*leave it out"):
        data.read_orc(str(path)).count()
    orc_file(path, 1, 100)
    assert fingerprint(data.read_orc(str(path))) != before
    orc.write_table(pa.table({"other": [1]}), str(tmp_path / "b.orc"))
    with pytest.raises(DataError, match=r"b\.orc' has the columns other \(int64\), and .*before union"):
        data.read_orc(str(tmp_path)).count()
    source = OrcSource(file_paths(str(path), None))
    source.inspect()
    path.unlink()
    with pytest.raises(DataError, match="is gone"):
        everything(source)
    orc_file(path, 0, 3)
    with pytest.raises(DataError, match="not the one that was inspected"):
        everything(source)
