"""Sources of data that other packages add by entry point."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.installed import install

from powertrain import data
from powertrain.errors import ConfigError, DataError

GROUP = "powertrain.sources"


def test_rows_of_a_registered_source_are_a_dataset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, tmp_path, "numbers", {GROUP: {"numbers": "tests.data.small_source:NumberedBlocks"}})
    dataset = data.read_source("numbers", sizes=[3, 2])
    assert [row["id"] for row in dataset.take_all()] == [0, 1, 2, 3, 4]


def test_a_name_that_is_not_registered_is_refused_with_those_that_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, tmp_path, "numbers", {GROUP: {"numbers": "tests.data.small_source:NumberedBlocks"}})
    with pytest.raises(ConfigError, match=r"'lance'.*powertrain\.sources.*'numbers'"):
        data.read_source("lance")


def test_an_object_that_returns_no_source_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, tmp_path, "odd", {GROUP: {"odd": "builtins:dict"}})
    with pytest.raises(DataError, match=r"'odd'.*returned a dict.*docs/data\.md"):
        data.read_source("odd", a=1)
