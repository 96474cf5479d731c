"""Columns of paths below a directory that the user names."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from powertrain import data
from powertrain.data.datasource.partitioning import Partitioning, PathPartitionFilter
from powertrain.errors import DataError


def files(directory: Path) -> None:
    for year in ("2023", "2024"):
        (directory / "data" / year).mkdir(parents=True)
        (directory / "data" / year / "x.csv").write_text("a\n1\n")


def test_a_relative_base_directory_is_that_of_the_process(tmp_path: Path) -> None:
    files(tmp_path)
    by_year = PathPartitionFilter.of(
        lambda found: found["year"] == "2024", style="dir", base_dir="data", field_names=["year"]
    )
    years = Partitioning("dir", base_dir="data", field_names=["year"])
    with contextlib.chdir(tmp_path):
        found = data.read_csv("data", partition_filter=by_year, partitioning=years).take_all()
    assert found == [{"a": 1, "year": "2024"}]


@pytest.mark.parametrize("base", ["/data/in", "/data/in/"])
def test_a_base_directory_ends_where_its_name_ends(base: str) -> None:
    seen: list[dict[str, str | None]] = []

    def note(found: dict[str, str | None]) -> bool:
        seen.append(found)
        return True

    keep = PathPartitionFilter.of(note, base_dir=base)
    assert keep(["/data/in/k=1/x", "/data/in2/k=2/x", "/data/ink=3/x"]) == [
        "/data/in/k=1/x",
        "/data/in2/k=2/x",
        "/data/ink=3/x",
    ]
    assert [found.get("k") for found in seen] == ["1", "2", None]


def test_a_base_directory_of_another_name_is_not_cut_off(tmp_path: Path) -> None:
    (tmp_path / "data2" / "k=1").mkdir(parents=True)
    (tmp_path / "data2" / "k=1" / "x.csv").write_text("a\n1\n")
    below = Partitioning("dir", base_dir=str(tmp_path / "data"), field_names=["b", "c"])
    with pytest.raises(DataError, match="lies in"):
        data.read_csv(str(tmp_path / "data2"), partitioning=below).take_all()
