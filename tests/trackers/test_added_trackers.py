"""Trackers that other packages add by entry point."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.installed import install

from powertrain import RunConfig
from powertrain.errors import ConfigError
from powertrain.trackers.base import Tracker
from powertrain.trackers.choosing import chosen

GROUP = "powertrain.trackers"
MODULE = """
from powertrain.trackers import Tracker

class Board(Tracker):
    name = "board"
"""


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "board_of_a_test.py").write_text(MODULE)
    install(monkeypatch, tmp_path, "board", {GROUP: {"board": "board_of_a_test:Board", "odd": "math:pi"}})


@pytest.mark.usefixtures("_installed")
def test_a_registered_tracker_is_chosen_by_its_name() -> None:
    (tracker,) = chosen(RunConfig(trackers=["board"]).trackers, "/runs/digits")
    assert isinstance(tracker, Tracker)
    assert tracker.name == "board"


@pytest.mark.usefixtures("_installed")
def test_an_unknown_tracker_is_refused_with_those_that_are_known() -> None:
    for refuse in (lambda: RunConfig(trackers=["bord"]), lambda: chosen(["bord"], "/runs/digits")):
        with pytest.raises(ConfigError, match=r"(?s)'bord'.*mean 'board'.*tensorboard.*powertrain\.trackers"):
            refuse()


@pytest.mark.usefixtures("_installed")
def test_an_entry_point_that_is_not_a_tracker_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'odd'.*subclass of powertrain\.trackers\.Tracker"):
        chosen(["odd"], "/runs/digits")
