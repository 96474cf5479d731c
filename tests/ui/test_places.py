"""Runs on storage without real files: what the dashboard asks it for."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyarrow import fs
from tests.recorded_run import at, points, write
from tests.ui import sample_runs

from powertrain.lookup.finding import names_in
from powertrain.run import events as ev
from powertrain.storage import open_storage
from powertrain.storage.adapter import FilesystemStorage
from powertrain.ui.listing import RunList
from powertrain.ui.log_pages import MOST_BYTES, log_page
from powertrain.ui.places import Places


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, str]]:
    """What the storage was asked for: operations with their first argument."""
    counts: Counter[tuple[str, str]] = Counter()

    def count(name: str) -> None:
        original = getattr(FilesystemStorage, name)

        def counted(self: FilesystemStorage, *given: Any, **options: Any) -> Any:
            counts[name, str(given[0]) if given else ""] += 1
            return original(self, *given, **options)

        monkeypatch.setattr(FilesystemStorage, name, counted)

    for name in ("list", "get", "get_file", "get_range", "directories"):
        count(name)
    return counts


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Places:
    ended = ev.Ended(time=at(9), state="finished", reason="")
    for name in ("one", "two"):
        write(tmp_path / name, points(range(1, 4), lambda row, rank: {"loss": 1.0}), end=ended)
    sample_runs.write_search(open_storage(tmp_path / "search"), 1.7e9, trials=6)
    (tmp_path / "other").mkdir()
    monkeypatch.setattr(
        "powertrain.ui.places.open_storage", lambda root: FilesystemStorage(fs.LocalFileSystem(), root)
    )
    # The clock stands, so that no listing becomes too old.
    monkeypatch.setattr("powertrain.ui.places.time", SimpleNamespace(monotonic=lambda: 1000.0))
    places = Places(str(tmp_path))
    assert not places.is_near
    return places


def test_names_are_found_without_a_listing_of_all_objects(
    remote: Places, asked: Counter[tuple[str, str]]
) -> None:
    known: dict[str, str] = {}
    assert names_in(remote.root, known) == (["one", "search", "two"], ["search"])
    assert asked["list", ""] == 0
    assert known == {"one": "run", "two": "run", "search": "sweep"}
    before = sum(asked.values())
    assert names_in(remote.root, known) == (["one", "search", "two"], ["search"])
    assert sum(asked.values()) - before == 2, (
        "one request for the names, and one for the directory without a journal"
    )


def test_a_removed_run_is_forgotten(remote: Places) -> None:
    known: dict[str, str] = {}
    names_in(remote.root, known)
    remote.root.delete_tree("two")
    assert names_in(remote.root, known) == (["one", "search"], ["search"])
    assert "two" not in known


def test_runs_that_are_over_are_read_once(remote: Places, asked: Counter[tuple[str, str]]) -> None:
    runs = RunList(remote)
    first = runs.all()
    assert [run["state"] for run in first["runs"]] == ["finished", "finished"]
    assert [one["done"] for one in first["sweeps"]] == [6]
    asked.clear()
    assert runs.all() == first
    assert sum(asked.values()) == 0, "within the age of a listing nothing is asked again"


def test_a_log_is_read_in_part(remote: Places, asked: Counter[tuple[str, str]]) -> None:
    remote.root.put("one/logs/attempt-0/rank-0.log", b"a line\n" * MOST_BYTES)
    files, there = remote.logs("one")
    page = log_page(files, there, {"search": "absent"})
    assert page["lines"] == []
    assert page["searched_from"] > 6 * (MOST_BYTES - 10), "it can be searched further"
    assert asked["get_file", "logs/attempt-0/rank-0.log"] == asked["get", "logs/attempt-0/rank-0.log"] == 0
    assert asked["get_range", "logs/attempt-0/rank-0.log"] == 1
    assert asked["list", "logs"] == 1
    remote.logs("one")
    assert asked["list", "logs"] == 1, "files are listed when the run has changed"
