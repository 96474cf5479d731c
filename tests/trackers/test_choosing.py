"""Trackers by name and as objects, kept in the run and opened only by who wrote them."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from tests.trackers.recorded import RecordedRun, facts_of

from powertrain.errors import ConfigError, StorageError
from powertrain.trackers import CSV, TensorBoard, Tracker
from powertrain.trackers.choosing import chosen, keep, kept, params_of


def test_names_and_objects_become_trackers_with_their_places() -> None:
    by_name, given = chosen(["csv", TensorBoard(directory="/boards/x")], "/runs/digits")
    assert isinstance(by_name, CSV)
    assert by_name.path == "/runs/digits/metrics.csv"
    assert isinstance(given, TensorBoard)
    assert given.directory == "/boards/x"


def test_two_trackers_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two trackers named 'csv'"):
        chosen(["csv", CSV("/other.csv")], "/runs/digits")
    assert len(chosen(["csv", CSV("/other.csv", name="csv2")], "/runs/digits")) == 2


def test_a_name_that_cannot_be_a_file_is_refused() -> None:
    class Mine(Tracker):
        name = "../mine"

    with pytest.raises(ConfigError, match="Mine has the name"):
        chosen([Mine()], "/runs/digits")


@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "wandb"])
def test_a_missing_package_is_one_sentence_with_the_line_for_pip(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=rf"pip install 'powertrain\[{name}\]'"):
        chosen([name], "/runs/digits")


def test_files_of_a_run_are_opened_by_the_user_who_wrote_them_and_by_no_other(run: RecordedRun) -> None:
    with pytest.raises(StorageError, match=r"started without trackers.*--tracker"):
        kept(run.storage)
    assert keep(run.storage, [CSV("/other.csv")], facts_of(run)) == ""
    trackers, facts = kept(run.storage)
    assert trackers == [CSV("/other.csv")]
    assert facts.params == {"lr": 0.1, "net/depth": 3}
    run.storage.put("trackers/trackers.signature", b"0" * 64)
    with pytest.raises(StorageError, match="not written by you"):
        kept(run.storage)


def test_parameters_are_flat_plain_and_without_secrets() -> None:
    class Odd:
        pass

    config: dict[str, Any] = {
        "lr": 0.1,
        "net": {"depth": 3, "sizes": [1, 2]},
        "odd": Odd(),
        "url": "s3://key:hunter2@bucket/x",
        "none": None,
    }
    params = params_of(config)
    assert params["lr"] == 0.1
    assert params["net/depth"] == 3
    assert params["net/sizes"] == "[1, 2]"
    assert "Odd" in params["odd"]
    assert "hunter2" not in params["url"]
    assert params["none"] is None
    assert params_of(None) == {}
