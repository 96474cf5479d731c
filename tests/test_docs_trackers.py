"""docs/trackers.md holds: its code runs from top to bottom, and its table has every tracker with its arguments."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.data.test_docs_data import python_of

from powertrain import RunConfig, trackers
from powertrain.config.run import TRACKER_NAMES
from powertrain.trackers.choosing import _BUILT_IN
from powertrain.trackers.sending import REFUSED_TIMEOUT_S

GUIDE = (Path(__file__).parents[1] / "docs" / "trackers.md").read_text("utf-8")
_ROW = re.compile(r"^\| `\"(?P<name>\w+)\"` \| `(?P<cls>\w+)\((?P<arguments>[^)]*)\)` \|", re.MULTILINE)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_block_of_the_guide_runs(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    script = tmp_path / "guide.py"
    script.write_text(python_of(GUIDE), "utf-8")
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert len((tmp_path / "digits.csv").read_text().splitlines()) == 101
    assert list((tmp_path / "runs" / "digits" / "tensorboard").iterdir())


def test_its_table_has_every_tracker_with_its_arguments() -> None:
    documented = {row["name"]: row for row in _ROW.finditer(GUIDE)}
    assert sorted(documented) == sorted(TRACKER_NAMES) == sorted(_BUILT_IN)
    for name, row in documented.items():
        kind: Any = getattr(trackers, row["cls"])
        assert row["cls"] == _BUILT_IN[name].__name__
        own = [field.name for field in dataclasses.fields(kind) if field.name != "name"]
        assert [argument.partition("=")[0].strip() for argument in row["arguments"].split(",")] == own


def test_its_times_are_those_of_the_code() -> None:
    assert f"RunConfig(tracker_timeout_s={RunConfig().tracker_timeout_s:g})" in GUIDE
    assert f"one that refuses has {REFUSED_TIMEOUT_S:g} seconds" in GUIDE
