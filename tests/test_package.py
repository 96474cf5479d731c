"""The wheel: what is in it, and what its metadata says."""

from __future__ import annotations

import email
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

import pytest

from powertrain.version import __version__

ROOT = Path(__file__).parents[1]
#: What other packages' tests, and those of users, import; and what these need.
PUBLISHED = {"__init__.py", "chronicle.py", "engine_contract.py", "faults.py", "power_cut.py", "programs.py"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    directory = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=100)
    (path,) = directory.glob("*.whl")
    with zipfile.ZipFile(path) as opened:
        yield opened


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    return email.message_from_bytes(wheel.read(f"powertrain-{__version__}.dist-info/METADATA"))


def test_the_wheel_holds_the_package_with_its_types_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    assert "powertrain/py.typed" in names
    assert {name.split("/")[0] for name in names} == {"powertrain", f"powertrain-{__version__}.dist-info"}


def test_of_the_test_tools_only_those_for_others_are_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    prefix = "powertrain/testing/"
    assert {name.removeprefix(prefix) for name in wheel.namelist() if name.startswith(prefix)} == PUBLISHED


def test_the_metadata_is_complete(metadata: Message) -> None:
    for field in ("Summary", "Keywords", "License-Expression", "License-File", "Requires-Python"):
        assert metadata[field], field
    assert metadata["Description-Content-Type"] == "text/markdown"
    classifiers = metadata.get_all("Classifier") or []
    assert "Typing :: Typed" in classifiers
    assert not [one for one in classifiers if one.startswith("License ::")], (
        "the licence is given as an expression"
    )
    assert metadata["Version"] == __version__


def test_the_command_line_is_an_entry_point(wheel: zipfile.ZipFile) -> None:
    entry_points = wheel.read(f"powertrain-{__version__}.dist-info/entry_points.txt").decode()
    assert "powertrain = powertrain.cli.main:main" in entry_points
