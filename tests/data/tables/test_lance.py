"""Lance datasets: the rows of one version, whatever is written later."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
from tests.data.formats.reading_all import everything, fingerprint, ids_of_ranks, source_of

from powertrain import data
from powertrain.data.sources.tables import lance as lance_source
from powertrain.errors import ArgumentError, DataError, NotSupportedError


def numbers(first: int, count: int) -> pa.Table:
    found = range(first, first + count)
    return pa.table(
        {"id": list(found), "name": [f"n{each}" for each in found], "x": [each / 2 for each in found]}
    )


@pytest.fixture
def address(tmp_path: Path) -> str:
    """A dataset of 85 rows: four fragments, of which each lacks some rows."""
    path = str(tmp_path / "rows.lance")
    lance.write_dataset(numbers(0, 100), path, max_rows_per_file=30).delete("id % 7 = 0")
    return path


KEPT = [number for number in range(100) if number % 7]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lance_source, "_BLOCK_ROWS", 10)


def test_rows_are_those_that_lance_reads(address: str) -> None:
    dataset = data.read_lance(address, num_cpus=1, override_num_blocks=3)
    source = source_of(dataset)
    assert everything(source) == lance.dataset(address).to_table().to_pylist()
    assert len(source.inspect().blocks) > 4  # ranges of fragments
    assert dataset.count() == 85
    assert everything(source, ["x", "id"])[:2] == [{"x": 0.5, "id": 1}, {"x": 1.0, "id": 2}]
    assert everything(source, [])[:1] == [{}]
    assert source.name_row(0, 3).endswith("rows.lance, fragment 0, row 3")


def test_columns_and_filter_are_applied_by_lance(address: str) -> None:
    dataset = data.read_lance(address, columns=["name", "id"], filter="id > 40 AND x < 48")
    theirs = lance.dataset(address).to_table(columns=["name", "id"], filter="id > 40 AND x < 48")
    assert everything(source_of(dataset)) == theirs.to_pylist()
    assert dataset.select_columns(["id"]).take(1) == [{"id": 41}]
    assert data.read_lance(address, filter="id < 0").count() == 0
    options: dict[str, Any] = {"columns": {"double": "id * 2"}, "filter": "id < 9", "batch_size": 2}
    assert data.read_lance(address, scanner_options=options).take_all()[-1] == {"double": 16}


def test_a_filter_with_an_index_keeps_the_order(address: str) -> None:
    opened = lance.dataset(address)
    opened.create_scalar_index("id", "BTREE")
    dataset = data.read_lance(address, filter="id IN (3, 90, 41, 5, 66)")
    assert [row["id"] for row in everything(source_of(dataset))] == [3, 5, 41, 66, 90]


def test_row_ids_can_be_read(address: str) -> None:
    dataset = data.read_lance(address, scanner_options={"with_row_id": True})
    theirs = lance.dataset(address).to_table(with_row_id=True).to_pylist()
    assert everything(source_of(dataset)) == theirs
    assert everything(source_of(dataset), ["_rowid"])[0] == {"_rowid": theirs[0]["_rowid"]}


def test_fragments_can_be_chosen(address: str) -> None:
    chosen = lance.dataset(address).get_fragments()[2:0:-1]
    ids = [row["id"] for row in data.read_lance(address, scanner_options={"fragments": chosen}).take_all()]
    assert ids == [*(each for each in KEPT if 60 <= each < 90), *(each for each in KEPT if 30 <= each < 60)]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("condition", [None, "id < 50"])
def test_every_row_comes_once(address: str, ranks: int, condition: str | None) -> None:
    dataset = data.read_lance(address, filter=condition).random_shuffle(seed=3)
    found = ids_of_ranks(dataset, ranks, "id")
    assert sorted(found) == [each for each in KEPT if condition is None or each < 50]
    assert found != sorted(found)


def test_a_dataset_that_changes_keeps_its_rows(address: str) -> None:
    dataset = data.read_lance(address)
    before = fingerprint(data.read_lance(address))
    opened = lance.dataset(address)
    opened.delete("id > 50")
    lance.write_dataset(numbers(1000, 5), address, mode="append")
    assert [row["id"] for row in everything(source_of(dataset))] == KEPT
    assert fingerprint(dataset) == before
    newest = data.read_lance(address)
    assert newest.count() == 48
    assert fingerprint(newest) != before


def test_versions_and_tags_are_read(address: str) -> None:
    opened = lance.dataset(address)
    opened.tags.create("all", 1)
    first = data.read_lance(address, version=1)
    assert first.count() == data.read_lance(address, version="all").count() == 100
    assert fingerprint(first) == fingerprint(data.read_lance(address, version="all"))
    assert fingerprint(first) != fingerprint(data.read_lance(address))


def test_a_filter_is_part_of_the_fingerprint(address: str) -> None:
    some, others = data.read_lance(address, filter="id < 50"), data.read_lance(address, filter="id < 51")
    assert fingerprint(some) != fingerprint(others)
    assert fingerprint(some) == fingerprint(data.read_lance(address, filter="id < 50", columns=["id"]))


def test_a_copy_elsewhere_has_the_same_fingerprint(address: str, tmp_path: Path) -> None:
    before = fingerprint(data.read_lance(address))
    moved = Path(address).rename(tmp_path / "moved.lance")
    assert fingerprint(data.read_lance(str(moved))) == before


def test_several_datasets_are_one_and_missing_columns_are_null(address: str, tmp_path: Path) -> None:
    other = str(tmp_path / "other.lance")
    lance.write_dataset(pa.table({"id": [200, 201], "more": ["a", "b"]}), other)
    rows = everything(source_of(data.read_lance([address, other])))
    assert rows[0] == {"id": 1, "name": "n1", "x": 0.5, "more": None}
    assert rows[-1] == {"id": 201, "name": None, "x": None, "more": "b"}
    assert everything(source_of(data.read_lance([address, other])), ["more"])[-2:] == [
        {"more": "a"},
        {"more": "b"},
    ]
    lance.write_dataset(pa.table({"id": ["text"]}), other, mode="overwrite")
    with pytest.raises(DataError, match=r"different types in a column.*cast before union"):
        data.read_lance([address, other]).count()


def test_columns_that_were_added_later_are_null_before(address: str) -> None:
    table = numbers(100, 3).append_column("more", pa.array([1, 2, 3]))
    opened = lance.dataset(address)
    opened.add_columns(pa.field("more", pa.int64()))
    lance.write_dataset(table, address, mode="append")
    assert everything(source_of(data.read_lance(address))) == lance.dataset(address).to_table().to_pylist()


def test_wrong_places_and_versions_are_named(address: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"Lance dataset '.*nothing\.lance' cannot be opened.*Check the path"):
        data.read_lance(str(tmp_path / "nothing.lance"))
    with pytest.raises(DataError, match="at version 99 cannot be opened"):
        data.read_lance(address, version=99)
    with pytest.raises(DataError, match=r"at version 'absent' cannot be opened.*absent"):
        data.read_lance(address, version="absent")
    with pytest.raises(DataError, match=r"no column 'nam' in the Lance dataset.*Did you mean 'name'"):
        data.read_lance(address, columns=["nam"]).count()
    with pytest.raises(DataError, match=r"No field named nothing.*Check columns, filter"):
        data.read_lance(address, filter="nothing = 3").count()


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ({"uri": []}, DataError, "list of addresses is empty"),
        ({"uri": 3}, DataError, "not a path"),
        ({"version": -1}, DataError, "version=-1"),
        ({"columns": "id"}, DataError, "one string"),
        ({"filter": " "}, DataError, "is empty"),
        ({"storage_options": "secret"}, DataError, "storage_options is a str"),
        ({"scanner_options": {"limit": 3}}, NotSupportedError, r"'limit'.*limit\(\)"),
        ({"scanner_options": {"scan_in_order": False}}, NotSupportedError, "random_shuffle"),
        ({"scanner_options": {"batch_sise": 3}}, ArgumentError, "batch_sise.*Known are: .*batch_size"),
        ({"scanner_options": {"fragments": [3]}}, DataError, "not fragments"),
        ({"runtime_env": {}}, NotSupportedError, "only Ray can install"),
        ({"colums": ["id"]}, ArgumentError, "unexpected keyword argument 'colums'"),
    ],
)
def test_wrong_arguments_are_refused(
    address: str, given: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words) as raised:
        data.read_lance(**{"uri": address, **given})
    assert "secret" not in str(raised.value)


def test_without_lance_the_command_that_installs_it_is_given(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lance", None)
    with pytest.raises(DataError, match=r"read_lance\(\) needs Lance.*pip install 'powertrain\[lance\]'\.$"):
        data.read_lance(address)
